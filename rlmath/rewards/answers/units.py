"""Units after a number: known ones are converted into each other, other nouns are compared as words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlmath.rewards.answers.lexer import Token
from rlmath.rewards.answers.normalize import word_set

MAX_NOUNS = 5
"""More unknown words than this are prose."""


@dataclass(frozen=True)
class Unit:
    """A product of base units, a factor, and words that are not known units.

    >>> Unit((("length", 2),), Fraction(1, 10000)).factor   # cm^2
    Fraction(1, 10000)
    """

    dimensions: tuple[tuple[str, int], ...] = ()
    """(base, exponent) in alphabetical order, without zeros."""
    factor: Fraction = Fraction(1)
    """The unit in base units."""
    nouns: tuple[str, ...] = ()
    """Other words, in lower case and without a plural s."""
    multiplier: int = 1
    """The value of "million" or "dozen", which belongs to the number."""


PARTS_OF_DEGREE = {"'": Fraction(1, 60), "''": Fraction(1, 3600)}
"""Minutes and seconds of arc."""
DEGREE = Unit((("degree", 1),))
RADIAN = Unit((("radian", 1),))
PERCENT = Unit((("percent", 1),))


def _scaled(base: str, names: dict[str, Fraction | int]) -> dict[str, tuple[str, int, Fraction]]:
    return {name: (base, 1, Fraction(factor)) for names_, factor in names.items() for name in names_.split()}


_M = Fraction(1)
_INCH = Fraction(254, 10000)
_KNOWN: dict[str, tuple[str, int, Fraction]] = {
    **_scaled(
        "length",
        {
            "m meter metre": 1,
            "km kilometer kilometre": 1000,
            "dm decimeter decimetre": Fraction(1, 10),
            "cm centimeter centimetre": Fraction(1, 100),
            "mm millimeter millimetre": Fraction(1, 1000),
            "nm nanometer nanometre": Fraction(1, 10**9),
            "inch inches in": _INCH,
            "ft foot feet": 12 * _INCH,
            "yd yard": 36 * _INCH,
            "mi mile": 63360 * _INCH,
        },
    ),
    **_scaled(
        "time",
        {
            "s sec second": 1,
            "ms millisecond": Fraction(1, 1000),
            "min minute mins": 60,
            "h hr hour": 3600,
            "day": 86400,
            "week": 604800,
        },
    ),
    **_scaled("month", {"month": 1, "year yr": 12}),
    **_scaled("mass", {"g gram": 1, "kg kilogram": 1000, "mg milligram": Fraction(1, 1000), "tonne": 10**6}),
    **_scaled("pound", {"lb pound lbs": 1, "oz ounce": Fraction(1, 16)}),
    **_scaled("dollar", {"dollar \\dollar usd buck": 1, "cent \\cent ¢": Fraction(1, 100)}),
    **_scaled("euro", {"\\euro euro": 1}),
    **_scaled("pound sterling", {"\\pound": 1}),
    **_scaled("degree", {"degree deg \\degree": 1}),
    **_scaled("radian", {"radian rad": 1}),
    **_scaled("percent", {"percent % \\%": 1}),
    **_scaled("joule", {"j joule": 1, "kj kilojoule": 1000}),
    **_scaled("volt", {"v volt": 1}),
    **_scaled("electronvolt", {"ev": 1}),
    **_scaled("newton", {"n newton": 1}),
    **_scaled("watt", {"w watt": 1, "kw kilowatt": 1000}),
    **_scaled("hertz", {"hz hertz": 1}),
    **_scaled("pascal", {"pa pascal": 1}),
    **_scaled("kelvin", {"k kelvin": 1}),
    **_scaled("celsius", {"celsius": 1}),
    **_scaled("fahrenheit", {"fahrenheit": 1}),
}
for _names, _divisor in {"l liter litre": 1000, "ml milliliter millilitre": 10**6}.items():
    _KNOWN |= {name: ("length", 3, Fraction(1, _divisor)) for name in _names.split()}
_MULTIPLIERS = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SPEEDS = {"mph": 63360 * _INCH / 3600, "kph": Fraction(1000, 3600), "kmh": Fraction(1000, 3600)}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SINGLE_LETTERS = word_set("m s g h L J N V W K")
_UNMISTAKABLE = word_set(
    "cm mm km kg mph hz kw usd ft lb lbs oz deg meter meters degrees cents dollars hours"
)
"""Units that may follow a number without a space: 5cm, but 2nm is a product."""
_NO_NOUNS = word_set(
    "not or and is are if no but either nor none maybe was were be equals equal then so because since "
    "where approximately about around less more greater than between only e i pi x y z sqrt sin cos tan "
    "log ln exp infinity inf th st nd rd least most over plus minus times wrong undefined am pm unit half "
    "halves third thirds quarter quarters fifth tenth tenths hundredth hundredths thousandth thousandths "
    "zero one two three four five six seven eight nine ten negative positive below above factorial root "
    "roots power powers mod choose off short dx dy dt squared cubed square cube to from by with without "
)
_NO_NOUNS |= word_set(
    "fourth fourths fifths sixth sixths seventh sevenths eighth eighths ninth ninths eleventh elevenths "
    "twelfth twelfths tens ones pair pairs double doubled triple tripled fewer ago divided unknown cannot "
    "tell unclear impossible"
)
_FILLERS = word_set("of the a an in total per each way")
_ORDINALS = frozenset(("th", "st", "nd", "rd"))


def read_unit(tokens: Sequence[Token]) -> Unit | None:
    """The unit of these tokens, or None: `cm^2`, `miles per hour`, `square feet`, `^\\circ C`, `apples`."""
    dimensions: dict[str, int] = {}
    factor, nouns, sign, pending, position, multiplier = Fraction(1), [], 1, 1, 0, 1
    while position < len(tokens):
        text = tokens[position].text
        lower = text.lower()
        step, exponent = 1, 1
        if lower in ("/", "per"):
            if position + 1 == len(tokens):
                return None
            sign = -1
        elif lower in ("\\cdot", "*", ".", "-"):
            pass
        elif lower in _POWERS:
            if lower.endswith("d"):  # "squared" follows its unit
                return None
            pending = _POWERS[lower]
        elif (degree := _degree(tokens, position)) is not None:
            name, step = degree
            _multiply(dimensions, (name, 1, Fraction(1)), sign)
        elif lower in ("unit", "units"):
            step += _exponent(tokens, position + 1)[1]
            pending = 1
        elif (known := _known(tokens[position])) is not None:
            exponent, more = _exponent(tokens, position + 1)
            step += more
            factor *= known[2] ** (sign * pending * exponent)
            _multiply(dimensions, known, sign * pending * exponent)
            sign = pending = 1
        elif lower.removesuffix("s") in _MULTIPLIERS:
            multiplier *= _MULTIPLIERS[lower.removesuffix("s")]
        elif lower in _SPEEDS:
            factor *= _SPEEDS[lower]
            _multiply(dimensions, ("length", 1, _M), 1)
            _multiply(dimensions, ("time", 1, _M), -1)
        elif _is_noun(tokens[position]) and sign == 1:
            nouns.append(lower.removesuffix("s") if len(lower) > 3 else lower)
        elif not (lower in _FILLERS or (lower in _ORDINALS and position == 0 and not tokens[0].space)):
            if not _is_noun(tokens[position]):
                return None
            nouns.append("per " + lower.removesuffix("s"))
            sign = 1
        position += step
    if len(nouns) > MAX_NOUNS or not tokens:
        return None
    bases = tuple(sorted((base, n) for base, n in dimensions.items() if n))
    return Unit(bases, factor, tuple(nouns), multiplier)


def _known(token: Token) -> tuple[str, int, Fraction] | None:
    text = token.text
    if len(text) == 1 and text.isalpha():
        return _KNOWN[text.lower()] if text in _SINGLE_LETTERS else None
    lower = text.lower()
    if not (token.space or token.prose or token.kind != "word" or lower in _UNMISTAKABLE):
        return None
    return _KNOWN.get(lower) or (_KNOWN.get(lower.removesuffix("s")) if len(lower) > 3 else None)


def _is_noun(token: Token) -> bool:
    text = token.text.lower()
    long_enough = len(text) > 1 if token.prose else len(text) > 3 and token.space
    return token.kind == "word" and long_enough and text not in _NO_NOUNS and text not in _FILLERS


def _degree(tokens: Sequence[Token], position: int) -> tuple[str, int] | None:
    """(base, number of tokens) of a degree sign, with the letter of its scale: `^\\circ C`."""
    texts = [token.text for token in tokens[position : position + 7]]
    for pattern in (["^", "\\circ"], ["^", "{", "\\circ", "}"], ["degrees"], ["degree"], ["\\degree"]):
        if texts[: len(pattern)] == pattern:
            after = texts[len(pattern) :]
            letter = after[0].lower() if after else ""
            scale = next((name for name in ("celsius", "fahrenheit") if letter in (name, name[0])), None)
            return (scale, len(pattern) + 1) if scale else ("degree", len(pattern))
    return None


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int, int]:
    """(exponent, number of tokens) of `^2`, `^{2}`, `^{-1}` or "squared"; (1, 0) if there is none."""
    texts = [token.text for token in tokens[position : position + 5]]
    if texts and texts[0].lower() in ("squared", "cubed"):
        return _POWERS[texts[0].lower()], 1
    for pattern, at, sign in (
        (("^", "#"), 1, 1),
        (("^", "{", "#", "}"), 2, 1),
        (("^", "{", "-", "#", "}"), 3, -1),
        (("^", "-", "#"), 2, -1),
    ):
        fits = all(want in ("#", got) for want, got in zip(pattern, texts, strict=False))
        if fits and len(texts) >= len(pattern) and texts[at] in ("1", "2", "3", "4"):
            return sign * int(texts[at]), len(pattern)
    return 1, 0


def _multiply(dimensions: dict[str, int], known: tuple[str, int, Fraction], times: int) -> None:
    base, exponent, _ = known
    dimensions[base] = dimensions.get(base, 0) + exponent * times


def compatible(one: Unit, other: Unit) -> bool:
    """Whether values in these units can be compared: equal dimensions, and no different nouns."""
    if one.dimensions != other.dimensions and all(u.dimensions or u.nouns for u in (one, other)):
        return False
    nouns, others = set(one.nouns), set(other.nouns)
    return nouns <= others or others <= nouns
