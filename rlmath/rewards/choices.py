"""Multiple choice: a letter, alone or with its text, and several letters."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LEAD = r"(?:(?:the\s+)?(?:final\s+)?(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?"
_CHOICE = re.compile(
    rf"{_LEAD}(?:\((?P<inside>[A-Ja-j])\)|(?P<bare>[A-J])(?=$|[.):]))[.):]?(?:\s+(?P<rest>.*))?",
)
_CHOICE_IN_WORDS = re.compile(rf"{_LEAD}\(?(?P<bare>[A-J])\)?\.?", re.IGNORECASE)
_WITH_TEXT = frozenset("ABCDEF")
"""Letters that are read as choices when a text follows; of others it may be a name or a label."""
_CONTINUES = tuple("([+-*/^=!_&,")
_ANOTHER = re.compile(
    r"^(?:and|or)\b|\(\s?[a-z]{1,3}\s?\)|(?:^|\s)[a-j][.):](?:\s|$)|\b(?:and|or)\s+\(?[a-j]\b|\b(?:not|wrong|incorrect)\b",
    re.IGNORECASE,
)
"""What shows that an answer has more than one part, or takes its letter back."""
_SEVERAL = re.compile(r"[A-J](?:(?:,\s?|\s+and\s+|,\s+and\s+)?[A-J]){1,9}")


@dataclass(frozen=True)
class Choice:
    letter: str
    rest: str
    """The text behind the letter, "" when there is none."""


def choice_of(key: str) -> Choice | None:
    """The one letter that a text chooses, as in `C`, `(c)`, `C) 12` or `Option C`; None where it is something else.

    >>> choice_of("(C) 12").letter
    'C'
    """
    alone = _CHOICE_IN_WORDS.fullmatch(key)
    if alone is not None and len(key) > 3:
        return Choice(alone["bare"].upper(), "") if alone["bare"].isupper() else None
    match = _CHOICE.fullmatch(key)
    if match is None:
        return None
    letter, rest = match["inside"] or match["bare"], (match["rest"] or "").strip()
    if not rest:
        return Choice(letter.upper(), "")
    if letter not in _WITH_TEXT or rest.startswith(_CONTINUES) or _ANOTHER.search(rest):
        return None
    return Choice(letter, rest)


def several_letters(key: str) -> str | None:
    """The letters of `A, C` or `AC` in order, None where it is something else."""
    return "".join(re.findall("[A-J]", key)) if _SEVERAL.fullmatch(key) else None


def same_letters(gold: str, answer: str, separated: bool) -> bool:
    """Whether several letters are the same: without order where the reference is in alphabetical order and the answer
    keeps its letters apart, else in order."""
    if gold == "".join(sorted(set(gold))) and separated:
        return gold == "".join(sorted(answer))
    return gold == answer
