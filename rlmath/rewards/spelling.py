"""Answers as strings, plain numbers and letters of choice: what can be compared within microseconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rlmath.rewards.extraction import AnswerFrom, extract_boxed
from rlmath.rewards.notation import NotMathematics, plain_unicode, without_layout

MAX_ANSWER_CHARS = 1000
"""Longest answer that is looked at (characters)."""


@dataclass(frozen=True)
class Rules:
    """How answers are found and compared."""

    answer_from: AnswerFrom = "boxed"
    """Where the answer may stand: see `extraction.extract_answer`."""
    protocol: bool = False
    """Compare numbers as loosely as the Qwen2.5-Math evaluation does: within 1e-4, rounded, a factor of 100 off."""


STRICT = Rules()


@dataclass(frozen=True)
class Plain:
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
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")


@lru_cache(maxsize=4096)
def plain_gold(gold: str) -> Plain | None:
    return plain_answer(gold_answer(gold))


def gold_answer(gold: str) -> str:
    """A reference answer without its box, if it has one."""
    boxed = extract_boxed(gold) if "box" in gold else None
    return gold if boxed is None else boxed


def plain_answer(text: str) -> Plain | None:
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
    return Plain(key, number, exact, letter, rest, words, letters)


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


def cheap_pair(ours: Plain, gold: Plain, rules: Rules) -> tuple[bool, str] | None:
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
