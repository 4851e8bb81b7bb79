"""Compares two answers, parsed by our grammar or, where it does not support them, by math-verify.

text -> special forms -> syntax tree (`parser`) -> interpretations (`interpret`) -> comparison
(`equivalence`)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from rlmath.answers.compare_values import mentions, symbols, value_of
from rlmath.answers.equivalence import Equivalence, names_agree
from rlmath.answers.evaluate import FINITE, INFINITE
from rlmath.answers.extraction import DECLARED, NAMED_BEFORE
from rlmath.answers.families import same_antiderivative, same_up_to_constants, same_up_to_renaming
from rlmath.answers.integer_sets import same_integers
from rlmath.answers.interpret import interpret
from rlmath.answers.lexer import Reading
from rlmath.answers.normalize import (
    KnownWords,
    NotMathematics,
    Unevaluated,
    Unsupported,
    other_notation,
    plain_unicode,
    without_layout,
)
from rlmath.answers.parser import parse_answer
from rlmath.answers.question import Question, known_words
from rlmath.answers.sentences import plain_sentences, says_order
from rlmath.answers.special_forms import (
    bare_parts,
    same_objects,
    same_special,
    split_chain,
    split_list,
    split_parts,
)
from rlmath.answers.string_match import Rules, plain_answer
from rlmath.answers.syntax_tree import Answer, Call, Expr, Num, Relation, Sym

_PARTIAL_DERIVATIVE = re.compile(
    r"^\$?\\frac\s?\{\\partial[^{}]{0,20}\}\s?\{\\partial[^{}]{0,20}\}\s{0,3}="
)
_REMARK = re.compile(r"\((?:\\text\s?\{)?\s?[a-z]{2,20}[\s}][^()]{1,200}\)[\s$.}]{0,5}$")
_WORKING = re.compile(r"(?:[+-]|\\cdot|\\times) ?\\[cl]?dots(?![a-zA-Z])|[0-9)] ?\\cdots")
"""Dots in a sum or product."""
_UNEVALUATED = re.compile(r"\\(?:i{0,2}int|sum|prod|lim)(?![a-zA-Z])|\|_")


def answers_equal(answer: str, gold: str, rules: Rules, question: Question) -> bool:
    """Whether two answers to a question are equal.

    May hang or take gigabytes in math-verify, and raises what that raises."""
    gold = gold.replace(":=", "=")
    answer_plain = plain_answer(answer)
    gold_plain = plain_answer(gold)
    if answer_plain is None or gold_plain is None:
        return False
    # A choice's text without its letter is accepted.
    if gold_plain.choice is not None and gold_plain.choice.rest:
        return answers_equal(
            answer_plain.choice.rest if answer_plain.choice else answer,
            gold_plain.choice.rest,
            rules,
            question,
        )
    name, marked, value = answer.partition(NAMED_BEFORE)
    if marked and ("(" in name or "_" in name):  # a function before the box
        return answers_equal(value, gold, rules, question) or answers_equal(
            f"{name}={value}", gold, rules, question
        )
    if ":=" in answer:
        return answers_equal(answer.replace(":=", "="), gold, rules, question)
    special = same_special(gold_plain.key, _without_reason(answer_plain.key))
    if special is not None:
        return special
    for compare in (same_objects, same_integers):
        if (decided := compare(gold_plain.key, answer_plain.key)) is not None:
            return decided
    sentences = plain_sentences(gold_plain.key, answer_plain.key)
    if sentences != (None, None) and _said_equal(
        sentences[0] or gold, sentences[1] or answer, rules, question
    ):
        return True
    if says_order(gold_plain.key) or says_order(answer_plain.key):
        return False  # "in any order", "and its permutations": as they are written only
    chains = split_chain(gold_plain.key), split_chain(answer_plain.key)
    if chains[0] is not None and chains[1] is not None and chains[0][1] == chains[1][1]:
        sides = zip(chains[0][0], chains[1][0], strict=True)
        if all(
            answers_equal(answer_side, gold_side, rules, question)
            for gold_side, answer_side in sides
        ):
            return True
    labelled = split_parts(gold_plain.key), split_parts(answer_plain.key)
    if labelled != (None, None):
        count = len(labelled[0] or labelled[1] or ())
        golds = labelled[0] or bare_parts(gold_plain.key, count)
        answers = labelled[1] or bare_parts(answer_plain.key, count)
        if None not in labelled and len(golds or ()) != len(answers or ()):
            return False
        if golds is not None and answers is not None and len(golds) == len(answers):
            is_same = all(
                answers_equal(answer_part, gold_part, rules, question)
                for gold_part, answer_part in zip(golds, answers, strict=True)
            )
            if is_same or labelled[0] is not None:  # (1)/(2) has no labels
                return is_same
    answer = _PARTIAL_DERIVATIVE.sub("", answer)
    gold = _PARTIAL_DERIVATIVE.sub("", gold)
    declared: tuple[str, ...] = ()
    if (match := DECLARED.search(answer)) is not None:
        answer = answer[: match.start()]
        declared = tuple(re.findall(r"[a-dkm]", match[1] or match[2]))
    try:
        return equal_by_grammar(answer, gold, rules, question=question, declared=declared)
    except Unsupported:
        return _is_bounded(answer) and _equal_by_math_verify(answer, gold)
    except NotMathematics:
        return False


_REASON = re.compile(
    r"(yes|no)(?:[,.;:] ?| ?(?=\())(\()?((?:[0-9 =+*/^.()-]|\\cdot|\\times){5,100})(?(2)\))",
    re.IGNORECASE,
)


def _without_reason(key: str) -> str:
    """The `No` of `No, 51 = 3 \\cdot 17`, an equation that holds; other texts as they are."""
    match = _REASON.fullmatch(key)
    if match is None:
        return key
    try:
        reading = parse_answer(match[3])
        # An equation of numbers that does not hold has no value.
        holds = isinstance(reading, Relation) and interpret(reading).scalar is not None
    except (NotMathematics, Unsupported):
        return key
    return match[1] if holds else key


def _said_equal(gold: str, answer: str, rules: Rules, question: Question) -> bool:
    """Whether two texts in plain notation are equal, as strings or as answers."""
    gold_plain = plain_answer(gold)
    answer_plain = plain_answer(answer)
    return (
        gold_plain is not None
        and answer_plain is not None
        and (gold_plain.key == answer_plain.key or answers_equal(answer, gold, rules, question))
    )


def boxes_equal(boxes: list[str], gold: str, rules: Rules, question: Question) -> bool:
    """Whether the contents of several boxes are the parts of the gold answer, which has as many."""
    gold_plain = plain_answer(gold)
    if gold_plain is None or any(plain_answer(box) is None for box in boxes):
        return False
    parts = split_parts(gold_plain.key) or split_list(gold_plain.key)
    count = 2 if gold_plain.key.count("\\pm") == 1 else len(parts)
    return count == len(boxes) and answers_equal("; ".join(boxes), gold, rules, question)


def equal_by_grammar(
    answer: str, gold: str, rules: Rules, question: Question, declared: tuple[str, ...] = ()
) -> bool:
    """Whether any reading of the answer equals any reading of the gold answer.

    Raises NotMathematics or Unsupported."""
    with_remark = _REMARK.search(gold) is not None
    answers = _readings(_without_working(answer), False, known_words(answer, gold, question))
    golds = _readings(_without_working(gold), with_remark, None)
    if _repeats_question(answers[0], golds[0]) and not _leaves_work(golds[0]):
        return False  # the question repeated
    if (
        isinstance(answers[0], Unsupported)
        and _UNEVALUATED.search(answer)
        and not _UNEVALUATED.search(gold)
    ):
        return False
    unparsed = [reading for reading in (golds[0], answers[0]) if isinstance(reading, Exception)]
    if unparsed:
        raise next((error for error in unparsed if isinstance(error, NotMathematics)), unparsed[0])
    refused: list[Exception] = []
    for gold_reading, answer_reading in itertools.product(golds, answers):
        # Digits in groups, read as a list, are no list of solutions.
        grouped = gold_reading is not golds[0] or answer_reading is not answers[0]
        try:
            equivalence = Equivalence(rules.protocol, repeats=not grouped, question=question)
            if _same_answer(gold_reading, answer_reading, equivalence, declared):
                return True
        except (NotMathematics, Unsupported) as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return False


def _same_answer(
    gold: Answer, answer: Answer, equivalence: Equivalence, declared: tuple[str, ...] = ()
) -> bool:
    """Whether two parsed answers are equal.

    Raises NotMathematics or Unsupported if that cannot be decided."""
    interpreted_gold = interpret(gold)
    interpreted_answer = interpret(answer)
    if equivalence.same(interpreted_gold, interpreted_answer):
        return True
    if (
        interpreted_gold.scalar is None
        or interpreted_answer.scalar is None
        or not names_agree(interpreted_gold.name, interpreted_answer.name)
    ):
        return False
    gold_expr = interpreted_gold.scalar.expr
    answer_expr = interpreted_answer.scalar.expr
    if interpreted_answer.family is not None and interpreted_answer.family[0] in ("R", "C"):
        declared = (*declared, *interpreted_answer.family[1])
    if same_antiderivative(gold_expr, answer_expr):
        return True
    if same_up_to_constants(gold_expr, answer_expr, declared):
        return True
    return same_up_to_renaming(gold_expr, answer_expr, declared)


def _without_working(text: str) -> str:
    """The last side of an equation whose first sides are not evaluated.

    `1` of `\\int_0^1 2x dx = 1`."""
    if "=" not in text or not (_WORKING.search(text) or _UNEVALUATED.search(text)):
        return text
    depth = 0
    cut = None
    for position, char in enumerate(text):
        depth += (char in "{(") - (char in "})")
        if char == "=" and depth == 0:
            cut = position
    if cut is None:
        return text
    front = text[:cut]
    last = text[cut + 1 :]
    is_work = _UNEVALUATED.search(front) or _WORKING.search(front)
    return last if is_work and not _UNEVALUATED.search(last) else text


def _leaves_work(reading: object) -> bool:
    """Whether it has an integral, a limit, or a sum or product of many terms."""
    has_series = any(mentions(expr, FINITE | INFINITE) for expr in _expressions(reading))
    return has_series or isinstance(reading, Unevaluated)


def _repeats_question(answer: object, gold: object) -> bool:
    """Whether an answer leaves work that the gold answer does not.

    Sums and products up to a letter of the gold answer are no such work."""
    if isinstance(answer, Unevaluated):
        return True
    series = [part for expr in _expressions(answer) for part in _series(expr)]
    if any(mentions(part, INFINITE) or not symbols(part) for part in series):
        return True
    return bool(series) and not _letters(answer) <= _letters(gold)


def _series(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Call):
        if expr.name in FINITE | INFINITE:
            yield expr
        for arg in expr.args:
            yield from _series(arg)


def _letters(reading: object) -> frozenset[str]:
    return frozenset().union(*(symbols(expr) for expr in _expressions(reading)))


def _expressions(reading: object) -> Iterator[Expr]:
    """All expressions in a parsed answer."""
    if isinstance(reading, (Num, Sym, Call)):
        yield reading
    elif isinstance(reading, tuple):
        for part in reading:
            yield from _expressions(part)
    else:
        for name in getattr(reading, "__dataclass_fields__", ()):
            yield from _expressions(getattr(reading, name))


@lru_cache(maxsize=2048)
def _readings(text: str, with_remark: bool, known_words: KnownWords | None) -> tuple:
    """The syntax trees of a text, one per reading; an exception if it has none.

    Readings differ in ambiguous digits and in words that the question counts, which may also
    multiply."""
    plain = other_notation(without_layout(plain_unicode(text)))
    plainly = Reading(with_remark=with_remark, known_words=known_words)
    ways = [plainly]
    if re.search(r"[0-9],[0-9]{3}(?![0-9])", plain):
        ways.append(replace(plainly, with_remark=False, commas_group=False))
    if re.search(r"[0-9][eE][+-][0-9]", plain):
        ways.append(replace(plainly, with_remark=False, e_is_exponent=False))
    if known_words is not None and known_words.counted:
        ways.append(replace(plainly, known_words=replace(known_words, counted=frozenset())))
    trees = []
    errors = []
    for way in ways:
        try:
            trees.append(parse_answer(plain, way))
        except (NotMathematics, Unsupported) as error:
            errors.append(error)
    return tuple(trees or errors[:1])


def _is_bounded(answer: str) -> bool:
    """Whether all numbers that our grammar parses of an answer are within our limits.

    It is asked before math-verify computes."""
    try:
        for reading in _readings(answer, False, None):
            if not isinstance(reading, Exception):
                _check_size(reading)
    except NotMathematics:
        return False
    return True


def _check_size(answer: object) -> None:
    """Raises NotMathematics if a number in an answer is beyond our limits, or undefined.

    1/0 is undefined."""
    for expr in _expressions(answer):
        has_series = mentions(expr, FINITE | INFINITE)
        if value_of(expr, complex_numbers=True) is None and not symbols(expr) and not has_series:
            raise NotMathematics("it has no value")


def _equal_by_math_verify(answer: str, gold: str) -> bool:
    """Whether math-verify finds them equal.

    Its own time limits, which need signals, are off."""
    from math_verify import verify  # imports sympy, which only some answers need

    return verify(
        _parse_gold(gold), _parse_by_math_verify(answer), timeout_seconds=0, raise_on_error=True
    )


def _parse_by_math_verify(answer: str) -> list:
    """A list of sympy expressions and the normalised string."""
    from math_verify import LatexExtractionConfig, parse

    boxed = f"\\boxed{{{answer}}}"
    return parse(
        boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=0, raise_on_error=True
    )


_parse_gold = lru_cache(maxsize=512)(_parse_by_math_verify)


def warm_up_math_verify() -> None:
    """Load math-verify and have it compare answers that differ.

    It takes most of a second, which the first answer would pay otherwise."""
    examples = (
        ("0.5", r"\int_0^1 3x^2 dx"),
        (r"\frac{3}{7}", r"\sum_{k=1}^{n} k"),
        ("2", r"\lim_{x\to 0} \frac{\sin x}{x}"),
    )
    equal = [_equal_by_math_verify(answer, gold) for answer, gold in examples]
    assert not any(equal), equal
