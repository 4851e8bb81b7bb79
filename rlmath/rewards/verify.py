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
from fractions import Fraction
from functools import lru_cache

from rlmath.rewards.extraction import AnswerFrom, extract_answer, extract_boxed
from rlmath.rewards.notation import (
    NotMathematics,
    Reading,
    Unevaluated,
    Unsupported,
    plain_unicode,
    without_layout,
)

TASKS = ("math",)
"""Tasks that can be judged."""

MAX_ANSWER_CHARS = 1000
"""Longest answer that is looked at (characters)."""

VERDICTS = ("string", "number", "choice", "symbolic", "no_answer", "too_long", "timeout", "error", "function")
"""All ways in which a completion may have been judged."""

FAILURES = ("timeout", "error")
"""Verdicts that say that an answer could not be judged."""


@dataclass(frozen=True)
class Rules:
    """How answers are found and compared."""

    answer_from: AnswerFrom = "boxed"
    """Where the answer may stand: see `extraction.extract_answer`."""
    protocol: bool = False
    """Compare numbers as loosely as the Qwen2.5-Math evaluation does: within 1e-4, rounded, a factor of 100 off."""


STRICT = Rules()


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


# ---------------------------------------------------------------- cheap: strings, plain numbers, letters


def cheap_verdict(answer: str | None, solutions: Sequence[str], rules: Rules = STRICT) -> Verdict | None:
    """The verdict where strings, plain numbers and letters of choice decide, else None."""
    if answer is None or not answer.strip():
        return Verdict(False, "", "no_answer")
    extracted = answer.strip()
    if len(extracted) > MAX_ANSWER_CHARS:
        return Verdict(False, extracted[:MAX_ANSWER_CHARS], "too_long")
    ours = _plain(extracted)
    if ours is None:
        return Verdict(False, extracted, "string")
    undecided = False
    kind = "string"
    for gold in usable_solutions(solutions):
        theirs = _plain_gold(gold)
        decided = None if theirs is None else _cheap_pair(ours, theirs, rules)
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


@dataclass(frozen=True)
class _Plain:
    """A text as the cheap comparisons see it."""

    key: str
    number: Fraction | None
    exact: bool
    """Whether the number was written without a decimal point."""
    letter: str | None
    """The letter of choice that it begins with."""
    rest: str
    """What follows the letter."""
    words: frozenset[str] | None
    """Of several words or names side by side: each of them."""
    letters: frozenset[str] | None
    """Of several letters of choice: each of them."""


_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol|operatorname)\s?\{([^{}]*)\}"
)
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([A-Za-z0-9])\}(?![A-Za-z0-9])")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9]) +| +(?![A-Za-z0-9])")
_INTEGER = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+"
_NUMBER = re.compile(rf"([+-]?)((?:{_INTEGER})(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"([+-]?)(?:([0-9]+)/([0-9]+)|\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|\\frac([0-9])([0-9]))")
_CHOICE = re.compile(
    r"(?:(?:the\s+)?(?:final\s+)?(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?(?:\(([A-Ja-j])\)|([A-J])(?=$|[.):]))[.):]?(?:\s+(.*))?",
    re.IGNORECASE,
)
_NAMES = re.compile(r"[A-Za-z]{3,30}(?:(?:, ?| and |, and )[A-Za-z]{3,30}){1,30}")
_JOINERS = re.compile(r", and |, ?| and ")
_CHOICES = re.compile(r"(?:[A-J](?:, ?| and |, and )?){2,10}")
_INTEGER_PARAMETER = re.compile(r"\(\s{0,3}([a-z])\s{0,3}(\\in\s{0,3}\\mathbb\s?\{?[ZN]\}?)\s{0,3}\)$")
_QUALIFIER = re.compile(r",?(?:\\text\{)?,? {0,3}for (?:all|every|any|each) [A-Za-z ${}\\]{1,60}$")
"""What a function is said to hold for: `f(x) = 2x for all real x`."""
_UNEVALUATED = re.compile(r"\\(?:i{0,2}int|sum|prod|lim)(?![a-zA-Z])|\|_")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")


@lru_cache(maxsize=4096)
def _plain_gold(gold: str) -> _Plain | None:
    return _plain(gold_answer(gold))


def gold_answer(gold: str) -> str:
    """A reference answer without its box, if it has one."""
    boxed = extract_boxed(gold) if "box" in gold else None
    return gold if boxed is None else boxed


def _plain(text: str) -> _Plain | None:
    try:
        key = _string_key(text)
    except NotMathematics:
        return None
    number, exact = _plain_number(key)
    choice = None if number is not None else _CHOICE.fullmatch(key)
    letter, rest = None, ""
    if choice is not None:
        letter, rest = (choice.group(1) or choice.group(2)).upper(), (choice.group(3) or "").strip()
        if rest[:1] in tuple("([+-*/^=!_") or choice.group(2) in (
            "a",
            "b",
            "c",
            "d",
            "e",
            "f",
            "g",
            "h",
            "i",
            "j",
        ):
            letter, rest = None, ""
    if len(key) > 1 and _WORDS.fullmatch(key) and not _CHOICES.fullmatch(key):
        key = key.casefold().removeprefix("the ").removeprefix("an ").removeprefix("a ")
    words = frozenset(_JOINERS.split(key)) if _NAMES.fullmatch(key) else None
    letters = frozenset(re.findall("[A-J]", key)) if _CHOICES.fullmatch(key) else None
    return _Plain(key, number, exact, letter, rest, words, letters)


def _string_key(text: str) -> str:
    """One spelling of what looks the same: no layout, no \\text, white space only between letters and digits."""
    key = without_layout(plain_unicode(text))
    key = _FRACTION_COMMAND.sub(r"\\frac", key)
    key = _SHORT_SCRIPT.sub(r"\1\2", _WRAPPER.sub(r" \1 ", key))
    key = " ".join(key.split()).rstrip(". ") or text.strip()
    if not _CHOICE.fullmatch(key):
        key = _LOOSE_SPACE.sub("", key)
    return key


def _plain_number(key: str) -> tuple[Fraction | None, bool]:
    """(exact value of a plain integer, decimal or fraction, whether it has no decimal point)."""
    if len(key) > MAX_ANSWER_CHARS:
        return None, True
    if number := _NUMBER.fullmatch(key):
        sign, digits = number.groups()
        value = Fraction(digits.replace(",", "").rstrip(".") or "0")
        return (-value if sign == "-" else value), "." not in digits.rstrip(".")
    if fraction := _FRACTION.fullmatch(key):
        sign, *parts = fraction.groups()
        above, below = [int(part) for part in parts if part is not None]
        if below:
            return (Fraction(-above, below) if sign == "-" else Fraction(above, below)), True
    return None, True


def _cheap_pair(ours: _Plain, gold: _Plain, rules: Rules) -> tuple[bool, str] | None:
    """(equal, how it was decided), or None."""
    if ours.key == gold.key:
        return True, "string"
    if gold.letter is not None and len(gold.key) <= 4:
        letter = ours.letter or (ours.key.upper() if ours.key in ("a", "b", "c", "d") else None)
        return (letter == gold.letter, "choice") if letter else None
    if ours.letter is not None and gold.letter is not None:
        return ours.letter == gold.letter, "choice"
    if ours.words is not None and gold.words is not None and len(gold.words) > 1:
        return ours.words == gold.words, "string"
    if ours.letters is not None and gold.letters is not None:
        return ours.letters == gold.letters, "choice"
    if ours.number is not None and gold.number is not None:
        if ours.number == gold.number:
            return True, "number"
        if ours.exact and gold.exact and not rules.protocol and "," not in gold.key + ours.key:
            return False, "number"
    return None


# ---------------------------------------------------------------- deep: the grammar, then math-verify


def deep_verdict(answer: str, solutions: Sequence[str], rules: Rules = STRICT) -> Verdict:
    """The verdict of the grammar or of math-verify. On hostile text the latter may hang or take gigabytes: for
    killable processes only."""
    extracted = answer.strip()
    try:
        correct = any(_deep_pair(extracted, gold_answer(gold), rules) for gold in usable_solutions(solutions))
    except Exception:  # a parser may raise anything on hostile text, MemoryError among it
        return Verdict(False, extracted, "error")
    return Verdict(correct, extracted, "symbolic")


def _deep_pair(answer: str, gold: str, rules: Rules) -> bool:
    plain_answer, plain_gold = _plain(answer), _plain(gold)
    if plain_answer is None or plain_gold is None:
        return False
    if plain_gold.rest and plain_answer.letter is None:
        return _deep_pair(answer, plain_gold.rest, rules)
    if plain_answer.rest and plain_gold.letter is None:
        return _deep_pair(plain_answer.rest, gold, rules)
    from rlmath.rewards.written import same_special

    special = same_special(plain_gold.key, plain_answer.key)
    if special is not None:
        return special
    answer, gold = _tidy(answer), _tidy(gold)
    try:
        return _same(answer, gold, rules)
    except Unsupported:
        return _is_bounded(answer) and _library_says(answer, gold)
    except NotMathematics:
        return False


def _tidy(text: str) -> str:
    """Without what a function is said to hold for; a parameter's set behind a comma."""
    return _INTEGER_PARAMETER.sub(r", \1 \2", _QUALIFIER.sub("", text))


def _same(answer: str, gold: str, rules: Rules) -> bool:
    """Whether any reading of the answer equals any reading of the gold answer."""
    from rlmath.rewards.answers import same_answer

    ours, golds = _readings(_without_working(answer)), _readings(_without_working(gold))
    if isinstance(ours[0], Unevaluated) and not isinstance(golds[0], Unevaluated):
        return False  # the question said once more
    refused: Exception | None = None
    for one in golds:
        for other in ours:
            for reading in (one, other):
                if isinstance(reading, Exception):
                    refused = refused or reading
            if isinstance(one, Exception) or isinstance(other, Exception):
                continue
            try:
                if same_answer(one, other, rules.protocol):
                    return True
            except (NotMathematics, Unsupported) as error:
                refused = refused or error
    prose = [r for r in (*ours, *golds) if isinstance(r, NotMathematics)]
    if prose:
        raise prose[0]
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
    from rlmath.rewards.grammar import parse_answer

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
    from rlmath.rewards.answers import check_size

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
