"""Infinite sets of integers in words or as a formula: `all odd positive integers`, `n = 2k + 1, k >= 0`, `3 \\nmid n`.

They are compared member by member inside a window that is wide for the numbers in them. A text that leaves open
whether its numbers are positive is compared on those that the other one has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import isqrt, lcm

from rlmath.answers.evaluate import symbols
from rlmath.answers.normalize import NotMathematics, Unsupported, word_set
from rlmath.answers.numbers import Context, Undefined, evaluate
from rlmath.answers.parser import parse_answer
from rlmath.answers.phrases import NUMBER_WORDS
from rlmath.answers.syntax_tree import Scalar

WINDOW = range(-150, 420)
_LARGEST = WINDOW[-1] // 4
"""Largest number in a text, and longest period of two sets together: what differs further out would not be seen."""
_FEWEST = 4
"""Least members inside the window."""
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
    """What its numbers are called."""
    period: int = 1
    """The least common multiple of its divisors and moduli."""
    longest_period: int = _LARGEST
    """The longest period of a set that it is compared with; less for kinds with few members in the window."""
    conditions: list[Callable[[int], bool]] = field(default_factory=list)

    def members(self, least: int | None = None) -> frozenset[int]:
        low = max(one for one in (WINDOW[0], self.least, least) if one is not None)
        numbers = range(low, WINDOW[-1] + 1)
        return frozenset(n for n in numbers if all(condition(n) for condition in self.conditions))


def same_integers(gold: str, answer: str) -> bool | None:
    """Whether two texts are the same infinite set of integers; None if one of them is not read as such a set."""
    both = f"{gold} {answer}"
    if not _TRIGGER.search(both) or max(len(gold), len(answer)) > _LONGEST:
        return None
    if any(int(number) > _LARGEST for number in re.findall("[0-9]+", both)):
        return None
    readings = [_in_words(text) or _listed(text) for text in (gold, answer)]
    if readings == [None, None] and "of the form" not in both:
        return None  # two formulas are compared by the grammar
    same = None
    for start in (1, 0):  # of the natural numbers
        ours, theirs = (
            reading or _by_formula(text, start)
            for reading, text in zip(readings, (gold, answer), strict=True)
        )
        if ours is None or theirs is None:
            return None
        same = same or _same_members(ours, theirs)
    return same


def _same_members(ours: _Described, theirs: _Described) -> bool | None:
    least = None
    if ours.is_open != theirs.is_open:
        least = theirs.least if ours.is_open else ours.least
    if ours.letters and theirs.letters and ours.letters.isdisjoint(theirs.letters):
        return False
    if lcm(ours.period, theirs.period) > min(ours.longest_period, theirs.longest_period):
        return None
    zero = {0} if ours.may_lack_zero or theirs.may_lack_zero else set()
    sets = ours.members(least) - zero, theirs.members(least) - zero
    return sets[0] == sets[1] if min(map(len, sets)) >= _FEWEST else None


_FILLERS = word_set(
    "all any every each the set of exactly those when if is are be an a that which such with for where satisfying "
    "values value numbers number only just must holds works iff precisely it , : . { }"
)
_LETTERS = frozenset("nmkpqNxab")
_QUANTIFIERS = word_set("all any every each")


def _listed(text: str) -> _Described | None:
    """`1, 3, 5, \\ldots` as an arithmetic progression, else None."""
    match = re.fullmatch(
        r"(?:([a-z]) ?(?:=|\\in) ?)?(?:\\\{)?((?:-?[0-9]{1,3}, ?){2,8}-?[0-9]{1,3}), ?(?:\\[lc]?dots|\.\.\.)(?:\\\})?",
        text,
    )
    if match is None:
        return None
    numbers = [int(one) for one in match[2].split(",")]
    step = numbers[1] - numbers[0]
    if step <= 0 or any(b - a != step for a, b in pairwise(numbers)):
        return None
    first = numbers[0]
    return _Described(
        first,
        is_open=False,
        letters={match[1]} - {None},
        period=step,
        conditions=[lambda n: n >= first and (n - first) % step == 0],
    )


def _in_words(text: str) -> _Described | None:
    """The numbers that meet all conditions of a text. None where these may stand for something else than all of them:
    `multiples of 3, multiples of 5`, `not odd multiples of 3`, `not all n`."""
    tokens = _TOKEN.findall(text.replace("non-", "non").replace("\\not ", "\\not"))
    found = _Described()
    at, negated, spoken = 0, False, False
    in_list = False  # behind a comma, or a condition that is denied
    while at < len(tokens):
        token = tokens[at].lower() if len(tokens[at]) > 1 else tokens[at]
        after = [one.lower() for one in tokens[at + 1 : at + 3]]
        if token in ("not", "nor"):
            negated, at = True, at + 1
            continue
        if negated and token in _QUANTIFIERS:
            return None
        known = len(found.conditions)
        step = _kind(found, token, after, negated) or _divisor(found, tokens, at, negated)
        if len(found.conditions) > known:
            if in_list and not (negated or "\\nmid" in tokens[at : at + step] or token == "\\not"):
                return None
            in_list = negated
        step = step or _comparison(found, tokens, at, negated) or _membership(found, tokens, at)
        if step:
            spoken, negated, at = True, False, at + step
        elif token in _FILLERS or (token in _LETTERS and len(token) == 1):
            in_list = (
                in_list or (token in (",", ".", ":") and bool(found.conditions))
            ) and token not in _OPENINGS
            if after[:1] != ["\\equiv"]:  # n \equiv 1 stands for a class, whatever its letter
                found.letters |= {token} & (_LETTERS - _FILLERS)
            at += 1
        else:
            return None
    return found if spoken and found.conditions and not negated else None


_OPENINGS = word_set("that which such with where")
"""What begins a further condition."""


def _kind(found: _Described, token: str, after: list[str], negated: bool) -> int:
    """Takes a kind of numbers, such as `odd` or `perfect squares`; returns how many tokens it has, 0 for none."""
    domain = {"positive": 1, "natural": 1, "nonnegative": 0, "whole": 0}.get(token)
    if domain is not None and not negated:
        found.least, found.is_open = domain, False
        return 1
    word = token.removesuffix("s")
    if word == "integer" and not negated:
        found.is_open = False
        return 1
    size = 1
    if word == "perfect" and after and after[0].removesuffix("s") in ("square", "cube"):
        word, size = after[0].removesuffix("s"), 2
    if size + 1 <= len(after) + 1 and after[size - 1 : size] in (
        ["number"],
        ["numbers"],
        ["integer"],
        ["integers"],
    ):
        size += 1
    kind = _KINDS.get(word)
    if kind is None:
        return 0
    found.is_open = False
    found.may_lack_zero = found.may_lack_zero or word == "square"
    found.period = lcm(found.period, 2 if word in ("odd", "even") else 1)
    found.longest_period = min(found.longest_period, _LONGEST_PERIODS.get(word, _LARGEST))
    found.conditions.append((lambda n: not kind(n)) if negated else kind)
    return size


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
"""Of these kinds, the window has members in every class."""


def _number(tokens: list[str], at: int) -> tuple[int, int] | None:
    """(whole number, position after it), also of `-3`, `{3}` or `three`, else None."""
    braced = tokens[at : at + 1] == ["{"]
    at += braced
    sign = -1 if tokens[at : at + 1] == ["-"] else 1
    at += sign < 0
    token = tokens[at].lower() if at < len(tokens) else ""
    value = int(token) if token.isdigit() and len(token) < 5 else NUMBER_WORDS.get(token)
    if value is None or value > _LARGEST or (braced and tokens[at + 1 : at + 2] != ["}"]):
        return None
    return sign * value, at + 1 + braced


def _divisor(found: _Described, tokens: list[str], at: int, negated: bool) -> int:
    """Takes `divisible by 3`, `multiples of 3`, `powers of 2`, `3 \\mid n` or `\\equiv 1 \\pmod 3`."""
    start, word = at, tokens[at].lower().removesuffix("s")
    if word in ("divisible", "multiple", "power"):
        is_of = tokens[at + 1 : at + 2] in (["of"], ["by"])
        number = _number(tokens, at + 2) if is_of else None
        if number is None or number[0] < 2:
            return 0
        base, at = number
        powers = {base**k for k in range(10)}
        condition = (lambda n: n in powers) if word == "power" else (lambda n: n % base == 0)
        found.conditions.append((lambda n: not condition(n)) if negated else condition)
        found.is_open = found.is_open and word == "divisible"
        if word == "power":
            found.longest_period = min(found.longest_period, _LONGEST_PERIODS[word])
        else:
            found.period = lcm(found.period, base)
        return at - start
    number = _number(tokens, at) if tokens[at].isdigit() else None
    if number is not None:
        divisor, at = number
        sign = tokens[at : at + 1]
        divides = {"\\mid": True, "|": True, "\\nmid": False, "\\not\\mid": False}.get(
            sign[0] if sign else ""
        )
        if divides is None or divisor < 2 or tokens[at + 1 : at + 2] == [] or tokens[at + 1] not in _LETTERS:
            return 0
        found.conditions.append(lambda n: (n % divisor == 0) is divides)
        found.letters.add(tokens[at + 1])
        found.period = lcm(found.period, divisor)
        return at + 2 - start
    differs = tokens[at] == "\\not" and tokens[at + 1 : at + 2] == ["\\equiv"]
    if tokens[at] == "\\equiv" or differs:
        return _congruence(found, tokens, at + 1 + differs, differs or negated) - start
    return 0


def _congruence(found: _Described, tokens: list[str], at: int, differs: bool) -> int:
    """Takes the classes and the modulus after `\\equiv`; returns the position after them."""
    start, classes = at, set()
    negative = tokens[at : at + 1] == ["\\pm"]
    at += negative
    while (number := _number(tokens, at)) is not None:
        classes |= {number[0], -number[0]} if negative else {number[0]}
        at = number[1]
        while tokens[at : at + 1] in ([","], ["or"], ["and"]):
            at += 1
    bracket = tokens[at : at + 1] == ["("]
    at += bracket
    if tokens[at : at + 1] not in (["\\pmod"], ["\\bmod"], ["mod"], ["\\mod"]) or not classes:
        return start - 2
    number = _number(tokens, at + 1)
    if number is None or number[0] < 2:
        return start - 2
    modulus, at = number
    residues = {one % modulus for one in classes}
    found.period = lcm(found.period, modulus)
    found.conditions.append(lambda n: (n % modulus in residues) is not differs)
    return at + (bracket and tokens[at : at + 1] == [")"])


def _membership(found: _Described, tokens: list[str], at: int) -> int:
    """Takes `\\in \\mathbb{N}`, or another set of integers."""
    match = _IN_SET.match(" ".join(tokens[at : at + 12]))
    if match is None:
        return 0
    part = (match[2] or "").strip("{} ").replace(" ", "")
    least = 0 if part.endswith("0") and ">" not in part else 1 if part or match[1] == "N" else None
    found.is_open = False
    if least is not None:
        found.least = least if found.least is None else max(least, found.least)
    return len(match.group().split())


_IN_SET = re.compile(
    r"\\in \\mathbb (?:\{ )?([NZ])(?: \})?(?: (?:\^|_) ((?:\{ )?(?:\+|\*|(?:\\geq?|>) [01]|0)(?: \})?))?(?= |$)"
)
_ORDERS: dict[tuple[str, ...], str] = {
    ("\\ge",): ">=",
    ("\\geq",): ">=",
    (">", "="): ">=",
    (">",): ">",
    ("greater", "than"): ">",
    ("more", "than"): ">",
    ("at", "least"): ">=",
}


def _comparison(found: _Described, tokens: list[str], at: int, negated: bool) -> int:
    """Takes `\\ge 3`, `greater than 3`, `at least 3`, or `except 1 and 2`."""
    if negated:
        return 0
    for words, order in _ORDERS.items():
        if tuple(tokens[at : at + len(words)]) == words:
            number = _number(tokens, at + len(words))
            if number is None:
                return 0
            least = number[0] + (order == ">")
            found.least = max(least, least if found.least is None else found.least)
            found.is_open = False
            found.conditions.append(range(least, WINDOW[-1] + 1).__contains__)
            return number[1] - at
    size = (
        2 if tokens[at : at + 2] == ["other", "than"] else 1 if tokens[at] in ("except", "excluding") else 0
    )
    left, end = set(), at + size + (tokens[at + size : at + size + 1] == ["for"])
    after_number = end
    while size and (number := _number(tokens, end)) is not None:
        left.add(number[0])
        end = after_number = number[1]
        while tokens[end : end + 1] in ([","], ["and"], ["or"]):
            end += 1
    if not left or after_number < end < len(tokens):  # except 3 and what follows
        return 0
    found.conditions.append(lambda n: n not in left)
    return end - at


_FORMULA = re.compile(
    r"(?:(?:all|any|every) )?(?P<whose>(?:positive |nonnegative |non-negative )?(?:integers?|numbers?) )?(?:[a-zA-Z] )?"
    r"(?:of the form ?|(?:(?P<name>[a-zA-Z]) ?= ?))?(?:[a-zA-Z] ?= ?)?(?P<formula>[^,;=]{1,60}?)"
    r"(?:(?:, ?\(?| ?\(| (?=for |where |with ))(?:for |where |with )?(?:some |any |all |every )?"
    r"(?P<domain>[^=]{2,60}?|[a-z] ?= ?[01], ?[0-9, ]{1,10}(?:\\[lc]?dots))\)?)?"
)
_DOMAINS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("N", r"[a-z] ?\\in ?\\mathbb ?\{?N\}?|natural numbers? [a-z]|[a-z] is a natural number"),
        ("Z+", r"[a-z] ?\\in ?\\mathbb ?\{?[NZ]\}?(?:\^\{?[+*]\}?|_\{?(?:>0|\\geq? ?1|\+)\}?)"),
        ("Z0", r"[a-z] ?\\in ?\\mathbb ?\{?[NZ]\}?_\{?(?:\\geq? ?)?0\}?"),
        ("Z", r"[a-z] ?\\in ?\\mathbb ?\{?Z\}?|integers? [a-z]|[a-z] is an integer"),
        (
            "Z+",
            r"[a-z] ?(?:\\geq? ?1|>0)|[a-z] ?= ?1, ?2,.*|positive integers? [a-z]|[a-z] is a positive integer",
        ),
        (
            "Z0",
            r"[a-z] ?\\geq? ?0|[a-z] ?= ?0, ?1,.*|non-?negative integers? [a-z]|[a-z] is a non-?negative integer",
        ),
    )
)
_LEASTS: dict[str, int | None] = {"Z+": 1, "Z0": 0, "Z": None}


@lru_cache(maxsize=512)
def _by_formula(text: str, natural: int) -> _Described | None:
    """The set of values of `n = 2k + 1, k \\in \\mathbb{Z}`, else None; the natural numbers begin with `natural`."""
    match = _FORMULA.fullmatch(text)
    if match is None:
        return None
    domain = match["domain"]
    least: int | None = None
    if domain is not None:
        found = next((one for one, pattern in _DOMAINS if pattern.fullmatch(domain)), "")
        if found == "":
            return None
        least = natural if found == "N" else _LEASTS[found]
    try:
        tree = parse_answer(match["formula"])
    except (NotMathematics, Unsupported):
        return None
    if not isinstance(tree, Scalar) or tree.unit is not None or len(symbols(tree.expr)) != 1:
        return None
    (letter,) = symbols(tree.expr)
    whole = match["whose"] or ""
    values = set()
    for k in range(WINDOW[0] if least is None else least, WINDOW[-1] + 1):
        try:
            value = evaluate(tree.expr, Context({letter: Fraction(k)}, complex_numbers=False))
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
    names = {match["name"]} - {None}
    described = _Described(is_open=domain is None, letters=names, conditions=[lambda n: n in values])
    if "positive" in whole or "negative" in whole:
        described.least, described.is_open = int("positive" in whole), False
    return described
