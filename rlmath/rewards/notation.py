"""One notation for mathematics: LaTeX of many habits, Unicode and plain text become tokens.

Everything here is linear in the text, which is at most a few thousand characters long (see `verify`).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction


class NotMathematics(Exception):
    """The text is prose, broken or beyond our limits: it equals nothing but itself."""


class Unsupported(Exception):
    """Mathematics that the grammar does not read, such as an integral; math-verify may."""


class Unevaluated(Unsupported):
    """It leaves an integral, a sum, a product or a limit to be worked out."""


def word_list(text: str) -> list[str]:
    """The words of a text: shorter to read than a list of quoted ones."""
    return text.split()


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_DIGITS = 400
"""Longest literal number (digits)."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
_GREEK = {
    name: letter
    for letter, name in zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        word_list(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon "
            "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
        ),
        strict=True,
    )
}
GREEK = frozenset(_GREEK)
_UNICODE = {letter: f"\\{name} " for name, letter in _GREEK.items()} | {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "∙": "\\cdot ",
    "÷": "/",
    "∕": "/",
    "≤": "\\le ",
    "⩽": "\\le ",
    "≥": "\\ge ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∅": "\\emptyset ",
    "∈": "\\in ",
    "∖": "\\setminus ",
    "°": "^\\circ ",
    "º": "^\\circ ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "ℂ": "\\mathbb{C}",
    "…": "\\ldots ",
    "′": "'",
    "’": "'",
    "″": "''",
    "∶": ":",
    "⟨": "\\langle ",
    "⟩": "\\rangle ",
    "⌊": "\\lfloor ",
    "⌋": "\\rfloor ",
    "⌈": "\\lceil ",
    "⌉": "\\rceil ",
    "⁄": "/",
    "ϕ": "\\phi ",
    "𝑖": "i",
    "€": "\\euro ",
    "£": "\\pound ",
    "∨": "\\lor ",
    "∧": "\\land ",
}

_SPACING = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|left|right|bigl|bigr|biggl|biggr|Bigl|Bigr|Big|big"
    r"|Bigg|bigg|middle|mathstrut|strut|rm|bf|it|hfill|noindent|boldmath)(?![a-zA-Z])"
)
_BRACED_COLON = re.compile(r"(?<![a-zA-Z])\{:\}")
_COLOUR = re.compile(
    r"\\(?:color\s?\{[a-zA-Z]{1,20}\}|textcolor\s?\{[a-zA-Z]{1,20}\}|(?:underline|mathbin|mathrel|mathord|mathop)"
    r"(?![a-zA-Z])|checkmark(?![a-zA-Z])|(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z]))"
)
_ROW_END = re.compile(r"\\\\(?:\[[0-9a-z. ]{1,8}\])?")
"""The end of a row of a matrix, maybe with a distance."""
_SPACES = re.compile(
    r"\\\\|\\(?:(?:quad|qquad|thinspace|enspace|space|hskip)(?![a-zA-Z])"
    r"|hspace\s?\{[^{}]{0,20}\}|[,;:>\s])|~"
)
"""Spacing; also the end of a matrix row, so that its second backslash is not read as the start of a space."""
_SIGN_OF = {"lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "colon": ":", "vert": "|"}
_OTHER_SIGNS = re.compile(r"\\(lbrack|rbrack|lparen|rparen|colon|vert)(?![a-zA-Z])")
_COMMA_BEFORE_NOTHING = re.compile(r",\s*\\!\s*")


def plain_unicode(text: str) -> str:
    """LaTeX instead of mathematical Unicode: `√12` becomes `\\sqrt{12}`, `3½` becomes `3\\frac{1}{2}`.

    Raises NotMathematics for control characters and halves of surrogate pairs.
    """
    if text.isascii():
        out = text
    else:
        out = _roots("".join(_one_character(char) for char in _scripts(text)))
    if any((char < " " and char not in "\t\n\r\f\v") or char == "\x7f" for char in out):
        raise NotMathematics("control characters")
    return out


def _one_character(char: str) -> str:
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
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda run: f"^{{{run.group().translate(_SUPERSCRIPTS)}}}", text)
    return re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", lambda run: f"_{{{run.group().translate(_SUBSCRIPTS)}}}", text)


def _roots(text: str) -> str:
    for sign, command in (("√", "\\sqrt"), ("∛", "\\sqrt[3]")):
        text = re.sub(rf"{sign}\s*([0-9]+(?:\.[0-9]+)?)", rf"{sign}{{\1}}", text).replace(sign, f"{command} ")
    return text


def without_layout(text: str) -> str:
    """Without dollar signs, spacing and size commands; escaped dollars stay, as currency."""
    text = _COMMA_BEFORE_NOTHING.sub(",", text)
    text = text.replace("\\!", "").replace("\\$", "\\dollar ")
    text = _OTHER_SIGNS.sub(lambda match: _SIGN_OF[match.group(1)], text)
    text = _ROW_END.sub(r"\\\\ ", text)
    for mark in ("$", "\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, " ")
    text = _COLOUR.sub(" ", text).strip("*")
    text = _SPACING.sub("", text)
    text = _SPACES.sub(lambda match: match.group() if match.group() == "\\\\" else " ", text)
    return _BRACED_COLON.sub(":", text).strip().rstrip("\\").strip()


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Token:
    """A piece of notation.

    >>> [token.text for token in tokenize("\\\\frac{1}{2}x")]
    ['\\\\frac', '{', '1', '}', '{', '2', '}', 'x']
    """

    kind: str
    """"number", "letter", "word", "command" or "sign"."""
    text: str
    space: bool = False
    """Whether white space came before."""
    prose: bool = False
    """Whether it stood in \\text{} or the like."""
    value: Fraction | None = None
    """Of a number: its exact value."""
    digits: int | None = None
    """Of a number with a decimal point: its significant digits."""
    open_ended: bool = False
    """Of a number: more digits follow, unsaid ("3.141...")."""


@dataclass(frozen=True)
class Reading:
    """How doubtful digits are read."""

    commas_group: bool = True
    """`1,234` is one number, not a list of two."""
    e_is_exponent: bool = True
    """`3e-2` is 0.03, not 3e - 2."""


_GROUPED = re.compile(
    r"(?:[0-9]{1,3}(?:\{,\}[0-9]{3})+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)(?![0-9])"
)
_PERIODIC = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|overset\{\.\}|dot)\s?\{([0-9]+)\}(?:([0-9]*)\\dot\s?\{([0-9])\})?|\(([0-9]+)\))"
)
_DECIMAL_COMMA = re.compile(r"([0-9]+)\{,\}([0-9]+)")
_DECIMAL = re.compile(r"[0-9]+\.(?![0-9.])|[0-9]*\.[0-9]+|[0-9]+")
_EXPONENT = re.compile(r"[eE]([+-]?)([0-9]{1,6})(?![0-9])")
_DOTS = re.compile(r"\s?(?:\.\.\.|\\l?dots(?![a-zA-Z])|\\cdots(?![a-zA-Z]))")
_ALIASES = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
}
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textup|textnormal|textsf|texttt|mbox|hbox|mathrm|mathsf|operatorname|emph)\*?\s?\{"
)
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_WORD = re.compile(r"[a-zA-Z]+")
_DIGITS = frozenset("0123456789")
_SIGNS = frozenset("+-*/^_(){}[]|,;:=<>!'%&.?#")


AS_WRITTEN = Reading()


def tokenize(text: str, reading: Reading = AS_WRITTEN) -> list[Token]:
    """The tokens of a text that `plain_unicode` and `without_layout` have seen.

    Raises NotMathematics for what is no notation at all.
    """
    tokens: list[Token] = []
    position, space, prose_until = 0, False, -1
    while position < len(text):
        char = text[position]
        prose = position < prose_until
        if char.isspace():
            space, position = True, position + 1
            continue
        if position == prose_until - 1 and char == "}":
            space, position = True, position + 1
            continue
        token, position_after = None, position
        if char in _DIGITS or (char == "." and text[position + 1 : position + 2] in _DIGITS):
            token, position_after = _number(text, position, reading)
        elif char == "\\":
            if not prose and (opening := _TEXT_COMMAND.match(text, position)):
                prose_until = _closing_brace(text, opening.end()) + 1
                space, position = True, opening.end()
                continue
            token, position_after = _command(text, position)
        elif char.isascii() and char.isalpha():
            run = _WORD.match(text, position)
            assert run is not None
            token, position_after = Token("word", run.group()), run.end()
        elif char in _SIGNS:
            token, position_after = Token("sign", char), position + 1
        if token is None:
            raise NotMathematics(f"character {char!r}")
        tokens.append(replace(token, space=space, prose=prose))
        space, position = False, position_after
    return tokens


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    raise NotMathematics("an unclosed brace")


def _command(text: str, position: int) -> tuple[Token, int]:
    match = _COMMAND.match(text, position)
    if match is None:
        raise NotMathematics("a backslash at the end")
    return Token("command", _ALIASES.get(match.group(), match.group())), match.end()


def _number(text: str, position: int, reading: Reading) -> tuple[Token, int]:
    if match := _PERIODIC.match(text, position):
        whole, fixed, first, middle, last, bracket = match.groups(default="")
        return _checked(_periodic(whole, fixed, bracket or first + middle + last), match)
    grouped = _GROUPED.match(text, position)
    if grouped and "," in grouped.group() and text[position - 1 : position] in ("(", "["):
        grouped = None  # (1,234) is a point
    if grouped and (reading.commas_group or "," not in grouped.group().replace("{,}", "")):
        digits, end = re.sub(r"[^0-9]", "", grouped.group()), grouped.end()
        if tail := re.compile(r"\.[0-9]+").match(text, end):
            digits, end = digits + tail.group(), tail.end()
    elif comma := _DECIMAL_COMMA.match(text, position):
        digits, end = f"{comma.group(1)}.{comma.group(2)}", comma.end()
    else:
        decimal = _DECIMAL.match(text, position)
        assert decimal is not None
        digits, end = decimal.group(), decimal.end()
    if len(digits) > MAX_DIGITS:
        raise NotMathematics(f"a number of more than {MAX_DIGITS} digits")
    value = Fraction(digits.rstrip("."))
    significant = len(digits.replace(".", "").lstrip("0")) if "." in digits.rstrip(".") else None
    exponent = _EXPONENT.match(text, end)
    if exponent and (reading.e_is_exponent or not exponent.group(1)):
        if int(exponent.group(2)) > MAX_DIGITS:
            raise NotMathematics(f"an exponent above {MAX_DIGITS}")
        value *= Fraction(10) ** int(exponent.group(1) + exponent.group(2))
        end = exponent.end()
    elif dots := _DOTS.match(text, end):
        periodic = _repeated(digits)
        if periodic is not None:
            return Token("number", digits, value=periodic), dots.end()
        if significant is not None:
            return Token("number", digits, value=value, digits=significant, open_ended=True), dots.end()
    return Token("number", text[position:end], value=value, digits=significant), end


def _checked(value: Fraction, match: re.Match[str]) -> tuple[Token, int]:
    if match.end() - match.start() > MAX_DIGITS:
        raise NotMathematics(f"a number of more than {MAX_DIGITS} digits")
    return Token("number", match.group(), value=value), match.end()


def _periodic(whole: str, fixed: str, period: str) -> Fraction:
    """The value of whole.fixed(period): 0.1(6) is 1/6."""
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _repeated(digits: str) -> Fraction | None:
    """The value of "0.333" or "0.142857142857" before dots, when its end repeats at least twice (one digit: thrice)."""
    whole, point, decimals = digits.partition(".")
    if not point or len(decimals) > 60:
        return None
    for start in range(len(decimals)):
        rest = decimals[start:]
        for period in range(1, len(rest) // 2 + 1):
            times = len(rest) // period
            if times * period == len(rest) and rest[:period] * times == rest and (period > 1 or times > 2):
                return _periodic(whole, decimals[:start], rest[:period])
    return None
