"""Names of geometric objects, groups and sets of numbers, in words or signs: `\\triangle ABC`, `\\mathbb{Z}_6`."""

from __future__ import annotations

import re
from collections import Counter

# ---------------------------------------------------------------- geometry
_KINDS = {
    kind: name
    for name, kinds in {
        "triangle": "\\triangle \\Delta \\bigtriangleup triangle",
        "angle": "\\angle \\measuredangle angle",
        "segment": "\\overline \\bar segment side chord",
        "vector": "\\overrightarrow \\vec vector ray",
        "line": "\\overleftrightarrow line",
        "circle": "\\odot \\bigodot circle",
        "arc": "\\widehat \\overparen arc",
        "point": "point",
        "quadrilateral": "quadrilateral \\square",
    }.items()
    for kind in kinds.split()
}
_POINT = r"[A-Z](?:_\{?[0-9]\}?|[0-9]|')?"
_OBJECT = re.compile(
    r"(?:the )?(?:line (?=segment))?"
    r"(?:(?P<kind>\\?[A-Za-z]{3,18})(?: |(?=\{)|(?<=[a-z])(?=[A-Z]))? ?)?\{? ?(?P<points>(?:"
    + _POINT
    + r" ?){1,5})\}?"
)
_BETWEEN = re.compile(
    r" ?(?:(\\parallel|\\\||is parallel to|\|\|)|(\\perp|is perpendicular to)|(\\cong|is congruent to)"
    r"|(\\sim|is similar to)) ?"
)


def same_objects(gold: str, answer: str) -> bool | None:
    """Whether two texts name the same geometric object, group, or relation of two objects; None if one does not."""
    if len(gold) > 100 or len(answer) > 100:
        return None
    if (groups := (_group(gold), _group(answer))) and None not in groups:
        return groups[0] == groups[1]
    one, two = _BETWEEN.split(gold), _BETWEEN.split(answer)
    if len(one) == len(two) == 6:
        signs = [[bool(sign) for sign in split[1:5]] for split in (one, two)]
        if signs[0] != signs[1]:
            return None
        straight, crossed = (
            [a == b or _same_object(a, b) for a, b in ((one[0], two[first]), (one[5], two[5 - first]))]
            for first in (0, 5)
        )
        return all(straight) or all(crossed) or (None if None in straight else False)
    return _same_object(gold, answer)


def _same_object(gold: str, answer: str) -> bool | None:
    one, two = _object(gold), _object(answer)
    if one is None or two is None or (one[0] is None and two[0] is None and gold != answer):
        return None
    if one[0] != two[0]:
        return ({one[0], two[0]} in ({"segment", None}, {"triangle", None}) and one[1] == two[1]) or None
    if one[1] == two[1]:
        return True
    turned = one[0] in ("segment", "line", "angle") and one[1] == two[1][::-1]
    return turned if one[0] is not None else None


def _object(text: str) -> tuple[str | None, list[str]] | None:
    """(kind, points) of `\\triangle ABC` or `segment AB`, else None."""
    match = _OBJECT.fullmatch(text)
    if match is None or (match["kind"] is not None and match["kind"] not in _KINDS):
        return None
    points = re.findall(_POINT, match["points"].replace("{", "").replace("}", ""))
    return _KINDS.get(match["kind"] or ""), points


# ---------------------------------------------------------------- cyclic groups
_Z = r"(?:\\mathbb ?\{?Z\}?|\\Z|Z)"
_ORDER = r"\{?([1-9][0-9]{0,4})\}?"
_CYCLIC = re.compile(
    rf"(?:\(?(?:{_Z}_{_ORDER}|{_Z}/\(?{_ORDER} ?{_Z}?\)?|C_{_ORDER}|(?:the )?cyclic group of order {_ORDER})\)?)"
    r"(?:\^\{?([1-9])\}?)?"
)


def _group(text: str) -> Counter[int] | None:
    """How often each prime power occurs in a product of cyclic groups, which shows groups that are isomorphic; None for
    other texts."""
    if "_" not in text and "/" not in text and "cyclic" not in text:
        return None
    powers: Counter[int] = Counter()
    for part in re.split(r" ?(?:\\times|\\oplus) ?", text):
        match = _CYCLIC.fullmatch(part)
        if match is None:
            return None
        *orders, times = match.groups()
        order = int(next(one for one in orders if one is not None))
        divisor = 2
        while order > 1:
            power = 1
            while order % divisor == 0:
                order, power = order // divisor, power * divisor
            powers[power] += int(times or 1) * (power > 1)
            divisor += 1
    return +powers


# ---------------------------------------------------------------- sets of numbers
_SET = re.compile(
    r"(?P<all>(?:all |any |the |set of |every )*)(?:(?P<sign>positive|negative|non-?zero|non-?negative) )?"
    r"(?P<set>real|integer|natural|rational|complex)(?P<many>s(?: numbers?)?| numbers)?(?: number)?(?: [a-z])?"
)
_SETS = {"real": "R", "integer": "Z", "natural": "N", "rational": "Q", "complex": "C"}
_SIGNED = {
    ("real", "positive"): "(0,\\infty)",
    ("real", "negative"): "(-\\infty,0)",
    ("real", "nonnegative"): "[0,\\infty)",
    ("real", "nonzero"): "\\mathbb{R}\\setminus\\{0\\}",
    ("integer", "positive"): "\\mathbb{Z}^+",
    ("integer", "nonnegative"): "\\mathbb{Z}_{\\ge 0}",
}


def set_notation(text: str) -> str | None:
    """The notation of a set of numbers in words, such as `all nonzero real numbers`. None for other texts, such as
    `real` or `a real number`, which are a kind."""
    match = _SET.fullmatch(text) if len(text) < 50 and text[-1:].isalpha() else None
    if match is None or not (match["many"] or match["all"].replace("the ", "")):
        return None
    if match["sign"] is None:
        return f"\\mathbb{{{_SETS[match['set']]}}}"
    return _SIGNED.get((match["set"], match["sign"].replace("-", "")))
