"""Compares two answers: parsed by our grammar, or by math-verify where the grammar does not support them.

text -> special forms -> syntax tree (`parser`) -> interpretations (`interpret`) -> comparison (`equivalence`)
"""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, is_dataclass
from functools import lru_cache

from rlmath.rewards.answers.equivalence import Equivalence, names_agree, same_antiderivative
from rlmath.rewards.answers.evaluate import symbols, value_of
from rlmath.rewards.answers.interpret import interpret
from rlmath.rewards.answers.lexer import Reading
from rlmath.rewards.answers.normalize import (
    NotMathematics,
    Unevaluated,
    Unsupported,
    plain_unicode,
    without_layout,
)
from rlmath.rewards.answers.parser import parse_answer
from rlmath.rewards.answers.special_forms import same_special
from rlmath.rewards.answers.string_match import Rules, plain_answer
from rlmath.rewards.answers.syntax_tree import Answer, Call, Num, Sym

_PARTIAL_DERIVATIVE = re.compile(r"^\$?\\frac\s?\{\\partial[^{}]{0,20}\}\s?\{\\partial[^{}]{0,20}\}\s{0,3}=")
"""The left side of an equation for a partial derivative."""
_BARE_SET = re.compile(r"\\in\s{0,3}([ZN])(?![a-zA-Z])")
_FOR_INTEGERS = re.compile(
    r",?\s{0,3}(?:\\text\s?\{)?,?\s{0,3}(?:for|where) (?:any |all |some |every )?integers? \}?\s{0,3}\$?([a-z])\$?\}?$"
)
"""`k\\pi for any integer k`."""
_QUALIFIER = re.compile(r",?(?:\\text\{)?,? {0,3}for (?:all|every|any|each) [A-Za-z ${}\\]{1,60}$")
"""The domain of a function in words: `f(x) = 2x for all real x`."""
_INTEGER_PARAMETER = re.compile(r"\(\s{0,3}([a-z])\s{0,3}(\\in\s{0,3}\\mathbb\s?\{?[ZN]\}?)\s{0,3}\)$")
_UNEVALUATED = re.compile(r"\\(?:i{0,2}int|sum|prod|lim)(?![a-zA-Z])|\|_")


def answers_equal(answer: str, gold: str, rules: Rules) -> bool:
    """Whether two answers are equal. May hang or take gigabytes in math-verify, and raises what that raises."""
    ours, theirs = plain_answer(answer), plain_answer(gold)
    if ours is None or theirs is None:
        return False
    if theirs.choice is not None and theirs.choice.rest:  # a choice's text without its letter is accepted
        return answers_equal(ours.choice.rest if ours.choice else answer, theirs.choice.rest, rules)
    if ours.choice is not None and ours.choice.rest and theirs.choice is None:
        return answers_equal(ours.choice.rest, gold, rules)
    special = same_special(theirs.key, ours.key)
    if special is not None:
        return special
    answer, gold = normalize_qualifiers(answer), normalize_qualifiers(gold)
    try:
        return equal_by_grammar(answer, gold, rules)
    except Unsupported:
        return _is_bounded(answer) and _equal_by_math_verify(answer, gold)
    except NotMathematics:
        return False


def normalize_qualifiers(text: str) -> str:
    """Removes the domain of a function; writes a parameter's set after a comma."""
    text = _PARTIAL_DERIVATIVE.sub("", text)
    text = _BARE_SET.sub(r"\\in \\mathbb{\1}", text)
    text = _FOR_INTEGERS.sub(r", \1 \\in \\mathbb{Z}", text)
    return _INTEGER_PARAMETER.sub(r", \1 \2", _QUALIFIER.sub("", text))


def equal_by_grammar(answer: str, gold: str, rules: Rules) -> bool:
    """Whether any reading of the answer equals any reading of the gold answer. Raises NotMathematics or Unsupported."""
    ours, golds = _readings(_without_working(answer)), _readings(_without_working(gold))
    if isinstance(ours[0], Unevaluated) and not isinstance(golds[0], Unevaluated):
        return False  # the question repeated
    if isinstance(ours[0], Unsupported) and _UNEVALUATED.search(answer) and not _UNEVALUATED.search(gold):
        return False
    unparsed = [reading for reading in (golds[0], ours[0]) if isinstance(reading, Exception)]
    if unparsed:
        raise next((error for error in unparsed if isinstance(error, NotMathematics)), unparsed[0])
    refused: list[Exception] = []
    for one, other in itertools.product(golds, ours):
        try:
            if _same_answer(one, other, rules.protocol):
                return True
        except (NotMathematics, Unsupported) as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return False


def _same_answer(gold: Answer, answer: Answer, protocol: bool) -> bool:
    """Whether two parsed answers are equal. Raises NotMathematics or Unsupported if that cannot be decided."""
    one, other = interpret(gold), interpret(answer)
    if Equivalence(protocol).same(one, other):
        return True
    if one.scalar is None or other.scalar is None or not names_agree(one.name, other.name):
        return False
    return same_antiderivative(one.scalar.expr, other.scalar.expr)


def _without_working(text: str) -> str:
    """The last side of an equation whose first sides are not evaluated: `1` of `\\int_0^1 2x dx = 1`."""
    front, equals, last = text.rpartition("=")
    if equals and isinstance(_readings(text)[0], Exception) and _UNEVALUATED.search(front):
        return last
    return text


@lru_cache(maxsize=2048)
def _readings(text: str) -> tuple:
    """The syntax trees of a text, one per reading of its ambiguous digits; an exception if it has none."""
    plain = without_layout(plain_unicode(text))
    ways = [Reading()]
    if re.search(r"[0-9],[0-9]{3}(?![0-9])", plain):
        ways.append(Reading(commas_group=False))
    if re.search(r"[0-9][eE][+-][0-9]", plain):
        ways.append(Reading(e_is_exponent=False))
    trees, errors = [], []
    for way in ways:
        try:
            trees.append(parse_answer(plain, way))
        except (NotMathematics, Unsupported) as error:
            errors.append(error)
    return tuple(trees or errors[:1])


def _is_bounded(answer: str) -> bool:
    """Whether all numbers in what our grammar parses of an answer are within our limits, before math-verify computes
    them."""
    try:
        for reading in _readings(answer):
            if not isinstance(reading, Exception):
                _check_size(reading)
    except NotMathematics:
        return False
    return True


def _check_size(answer: object) -> None:
    """Raises NotMathematics if a number in an answer is beyond our limits, or undefined, such as 1/0."""
    if isinstance(answer, (Num, Sym, Call)):
        if value_of(answer, complex_numbers=True) is None and not symbols(answer):
            raise NotMathematics("it has no value")
    elif isinstance(answer, tuple):
        for part in answer:
            _check_size(part)
    elif is_dataclass(answer):
        for part in fields(answer):
            _check_size(getattr(answer, part.name))


def _equal_by_math_verify(answer: str, gold: str) -> bool:
    """Whether math-verify finds them equal. Its own time limits, which need signals, are off."""
    from math_verify import verify  # imports sympy, which only some answers need

    return verify(_parse_gold(gold), _parse_by_math_verify(answer), timeout_seconds=0, raise_on_error=True)


def _parse_by_math_verify(answer: str) -> list:
    """sympy expressions, and the normalised string."""
    from math_verify import LatexExtractionConfig, parse

    boxed = f"\\boxed{{{answer}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=0, raise_on_error=True)


_parse_gold = lru_cache(maxsize=512)(_parse_by_math_verify)
