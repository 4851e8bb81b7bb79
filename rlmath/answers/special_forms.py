"""Answers with their own comparison, such as times, dates and numerals with a base.

The others are names, "no solution" and geometric objects."""

from __future__ import annotations

import re
from itertools import islice

from rlmath.answers.normalize import word_list
from rlmath.answers.phrases import NUMBER_WORDS

_CLOCK = re.compile(
    r"([0-9]{1,2}):([0-5][0-9])(?::([0-5][0-9]))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE
)
_FULL_HOUR = re.compile(r"([0-9]{1,2})\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_BASED = re.compile(
    r"\(?([0-9A-F]+)\)?(?:_\{?\(?(?:base)?|\(?(?:in)?base)([0-9]{1,2}|[a-z]+)\)?\}?", re.IGNORECASE
)

_BASES = {word: number for word, number in NUMBER_WORDS.items() if 2 <= number <= 16}

_NUMBER_KINDS = "real integer integral rational positive negative natural complex nonzero"
_HOW_MANY = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?"
    r"(?:there (?:is|are|exists?)|(?:(?:the |this )?(?:equation|system|problem|inequality)|it) "
    r"(?:has|have)|has|have)?"
    r" ?(?:(?P<none>no)|infinitely many|(?:an )?infinite number(?: of)?|infinite)"
    rf"(?P<kinds>(?: (?:such|valid|possible|other|distinct|different|{_NUMBER_KINDS.replace(' ', '|')}))*)"
    r"(?: (?:solutions?|roots?|values?|answers?|numbers?|pairs?|triples?|functions?|ways|points?|"
    r"primes?|[a-z]"
    r"|(?P<noun>integer|real)s?))?"
    r"(?: (?:exists?|(?:are|is) possible|to the (?:equation|system|inequality)))?"
    r"(?: (?:in|over|among) (?:the )?(?P<among>real|integer|rational|complex)(?:s| numbers))?"
)
"""Texts on the number of solutions: none, of some kind of number perhaps, or infinitely many."""
_NONE = re.compile(
    r"none(?: exist)?|(?:(?:the )?system is )?inconsistent|(?:the )?empty set|\\emptyset|"
    r"\\varnothing|\\\{\\\}"
)
_INFINITE = frozenset(("\\infty", "+\\infty", "infinity"))

_SHORT_TITLES = {"mister": "mr", "doctor": "dr", "professor": "prof"}
_TITLED = re.compile(
    r"(?:(mr|mrs|ms|miss|dr|prof|sir|mister|doctor|professor)\.? )?([a-z][a-z'-]+(?:[. "
    r"]{1,2}[a-z'-]+){0,3})"
)

_YES_NO = re.compile(
    r"(yes|no(?![,.;:] ?(?:it|this|that)(?: is|'s) (?:true|correct|right|so)\b))"
    r"(?:[,.;:] ?(?!.*\b(?:yes|no|not|never|cannot|false|wrong)\b)"
    r"(?:[0-9]{1,9} (?:is|are) )?[a-z ,.']{1,100})?"
)
_REASONED = re.compile(r"(yes|no)[,.;:] .{1,200}", re.IGNORECASE)
"""A reference with its reason, which an answer leaves out: `No, 91 = 7 * 13`."""
_DENIED = re.compile(
    r"^no[,.;:]? (?:it|they|he|she|this|that|we|you) (?:is|are|does|do|can|will|has|have) ?not$"
)
_MONTHS = word_list("jan feb mar apr may jun jul aug sep oct nov dec")
_MONTH = r"(?P<month{0}>jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{{0,7}}\.?"
_DAY = r"(?:the )?(?P<day{0}>[0-9]{{1,2}})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?P<weekday{0}>(?:mon|tues|wednes|thurs|fri|satur|sun)day)"
_DATE = re.compile(
    rf"(?:{_WEEKDAY.format(1)},? ?)?"
    rf"(?:{_MONTH.format(1)} ?{_DAY.format(1)}|{_DAY.format(2)} (?:of )?{_MONTH.format(2)})"
    rf"(?:,? ?(?P<year>[0-9]{{4}}))?(?:,? ?{_WEEKDAY.format(2)})?"
)


def same_special(gold: str, answer: str) -> bool | None:
    """Whether two texts are the same special form; None if neither is one.

    Special forms are a time of day, a date, a name, a numeral or a number of solutions. `3:30 PM`
    equals `15:30` and `3:30`; a numeral with a base only the same digits in the same base."""
    if _POLITE.sub("", gold) == _POLITE.sub("", answer):
        return True
    time = _clock(gold)
    other = _clock(answer)
    if time is not None and other is not None:
        if time[0] == other[0] or time[1] == other[1]:
            return time[0] == other[0]
        without_half = other if time[1] else time
        return without_half[0] < 13 * 3600 and time[0] % 43200 == other[0] % 43200
    folded_gold, folded_answer = (
        text if "\\" in text else text.casefold() for text in (gold, answer)
    )
    if (counts := _same_count(folded_gold, folded_answer)) is not None:
        return counts
    if _titled(folded_gold, folded_answer) or _same_meaning(folded_gold, folded_answer):
        return True
    reasoned = _REASONED.fullmatch(gold)
    yes_or_no = (
        _YES_NO.fullmatch(reasoned[1].casefold() if reasoned else folded_gold),
        _YES_NO.fullmatch(_DENIED.sub("no", folded_answer)),
    )
    if yes_or_no[0] is not None and yes_or_no[1] is not None:
        return yes_or_no[0][1] == yes_or_no[1][1]
    dates = _date(folded_gold), _date(folded_answer)
    if None not in dates:
        return dates[0] == dates[1]
    bases = _numeral(gold), _numeral(answer)
    if bases[0] is not None or bases[1] is not None:
        return bases[0] == bases[1]
    return None


_POLITE = re.compile(
    r"^(?:only|exactly|on an?|on|player) | (?:only|wins|will win|has a winning strategy)$",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"^(?:(?:so|thus|hence|therefore),? )?(?:(?:the|this|that|it|its|f|given) )*(?:(?:limit|"
    r"series|sum|integral"
    r"|sequence|statement|claim|function|value|expression|triangle|quadrilateral|figure|shape|"
    r"curve|graph) )?"
    r"(?:(?:is|are|does|do|must be|will) )?(?:(?:an?|the) )?"
)
_MEANINGS = {
    "no limit": ("not exist", "dne", "have no limit"),
    "undefined": ("undefined", "not defined"),
    "diverges": ("diverges", "diverge", "divergent", "not converge", "not convergent"),
    "converges": ("converges", "converge", "convergent"),
    "absolutely": ("converges absolutely", "absolutely convergent", "converge absolutely"),
    "conditionally": (
        "converges conditionally",
        "conditionally convergent",
        "converge conditionally",
    ),
    "true": ("true", "t", "not false", "correct"),
    "false": ("false", "f", "not true", "incorrect"),
    "concave up": ("concave up", "concave upward", "concave upwards"),
    "concave down": ("concave down", "concave downward", "concave downwards"),
    "quadrant i": ("quadrant i", "quadrant 1", "first quadrant"),
    "quadrant ii": ("quadrant ii", "quadrant 2", "second quadrant"),
    "quadrant iii": ("quadrant iii", "quadrant 3", "third quadrant"),
    "quadrant iv": ("quadrant iv", "quadrant 4", "fourth quadrant"),
    "first player": ("first player", "player 1", "player one"),
    "second player": ("second player", "player 2", "player two"),
    "impossible": ("impossible", "not possible", "cannot be done"),
    "right triangle": ("right triangle", "right-angled triangle"),
    "neither": (
        "neither",
        "neither of them",
        "neither one",
        "neither even nor odd",
        "neither odd nor even",
    ),
}
_MEANING = {text: meaning for meaning, texts in _MEANINGS.items() for text in texts}
_LAST_NOUN = re.compile(r" (?:function|number|integer)$")


def _same_meaning(gold: str, answer: str) -> bool:
    """Whether two statements say the same: `the limit does not exist` and `DNE`."""
    if not (gold[:1].isalpha() and answer[:1].isalpha() and gold.isascii() and answer.isascii()):
        return False
    if len(gold) > 80 or len(answer) > 80 or "\\" in gold + answer:
        return False
    gold_meaning = _meaning(gold)
    answer_meaning = _meaning(answer)
    return gold_meaning == answer_meaning and (
        gold_meaning in _MEANINGS
        or gold_meaning in ("odd", "even")
        or _PLAIN_WORDS.fullmatch(gold_meaning) is not None
    )


_PLAIN_WORDS = re.compile(r"[a-z]{4,}(?: [a-z]{2,})*")


def _meaning(text: str) -> str:
    statement = _SUBJECT.sub("", text.rstrip("."))
    return _MEANING.get(statement) or _LAST_NOUN.sub("", statement)


_LABEL_SETS = (tuple("abcdefgh"), ("i", "ii", "iii", "iv", "v"), tuple("123456"))
_FIRST_LABEL = re.compile(r"(?:part ?)?\(?([ai1])(?:[).:]|(?<=part .) )")
_LABELS = [
    re.compile(
        rf"(?:\(|(?<![a-z0-9(\\])(?:part ?)?)({'|'.join(reversed(labels))})(?:\):?|[:.](?= |[0-9]))"
    )
    for labels in _LABEL_SETS
]
"""Any label of each kind."""
_NEXT_LABELS = {
    label: re.compile(rf"(?:\(|(?<![a-z0-9(\\])(?:part ?)?){label}(?:\):?|[:.](?= |[0-9]))")
    for labels in _LABEL_SETS
    for label in labels[1:]
}


def split_parts(text: str) -> list[str] | None:
    """The parts of `(a) 12; (b) 30` in the order of their labels, None if it has no such labels."""
    low = text.casefold()
    if (parts := _parts_in_any_order(text, low)) is not None:
        return parts
    start = _FIRST_LABEL.match(low)
    labels = next((labels for labels in _LABEL_SETS if start and labels[0] == start[1]), None)
    if start is None or labels is None or not (start.group()[-1] == ")" or low.startswith("part")):
        return None
    cuts = [(0, start.end())]
    position = start.end()
    for label in labels[1:]:
        label_match = _NEXT_LABELS[label].search(low, position)
        if label_match is None:
            break
        cuts.append(label_match.span())
        position = label_match.end()
    parts = _between(text, cuts)
    return parts if len(parts) > 1 and all(parts) else None


def _parts_in_any_order(text: str, low: str) -> list[str] | None:
    """The parts of `(b) 30; (a) 12`, which begins with a later label, in their order.

    None of other texts."""
    for labels, pattern in zip(_LABEL_SETS, _LABELS, strict=True):
        start = pattern.match(low)
        if start is None or start[1] == labels[0]:
            continue
        matches = list(islice(pattern.finditer(low), len(labels) + 1))
        if sorted((match[1] for match in matches), key=labels.index) == list(
            labels[: len(matches)]
        ):
            parts = _between(text, [match.span() for match in matches])
            in_order = sorted(
                zip(matches, parts, strict=True), key=lambda pair: labels.index(pair[0][1])
            )
            return [part for _, part in in_order] if all(parts) else None
    return None


def _between(text: str, cuts: list[tuple[int, int]]) -> list[str]:
    """The texts behind each of the cuts, up to the next one."""
    ends = [begin for begin, _ in cuts[1:]] + [len(text)]
    return [
        _END_OF_PART.sub("", text[after:end]).strip()
        for (_, after), end in zip(cuts, ends, strict=True)
    ]


_ORDER = re.compile(r" ?([<>](?!=)|\\(?:[lg]eq?(?:slant)?|[lg]t)(?![a-zA-Z])) ?")
_ASCENDING = {"<": "<", "\\lt": "<", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<="}
_DESCENDING = {">": "<", "\\gt": "<", "\\ge": "<=", "\\geq": "<=", "\\geqslant": "<="}


def split_chain(text: str) -> tuple[list[str], list[str]] | None:
    """(sides, signs) of a chain of inequalities from its least side on; None of other texts.

    Examples are `a < x <= b` and `b >= x > a`."""
    if not ("<" in text or ">" in text or "\\l" in text or "\\g" in text):
        return None
    pieces = _ORDER.split(text)
    sides = [side.strip() for side in pieces[::2]]
    signs = pieces[1::2]
    if (
        not 1 <= len(signs) <= _MAX_PARTS
        or not all(sides)
        or any(re.search("[=,;|{]|\\\\in", side) for side in sides)
    ):
        return None
    for reading, step in ((_ASCENDING, 1), (_DESCENDING, -1)):
        if all(sign in reading for sign in signs):
            return sides[::step], [reading[sign] for sign in signs][::step]
    return None


_END_OF_PART = re.compile(r"[\s,;.]*(?:\band\s*)?$")


def bare_parts(text: str, count: int) -> list[str] | None:
    """The `count` parts of a list without labels, else None.

    `12, 30` and `(12, 30)` are such lists, but no interval, set or `12 or 30`."""
    if text.startswith(("[", "{", "\\{")):
        return None
    for separators in (";", ",;"):
        parts = split_list(text, separators, words=("and",))
        if len(parts) == count > 1:
            return parts
    return None


_LIST_TOKEN = re.compile(r"\\begin|\\end|\\[^a-zA-Z]|[()\[\]{},;]|\b(?:and|or)\b")
_MAX_PARTS = 40
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}


def split_list(
    text: str, separators: str = ",;", words: tuple[str, ...] = ("and", "or")
) -> list[str]:
    """The items of a list, split at separators and words outside all brackets.

    Brackets around the whole list are left out."""
    parts = []
    depth = 0
    start = 0
    cuts = 0
    closing = _CLOSING.get(text[: 1 + text.startswith("\\{")])
    enclosed = closing is not None and text.endswith(closing)
    for match in _LIST_TOKEN.finditer(text):
        token = match.group()
        if token in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif token in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
            if enclosed and depth == 0 and match.end() < len(text):
                enclosed = False
        elif depth == 0 and (token in separators or token in words) and cuts < _MAX_PARTS:
            parts.append(text[start : match.start()].strip())
            start = match.end()
            cuts = cuts + 1
    parts.append(text[start:].strip())
    parts = [part for part in parts if part]
    if len(parts) == 1 and enclosed and depth == 0:
        size = 1 + text.startswith("\\{")
        inside = text[size:-size].strip()
        return split_list(inside, separators, words) if inside and inside[0] not in "([{" else parts
    return parts


def _same_count(gold: str, answer: str) -> bool | None:
    """Whether two texts say the same about the number of solutions; None if one says nothing."""
    counts = _how_many(gold), _how_many(answer)
    if "infinite" in counts and not _INFINITE.isdisjoint((gold, answer)):
        return True
    if counts[0] is None or counts[1] is None:
        return None
    # "no solutions" says more than the reference "no real solutions", not less.
    return counts[0] == counts[1] or (counts[1] == "none" and counts[0] != "infinite")


def _how_many(text: str) -> str | None:
    """The number of solutions in words: "infinite" or "none"; None for other texts.

    "none" may be followed by the kind of numbers there is none of."""
    if _NONE.fullmatch(text):
        return "none"
    match = None if text == "no" else _HOW_MANY.fullmatch(text)
    if match is None:
        return None
    if not match["none"]:
        return "infinite"
    if "such" in match["kinds"]:
        return "none"
    kinds = {*match["kinds"].split(), match["noun"], match["among"]}
    return " ".join(["none", *sorted(kinds & set(_NUMBER_KINDS.split()))])


def _titled(gold: str, answer: str) -> bool:
    """Whether two texts are the same name, with the same title or one without."""
    gold_match = _TITLED.fullmatch(gold)
    answer_match = _TITLED.fullmatch(answer)
    if gold_match is None or answer_match is None or gold_match[2] != answer_match[2]:
        return False
    titles = {_SHORT_TITLES.get(match[1], match[1]) for match in (gold_match, answer_match)}
    return len(titles - {None}) == 1


def _date(text: str) -> tuple[str | None, ...] | None:
    """(month, day, year, day of the week) of a date, else None."""
    match = _DATE.fullmatch(text) if text[:1].isalnum() and text[-1:].isalnum() else None
    if match is None:
        return None
    parts = {name.rstrip("12"): value for name, value in match.groupdict().items() if value}
    return (
        str(_MONTHS.index(parts["month"][:3])),
        str(int(parts["day"])),
        parts.get("year"),
        parts.get("weekday"),
    )


_SPOKEN_NOON = re.compile(r"^(?:12(?::00)? ?)?noon$", re.IGNORECASE)
_SPOKEN_MIDNIGHT = re.compile(r"^(?:12(?::00)? ?)?midnight$", re.IGNORECASE)


def _clock(text: str) -> tuple[int, bool] | None:
    """(seconds after midnight, whether it has AM or PM) of a time of day, else None."""
    if "noon" in text or "midnight" in text or "o'" in text or "in the" in text:
        text = _SPOKEN_NOON.sub("12:00 pm", _SPOKEN_MIDNIGHT.sub("12:00 am", text))
        text = re.sub(r"^([0-9]{1,2}) ?(?=o')", r"\1:00", text)
        text = re.sub(r" ?o'? ?clock", "", text)
        text = re.sub(
            r" ?in the (?:afternoon|evening)$", " pm", re.sub(r" ?in the morning$", " am", text)
        )
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds, half = match.groups()
    elif match := _FULL_HOUR.fullmatch(text):
        (hours, half), minutes, seconds = match.groups(), "0", None
    else:
        return None
    hour = int(hours)
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + (12 if half.lower() == "p" else 0)
    return hour * 3600 + int(minutes) * 60 + int(seconds or 0), bool(half)


def _numeral(text: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral such as `52_8` or `1010_{two}`, else None."""
    match = _BASED.fullmatch(text.replace("\\", "").replace(" ", ""))
    if match is None or not any(character.isdigit() for character in match.group(1)):
        return None
    digits = match.group(1).upper()
    base = match.group(2).lower()
    number = int(base) if base.isdigit() else _BASES.get(base)
    if number is None or (not digits[0].isdigit() and number <= 10):
        return None
    if any(int(digit, 36) >= number for digit in digits):
        return None
    return digits.lstrip("0") or "0", number


# ---------------------------------------------------------------- geometric objects
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


def same_objects(gold: str, answer: str) -> bool | None:
    """Whether two texts name the same geometric object, in words or signs; None if one does not."""
    if len(gold) > 100 or len(answer) > 100:
        return None
    gold_object = _object(gold)
    answer_object = _object(answer)
    if (
        gold_object is None
        or answer_object is None
        or (gold_object[0] is None and answer_object[0] is None and gold != answer)
    ):
        return None
    if gold_object[0] != answer_object[0]:
        return (
            {gold_object[0], answer_object[0]} in ({"segment", None}, {"triangle", None})
            and gold_object[1] == answer_object[1]
        ) or None
    if gold_object[1] == answer_object[1]:
        return True
    turned = (
        gold_object[0] in ("segment", "line", "angle") and gold_object[1] == answer_object[1][::-1]
    )
    return turned if gold_object[0] is not None else None


def _object(text: str) -> tuple[str | None, list[str]] | None:
    """(kind, points) of `\\triangle ABC` or `segment AB`, else None."""
    match = _OBJECT.fullmatch(text)
    if match is None or (match["kind"] is not None and match["kind"] not in _KINDS):
        return None
    points = re.findall(_POINT, match["points"].replace("{", "").replace("}", ""))
    return _KINDS.get(match["kind"] or ""), points
