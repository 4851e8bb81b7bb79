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
    counts_things: bool = False
    """Whether it asks `How many` of something that is no unit: `How many pages`."""
    dividing: frozenset[Known] | None = None
    """The units that may divide what is asked for: day of `How many pages a day`; None where it
    does not say, as in `What is the speed`."""
    powers: frozenset[int] = frozenset()
    """The powers of a length that are asked for, 2 of an area; none where it does not say."""

    def has(self, unit: Unit) -> bool:
        """Whether a unit may stand beside a value of which the reference has no unit.

        All known units it is written with stand in the question. Where the question says which
        units are asked for, one of them must be among these and divide nothing. A rate, an area or
        a volume must not be another kind of quantity than what is asked for."""
        if not unit.parts <= self.units:
            return False
        above = unit.parts - unit.below
        if unit.parts and self.asked and self.asked.isdisjoint(above):
            return False
        if above and self.counts_things and not unit.nouns:
            return False
        if self.dividing is not None and not unit.below <= self.dividing | self.asked:
            return False
        is_length = [base for base, _ in unit.dimensions] == ["length"]
        return not (is_length and self.powers) or unit.dimensions[0][1] in self.powers


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
    request, text_after = _last_request(text)
    counted += _SCALE.findall(request + text_after)
    asked_names = _asked_names(request + text_after)
    asked = _asked_units(asked_names)
    return Question(
        frozenset(map(singular, words)),
        frozenset(units),
        counted=frozenset(map(singular, counted)),
        asked=asked,
        counts_things=not asked and text_after.strip() in ("", "?") and _counts_things(request),
        dividing=_dividing_units(request),
        powers=_asked_powers(request, asked_names, text),
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
_SCALE = re.compile(
    r"\bin (hundreds|thousands|millions|billions|trillions|dozens|lakhs|crores)"
    r"(?= of\b|[\s)]*[.,;?:]|[\s)]*$)",
    re.IGNORECASE,
)
"""The multiple that a value is asked for in: `in thousands of dollars`."""
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


_NO_EXPONENT = r"(?![a-zA-Z]|[\s}$]{0,3}\^[\s{]{0,2}-)"
_ASKED = re.compile(
    rf"\b(?:in|into|to|how{_LAYOUT}{{1,6}}(?:many|much)|number{_LAYOUT}{{1,6}}of){_LAYOUT}{{1,6}}"
    rf"(?:more |fewer |full |total |(square|cubic) )?([a-zA-Z]{{1,20}}){_NO_EXPONENT}"
    r"([\s}$]{0,3}(?:\^|[²³]|squared|cubed))?",
    re.IGNORECASE,
)
"""(square or cubic, unit, power behind it) of a unit that is asked for."""
_LAST_SENTENCE_CHARS = 300


def _last_request(text: str) -> tuple[str, str]:
    """(the last question of a text, what follows from its `?` on); else the last sentence."""
    tail = text[-_LAST_SENTENCE_CHARS:]
    end = tail.rfind("?") if "?" in tail else len(tail)
    start = 1 + max(tail.rfind(mark, 0, end) for mark in (". ", "? ", "! ", "\n"))
    return tail[start:end], tail[end:]


def _asked_names(text: str) -> list[tuple[str, str, str]]:
    """The words of a text that may be units it asks for, each as `_ASKED` has it."""
    return [match for match in _ASKED.findall(text) if match[1].lower() not in _NO_UNITS]


def _asked_units(asked_names: list[tuple[str, str, str]]) -> frozenset[Known]:
    """The units of what is asked for; none where the question does not say."""
    names = [name for _, name, _ in asked_names]
    if any(singular(name) == "degree" for name in names):
        names += ["celsius", "fahrenheit"]
    return frozenset().union(*map(unit_of_symbol, names))


_HOW_MANY = re.compile(
    r"\bhow many (?:(?:more|fewer|full|total|other|additional|extra|different) )?"
    r"([a-z]{2,20}(?: [a-z]{1,20}){0,3})",
    re.IGNORECASE,
)
_NO_THINGS = word_set(
    "of in do does did is are was were has have had will would can could should must might may "
    "unit hundred thousand million billion trillion k"
)


def _counts_things(request: str) -> bool:
    """Whether it asks how many there are of something other than a unit."""
    things = [words.lower().split() for words in _HOW_MANY.findall(request)]
    first_words = {form for words in things for form in (words[0], singular(words[0]))}
    has_unit = any(unit_of_word(word) for words in things for word in words)
    return bool(things) and first_words.isdisjoint(_NO_THINGS) and not has_unit


_AMOUNT_ASKED = re.compile(r"\bhow (?:many|much|far|long)\b|\bnumber of\b|\btotal\b", re.IGNORECASE)
_CONDITION = re.compile(r"\b(?:if|when|given|assuming|provided|suppose)\b", re.IGNORECASE)
_RATE = re.compile(
    r"(?<!\bthis )(?<!\bthat )(?<!\bsame )"
    r"\b(?:average|faster|slower|rate|speed|velocity|pace|wages?|salary|rent|density|flow)\b",
    re.IGNORECASE,
)
_PER = re.compile(
    rf"(?:\b(?:per|an?|each|every|one|single|any)|/|(?<![0-9.])1){_LAYOUT}{{0,6}}"
    r"(?:square |cubic )?([a-zA-Z]{1,20})(?![a-zA-Z])",
    re.IGNORECASE,
)
_ADVERBS = {
    "hourly": "hour",
    "daily": "day",
    "weekly": "week",
    "monthly": "month",
    "yearly": "year",
    "annually": "year",
    "annual": "year",
}


def _dividing_units(request: str) -> frozenset[Known] | None:
    """The units behind `per`, `a` and the like where an amount is asked for; None elsewhere."""
    amount = _AMOUNT_ASKED.search(request)
    if amount is None:
        return None
    starts_with_condition = _CONDITION.search(request, 0, amount.start()) is not None
    condition_behind = _CONDITION.search(request, amount.end())
    start = amount.start() if starts_with_condition else 0
    end = condition_behind.start() if condition_behind else len(request)
    clause = request[start:end]
    if _RATE.search(clause):
        return None
    names = _PER.findall(clause)
    names += [_ADVERBS[word] for word in clause.lower().split() if word in _ADVERBS]
    return frozenset().union(*map(unit_of_symbol, names))


_LENGTH = (("length", 1),)
_LENGTHS = "perimeter|circumference|length|height|width|radius|diameter|distance"
_MEASURE_POWERS = {"area": 2, "volume": 3} | dict.fromkeys(_LENGTHS.split("|"), 1)
_MEASURE = rf"(area|volume|{_LENGTHS})\b"
_MEASURE_ASKED = re.compile(
    r"\b(?:what(?:'s| is| are| was| would be| will be)|find|compute|calculate|determine|give"
    rf"|state) (?:the|its|their) (?:(?!of\b|with\b|whose\b|in\b|for\b|and\b|to\b)[a-z]+ ){{0,3}}?"
    rf"{_MEASURE}",
    re.IGNORECASE,
)
_SECOND_MEASURE = re.compile(rf"\b(?:and|or) (?:(?:the|its|their) )?{_MEASURE}", re.IGNORECASE)
_HIGHER_POWERS = re.compile(
    r"\b(?:area|surface|square|cubic|volume|sq)\b|\^|[²³]|squared|cubed", re.IGNORECASE
)


def _asked_powers(
    request: str, asked_names: list[tuple[str, str, str]], question: str
) -> frozenset[int]:
    """The powers of a length that are asked for, 2 of an area; none where it does not say."""
    measures = _MEASURE_ASKED.findall(request)
    if measures:
        measures += _SECOND_MEASURE.findall(request)
    powers = [_MEASURE_POWERS[measure.lower()] for measure in measures]
    is_plain = not _HIGHER_POWERS.search(question)
    for prefix, name, power in asked_names:
        if power or {dimensions for dimensions, _ in unit_of_symbol(name)} != {_LENGTH}:
            continue
        if prefix:
            powers.append(2 if prefix.lower() == "square" else 3)
        elif is_plain:
            powers.append(1)
    return frozenset(powers)
