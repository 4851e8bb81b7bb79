"""Answers with their own comparison: clock times, numerals in another base, number words and "no solution"."""

from __future__ import annotations

import re

from rlmath.rewards.answers.normalize import word_list

_CLOCK = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?::([0-5][0-9]))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_FULL_HOUR = re.compile(r"([0-9]{1,2})\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_BASED = re.compile(r"\(?([0-9A-F]+)\)?_\{?\(?([0-9]{1,2}|[a-z]+)\)?\}?", re.IGNORECASE)

_NO_SOLUTION = ("no solution", "no solutions", "there is no solution", "there are no solutions")
_REALS = ("all real numbers", "all reals", "real numbers", "\\mathbb{R}", "\\mathbb R", "(-\\infty,\\infty)")
_ALIKE = (
    frozenset((*_NO_SOLUTION, "\\emptyset", "\\varnothing", "\\{\\}", "empty set")),
    frozenset((*_NO_SOLUTION, "none")),
    frozenset(("no real solution", "no real solutions", "none")),
    frozenset(("does not exist", "dne", "do not exist")),
    frozenset(_REALS),
)
"""Sets of texts with the same meaning."""
_WORDS = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS)}
_BASES = {word: number for word, number in _NUMBER_WORDS.items() if 2 <= number <= 16}


def same_special(gold: str, answer: str) -> bool | None:
    """Whether two texts are the same time of day, numeral, number word or "no solution"; None if neither is one.

    `3:30 PM` equals `15:30`; if one side has no AM or PM, the other's is ignored. A numeral with a base equals only
    the same digits in the same base.
    """
    time, other = _clock(gold), _clock(answer)
    if time is not None and other is not None:
        if time[0] == other[0] or time[1] == other[1]:
            return time[0] == other[0]
        without_half = other if time[1] else time
        return without_half[0] < 13 * 3600 and time[0] % 43200 == other[0] % 43200
    folded = {text if "\\" in text else text.casefold() for text in (gold, answer)}
    if any(folded <= alike for alike in _ALIKE):
        return True
    if (gold in _NUMBER_WORDS or answer in _NUMBER_WORDS) and (gold.isdigit() or answer.isdigit()):
        return str(_NUMBER_WORDS.get(gold, gold)) == str(_NUMBER_WORDS.get(answer, answer))
    bases = _numeral(gold), _numeral(answer)
    if bases[0] is not None or bases[1] is not None:
        return bases[0] == bases[1]
    return None


def _clock(text: str) -> tuple[int, bool] | None:
    """(seconds after midnight, whether it has AM or PM) of a time of day, else None."""
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds, half = match.groups()
    elif match := _FULL_HOUR.fullmatch(text):
        (hours, half), minutes, seconds = match.groups(), "0", None
    else:
        return None
    hour = int(hours)
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + (12 if half.lower() == "p" else 0)
    return hour * 3600 + int(minutes) * 60 + int(seconds or 0), bool(half)


def _numeral(text: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral such as `52_8` or `1010_{two}`, else None."""
    match = _BASED.fullmatch(text.replace("\\", "").replace(" ", ""))
    if match is None or not any(character.isdigit() for character in match.group(1)):
        return None
    digits, base = match.group(1).upper(), match.group(2).lower()
    number = int(base) if base.isdigit() else _BASES.get(base)
    if number is None or (not digits[0].isdigit() and number <= 10):
        return None
    if any(int(digit, 36) >= number for digit in digits):
        return None
    return digits.lstrip("0") or "0", number
