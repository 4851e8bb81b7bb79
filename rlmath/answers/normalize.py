"""Normalises mathematical text: LaTeX variants and Unicode become plain LaTeX without layout.

Everything is linear in the text, which has at most a few thousand characters (see
`verifier.usable_solutions`).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass


class NotMathematics(Exception):
    """The text is prose, malformed or beyond our limits: it equals only itself."""


class Unsupported(Exception):
    """Mathematics that the grammar does not support, such as an integral; math-verify may."""


class Unevaluated(Unsupported):
    """It contains an integral, a sum, a product or a limit that is not evaluated."""


def word_list(text: str) -> list[str]:
    """The words of a text: shorter than a list of quoted ones."""
    return text.split()


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SINGULAR = dict(
    pair.split(":")
    for pair in word_list(
        "children:child men:man women:woman people:person feet:foot teeth:tooth geese:goose "
        "mice:mouse lives:life knives:knife wives:wife wolves:wolf shelves:shelf leaves:leaf "
        "loaves:loaf calves:calf halves:half scarves:scarf thieves:thief elves:elf "
        "vertices:vertex indices:index matrices:matrix axes:axis bases:basis radii:radius "
        "dice:die buses:bus gases:gas pennies:penny pence:penny potatoes:potato tomatoes:tomato "
        "heroes:hero movies:movie cookies:cookie pies:pie ties:tie zombies:zombie "
        "brownies:brownie series:series species:species"
    )
)


def singular(word: str) -> str:
    """A noun in lower case and, where it is a plural, in the singular.

    >>> [singular(word) for word in ("Apples", "boxes", "berries", "children", "glass", "horses")]
    ['apple', 'box', 'berry', 'child', 'glass', 'horse']
    """
    word = word.lower()
    if word in _SINGULAR:
        return _SINGULAR[word]
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("sses", "shes", "ches", "xes", "zzes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


@dataclass(frozen=True)
class KnownWords:
    """The words of an answer that are known to change nothing of the value beside them.

    They are in the singular."""

    words: frozenset[str] = frozenset()
    """Those that stand in the reference or the question."""
    counted: frozenset[str] = frozenset()
    """Those that the question counts, also where they would turn or multiply a value: pairs of `How
    many pairs`."""

    def __contains__(self, word: str) -> bool:
        return singular(word) in self.words


MAX_DIGITS = 400
"""Longest literal number (digits)."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
_GREEK = {
    name: letter
    for letter, name in zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        word_list(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho "
            "sigma tau upsilon "
            "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
        ),
        strict=True,
    )
}
GREEK = frozenset(_GREEK)
_UNICODE = {letter: f"\\{name} " for name, letter in _GREEK.items()} | {
    sign: f"{plain} " if "\\" in plain and plain[-1].isalpha() else plain
    for sign, plain in zip(
        "−–—×·⋅∙÷∕⁄≤⩽≥⩾≠≈±∓∞∪∩∅∈∖°ºℝℤℕℚℂ…′’″∶⟨⟩⌊⌋⌈⌉ϕ𝑖€£∨∧₹¥¢µ",
        word_list(
            "- - - \\times \\cdot \\cdot \\cdot / / / \\le \\le \\ge \\ge \\ne \\approx \\pm \\mp "
            "\\infty \\cup \\cap "
            "\\emptyset \\in \\setminus ^\\circ ^\\circ \\mathbb{R} \\mathbb{Z} \\mathbb{N} "
            "\\mathbb{Q} \\mathbb{C} "
            "\\ldots ' ' '' : \\langle \\rangle \\lfloor \\rfloor \\lceil \\rceil \\phi i \\euro "
            "\\pound \\lor \\land "
            "\\rupee \\yen \\cent \\mu"
        ),
        strict=True,
    )
}
_SPACING = re.compile(
    r"\\(?:left|right)\s?\."  # no bracket at all
    r"|\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|left|right|bigl|bigr|biggl|biggr|"
    r"Bigl|Bigr|Big|big"
    r"|Bigg|bigg|middle|mathstrut|strut|rm|bf|it|hfill|noindent|boldmath)(?![a-zA-Z])"
)
_BETWEEN_EQUATIONS = re.compile(
    r"(?<=[0-9a-z)])\s{0,3}\\q?quad\s{0,3}(?=[a-zA-Z](?:_[0-9a-z]|_\{[0-9a-z]{1,3}\})?\s{0,3}=)"
)
_BRACED_COLON = re.compile(r"(?<![a-zA-Z])\{:\}")
_COLOUR = re.compile(
    r"\\(?:color\s?\{[a-zA-Z]{1,20}\}|textcolor\s?\{[a-zA-Z]{1,20}\}|(?:underline|mathbin|mathrel|"
    r"mathord|mathop)"
    r"(?![a-zA-Z])|checkmark(?![a-zA-Z])|(?:tiny|small|normalsize|large|Large|LARGE|huge|"
    r"Huge)(?![a-zA-Z]))"
)
_ROW_END = re.compile(r"\\\\(?:\[[0-9a-z. ]{1,8}\])?")
"""The end of a row of a matrix, with an optional distance."""
_SPACES = re.compile(
    r"\\\\|\\(?:(?:quad|qquad|thinspace|enspace|space|hskip)(?![a-zA-Z])"
    r"|hspace\s?\{[^{}]{0,20}\}|[,;:>\s])|~"
)
"""Spacing; also the end of a matrix row, so that its second backslash does not start a space."""
_SIGN_OF = {"lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "colon": ":", "vert": "|"}
_OTHER_SIGNS = re.compile(r"\\(lbrack|rbrack|lparen|rparen|colon|vert)(?![a-zA-Z])")
_COMMA_BEFORE_NOTHING = re.compile(r",\s*\\!\s*")


def plain_unicode(text: str) -> str:
    """Unicode as LaTeX: `√12` as `\\sqrt{12}`.

    Raises NotMathematics for control characters and surrogates."""
    latex = (
        text if text.isascii() else _roots("".join(_one_character(char) for char in _scripts(text)))
    )
    if any((char < " " and char not in "\t\n\r\f\v") or char == "\x7f" for char in latex):
        raise NotMathematics("control characters")
    return latex


def _one_character(char: str) -> str:
    """The LaTeX of a character; NotMathematics for control characters."""
    if char in _UNICODE:
        return _UNICODE[char]
    if char.isascii() or char in "√∛":
        return char
    category = unicodedata.category(char)
    if category == "Cf":
        return ""
    if category[0] == "C":
        raise NotMathematics("control characters")
    plain = unicodedata.normalize("NFKC", char)
    if "⁄" in plain:  # a vulgar fraction
        above, below = plain.split("⁄")
        return f"\\frac{{{above}}}{{{below or '1'}}}"
    return _UNICODE.get(plain, plain)


def _scripts(text: str) -> str:
    text = re.sub(
        "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda run: f"^{{{run.group().translate(_SUPERSCRIPTS)}}}", text
    )
    return re.sub(
        "[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", lambda run: f"_{{{run.group().translate(_SUBSCRIPTS)}}}", text
    )


def _roots(text: str) -> str:
    for sign, command in (("√", "\\sqrt"), ("∛", "\\sqrt[3]")):
        text = re.sub(rf"{sign}\s*([0-9]+(?:\.[0-9]+)?)", rf"{sign}{{\1}}", text).replace(
            sign, f"{command} "
        )
    return text


_POWER_OF_TEN = re.compile(r"(?<=[0-9])\s?x\s?(?=10\s?(?:\^|\*\*))")
_ELECTRON_VOLT = re.compile(r"electron[ -]volt")
_DOTTED_DIGIT = re.compile(r"(?<=[0-9.])\\(dot|bar|overline)\s?([0-9])(?![0-9])")
_CHOSEN = r"\{?([0-9]{1,4}|n)\}?"
_FROM = r"\{?([0-9]{1,4}|[kr])\}?"
_COMBINATIONS = re.compile(
    rf"(?:\{{\}}\s?)?[_^]\s?{_CHOSEN}\s?(?:\\(?:mathrm|text)\s?\{{\s?C\s?\}}|C)\s?_\s?{_FROM}"
    rf"|(?<![A-Za-z\\])C\s?\(\s?{_CHOSEN}\s?,\s?{_FROM}\s?\)|(?<![A-Za-z\\])C_{_CHOSEN}\s?\^\s?{_FROM}"
    r"|^([0-9]{1,4})C([0-9]{1,4})$"
)
_BOUND = re.compile(
    r"(?:\\text\s?\{ ?)?(?:([a-z])\s?(?:\\text\s?\{)?(?: ?(?:is|must be)) )?(?:\\text\s?\{ ?)?"
    r"(at least|at most|no less than|no more than|not less than|not more than|greater than or "
    r"equal to"
    r"|less than or equal to|greater than|more than|less than)\s?\}?\s?"
    r"([-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?|-?\\frac\s?\{[0-9]+\}\s?\{[0-9]+\})\s?\}?"
)
_BOUND_SIGNS = {"at least": ">=", "at most": "<=", "no less than": ">=", "no more than": "<="}
_BOUND_SIGNS |= {"not less than": ">=", "not more than": "<=", "greater than or equal to": ">="}
_BOUND_SIGNS |= {
    "less than or equal to": "<=",
    "greater than": ">",
    "more than": ">",
    "less than": "<",
}
_POINT_NAME = re.compile(
    r"(?:^|(?<=[,;] )|(?<=[,;])|(?<=and ))([A-Z])\s?\((?=[-+0-9\\.][^()=]*,[^()=]*\)\s?(?:$|[,;.]|"
    r"and\b|or\b))"
)
_WITHOUT_ZERO = re.compile(r"\\mathbb ?\{?([RC])\}? ?\^ ?(?:\*|\{\*\}|\{?\\times\}?|\\ast)")
_POINT_WORD = re.compile(r"^(?:the )?points? (?=\()")
_MONEY_WORD = re.compile(
    r"^(?:\\(?:text|mathrm)\s?\{\s?)?(US\s?\\dollar|USD|EUR|GBP|INR|Rs\.?)\s*\}?\s*(?=[0-9\\])"
)
_CURRENCY = {"USD": "\\dollar ", "US\\dollar": "\\dollar ", "EUR": "\\euro ", "GBP": "\\pound "}


def other_notation(text: str) -> str:
    """`1.5x10^3`, `0.1\\dot6`, `C(10,3)`, `A(1,2)` and `USD 5` in the notation of the grammar."""
    if "electron" in text:
        text = _ELECTRON_VOLT.sub("electronvolt", text)
    if "x" in text and "10" in text:
        text = _POWER_OF_TEN.sub(r" \\times ", text)
    if "\\dot" in text or "\\bar" in text or "\\overline" in text:
        text = _DOTTED_DIGIT.sub(r"\\\1{\2}", text)
    if "C" in text:
        text = _COMBINATIONS.sub(_as_binomial, text)
    if ("than" in text or "at " in text) and (match := _BOUND.fullmatch(text)):
        sign = _BOUND_SIGNS[match[2]]
        letter = match[1]
        bound = match[3]
        if letter:
            return f"{letter} {sign} {bound}"
        closed = "=" in sign
        if sign[0] == ">":
            return f"{'[' if closed else '('}{bound}, \\infty)"
        return f"(-\\infty, {bound}{']' if closed else ')'}"
    if "^" in text and "\\mathbb" in text:
        text = _WITHOUT_ZERO.sub(r"\\mathbb{\1}\\setminus\\{0\\}", text)
    if "(" in text and "," in text:
        text = _POINT_NAME.sub(r"\1=(", _POINT_WORD.sub("", text))
    money = _MONEY_WORD.match(text) if text[:1] in _MONEY_BEGINS else None
    return _CURRENCY.get(money[1], "\\rupee ") + text[money.end() :] if money else text


_MONEY_BEGINS = frozenset("\\UEGIR")


def _as_binomial(match: re.Match[str]) -> str:
    n, k = (group for group in match.groups() if group is not None)
    are_numbers = n.isdigit() and k.isdigit()
    if are_numbers and not (int(n) >= int(k) and int(n) > 2):
        return match.group()
    return f"\\binom{{{n}}}{{{k}}}"


_PRICE = re.compile(r"\$\s?(?=[0-9]|\.[0-9])")
_AFTER_AMOUNT = re.compile(r"(?<=[0-9])\$$")


def _with_currency(text: str) -> str:
    """The text with `\\dollar` for each `$` before an amount that no other one closes.

    Examples are `$80` and `$5 and $6`."""
    pieces: list[str] = []
    start = 0
    while (dollar := text.find("$", start)) >= 0:
        next_dollar = text.find("$", dollar + 1)
        opens = _PRICE.match(text, dollar) is not None
        closed = next_dollar >= 0 and not (
            opens
            and _PRICE.match(text, next_dollar)
            and re.search("[a-z, ]$", text[dollar:next_dollar])
        )
        if closed:
            pieces.append(text[start : next_dollar + 1])
            start = next_dollar + 1
            continue
        is_price = opens or (dollar == len(text) - 1 and _AFTER_AMOUNT.search(text) is not None)
        pieces.append(text[start:dollar] + (" \\dollar " if is_price else "$"))
        start = dollar + 1
    return "".join(pieces) + text[start:]


def without_layout(text: str) -> str:
    """Removes dollar signs, spacing and size commands; escaped dollars are kept as currency."""
    text = _COMMA_BEFORE_NOTHING.sub(",", text)
    text = text.replace("\\!", "").replace("\\$", "\\dollar ").replace("+/-", "\\pm ")
    if "$" in text:
        text = _with_currency(text)
    text = _OTHER_SIGNS.sub(lambda match: _SIGN_OF[match.group(1)], text)
    text = _ROW_END.sub(r"\\\\ ", text)
    for mark in ("$", "\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, " ")
    if "quad" in text:
        text = _BETWEEN_EQUATIONS.sub(", ", text)
    text = _COLOUR.sub(" ", text).lstrip("*")
    text = text if text.endswith("^*") else text.rstrip("*")
    text = _SPACING.sub("", text)
    text = _SPACES.sub(lambda match: match.group() if match.group() == "\\\\" else " ", text)
    return _BRACED_COLON.sub(":", text).strip().rstrip("\\").strip()
