"""Units after a number.

Known ones are converted into each other, other nouns are compared as words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlmath.answers.lexer import Token
from rlmath.answers.normalize import KnownWords, singular, word_list, word_set

MAX_NOUNS = 5
"""More unknown words than this are prose."""


Dimensions = tuple[tuple[str, int], ...]
"""(base, exponent) of base units, in alphabetical order, without zeros."""
Known = tuple[Dimensions, Fraction]
"""Dimensions of a known unit, and its size in base units."""


@dataclass(frozen=True)
class Unit:
    """A product of base units, a factor, and words that are not known units.

    >>> Unit((("length", 2),), Fraction(1, 10000)).factor   # cm^2
    Fraction(1, 10000)
    """

    dimensions: Dimensions = ()
    factor: Fraction = Fraction(1)
    """The unit in base units."""
    nouns: tuple[str, ...] = ()
    """Other words, in lower case and in the singular."""
    multiplier: int = 1
    """The value of "million" or "dozen", which belongs to the number."""
    parts: frozenset[Known] = frozenset()
    """The known units it is written with: mile and hour of `miles per hour`, and of `mph`."""
    below: frozenset[Known] = frozenset()
    """The parts that divide: hour of `miles per hour`."""


PARTS_OF_DEGREE = {"'": Fraction(1, 60), "''": Fraction(1, 3600)}
"""Minutes and seconds of arc."""
DEGREE = Unit((("degree", 1),), parts=frozenset({((("degree", 1),), Fraction(1))}))
RADIAN = Unit((("radian", 1),), parts=frozenset({((("radian", 1),), Fraction(1))}))
PERCENT = Unit((("percent", 1),), parts=frozenset({((("percent", 1),), Fraction(1))}))

_PREFIXES = {"p": -12, "n": -9, "\\mu ": -6, "m": -3, "c": -2, "d": -1, "": 0, "h": 2, "k": 3}
_PREFIXES |= {"M": 6, "G": 9, "T": 12}
_LONG_PREFIXES = {"pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "": 0}
_LONG_PREFIXES |= {"hecto": 2, "kilo": 3, "mega": 6, "giga": 9, "tera": 12}
_WITH_PREFIXES = r"""
length: m meter metre 1
time: s second 1
mass: g gram gramme 1
current: A ampere amp 1
mole: mol mole 1
kelvin: K kelvin 1
mass length time-2: N newton 1000
mass length2 time-2: J joule 1000; Wh watt-hour 3600000
mass length2 time-3: W watt 1000
mass length-1 time-2: Pa pascal 1000; bar bar 1e8
current time: C coulomb 1
mass length2 time-3 current-1: V volt 1000
mass length2 time-3 current-2: \Omega ohm 1000
mass-1 length-2 time3 current2: S siemens 0.001
mass-1 length-2 time4 current2: F farad 0.001
mass length2 time-2 current-2: H henry 1000
mass length2 time-2 current-1: Wb weber 1000
mass time-2 current-1: T tesla 1000
time-1: Hz hertz 1
length3: L liter litre 0.001
mole length-3: M molar 1000
electronvolt: eV electronvolt 1
calorie: cal calorie 1
decibel: dB decibel 1
byte: B byte 1
lumen: lm lumen 1
becquerel: Bq becquerel 1
"""
"""Dimensions in metres, seconds, grams and others, then symbol, names and size of each unit."""
_OTHERS = r"""
length: kms 1000; cms 0.01; micron 1e-6; inch inches in 0.0254; ft foot feet 0.3048; yd yds yard 0.9144
length: mi mile 1609.344; angstrom ångström å \aa \angstrom 1e-10
time: sec secs 1; min minute mins 60; h hr hrs hour 3600; day 86400; week wk wks 604800; fortnight 1209600
month: month mo mos mth mths 1; year yr yrs 12; decade 120; century centuries 1200
mass: gm gms 1; kgs kilogramme 1000; tonne 1e6
pound: lb pound lbs 1; oz ounce 0.0625
length2: hectare ha 10000; acre 4046.8564224
length3: cc 1e-6; gallon gal 0.003785411784; quart qt qts 0.000946352946; pint pts 0.000473176473
dollar: dollar \dollar usd buck 1; cent \cent ¢ 0.01
euro: \euro euro eur 1
sterling: \pound gbp 1
rupee: \rupee rupee inr 1; paise paisa 0.01
yen: \yen yen 1
degree: degree deg degs \degree 1
radian: radian rad rads 1
revolution: revolution rev revs 1
beat: beat 1
percent: percent % \% pct percentage 1
mass length2 time-3: hp horsepower 745699.872
mass length-1 time-2: atm atmosphere 101325000
mass length2 time-2 current-2: henries 1000
celsius: celsius 1
fahrenheit: fahrenheit 1
length time-1: mph 0.44704; kph kmh kmph 5/18; mps 1
revolution time-1: rpm 1/60
beat time-1: bpm 1/60
length-2: mpg 1609344000000000/3785411784
"""
"""Dimensions, then names and size of each unit."""
_SPELLED = re.compile(r"([a-z]+)(-?[0-9])?")


def _rows(table: str) -> Iterator[tuple[Dimensions, list[str], Fraction]]:
    """(dimensions, names, size) of every unit of a table."""
    for line in table.strip().splitlines():
        spelled, _, units = line.partition(": ")
        matches = (_SPELLED.fullmatch(word) for word in spelled.split())
        dimensions = tuple(sorted((match[1], int(match[2] or 1)) for match in matches if match))
        for unit in units.split("; "):
            *names, size = unit.split()
            yield dimensions, names, Fraction(size)


_SYMBOLS: dict[str, Known] = {}
"""Known units by symbol, whose case matters; the first unit of a symbol counts."""
_KNOWN: dict[str, Known] = {}
"""Known units by name, in lower case."""
for _base, (_symbol, *_words), _size in _rows(_WITH_PREFIXES):
    for _prefix, _power in _PREFIXES.items():
        _SYMBOLS.setdefault(_prefix + _symbol, (_base, _size * Fraction(10) ** _power))
    for _prefix, _power in _LONG_PREFIXES.items():
        _KNOWN |= {_prefix + _word: (_base, _size * Fraction(10) ** _power) for _word in _words}
_ANY_CASE = (
    "m km dm cm mm nm s ms g kg mg L mL J kJ kWh eV keV MeV GeV mol N W kW V Hz kHz MHz "
    "GHz Pa kPa K"
)
"""Symbols that are read in any case."""
_KNOWN |= {symbol.lower(): _SYMBOLS[symbol] for symbol in _ANY_CASE.split()}
_KNOWN |= {name: (base, size) for base, names, size in _rows(_OTHERS) for name in names}
for _misread in word_list("cd pm ha hA dA min hL cal Mm dm dT dS dC dF dH MM pt"):
    _SYMBOLS.pop(_misread, None)
_WRITTEN_WITH = {
    _KNOWN[name]: (_KNOWN[above], _KNOWN[below])
    for name, above, below in (
        ("mph", "mile", "hour"),
        ("kph", "kilometer", "hour"),
        ("mps", "meter", "second"),
        ("rpm", "revolution", "minute"),
        ("bpm", "beat", "minute"),
        ("mpg", "mile", "gallon"),
    )
}
"""The units that an abbreviation stands for, the second of which divides."""
_MULTIPLIERS = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_MULTIPLIERS |= {"dozen": 12, "gross": 144, "score": 20, "lakh": 10**5, "crore": 10**7}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SINGLE_LETTERS = word_set("m s g h L J N V W K")
_UNMISTAKABLE = word_set(
    "cm mm km kg mph hz kw usd ft lb lbs oz deg meter meters degrees cents dollars hours"
)
"""Units that may follow a number without a space: 5cm, but 2nm is a product."""
_NO_NOUNS = word_set(
    "not or and is are if no but either nor none maybe was were be equals equal then so because "
    "since "
    "where approximately about around less more greater than between only e i pi x y z sqrt sin "
    "cos tan "
    "log ln exp infinity inf th st nd rd least most over plus minus times wrong undefined am pm "
    "unit half "
    "halves third thirds quarter quarters fifth tenth tenths hundredth hundredths thousandth "
    "thousandths "
    "zero one two three four five six seven eight nine ten negative positive below above "
    "factorial root "
    "roots power powers mod choose off short dx dy dt squared cubed square cube to from by with "
    "without "
)
_NO_NOUNS |= word_set(
    "fourth fourths fifths sixth sixths seventh sevenths eighth eighths ninth ninths eleventh "
    "elevenths "
    "twelfth twelfths tens ones pair pairs double doubled triple tripled fewer ago divided "
    "unknown cannot "
    "tell unclear impossible twice thrice quadruple quadrupled halved nearly almost never except "
    "under"
)
TURNING_WORDS = word_set(
    "decrease decreased reduction reduced loss lost debt owed deficit shortfall drop dropped "
    "decline declined "
    "fall fell fold bc bce down downward downwards backward backwards reciprocal inverse opposite "
    "deducted withdrawn "
    "overdrawn"
)
"""Words that make another value of the number before them.

They are no units, which may be left out."""
_NO_NOUNS |= TURNING_WORDS
_FILLERS = word_set("of the a an them altogether")
_AFTER_IN = word_set("total all the")
"""Words beside a value, and behind "in", that are known to change nothing of it."""
_SHORT_NOUNS = word_set(
    "ant ape axe bag bar bat bed bee box boy bug bun bus cab can cap car cat cow cup cut day dog "
    "dot egg fan fox gas gem hat hen hut ice jar jug key kid kit leg lot man map mat men mug nut "
    "oar ox owl pad pan pea pen pet pie pig pin pit pot ram rat rod row rug set sit sky son tap "
    "tax tie tin tip toe ton top toy tub van way web wig win yak zoo"
)
"""Nouns of three letters, which are no product of letters behind a space: `6 egg`, but not `6
abc`."""
_ORDINALS = frozenset(("th", "st", "nd", "rd"))


def read_unit(tokens: Sequence[Token], known_words: KnownWords | None = None) -> Unit | None:
    """The unit of these tokens, else None; nouns are `known_words` (None: any).

    Examples are `cm^2`, `miles per hour`, `square feet`, `^\\circ C` and `apples`."""
    reader = _UnitReader(tokens, known_words)
    position = 0
    while position < len(tokens):
        size = reader.take(position)
        if size == 0:
            return None
        position += size
    return reader.unit() if tokens else None


class _UnitReader:
    """A unit of which the tokens are taken one after another."""

    def __init__(self, tokens: Sequence[Token], known_words: KnownWords | None) -> None:
        self._tokens = tokens
        self._known_words = known_words
        self._dimensions: dict[str, int] = {}
        self._parts: set[Known] = set()
        self._below: set[Known] = set()
        self._factor = Fraction(1)
        self._multiplier = 1
        self._nouns: list[str] = []
        self._sign = 1
        """-1 behind "per", for one unit."""
        self._power = 1
        """2 behind "square", for one unit."""

    def take(self, position: int) -> int:
        """Take what stands at a position: the number of its tokens, 0 where it is of no unit."""
        tokens = self._tokens
        lower = tokens[position].text.lower()
        unit_and_tokens = _known_unit_at(tokens, position)
        if unit_and_tokens is None and self._is_counted(lower):
            self._nouns.append(singular(lower))
            return 1
        if lower in ("/", "per") or (lower in ("a", "an") and self._may_divide):
            self._sign = -1
            return 1 if position + 1 < len(tokens) else 0
        if lower in ("\\cdot", "*", ".", "-"):
            return 1
        if lower == "in" and _text(tokens, position + 1) in _AFTER_IN:
            return 2
        if lower in _POWERS:
            self._power = _POWERS[lower]
            return 0 if lower.endswith("d") else 1  # "squared" follows its unit
        degree = _degree(tokens, position)
        if degree is not None:
            name, size = degree
            _multiply(self._dimensions, ((name, 1),), self._sign)
            self._parts.add((((name, 1),), Fraction(1)))
            return size
        if lower in ("unit", "units"):
            self._power = 1
            return 1 + _exponent(tokens, position + 1)[1]
        quotient = _quotient(tokens, position) if lower == "\\frac" and self._sign == 1 else None
        if quotient is not None:
            unit, size = quotient
            self._multiply_by(unit)
            return size
        if unit_and_tokens is not None:
            return self._take_known_unit(position, unit_and_tokens)
        times = _MULTIPLIERS.get(lower) or _MULTIPLIERS.get(lower.removesuffix("s"))
        if times is not None:
            self._multiplier *= times
            return 1
        if self._sign == 1 and _is_noun(tokens[position]) and self._is_known(lower):
            self._nouns.append(singular(lower))
            return 1
        is_ordinal = lower in _ORDINALS and position == 0 and not tokens[0].space
        return 1 if lower in _FILLERS or is_ordinal else 0

    @property
    def _may_divide(self) -> bool:
        """Whether "a" may stand for "per", as in "5 miles an hour"."""
        return self._sign == 1 and bool(self._dimensions or self._nouns)

    def _is_counted(self, word: str) -> bool:
        return self._known_words is not None and singular(word) in self._known_words.counted

    def _is_known(self, word: str) -> bool:
        return self._known_words is None or word in self._known_words

    def _multiply_by(self, unit: Unit) -> None:
        """Multiply by a unit that is written as a fraction."""
        self._factor *= unit.factor
        _multiply(self._dimensions, unit.dimensions, 1)
        self._parts |= unit.parts
        self._below |= unit.below

    def _take_known_unit(self, position: int, unit_and_tokens: tuple[Known, int]) -> int:
        """Take a known unit of so many tokens, and the exponent behind it."""
        known_unit, n_tokens = unit_and_tokens
        lower = self._tokens[position].text.lower()
        exponent, exponent_size = _exponent(self._tokens, position + n_tokens)
        if lower == "ms" and exponent < 0:  # m s^{-2}
            _multiply(self._dimensions, (("length", 1),), self._sign)
            self._parts.add(_KNOWN["m"])
            known_unit = _KNOWN["s"]
        base, unit_size = known_unit
        power = self._sign * self._power * exponent
        written_with = _WRITTEN_WITH.get(known_unit, (known_unit,))
        self._parts.update(written_with)
        self._below.update(written_with[1:] if power > 0 else written_with[:1])
        self._factor *= unit_size**power
        _multiply(self._dimensions, base, power)
        self._sign = 1
        self._power = 1
        is_point = _text(self._tokens, position + 1).startswith("point")
        return n_tokens + exponent_size + (lower == "percentage" and is_point)

    def unit(self) -> Unit | None:
        """The unit of all tokens; None for too many nouns, or powers of a percent or degree."""
        if len(self._nouns) > MAX_NOUNS:
            return None
        if any(self._dimensions.get(base, 1) != 1 for base in ("percent", "degree")):
            return None
        bases = tuple(sorted((base, n) for base, n in self._dimensions.items() if n))
        return Unit(
            bases,
            self._factor,
            tuple(self._nouns),
            self._multiplier,
            parts=frozenset(self._parts),
            below=frozenset(self._below),
        )


def _text(tokens: Sequence[Token], position: int) -> str:
    """A token's text in lower case; "" behind the last one."""
    return tokens[position].text.lower() if position < len(tokens) else ""


def _known_unit_at(tokens: Sequence[Token], position: int) -> tuple[Known, int] | None:
    """(known unit, number of tokens) of the unit at a position, else None."""
    token = tokens[position]
    text = token.text
    following = tokens[position + 1].text if position + 1 < len(tokens) else ""
    if text == "\\mu" and token.kind == "command":
        micro = _SYMBOLS.get(f"\\mu {following}")
        return (micro, 2) if micro is not None else None
    if following == "\\Omega" and text in ("k", "M", "m", "G"):
        return _SYMBOLS[f"{text}\\Omega"], 2
    known_unit = _unit_of_word(
        token, behind_slash=position > 0 and tokens[position - 1].text == "/"
    )
    return (known_unit, 1) if known_unit is not None else None


def _unit_of_word(token: Token, behind_slash: bool) -> Known | None:
    """The known unit that a token is, else None."""
    text = token.text
    if len(text) == 1 and text.isalpha() and text in _SINGLE_LETTERS:
        return _KNOWN[text.lower()]
    apart = token.kind == "command" or (token.space and len(text) > 1 and not text.islower())
    if text in _SYMBOLS and (token.prose or apart):
        return _SYMBOLS[text]
    if text == "Nm" and (token.prose or token.space):
        return _KNOWN["joule"]
    lower = text.lower()
    if len(text) == 1 and text.isalpha():
        return None
    if not (
        token.space or token.prose or behind_slash or token.kind != "word" or lower in _UNMISTAKABLE
    ):
        return None
    return _KNOWN.get(lower) or (_KNOWN.get(singular(lower)) if len(lower) > 3 else None)


def unit_of_word(word: str) -> frozenset[Known]:
    """The known units that a word stands for, whatever its case; none of other words.

    Examples are `miles` and `mph`."""
    known_unit = _KNOWN.get(word.lower()) or _KNOWN.get(singular(word))
    return (
        frozenset()
        if known_unit is None
        else frozenset(_WRITTEN_WITH.get(known_unit, (known_unit,)))
    )


def unit_of_symbol(symbol: str) -> frozenset[Known]:
    """The known units of a symbol behind a number, `m`, or of a word; none of others."""
    known_unit = _SYMBOLS.get(symbol)
    return unit_of_word(symbol) if known_unit is None else frozenset({known_unit})


def _quotient(tokens: Sequence[Token], position: int) -> tuple[Unit, int] | None:
    """(unit, number of tokens) of `\\frac{m}{s^2}`, else None."""
    brace = position + 1
    parts = []
    for _ in range(2):
        if brace >= len(tokens) or tokens[brace].text != "{":
            return None
        depth = 0
        stop = brace
        while stop < len(tokens):
            depth += (tokens[stop].text == "{") - (tokens[stop].text == "}")
            if depth == 0:
                break
            stop += 1
        part = read_unit(tokens[brace + 1 : stop])
        if part is None or part.nouns or not part.dimensions or part.multiplier > 1:
            return None
        parts.append(part)
        brace = stop + 1
    dimensions = dict(parts[0].dimensions)
    _multiply(dimensions, parts[1].dimensions, -1)
    bases = tuple(sorted(dimensions.items()))
    unit = Unit(
        bases,
        parts[0].factor / parts[1].factor,
        parts=parts[0].parts | parts[1].parts,
        below=parts[0].below | (parts[1].parts - parts[1].below),
    )
    return unit, brace - position


def is_known_noun(token: Token, known_words: KnownWords | None) -> bool:
    """Whether a word before a value changes nothing of it: the year of `year 1469`."""
    word = token.text.lower()
    if known_words is None or word == "the":
        return known_words is not None
    return _is_noun(token) and word in known_words and may_name(word)


_NUMBERED_UNITS = word_set("minute hour day week month year decade century")
"""Units that may be counted: hour 7 is no 7 hours, and is asked for by its number."""


def may_name(word: str) -> bool:
    """Whether a word of the question before a value may name what has the value.

    Units and words that change a value do not."""
    word = word.lower()
    is_unit = bool(unit_of_word(word)) and word not in _NUMBERED_UNITS
    return not (is_unit or word in _NO_NOUNS or singular(word) in _MULTIPLIERS)


def _is_noun(token: Token) -> bool:
    text = token.text.lower()
    long_enough = (
        len(text) > 1 if token.prose else token.space and (len(text) > 3 or text in _SHORT_NOUNS)
    )
    return token.kind == "word" and long_enough and text not in _NO_NOUNS and text not in _FILLERS


def _degree(tokens: Sequence[Token], position: int) -> tuple[str, int] | None:
    """(base, number of tokens) of a degree sign, with the letter of its scale: `^\\circ C`."""
    texts = [token.text for token in tokens[position : position + 7]]
    for pattern in (
        ["^", "\\circ"],
        ["^", "{", "\\circ", "}"],
        ["degrees"],
        ["degree"],
        ["\\degree"],
    ):
        if texts[: len(pattern)] == pattern:
            after = texts[len(pattern) :]
            letter = after[0].lower() if after else ""
            scale = next(
                (name for name in ("celsius", "fahrenheit") if letter in (name, name[0])), None
            )
            return (scale, len(pattern) + 1) if scale else ("degree", len(pattern))
    return None


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int, int]:
    """(exponent, number of tokens) of `^2`, `^{2}` or `^{-1}`; (1, 0) if there is none."""
    texts = [token.text for token in tokens[position : position + 5]]
    for pattern, digit_index, sign in (
        (("^", "#"), 1, 1),
        (("^", "{", "#", "}"), 2, 1),
        (("^", "{", "-", "#", "}"), 3, -1),
        (("^", "-", "#"), 2, -1),
    ):
        fits = all(want in ("#", got) for want, got in zip(pattern, texts, strict=False))
        if fits and len(texts) >= len(pattern) and texts[digit_index] in ("1", "2", "3", "4"):
            return sign * int(texts[digit_index]), len(pattern)
    return 1, 0


def _multiply(dimensions: dict[str, int], factors: Dimensions, times: int) -> None:
    """Multiply dimensions in place by others, to the power `times`."""
    for base, exponent in factors:
        dimensions[base] = dimensions.get(base, 0) + exponent * times


_POUNDS = {(("pound", 1),), (("sterling", 1),)}


def compatible(first: Unit, second: Unit) -> bool:
    """Whether values in these units can be compared: equal dimensions, and no different nouns."""
    pounds = {first.dimensions, second.dimensions} == _POUNDS and first.factor == second.factor == 1
    if (
        not pounds
        and first.dimensions != second.dimensions
        and all(u.dimensions or u.nouns for u in (first, second))
    ):
        return False
    first_nouns = set(first.nouns)
    second_nouns = set(second.nouns)
    return first_nouns <= second_nouns or second_nouns <= first_nouns
