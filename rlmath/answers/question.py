"""Words and units of a question that change nothing of a value in its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from rlmath.answers.normalize import KnownWords, singular, word_set
from rlmath.answers.units import Known, Unit, unit_of_symbol, unit_of_word

MAX_QUESTION_CHARS = 20_000
"""Longest question that is read in full; of a longer one the beginning and the end are read,
half as many characters of each."""


@dataclass(frozen=True)
class Question:
    """The words and units of a question."""

    words: frozenset[str] = frozenset()
    """Words in lower case and in the singular."""
    units: frozenset[Known] = frozenset()
    counted: frozenset[str] = frozenset()
    """The words behind "how many" and the like."""
    asked: frozenset[Known] = frozenset()
    """The units of what is asked for, where it says: hours of `How many hours` and of `in
    hours`."""

    def has(self, unit: Unit) -> bool:
        """Whether all known units that a unit is written with stand in the question.

        Where the question says which units are asked for, one of them must be among these."""
        is_asked = not unit.parts or not self.asked or not self.asked.isdisjoint(unit.parts)
        return is_asked and unit.parts <= self.units


def usable_question(question: str) -> str:
    """The part of a question that is read."""
    if len(question) <= MAX_QUESTION_CHARS:
        return question
    half = MAX_QUESTION_CHARS // 2
    return f"{question[:half]} {question[-half:]}"


def read_question(question: str) -> Question:
    """The words and units in the part of a question that is read; linear in it.

    >>> sorted(read_question("How many boxes of $3$ kg are there?").words)
    ['are', 'box', 'how', 'kg', 'many', 'of', 'there']
    """
    return _read(usable_question(question))


@lru_cache(maxsize=512)
def _read(text: str) -> Question:
    prose = _MATHEMATICS.sub(_prose_in, text)
    words = [word for word in _WORD.findall(prose) if len(word) > 1]
    units = [*_units_of_signs(text), *_units_of_words(words), *_units_of_symbols(text)]
    counted = [word for words_behind in _COUNTED.findall(prose) for word in words_behind.split()]
    return Question(
        frozenset(map(singular, words)),
        frozenset(units),
        counted=frozenset(map(singular, counted)),
        asked=_asked_units(text),
    )


def known_words(answer: str, gold: str, question: Question) -> KnownWords:
    """The words of an answer that are known by its reference or question."""
    answer_words, gold_words = (
        frozenset(map(singular, _WORD.findall(text))) for text in (answer, gold)
    )
    return KnownWords(
        answer_words & (gold_words | question.words),
        counted=(answer_words & question.counted) - gold_words,
    )


_COUNTED = re.compile(
    r"\b(?:how (?:many|much)|percent(?:age)?) ((?:[a-z]{3,20} ?){1,2})", re.IGNORECASE
)
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]+")
_MATHEMATICS = re.compile(
    r"\$\$?([^$]{1,300})\$\$?"
    r"|\\\(((?:[^\\]|\\[^)]){1,300})\\\)"
    r"|\\\[((?:[^\\]|\\[^\]]){1,600})\\\]"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|rm|mbox|operatorname)\s?\{([^{}]{1,200})\}")
_SENTENCE = re.compile(
    r"(?<![\\a-zA-Z])[a-z]{2,20} [a-z]{2,20}(?![a-zA-Z])|^[^a-zA-Z\\]*[a-z]{2,20} "
)


def _prose_in(match: re.Match[str]) -> str:
    """The words of a formula; of two prices, `$5 for pens and $`, the whole text."""
    inside = next(group for group in match.groups() if group is not None)
    if match[0][0] == "$" and _SENTENCE.search(_TEXT.sub("", inside)):
        return f" {inside} "
    return f" {' '.join(_TEXT.findall(inside))} "


# ---------------------------------------------------------------- units
_AMOUNT = r"(?:[0-9][0-9,]{0,20})?(?:(?<=[0-9])|\.[0-9]{1,9})"
_SIGNS = {
    "dollar": re.compile(
        rf"\\\$|\\dollar"
        # `$5 for a pen`, but not `$5 + x$`
        rf"|(?<![$\\0-9a-zA-Z])\$ ?{_AMOUNT}"
        r"(?=[.,;:?!)]{0,2}(?:\s+(?:[a-zA-Z]{2}|a\s)|\s*$|\s\()|[/-][a-z]{2}|[.;:?!)])"
        # `it costs 15$`
        rf"|(?<=[a-z]{{2}} ){_AMOUNT}\$(?=[\s?.,!)]|$)"
    ),
    "euro": re.compile(r"€|\\euro|\\texteuro"),
    "gbp": re.compile(r"£|\\pounds?"),
    "rupee": re.compile(r"₹|\\rupee|\bRs\b"),
    "yen": re.compile(r"¥|\\yen"),
    "cent": re.compile(r"¢|\\cent"),
    "degree": re.compile(r"[°º∠]|\\circ(?![a-zA-Z])|\\degree|\\(?:measured)?angle"),
}
_MEASURED_IN_DEGREES = word_set(
    "angle rotate rotated rotates rotation bearing latitude longitude inclination"
)
_NO_UNITS = word_set("in as am mo mi pa pt us at be a")
"""English words that are no units, outside of formulas and away from numbers."""


def _units_of_signs(text: str) -> Iterator[Known]:
    for name, sign in _SIGNS.items():
        if sign.search(text):
            yield from unit_of_word(name)


def _units_of_words(words: list[str]) -> Iterator[Known]:
    for word in frozenset(map(str.lower, words)) - _NO_UNITS:
        yield from unit_of_word("degree" if singular(word) in _MEASURED_IN_DEGREES else word)


_LAYOUT = r"(?:[\s~$({]|\\[,;:! ]|\\(?:text|mathrm|rm|mbox)\s?\{)"
_BEHIND_NUMBER = re.compile(
    r"(?:[0-9]|(?<![a-zA-Z])(?:in|per)(?=[\s~$])|(?<=[a-zA-Z}])/)"
    rf"{_LAYOUT}{{0,6}}(\\mu ?)?(\\Omega|[a-zA-Z]{{1,20}})(?![a-zA-Z])"
)
_SYMBOL = re.compile(r"(\\mu ?)?(\\Omega|(?<![a-zA-Z\\])[a-zA-Z]{1,5}(?![a-zA-Z]))")


def _units_of_symbols(text: str) -> Iterator[Known]:
    """Units behind numbers, and symbols in upright type: `5 m`, `\\mathrm{m/s}`."""
    symbols = {match.groups() for match in _BEHIND_NUMBER.finditer(text)}
    for inside in _TEXT.findall(text):
        symbols |= {match.groups() for match in _SYMBOL.finditer(inside)}
    for micro, symbol in symbols:
        yield from unit_of_symbol(f"\\mu {symbol}" if micro else symbol)


_ASKED = re.compile(
    rf"\b(?:in|into|to|how{_LAYOUT}{{1,6}}(?:many|much)|number{_LAYOUT}{{1,6}}of){_LAYOUT}{{1,6}}"
    r"(?:more |fewer |full |total |square |cubic )?([a-zA-Z]{1,20})(?![a-zA-Z])",
    re.IGNORECASE,
)
_LAST_SENTENCE_CHARS = 300


def _asked_units(text: str) -> frozenset[Known]:
    """The units of what the last question of a text asks for; none where it does not say."""
    tail = text[-_LAST_SENTENCE_CHARS:]
    end = tail.rfind("?") if "?" in tail else len(tail)
    start = 1 + max(tail.rfind(mark, 0, end) for mark in (". ", "? ", "! ", "\n"))
    names = [name for name in _ASKED.findall(tail[start:]) if name.lower() not in _NO_UNITS]
    if any(singular(name) == "degree" for name in names):
        names += ["celsius", "fahrenheit"]
    return frozenset().union(*map(unit_of_symbol, names))
