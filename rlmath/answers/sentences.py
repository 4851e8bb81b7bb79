"""Answers in words: a sentence, `The value is 10`, and a condition, `x = 2 (x > 0)`."""

from __future__ import annotations

import re

from rlmath.answers.normalize import NotMathematics, Unsupported
from rlmath.answers.parser import parse_answer
from rlmath.answers.real_sets import RealSet, point
from rlmath.answers.solution_sets import bound_of, half_line
from rlmath.answers.syntax_tree import Relation

_NOUNS = (
    "values?|solutions?|roots?|results?|numbers?|ways?|sum|product|area|perimeter|volume|length|radius|cent(?:er|re)|vertex"
    "|points?|maximum|minimum|probability|total|limit|integral|functions?|equations?|slope|domain|range|set|difference"
    "|ratio|distance|height|width|speed|cost|price|age|angle|measure|coordinates?|remainder|quotient|degree|coefficient"
    "|expression|inverse|derivative|period|amplitude|mean|median|mode|average|interval|pairs?|triples?|elements?|zeros?"
)
_OTHERS = (
    "final|only|possible|real|integer|all|distinct|greatest|smallest|largest|positive|common|expected|of|the|its|for|such"
    "|different|required|desired|given|exact|general|particular|complex|two|three|four|ordered|[a-zA-Z]"
)
_LEAD = re.compile(
    rf"(?:(?:so|thus|hence|therefore),? )?(?:(?:[Tt]he|[Ii]ts|[Aa]ll) )?(?:(?:{_OTHERS}|{_NOUNS}) ){{0,6}}?(?:{_NOUNS})"
    r"(?: (?:of|for) (?:[a-zA-Z]|ways|solutions|values))? ?(?:is|are|equals|=|"
    r":) ?(?=[-+0-9\\(\[{a-zA-Z$])",
    re.IGNORECASE,
)
_SHORT_LEAD = re.compile(rf"(?:[a-zA-Z]+ ){{0,6}}?(?:{_NOUNS}) (?=[-+0-9\\(\[$])", re.IGNORECASE)
_THERE = re.compile(
    r"there (?:is|are) (?:exactly |a total of |only )?(?=[0-9])|(?:a )?total of (?=[0-9])",
    re.IGNORECASE,
)
_ABOUT = re.compile(
    r"(?<=[0-9a-z)}%]),? ?\(?(?:or |which is |that is |i\.e\.,? )?(?:approximately|about|"
    r"approx\.?|roughly|around) "
    r"(-?[0-9]{0,9}\.[0-9]{1,9})\)?$"
)
_WHERE = re.compile(
    r"^([a-z]) ?=(?P<value>[^()]*?),? ?(?P<where>\((\1) ?(?:>|<|\\geq?|\\leq?|"
    r"\\neq?) ?-?[0-9/]{1,9}\))$"
)
_AMOUNTS = re.compile(
    r"([0-9]{1,9} ?(?:hours?|hrs?|h|minutes?|min|days?|weeks?|years?|feet|foot|ft|pounds?|dollars?"
    r"|degrees?|yards?|meters?|kilograms?|gallons?)) and (?=[0-9]{1,9} ?(?:minutes?|min|seconds?|"
    r"sec|hours?|days?"
    r"|months?|inch(?:es)?|ounces?|oz|cents?|feet|centimeters?|grams?|quarts?)$)"
)
_LONGEST = 200


_FILLER = re.compile(
    "so|thus|hence|therefore|the|its|of|for|is|are|equals|value|result|expression|final|only|possible|all|common"
    "|such|required|desired|given|exact|general|expected|measure"
)
"""Words of a label that say nothing of what has the value."""
_SAME_WORD = {
    "greatest": "maximum",
    "largest": "maximum",
    "smallest": "minimum",
    "root": "solution",
    "zero": "solution",
    "way": "number",
    "centre": "center",
}
_ASKED_LETTER = re.compile(
    r"\b(?:values?|solutions?|measure) (?:of|for) ([a-zA-Z]) ?(?:is|are|equals|=|:) ?$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\(?([a-zA-Z])[a-zA-Z_0-9(){},\\]{0,20} ?=")


def plain_sentences(gold: str, answer: str) -> tuple[str | None, str | None]:
    """Two texts in plain notation: `10` of `The value is 10`; None of a text that is plain.

    A label, as in `The area is 5`, is left out unless the other text has another one; so is a
    condition, `x = 2 (x > 0)`."""
    texts = [_without_remarks(key) for key in (gold, answer)]
    leads = [_lead(text) for text in texts]
    if _labels_agree(texts, leads):
        texts = [_without_lead(text, lead) for text, lead in zip(texts, leads, strict=True)]
    ends = [_WHERE.match(text) for text in texts]
    conditions = [None if end is None else end["where"].replace(" ", "") for end in ends]
    for index, end in enumerate(ends):
        if end is not None and (
            conditions[0] == conditions[1] or (conditions[1 - index] is None and _holds(end))
        ):
            texts[index] = texts[index][: end.start("where")].rstrip(" ,")
    plain_texts = [
        text if text and text != key else None
        for text, key in zip(texts, (gold, answer), strict=True)
    ]
    return plain_texts[0], plain_texts[1]


def _without_remarks(key: str) -> str:
    if " " not in key or len(key) > _LONGEST or not (key[-1:] == ")" or key[-1:].isalnum()):
        return key
    return _AMOUNTS.sub(r"\1 ", _ABOUT.sub(r" \\approx \1", key))


def _lead(text: str) -> re.Match[str] | None:
    if len(text) > _LONGEST or not text[:1].isalpha() or " " not in text:
        return None
    return _LEAD.match(text) or _THERE.match(text)


def _without_lead(text: str, lead: re.Match[str] | None) -> str:
    if lead is None:
        return text
    sentence = text[lead.end() :]
    letter = _ASKED_LETTER.search(lead[0])
    return sentence if letter is None or _NAMED.match(sentence) else f"{letter[1]}={sentence}"


def _labels_agree(texts: list[str], leads: list[re.Match[str] | None]) -> bool:
    """Whether the labels of two texts do not contradict each other.

    Labels are such as `The maximum value is` and `x =`."""
    gold_label, answer_label = (
        _label(lead or _SHORT_LEAD.match(text)) for text, lead in zip(texts, leads, strict=True)
    )
    if gold_label and answer_label:
        return gold_label == answer_label
    for index, label in enumerate((gold_label, answer_label)):
        lead = leads[index]
        named_match = _NAMED.match(texts[1 - index])
        if not label or lead is None or named_match is None or "solution" in label:
            continue
        if _NAMED.match(texts[index][lead.end() :]) is None and not any(
            word.startswith(named_match[1].lower()) for word in label
        ):
            return False
    return True


def _label(lead: re.Match[str] | None) -> frozenset[str]:
    """The words of a label that tell what has the value: `maximum` of `The maximum value is`."""
    if lead is None or lead.re is _THERE:
        return frozenset()
    asked = _ASKED_LETTER.search(lead[0])
    words = re.findall(r"[a-zA-Z]+", lead[0] if asked is None else lead[0][: asked.start(1)])
    plain = [word if len(word) == 1 else word.lower() for word in words]
    singular = [
        word[:-1] if word.endswith("s") and word not in ("its", "is", "radius") else word
        for word in plain
    ]
    return frozenset(_SAME_WORD.get(word, word) for word in singular if not _FILLER.fullmatch(word))


def _holds(end: re.Match[str]) -> bool:
    """Whether the value satisfies the condition after it: `x = 2 (x > 0)`."""
    try:
        value = bound_of(parse_answer(end["value"].strip(" ,")))
        relation = parse_answer(end["where"].strip("()"))
    except (NotMathematics, Unsupported):
        return False
    if value is None or not isinstance(relation, Relation) or len(relation.sides) != 2:
        return False
    solved = half_line(relation.sides[0], relation.ops[0], relation.sides[1])
    return solved is not None and not RealSet.intersection([solved[1], point(value)]).is_empty


_ORDER = re.compile(r"permut|\bin (?:[a-z]+ ){0,2}order\b|arrangement")


def says_order(key: str) -> bool:
    return ("permut" in key or "order" in key or "arrangement" in key) and _ORDER.search(
        key
    ) is not None
