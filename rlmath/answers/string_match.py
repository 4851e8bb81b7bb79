"""Equivalence of answers without a parser: equal strings, plain numbers, words and choices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rlmath.answers.extraction import extract_boxed
from rlmath.answers.normalize import NotMathematics, plain_unicode, without_layout, word_set

MAX_ANSWER_CHARS = 1000
"""Longest answer that is compared (characters)."""


@dataclass(frozen=True)
class Rules:
    """The rules by which answers are extracted and compared."""

    answer_from: str = "boxed"
    """The place where the answer is searched: see `extraction.extract_answer`."""
    protocol: bool = False
    """Compare numbers as loosely as the Qwen2.5-Math evaluation does: within 1e-4, rounded, a
    factor of 100 off."""


STRICT = Rules()


@dataclass(frozen=True)
class Choice:
    """A letter of multiple choice."""

    letter: str
    rest: str
    """The text after the letter, "" if there is none."""


@dataclass(frozen=True)
class Plain:
    """A text prepared for the comparisons of this module."""

    key: str
    number: Fraction | None
    exact: bool
    """Whether the number was written without a decimal point."""
    choice: Choice | None
    """The letter of choice that it is, or begins with."""
    letters: str | None
    """Several letters of choice, in order."""
    words: tuple[str, ...] | None
    """Several words or names in a list, in order."""


def compare_plain(answer: Plain, gold: Plain, rules: Rules) -> tuple[bool, str] | None:
    """(equal, kind of comparison); None if it cannot be decided here.

    The kind is "string", "number" or "choice"."""
    if answer.key == gold.key:
        return True, "string"
    if gold.choice is not None and answer.choice is not None:
        if gold.choice.letter != answer.choice.letter or "" in (
            gold.choice.rest,
            answer.choice.rest,
        ):
            return gold.choice.letter == answer.choice.letter, "choice"
        return None
    if gold.choice is not None and not gold.choice.rest and answer.key in ("a", "b", "c", "d"):
        return answer.key.upper() == gold.choice.letter, "choice"
    if gold.words is not None and answer.words is not None:
        unordered = " and " in gold.key
        same_words = (
            sorted(answer.words) == sorted(gold.words) if unordered else answer.words == gold.words
        )
        return same_words, "string"
    if gold.letters is not None and answer.letters is not None:
        return _same_letters(
            gold.letters, answer.letters, separated=answer.key != answer.letters
        ), "choice"
    if answer.number is not None and gold.number is not None:
        if answer.number == gold.number:
            return True, "number"
        if answer.exact and gold.exact and not rules.protocol and "," not in gold.key + answer.key:
            return False, "number"
    return None


@lru_cache(maxsize=4096)
def gold_answer(gold: str) -> str:
    """A reference answer without its box, if it has one."""
    boxed = extract_boxed(gold) if "box" in gold else None
    return gold if boxed is None else boxed


@lru_cache(maxsize=4096)
def plain_answer(text: str) -> Plain | None:
    """A text prepared for `compare_plain`, None if it has control characters."""
    try:
        key = _string_key(text)
    except NotMathematics:
        return None
    number, exact = _plain_number(key)
    choice = None if number is not None else choice_of(key)
    letters = "".join(re.findall("[A-J]", key)) if _SEVERAL_LETTERS.fullmatch(key) else None
    if letters is None and choice is None and _are_words(key):
        key = _LEAD_WORDS.sub("", key.casefold())
    words = tuple(_JOINERS.split(key.casefold())) if _NAMES.fullmatch(key) else None
    return Plain(key, number, exact=exact, choice=choice, letters=letters, words=words)


# ---------------------------------------------------------------- strings
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol|operatorname)\s?\{([^{}]*)\}"
)
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([A-Za-z0-9])\}(?![A-Za-z0-9])")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9.,]) +| +(?![A-Za-z0-9])")


def _string_key(text: str) -> str:
    """One spelling for texts that look the same.

    It has no layout and no \\text, and white space only between letters and digits."""
    key = without_layout(plain_unicode(text))
    key = _FRACTION_COMMAND.sub(r"\\frac", key)
    key = _SHORT_SCRIPT.sub(r"\1\2", _WRAPPER.sub(r" \1 ", key))
    key = " ".join(key.split()).rstrip(". ") or text.strip()
    return _LOOSE_SPACE.sub("", key) if choice_of(key) is None else key


# ---------------------------------------------------------------- numbers
_INTEGER = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+"
_NUMBER = re.compile(rf"([+-]?)((?:{_INTEGER})(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(
    r"([+-]?)(?:([0-9]+)/([0-9]+)|\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|\\frac([0-9])([0-9]))"
)


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


# ---------------------------------------------------------------- words
_NAMES = re.compile(r"[A-Za-z]{3,30}(?:(?:, ?| and |, and )[A-Za-z]{3,30}){1,30}")
_JOINERS = re.compile(r", and |, ?| and ")
_LEAD_WORDS = re.compile(r"^(?:it is )?(?:the |an? )?")
_WORDS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
_SHORT_WORDS = word_set("a an the of in on to no yes not and or is it at by up")


def _are_words(key: str) -> bool:
    """Whether a text is words, whose case does not matter, and not a product of letters.

    `Even` is, `nRT` is not."""
    if not _WORDS.fullmatch(key):
        return False
    words = re.split("[ -]", key)
    plain = [len(word) > 3 or word.islower() or word.istitle() for word in words if len(word) > 2]
    short = [word.casefold() in _SHORT_WORDS for word in words if len(word) < 3]
    return all(plain) and all(short) and bool(plain or words[0].casefold() in ("yes", "no"))


# ---------------------------------------------------------------- multiple choice
_LEAD = r"(?:(?:the\s+)?(?:final\s+)?(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?"
_CHOICE = re.compile(
    rf"{_LEAD}(?:\((?P<inside>[A-Ja-j])\)|(?P<bare>[A-J])(?=$|[.):]))[.):]?(?:\s+(?P<rest>.*))?"
)
_CHOICE_IN_WORDS = re.compile(rf"{_LEAD}\(?(?P<bare>[A-J])\)?\.?", re.IGNORECASE)
_SEVERAL_LETTERS = re.compile(r"[A-J](?:(?:,\s?|\s+and\s+|,\s+and\s+)?[A-J]){1,9}")
_WITH_TEXT = frozenset("ABCDEF")
"""Letters that are choices if a text follows; others may be a name or a label."""
_CONTINUES = tuple("([+-*/^=!_&,")
_ANOTHER = re.compile(
    r"^(?:and|or)\b|\(\s?[a-z]{1,3}\s?\)|(?:^|\s)[a-j][.):](?:\s|$)|\b(?:and|or)\s+\(?[a-j]\b|"
    r"\b(?:not|wrong|incorrect)\b",
    re.IGNORECASE,
)
"""Signs that an answer has more than one part, or revokes its letter."""


def choice_of(key: str) -> Choice | None:
    """The single letter that a text chooses; None for anything else.

    Examples are `C`, `(c)`, `C) 12` and `Option C`.

    >>> choice_of("(C) 12").letter
    'C'
    """
    letter_alone = _CHOICE_IN_WORDS.fullmatch(key)
    if letter_alone is not None and len(key) > 3:
        return Choice(letter_alone["bare"].upper(), "") if letter_alone["bare"].isupper() else None
    match = _CHOICE.fullmatch(key)
    if match is None:
        return None
    letter = match["inside"] or match["bare"]
    text = (match["rest"] or "").strip()
    if not text:
        return Choice(letter.upper(), "")
    if letter not in _WITH_TEXT or text.startswith(_CONTINUES) or _ANOTHER.search(text):
        return None
    return Choice(letter, text)


def _same_letters(gold: str, answer: str, separated: bool) -> bool:
    """Whether letters of choice are the same.

    Their order does not count if the gold ones are alphabetical and the answer's `separated`."""
    if gold == "".join(sorted(set(gold))) and separated:
        return gold == "".join(sorted(answer))
    return gold == answer
