"""Infinite sets of integers in words or as a formula.

Examples are `all odd positive integers`, `n = 2k + 1, k >= 0` and `3 \\nmid n`.

They are compared member by member inside a window that is wide for the numbers in them. A text that
leaves open whether its numbers are positive is compared on those that the other one has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import isqrt, lcm

from rlmath.answers.compare_values import symbols
from rlmath.answers.evaluate import Context, Undefined, evaluate
from rlmath.answers.interpret import interpret
from rlmath.answers.normalize import NotMathematics, Unsupported, word_set
from rlmath.answers.parser import parse_answer
from rlmath.answers.phrases import NUMBER_WORDS

WINDOW = range(-150, 420)
_LARGEST = WINDOW[-1] // 4
"""Largest number in a text, and longest period of two sets together: what differs further out would
not be seen."""
_FEWEST = 4
"""Fewest members inside the window of sets that are compared."""
_TRIGGER = re.compile(
    r"odd|even|prime|composite|square|cube|power|multiple|divisible|integer|natural|of the form"
    r"|(?:\\geq?|>) ?[0-9]{1,3}(?:,| and) ?[a-z] ?\\in ?\\mathbb|\\nmid|\\not ?\\equiv|\\not ?\\mid"
    r"|\\ldots|\\dots|\\cdots"
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]+|[0-9]+|\S")
_LONGEST = 160


@dataclass
class _Described:
    """A set of integers, while its text is read."""

    least: int | None = None
    """The least number of its domain where that is written: 1 for positive integers."""
    is_open: bool = True
    """Whether the text does not say which integers."""
    may_lack_zero: bool = False
    """Whether zero is one of them only for some, as of the squares."""
    letters: set[str] = field(default_factory=set)
    """Letters that stand for its numbers."""
    period: int = 1
    """The least common multiple of its divisors and moduli."""
    longest_period: int = _LARGEST
    """The longest period of a set that it is compared with; less for kinds with few members in the
    window."""
    conditions: list[Callable[[int], bool]] = field(default_factory=list)

    def add(self, condition: Callable[[int], bool], negated: bool = False, period: int = 1) -> None:
        self.conditions.append((lambda n: not condition(n)) if negated else condition)
        self.period = lcm(self.period, period)

    def members(self, least: int | None = None) -> frozenset[int]:
        low = max(bound for bound in (WINDOW[0], self.least, least) if bound is not None)
        numbers = range(low, WINDOW[-1] + 1)
        return frozenset(n for n in numbers if all(condition(n) for condition in self.conditions))


def same_integers(gold: str, answer: str) -> bool | None:
    """Whether two texts are the same infinite set of integers.

    None if one of them is not read as such a set."""
    both_texts = f"{gold} {answer}"
    if not _TRIGGER.search(both_texts) or max(len(gold), len(answer)) > _LONGEST:
        return None
    if any(int(number) > _LARGEST for number in re.findall("[0-9]+", both_texts)):
        return None
    readings = [_in_words(text) for text in (gold, answer)]
    if readings == [None, None] and "of the form" not in both_texts:
        return None  # two formulas are compared by the grammar
    is_same = None
    for start in (1, 0):  # where the natural numbers begin
        gold_set, answer_set = (
            reading or _by_formula(text, start)
            for reading, text in zip(readings, (gold, answer), strict=True)
        )
        if gold_set is None or answer_set is None:
            return None
        is_same = is_same or _same_members(gold_set, answer_set)
    return is_same


def _same_members(first: _Described, second: _Described) -> bool | None:
    """Whether two sets have the same members in the window; None where that cannot be told."""
    least = None
    if first.is_open != second.is_open:
        least = second.least if first.is_open else first.least
    if first.letters and second.letters and first.letters.isdisjoint(second.letters):
        return False
    if lcm(first.period, second.period) > min(first.longest_period, second.longest_period):
        return None
    zero = {0} if first.may_lack_zero or second.may_lack_zero else set()
    sets = first.members(least) - zero, second.members(least) - zero
    return sets[0] == sets[1] if min(map(len, sets)) >= _FEWEST else None


_NUMBER = rf"(?:\{{ )?(?:- )?(?:[0-9]{{1,4}}|{'|'.join(NUMBER_WORDS)})(?: \}})?"
_SEVERAL = rf"{_NUMBER} (?:(?:(?:,|and|or) )+{_NUMBER} )*"
_LETTERS = frozenset("nmkpqNxab")
_FILLERS = word_set(
    "all any every each the set of exactly those when if is are be an a that which such with for "
    "where satisfying "
    "values value numbers number only just must holds works iff precisely it , : . { }"
)
_OPENINGS = word_set("that which such with where")
"""Words that begin a further condition."""
_DENIED = re.compile(r"(?:not|nor) ", re.IGNORECASE)
_QUANTIFIER = re.compile(r"(?:all|any|every|each) ", re.IGNORECASE)


def _in_words(text: str) -> _Described | None:
    """The numbers that meet all conditions of a text.

    None where others are meant: `not odd multiples of 3`."""
    spaced = " ".join(_TOKEN.findall(text.replace("non-", "non"))) + " "
    described = _Described()
    position = 0
    negated = False
    spoken = False
    in_list = False  # behind a comma, or a condition that is denied
    while position < len(spaced):
        if match := _DENIED.match(spaced, position):
            negated = True
            position = match.end()
            continue
        if negated and _QUANTIFIER.match(spaced, position):
            return None
        matches = ((take, pattern.match(spaced, position)) for pattern, take in _PARTS)
        match = next(
            (match for take, match in matches if match and take(described, match, negated)), None
        )
        if match is not None:
            if match.re in (_KIND, _DIVISOR, _DIVIDES, _CONGRUENCE):
                if in_list and not (negated or "\\n" in match[0]):
                    return None
                in_list = negated
            spoken = True
            negated = False
            position = match.end()
            continue
        token, _, after = spaced[position:].partition(" ")
        if token.lower() not in _FILLERS and token not in _LETTERS:
            return None
        in_list = (
            in_list or (token in (",", ".", ":") and bool(described.conditions))
        ) and token not in _OPENINGS
        if not after.startswith("\\equiv"):  # n \equiv 1 stands for a class, whatever its letter
            described.letters |= {token} & (_LETTERS - _FILLERS)
        position += len(token) + 1
    return described if spoken and described.conditions and not negated else None


def _whole_numbers(text: str) -> list[int]:
    """The numbers of a list such as `1 , - 3 and four`."""
    words = re.findall(r"(- )?([0-9]+|[a-z]+)", re.sub(r"\b(?:and|or)\b", "", text.lower()))
    numbers = [(sign, NUMBER_WORDS.get(word), word) for sign, word in words]
    return [
        (-1 if sign else 1) * int(word if word_number is None else word_number)
        for sign, word_number, word in numbers
    ]


def _take_domain(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take the domain: positive, natural, nonnegative, whole or all integers."""
    least = {"positive": 1, "natural": 1, "nonnegative": 0, "whole": 0}.get(
        match[1].lower(), described.least
    )
    if not negated:
        described.least = least
        described.is_open = False
    return not negated


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, isqrt(n) + 1))


_KINDS: dict[str, Callable[[int], bool]] = {
    "odd": lambda n: n % 2 == 1,
    "even": lambda n: n % 2 == 0,
    "prime": _is_prime,
    "composite": lambda n: n > 3 and not _is_prime(n),
    "square": lambda n: n >= 0 and isqrt(n) ** 2 == n,
    "cube": lambda n: any(k**3 == n for k in range(-6, 8)),
}
_LONGEST_PERIODS = {"prime": 24, "composite": 24, "square": 12, "cube": 6, "power": 4}
"""Longest periods at which the window has members of these kinds in every class."""


def _take_kind(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take a kind of numbers, such as odd or prime."""
    word = match[1].lower()
    described.is_open = False
    described.may_lack_zero = described.may_lack_zero or word == "square"
    described.add(_KINDS[word], negated, 2 if word in ("odd", "even") else 1)
    described.longest_period = min(described.longest_period, _LONGEST_PERIODS.get(word, _LARGEST))
    return True


def _take_divisor(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take `multiples of 6`, `divisible by 6` or `powers of 2`."""
    word, (base,) = match[1].lower(), _whole_numbers(match[2])
    if base < 2:
        return False
    powers = {base**k for k in range(10)}
    described.is_open = described.is_open and word == "divisible"
    if word == "power":
        described.add(powers.__contains__, negated)
        described.longest_period = min(described.longest_period, _LONGEST_PERIODS[word])
    else:
        described.add(lambda n: n % base == 0, negated, base)
    return True


def _take_divides(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take `3 \\mid n` or `3 \\nmid n`."""
    (divisor,) = _whole_numbers(match[1])
    if divisor > 1:
        described.add(lambda n: n % divisor == 0, "\\n" in match[2], divisor)
        described.letters.add(match[3])
    return divisor > 1


def _take_congruence(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take a congruence: `\\equiv 1, 4 \\pmod 5`."""
    classes, (modulus,) = _whole_numbers(match["classes"]), _whole_numbers(match["modulus"])
    if modulus < 2:
        return False
    signs = (1, -1) if match["both"] else (1,)
    residues = {sign * number % modulus for number in classes for sign in signs}
    described.add(lambda n: n % modulus in residues, bool(match["differs"]) or negated, modulus)
    return True


def _take_bound(described: _Described, match: re.Match[str], negated: bool) -> bool:
    """Take a lower bound: `n > 2`, `at least 3`."""
    if negated:
        return False
    (number,) = _whole_numbers(match[2])
    least = number + (match[1].lower() in (">", "greater than", "more than"))
    described.least = least if described.least is None else max(least, described.least)
    described.is_open = False
    described.add(range(least, WINDOW[-1] + 1).__contains__)
    return True


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


_DOMAIN = _pattern(r"(positive|natural|nonnegative|whole|integer)s? ")
_KIND = _pattern(
    r"(?:perfect (?=square|cube))?(odd|even|prime|composite|square|cube)s? (?:(?:number|"
    r"integer)s? )?"
)
_DIVISOR = _pattern(rf"(divisible|multiple|power)s? (?:of|by) ({_NUMBER}) ")
_DIVIDES = re.compile(
    rf"({_NUMBER}) (\\mid|\||\\nmid|\\not \\mid) ([{''.join(sorted(_LETTERS))}]) "
)
_CONGRUENCE = _pattern(
    rf"(?P<differs>\\not )?\\equiv (?P<both>\\pm )?(?P<classes>{_SEVERAL})(?:, )*(?:\( )?\\?[pb]?mod "
    rf"(?P<modulus>{_NUMBER}) (?:\) )?"
)
_PARTS: tuple[tuple[re.Pattern[str], Callable[[_Described, re.Match[str], bool], bool]], ...] = (
    (_DOMAIN, _take_domain),
    (_KIND, _take_kind),
    (_DIVISOR, _take_divisor),
    (_DIVIDES, _take_divides),
    (_CONGRUENCE, _take_congruence),
    (_pattern(rf"(\\geq?|> =|>|greater than|more than|at least) ({_NUMBER}) "), _take_bound),
)
"""Statements that a text may make of its numbers, each with the function that takes it; it
returns whether it did."""


_OF_THE_FORM = re.compile(
    r"(?:(?:all|any|every) )?(?:(positive|non-?negative) )?(?:integers?|numbers?)? ?(?:[a-zA-Z] "
    r")?of the form "
)
_LEASTS = {"": WINDOW[0], "Z": WINDOW[0], "N": 0, "Z0": 0, "Z+": 1}
"""First values of the letter of a formula, by the name of its set; "": none is written."""


@lru_cache(maxsize=512)
def _by_formula(text: str, natural: int) -> _Described | None:
    """The set of values of `n = 2k + 1, k \\in \\mathbb{Z}`, else None.

    The natural numbers begin with `natural`."""
    form = _OF_THE_FORM.match(text)
    try:
        interpreted = interpret(parse_answer(text[form.end() :] if form else text))
    except (NotMathematics, Unsupported):
        return None
    named_set, letters, rows = interpreted.family or ("", (), ())
    if (
        interpreted.family is None
        and interpreted.scalar is not None
        and interpreted.scalar.unit is None
    ):
        letters = tuple(symbols(interpreted.scalar.expr))
        rows = ((interpreted.scalar.expr,),)
    if named_set not in _LEASTS or len(letters) != 1 or len(rows) != 1:
        return None
    (letter,), (expr, *further_exprs) = letters, rows[0]
    if further_exprs or symbols(expr) != {letter}:
        return None
    values = set()
    for k in range(_LEASTS[named_set] + natural * (named_set == "N"), WINDOW[-1] + 1):
        try:
            value = evaluate(expr, Context({letter: Fraction(k)}, complex_numbers=False))
        except (Undefined, NotMathematics):
            if k < 0:
                continue
            return None
        if isinstance(value, Fraction) and value.denominator == 1:
            values.add(int(value))
        elif k >= 0:
            return None
        if k > 1 and abs(value) > WINDOW[-1]:
            break
    names = {interpreted.name} if interpreted.name else set()
    described = _Described(is_open=not named_set, letters=names, conditions=[lambda n: n in values])
    if form and form[1]:
        described.least = int(form[1] == "positive")
        described.is_open = False
    return described
