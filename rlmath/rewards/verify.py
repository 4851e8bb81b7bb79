"""Is the answer of a completion right?

Two halves. The cheap half takes microseconds and runs in the caller's process: it finds the boxed answer and
compares strings and plain numbers. What it cannot decide goes to math-verify, which may take for ever, so
only processes that can be killed run that half (see `pool`). Model text is never evaluated as code:
math-verify's plain-expression extraction, which ends in Python's `eval`, stays switched off.

This module imports neither torch nor sympy; the worker processes stay small and the trainer's start quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

TASKS = ("math",)
"""Tasks that can be judged."""

MAX_ANSWER_CHARS = 1000
"""Longest boxed answer that is looked at (characters)."""

_BRACES = re.compile(r"\\boxed\s*\{|\\(?!\\?boxed)[\s\S]|[{}]")
"""A box's opening, an escaped character (which is no brace), or a brace."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer.

    >>> judge("so it is \\\\boxed{ 132 }", ("\\\\boxed{132}",), "math")
    Verdict(correct=True, extracted='132', verdict='string')
    """

    correct: bool
    extracted: str
    """The answer that was compared, at most `MAX_ANSWER_CHARS` long; "" when none was found."""
    verdict: str
    """How it was decided: "string", "number", "symbolic", "no_answer", "too_long", "timeout" or "error"."""


def check_tasks(tasks: Iterable[str]) -> None:
    """Raises ValueError when a task of the data has no judge."""
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise ValueError(
            f"the data has rows of task {', '.join(map(repr, unknown))}, which cannot be judged;"
            f" keep rows of task {', '.join(map(repr, TASKS))} only"
        )


def judge(text: str, solutions: Sequence[str], task: str) -> Verdict:
    """The verdict on a completion: right when its last boxed answer equals any of the solutions.

    Has no time limit. In a process that must go on, use `VerifierPool`.
    """
    assert task in TASKS, task
    answer = extract_boxed(text)
    return cheap_verdict(answer, solutions) or symbolic_verdict(answer or "", solutions)


def extract_boxed(text: str) -> str | None:
    """What is in the last complete \\boxed{...}; of nested ones the innermost. One pass, linear in the text.

    >>> extract_boxed("\\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3")
    '\\\\frac{1}{2}'
    """
    open_boxes: list[
        int | None
    ] = []  # one entry per open brace: where its box's content starts, None for others
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_boxes.append(None)
        elif token.startswith("\\boxed"):
            open_boxes.append(match.end())
        elif token == "}" and open_boxes:
            start = open_boxes.pop()
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] : best[1]]


def cheap_verdict(answer: str | None, solutions: Sequence[str]) -> Verdict | None:
    """The verdict where strings and plain numbers decide, else None. `answer` is the content of the box."""
    if answer is None or not answer.strip():
        return Verdict(False, "", "no_answer")
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, answer[:MAX_ANSWER_CHARS], "too_long")
    extracted = answer.strip()
    plain = _plain(answer)
    golds = [_plain(solution) for solution in solutions if len(solution) <= 2 * MAX_ANSWER_CHARS]
    if plain in golds:
        return Verdict(True, extracted, "string")
    number = _number(plain)
    if number is None:
        return None
    gold_numbers = [_number(gold) for gold in golds]
    if number in gold_numbers:
        return Verdict(True, extracted, "number")
    return None if None in gold_numbers else Verdict(False, extracted, "number")


def symbolic_verdict(answer: str, solutions: Sequence[str]) -> Verdict:
    """The verdict of math-verify. On hostile text it may hang or take gigabytes: for killable processes only.

    math-verify's own time limits, which need signals, are off.
    """
    from math_verify import verify  # here, because sympy takes a second that the trainer does not need

    extracted = answer.strip()
    try:
        parsed = _parse(answer)
        correct = any(
            verify(_parse_gold(gold), parsed, timeout_seconds=0, raise_on_error=True) for gold in solutions
        )
    except Exception:  # a parser may raise anything on hostile text, MemoryError among it
        return Verdict(False, extracted, "error")
    return Verdict(correct, extracted, "symbolic")


@lru_cache(maxsize=1024)
def _parse_gold(solution: str) -> list:
    return _parse(_plain(solution))


def _parse(answer: str) -> list:
    """sympy expressions, and the normalised string for what is none."""
    from math_verify import LatexExtractionConfig, parse

    boxed = f"\\boxed{{{answer}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=0, raise_on_error=True)


def _plain(answer: str) -> str:
    """Without surrounding white space, dollar signs and boxes; inner white space made single spaces."""
    text = " ".join(answer.split())
    while True:
        if len(text) >= 2 and text[0] == text[-1] == "$":
            inner = text[1:-1]
        elif text.startswith("\\boxed") and text.endswith("}") and _is_one_box(text):
            inner = text[text.index("{") + 1 : -1]
        else:
            return text
        text = inner.strip()


def _is_one_box(text: str) -> bool:
    """Whether the brace that opens the box is closed by the last character only."""
    depth = 0
    for match in _BRACES.finditer(text):
        token = match.group()
        depth += token.endswith("{") and token != "\\{"
        depth -= token == "}"
        if depth == 0 and token == "}":
            return match.end() == len(text)
    return False


def _number(text: str) -> Fraction | None:
    """The exact value of a plain integer or decimal of at most `MAX_ANSWER_CHARS` characters, else None."""
    if len(text) > MAX_ANSWER_CHARS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text)
