"""Is the answer of a completion right?

    completion -> final answer -> strings, plain numbers, letters -> our own grammar -> math-verify

The first two steps take microseconds and run in the caller's process. The grammar (`grammar`, `expressions`,
`answers`) is bounded in size and never evaluates anything but its own tree; it takes about a millisecond. What it does
not read, such as an integral, goes to math-verify, which may take for ever: so only processes that can be killed run
those two (see `pool`). Text is never evaluated as code: math-verify's plain-expression extraction, which ends in
Python's `eval`, stays switched off.

The rules, with examples that the tests run, are in docs/rewards.md. This module imports neither torch nor sympy; the
worker processes stay small and the trainer's start quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rlmath.rewards.answers.lexer import Reading
from rlmath.rewards.answers.normalize import (
    NotMathematics,
    Unevaluated,
    Unsupported,
    plain_unicode,
    without_layout,
)
from rlmath.rewards.answers.string_match import (
    MAX_ANSWER_CHARS,
    STRICT,
    Rules,
    cheap_pair,
    gold_answer,
    plain_answer,
    plain_gold,
)
from rlmath.rewards.extraction import extract_answer

TASKS = ("math", "choice")
"""Tasks that can be judged: a mathematical answer, or the letter of one of the question's options."""

VERDICTS = ("string", "number", "choice", "symbolic", "no_answer", "too_long", "timeout", "error", "function")
"""All ways in which a completion may have been judged."""

FAILURES = ("timeout", "error")
"""Verdicts that say that an answer could not be judged."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer.

    >>> verify("so it is \\\\boxed{ 132 }", ("\\\\boxed{132}",), "math")
    Verdict(correct=True, extracted='132', verdict='string')
    """

    correct: bool
    extracted: str
    """The answer that was compared, at most `MAX_ANSWER_CHARS` long; "" when none was found."""
    verdict: str
    """How it was decided: "string", "number", "choice", "symbolic", "no_answer", "too_long", "timeout" or "error"."""
    seconds: float = field(default=0.0, compare=False, repr=False)
    """How long the check took (seconds), where a pool judged; an answer known from before takes no time."""


def check_tasks(tasks: Iterable[str]) -> None:
    """Raises ValueError when a task of the data has no judge."""
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise ValueError(
            f"the data has rows of task {', '.join(map(repr, unknown))}, which cannot be judged;"
            f" keep rows of task {', '.join(map(repr, TASKS))} only, or set reward.function"
        )


def verify(completion: str, solutions: Sequence[str], task: str = "math", rules: Rules = STRICT) -> Verdict:
    """The verdict on a completion: right when its final answer equals any of the solutions.

    Has no time limit. In a process that must go on, use `VerifierPool`.
    """
    assert task in TASKS, task
    answer = extract_answer(completion, rules.answer_from)
    return cheap_verdict(answer, solutions, rules) or deep_verdict(answer or "", solutions, rules)


def cheap_verdict(answer: str | None, solutions: Sequence[str], rules: Rules = STRICT) -> Verdict | None:
    """The verdict where strings, plain numbers and letters of choice decide, else None."""
    if answer is None or not answer.strip():
        return Verdict(False, "", "no_answer")
    extracted = answer.strip()
    if len(extracted) > MAX_ANSWER_CHARS:
        return Verdict(False, extracted[:MAX_ANSWER_CHARS], "too_long")
    ours = plain_answer(extracted)
    if ours is None:
        return Verdict(False, extracted, "string")
    undecided = False
    kind = "string"
    for gold in usable_solutions(solutions):
        theirs = plain_gold(gold)
        decided = None if theirs is None else cheap_pair(ours, theirs, rules)
        if decided is None:
            undecided = True
        elif decided[0]:
            return Verdict(True, extracted, decided[1])
        else:
            kind = decided[1]
    return None if undecided else Verdict(False, extracted, kind)


def usable_solutions(solutions: Sequence[str]) -> tuple[str, ...]:
    """Those short enough to be compared."""
    return tuple(solution for solution in solutions if len(solution) <= 20 * MAX_ANSWER_CHARS)


def deep_verdict(answer: str, solutions: Sequence[str], rules: Rules = STRICT) -> Verdict:
    """The verdict of the grammar or of math-verify. On hostile text the latter may hang or take gigabytes: for
    killable processes only."""
    extracted = answer.strip()
    kind = "symbolic"
    for gold in usable_solutions(solutions):
        try:
            if _deep_pair(extracted, gold_answer(gold), rules):
                return Verdict(True, extracted, "symbolic")
        except Exception:  # a parser may raise anything on hostile text, MemoryError among it
            kind = "error"
    return Verdict(False, extracted, kind)


def _deep_pair(answer: str, gold: str, rules: Rules) -> bool:
    ours, theirs = plain_answer(answer), plain_answer(gold)
    if ours is None or theirs is None:
        return False
    if theirs.choice is not None and theirs.choice.rest:  # the text of a choice without its letter will do
        return _deep_pair(ours.choice.rest if ours.choice else answer, theirs.choice.rest, rules)
    if ours.choice is not None and ours.choice.rest and theirs.choice is None:
        return _deep_pair(ours.choice.rest, gold, rules)
    from rlmath.rewards.answers.special_forms import same_special

    special = same_special(theirs.key, ours.key)
    if special is not None:
        return special
    answer, gold = _tidy(answer), _tidy(gold)
    try:
        return _same(answer, gold, rules)
    except Unsupported:
        return _is_bounded(answer) and _library_says(answer, gold)
    except NotMathematics:
        return False


_INTEGER_PARAMETER = re.compile(r"\(\s{0,3}([a-z])\s{0,3}(\\in\s{0,3}\\mathbb\s?\{?[ZN]\}?)\s{0,3}\)$")
_PARTIAL_DERIVATIVE = re.compile(r"^\$?\\frac\s?\{\\partial[^{}]{0,20}\}\s?\{\\partial[^{}]{0,20}\}\s{0,3}=")
"""What a partial derivative's value is given to."""
_BARE_SET = re.compile(r"\\in\s{0,3}([ZN])(?![a-zA-Z])")
_FOR_INTEGERS = re.compile(
    r",?\s{0,3}(?:\\text\s?\{)?,?\s{0,3}(?:for|where) (?:any |all |some |every )?integers? \}?\s{0,3}\$?([a-z])\$?\}?$"
)
"""`k\\pi for any integer k`."""
_QUALIFIER = re.compile(r",?(?:\\text\{)?,? {0,3}for (?:all|every|any|each) [A-Za-z ${}\\]{1,60}$")
"""What a function is said to hold for: `f(x) = 2x for all real x`."""
_UNEVALUATED = re.compile(r"\\(?:i{0,2}int|sum|prod|lim)(?![a-zA-Z])|\|_")


def _tidy(text: str) -> str:
    """Without what a function is said to hold for; a parameter's set behind a comma."""
    text = _PARTIAL_DERIVATIVE.sub("", text)
    text = _BARE_SET.sub(r"\\in \\mathbb{\1}", text)
    text = _FOR_INTEGERS.sub(r", \1 \\in \\mathbb{Z}", text)
    return _INTEGER_PARAMETER.sub(r", \1 \2", _QUALIFIER.sub("", text))


def _same(answer: str, gold: str, rules: Rules) -> bool:
    """Whether any reading of the answer equals any reading of the gold answer."""
    from rlmath.rewards.answers.answers_equal import same_answer

    ours, golds = _readings(_without_working(answer)), _readings(_without_working(gold))
    if isinstance(ours[0], Unevaluated) and not isinstance(golds[0], Unevaluated):
        return False  # the question said once more
    if isinstance(ours[0], Unsupported) and _UNEVALUATED.search(answer) and not _UNEVALUATED.search(gold):
        return False
    unread = [reading for reading in (golds[0], ours[0]) if isinstance(reading, Exception)]
    if unread:
        raise next((error for error in unread if isinstance(error, NotMathematics)), unread[0])
    refused: Exception | None = None
    for one in golds:
        for other in ours:
            try:
                if same_answer(one, other, rules.protocol):
                    return True
            except (NotMathematics, Unsupported) as error:
                refused = refused or error
    if refused is not None:
        raise refused
    return False


def _without_working(text: str) -> str:
    """`\\int_0^1 2x dx = 1` is worth what stands last."""
    front, equals, last = text.rpartition("=")
    if equals and isinstance(_readings(text)[0], Exception) and _UNEVALUATED.search(front):
        return last
    return text


@lru_cache(maxsize=2048)
def _readings(text: str) -> tuple:
    """The trees of a text, one for each way to read its doubtful digits; an exception where it has none."""
    from rlmath.rewards.answers.parser import parse_answer

    plain = without_layout(plain_unicode(text))
    ways = [Reading()]
    if re.search(r"[0-9],[0-9]{3}(?![0-9])", plain):
        ways.append(Reading(commas_group=False))
    if re.search(r"[0-9][eE][+-][0-9]", plain):
        ways.append(Reading(e_is_exponent=False))
    trees = []
    for way in ways:
        try:
            trees.append(parse_answer(plain, way))
        except (NotMathematics, Unsupported) as error:
            trees.append(error)
    good = tuple(tree for tree in trees if not isinstance(tree, Exception))
    return good or (trees[0],)


def _is_bounded(answer: str) -> bool:
    """Whether what our grammar reads of an answer stays within our limits, before another parser works it out."""
    from rlmath.rewards.answers.answers_equal import check_size

    try:
        for reading in _readings(answer):
            if not isinstance(reading, Exception):
                check_size(reading)
    except NotMathematics:
        return False
    return True


def _library_says(answer: str, gold: str) -> bool:
    """Whether math-verify finds them equal. Its own time limits, which need signals, are off."""
    from math_verify import verify as equal

    return equal(_library_parse(gold), _library_parse_answer(answer), timeout_seconds=0, raise_on_error=True)


@lru_cache(maxsize=512)
def _library_parse(gold: str) -> list:
    return _library_parse_answer(gold)


def _library_parse_answer(answer: str) -> list:
    """sympy expressions, and the normalised string for what is none."""
    from math_verify import LatexExtractionConfig, parse

    boxed = f"\\boxed{{{answer}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=0, raise_on_error=True)
