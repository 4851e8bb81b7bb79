"""Checks whether the final answer of a completion is correct.

    completion -> final answer -> strings, plain numbers, letters -> our own grammar -> math-verify

The first two steps take microseconds and run in the caller's process (`verify_by_string`). The
grammar (`answers.answers_equal`) is bounded in size and evaluates only its own syntax tree; it
takes about a millisecond. What it does not parse, such as an integral, goes to math-verify, which
has no time limit of its own: so these two run only in processes that can be killed (see
`worker_pool`). Text is never evaluated as code: math-verify's plain-expression extraction, which
ends in Python's `eval`, stays switched off.

The rules, with examples that the tests run, are in docs/rewards.md. This module imports neither
torch nor sympy, so that the worker processes stay small and the trainer starts fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlmath.answers.extraction import BOX_SEPARATOR, extract_answer, split_boxes
from rlmath.answers.string_match import (
    MAX_ANSWER_CHARS,
    STRICT,
    Rules,
    compare_plain,
    gold_answer,
    plain_answer,
)

TASKS = ("math", "choice")
"""Supported tasks: a mathematical answer, or the letter of one of the question's options."""

VERDICTS = (
    "string",
    "number",
    "choice",
    "symbolic",
    "no_answer",
    "too_long",
    "timeout",
    "error",
    "function",
)
"""All values of `Verdict.verdict`: how a completion was scored."""

FAILURES = ("timeout", "error")
"""Verdicts of answers that could not be checked."""

MAX_SOLUTIONS = 1000
"""Most solutions of one prompt."""
FEW_SOLUTIONS = 16
FEW_CHARS = 20_000
"""Up to so many solutions, with so many characters together, are compared as strings in the
caller's process; more of them in a worker, under its time limit."""


_SEVERAL_PARTS = re.compile(
    r"[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\pm|(?<![a-zA-Z0-9])\(?(?:[a-h]|[1-9]|i{1,3}|iv|"
    r"v)(?:\)|[.:](?=\s))|\bpart\b",
    re.IGNORECASE,
)
"""Signs that a solution has several parts."""
_INTERVAL = re.compile(r"[\[(][^\[\](),;]{1,100}[,;][^\[\](),;]{1,100}[\])]")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_TWO_NUMBERS = re.compile(
    r"[0-9]\$?(?:, | ,|;|,? ?(?:\\text ?\{ ?)?(?:and|or|as well as)\b)[^0-9]{0,12}[0-9]"
)
_SEPARATOR = re.compile(r"[,;]|(?<![a-zA-Z\\])(?:and|or|as well as)(?![a-zA-Z])")


@dataclass(frozen=True)
class Verdict:
    """The result of checking one answer.

    >>> verify("so it is \\\\boxed{ 132 }", ("\\\\boxed{132}",), "math")
    Verdict(correct=True, extracted='132', verdict='string')
    """

    correct: bool
    extracted: str
    """The answer that was compared, at most `MAX_ANSWER_CHARS` long; "" when none was found."""
    verdict: str
    """The way in which it was decided: "string", "number", "choice", "symbolic", "no_answer",
    "too_long", "timeout" or "error"."""
    seconds: float = field(default=0.0, compare=False, repr=False)
    """Duration of the check where a pool ran it; 0 for a result from its cache."""
    queue_seconds: float = field(default=0.0, compare=False, repr=False)
    """Time for which it waited for a worker before."""


def check_tasks(tasks: Iterable[str]) -> None:
    """Raises ValueError for tasks that the verifier does not support."""
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise ValueError(
            f"the data has rows of task {', '.join(map(repr, unknown))}, which cannot be verified;"
            f" keep rows of task {', '.join(map(repr, TASKS))} only, or set reward.function"
        )


def verify(
    completion: str,
    solutions: Sequence[str],
    task: str = "math",
    rules: Rules = STRICT,
    question: str = "",
) -> Verdict:
    """Whether a completion's final answer equals any of the solutions.

    It has no time limit, unlike a `WorkerPool`.

    A word or unit beside a value counts only where it stands in the solution or in the `question`,
    the problem's text without its template; see docs/rewards.md.
    """
    assert task in TASKS, task
    answer = extract_answer(completion, rules.answer_from)
    verdict = verify_by_string(answer, solutions, rules)
    return verdict or verify_by_parser(answer or "", solutions, rules, question)


def are_few(solutions: Sequence[str]) -> bool:
    """Whether `verify_by_string` takes no more than a millisecond or two."""
    return len(solutions) <= FEW_SOLUTIONS and sum(map(len, solutions)) <= FEW_CHARS


def verdict_without_solutions(answer: str | None) -> Verdict | None:
    """The verdict on an answer that is wrong whatever the solutions are, else None."""
    if answer is None or not answer.strip():
        return Verdict(False, "", "no_answer")
    extracted = split_boxes(answer.strip())[0]
    if len(extracted) > MAX_ANSWER_CHARS:
        return Verdict(False, extracted[:MAX_ANSWER_CHARS], "too_long")
    return Verdict(False, extracted, "string") if plain_answer(extracted) is None else None


def verify_by_string(
    answer: str | None, solutions: Sequence[str], rules: Rules = STRICT
) -> Verdict | None:
    """The result where strings, plain numbers and letters of choice decide, else None."""
    wrong_verdict = verdict_without_solutions(answer)
    if wrong_verdict is not None:
        return wrong_verdict
    assert answer is not None
    extracted, every_box = split_boxes(answer.strip())
    answer_plain = plain_answer(extracted)
    assert answer_plain is not None
    undecided = bool(every_box) and any(map(_SEVERAL_PARTS.search, solutions))
    kind = "string"
    for solution in usable_solutions(solutions):
        if _is_one_where_answer_is_two(solution, extracted):
            continue
        gold = plain_answer(gold_answer(solution))
        decided = None if gold is None else compare_plain(answer_plain, gold, rules)
        if decided is None:
            undecided = True
        elif decided[0]:
            return Verdict(True, extracted, decided[1])
        else:
            kind = decided[1]
    return None if undecided else Verdict(False, extracted, kind)


def usable_solutions(solutions: Sequence[str]) -> tuple[str, ...]:
    """The solutions that are short enough to be compared."""
    return tuple(solution for solution in solutions if len(solution) <= 20 * MAX_ANSWER_CHARS)


def _is_one_where_answer_is_two(solution: str, answer: str) -> bool:
    """Whether the answer is two numbers or boxes where the solution is one.

    The solution is an interval or one number, such as 3,000."""
    if not _SEPARATOR.search(answer):
        return False
    gold = plain_answer(gold_answer(solution))
    if gold is None:
        return False
    if _THOUSANDS.fullmatch(gold.key):
        return _TWO_NUMBERS.search(answer) is not None
    if not _INTERVAL.fullmatch(gold.key) or not {"[", "]"} & {gold.key[0], gold.key[-1]}:
        return False
    answer_plain = plain_answer(answer)
    return answer_plain is not None and not _HAS_BOUNDS.search(answer_plain.key)


_HAS_BOUNDS = re.compile(r"[\[\](<>{|≤≥]|\\(?:in|[lg]eq?|[lg]t)(?![a-z])|between|to")


def verify_by_parser(
    answer: str, solutions: Sequence[str], rules: Rules = STRICT, question: str = ""
) -> Verdict:
    """The verdict of the grammar or of math-verify, for workers alone.

    They may hang or take gigabytes."""
    # These import mpmath, which only workers need.
    from rlmath.answers.answers_equal import answers_equal, boxes_equal
    from rlmath.answers.question import read_question

    parsed_question = read_question(question)
    extracted, every_box = split_boxes(answer.strip())
    kind = "symbolic"
    for solution in usable_solutions(solutions):
        gold = gold_answer(solution)
        try:
            if (
                not _is_one_where_answer_is_two(solution, extracted)
                and answers_equal(extracted, gold, rules, parsed_question)
            ) or (
                every_box
                and not _is_one_where_answer_is_two(solution, every_box)
                and boxes_equal(
                    every_box.split(BOX_SEPARATOR), gold, rules, question=parsed_question
                )
            ):
                return Verdict(True, extracted, "symbolic")
        except Exception:  # a parser may raise anything on hostile text, MemoryError among it
            kind = "error"
    return Verdict(False, extracted, kind)
