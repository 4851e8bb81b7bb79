"""Splits text into tokens: numbers in all spellings, words, commands and signs.

It also has the tables of what words and commands mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rlmath.answers.normalize import MAX_DIGITS, KnownWords, NotMathematics, word_list, word_set


@dataclass(frozen=True)
class Token:
    """A token of mathematical text.

    >>> [token.text for token in tokenize("\\\\frac{1}{2}x")]
    ['\\\\frac', '{', '1', '}', '{', '2', '}', 'x']
    """

    kind: str
    """"number", "letter", "word", "command" or "sign"."""
    text: str
    space: bool = False
    """Whether white space precedes it."""
    prose: bool = False
    """Whether it is inside \\text{} or a similar command."""
    value: Fraction | None = None
    """The exact value of a number."""
    digits: int | None = None
    """The number of significant digits, if written with a decimal point."""


@dataclass(frozen=True)
class Reading:
    """The rules by which ambiguous digits are parsed."""

    commas_group: bool = True
    """`1,234` is one number, not a list of two numbers."""
    e_is_exponent: bool = True
    """`3e-2` is 0.03, not 3e - 2."""
    with_remark: bool = False
    """A remark in brackets may be mathematics, as in a reference: `5 (least for x = 2)`."""
    known_words: KnownWords | None = None
    """The words that may stand beside a value; None: any, as in a reference."""


_GROUPED = re.compile(
    r"(?:[0-9]{1,3}(?:\{,\}[0-9]{3})+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)(?![0-9])"
)
_PERIODIC = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|overset\{\.\}|"
    r"dot)\s?\{([0-9]+)\}(?:([0-9]*)\\dot\s?\{([0-9])\})?|\(([0-9]+)\))"
)
_DECIMAL = re.compile(r"[0-9]+\.(?![0-9.])|[0-9]*\.[0-9]+|[0-9]+")
_EXPONENT = re.compile(r"[eE]([+-]?)([0-9]{1,6})(?![0-9])")
_DOTS = re.compile(r"\s?(?:\.\.\.|\\l?dots(?![a-zA-Z])|\\cdots(?![a-zA-Z]))")
_ALIASES = dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac") | {
    "\\nicefrac": "\\frac",
    "\\sfrac": "\\frac",
    "\\pounds": "\\pound",
    "\\textdollar": "\\dollar",
    "\\texteuro": "\\euro",
    "\\dots": "\\ldots",
    "\\cdots": "\\ldots",
    "\\jmath": "j",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
}
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textup|textnormal|textsf|texttt|mbox|hbox|mathrm|mathsf|"
    r"operatorname|emph)\*?\s?\{"
)
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_WORD = re.compile(r"[a-zA-Z]+")
_DIGITS = frozenset("0123456789")
_SIGNS = frozenset("+-*/^_(){}[]|,;:=<>!'%&.?#")

AS_WRITTEN = Reading()


def tokenize(text: str, reading: Reading = AS_WRITTEN) -> list[Token]:
    """The tokens of a normalised text.

    Raises NotMathematics for characters that are not notation."""
    tokens: list[Token] = []
    position = 0
    space = False
    prose_until = -1
    while position < len(text):
        char = text[position]
        prose = position < prose_until
        if char.isspace():
            space = True
            position = position + 1
            continue
        if position == prose_until - 1 and char == "}":
            space = True
            position = position + 1
            continue
        token = None
        position_after = position
        if char in _DIGITS or (char == "." and text[position + 1 : position + 2] in _DIGITS):
            token, position_after = _number(text, position, reading)
        elif char == "\\":
            if not prose and (opening := _TEXT_COMMAND.match(text, position)):
                prose_until = _closing_brace(text, opening.end()) + 1
                space = True
                position = opening.end()
                continue
            command = _COMMAND.match(text, position)
            if command is None:
                raise NotMathematics("a backslash at the end")
            name = command.group()
            name = _ALIASES.get(name, name)
            token = Token("word" if name == "j" else "command", name)
            position_after = command.end()
        elif char.isascii() and char.isalpha():
            run = _WORD.match(text, position)
            assert run is not None
            token = Token("word", run.group())
            position_after = run.end()
        elif text.startswith("...", position):
            token = Token("command", "\\ldots")
            position_after = position + 3
        elif char in _SIGNS:
            token = Token("sign", char)
            position_after = position + 1
        if token is None:
            raise NotMathematics(f"character {char!r}")
        if space or prose:
            token = Token(
                token.kind,
                token.text,
                space=space,
                prose=prose,
                value=token.value,
                digits=token.digits,
            )
        tokens.append(token)
        space = False
        position = position_after
    return tokens


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    raise NotMathematics("an unclosed brace")


def _number(text: str, position: int, reading: Reading) -> tuple[Token, int]:
    """(the number at a position, the position after it)."""
    if match := _PERIODIC.match(text, position):
        whole, fixed, first, middle, last, bracket = match.groups(default="")
        value = _periodic(whole, fixed, bracket or first + middle + last)
        if len(match.group()) > MAX_DIGITS:
            raise NotMathematics(f"a number of more than {MAX_DIGITS} digits")
        return Token("number", match.group(), value=value), match.end()
    grouped = _GROUPED.match(text, position)
    if grouped and "," in grouped.group() and text[position - 1 : position] in ("(", "["):
        grouped = None  # (1,234) is a point
    if grouped and (reading.commas_group or "," not in grouped.group().replace("{,}", "")):
        digits = re.sub(r"[^0-9]", "", grouped.group())
        end = grouped.end()
        if tail := re.compile(r"\.[0-9]+").match(text, end):
            digits = digits + tail.group()
            end = tail.end()
    else:
        decimal = _DECIMAL.match(text, position)
        assert decimal is not None
        digits = decimal.group()
        end = decimal.end()
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
    return Token("number", text[position:end], value=value, digits=significant), end


def _periodic(whole: str, fixed: str, period: str) -> Fraction:
    """The value of whole.fixed(period): 0.1(6) is 1/6."""
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _repeated(digits: str) -> Fraction | None:
    """The value of "0.333" or "0.142857142857" before dots, if its end repeats.

    It must repeat at least twice; one digit must be there 3 times."""
    whole, point, decimals = digits.partition(".")
    if not point or len(decimals) > 60:
        return None
    for start in range(len(decimals)):
        tail = decimals[start:]
        for period in range(1, len(tail) // 2 + 1):
            times = len(tail) // period
            if (
                times * period == len(tail)
                and tail[:period] * times == tail
                and (period > 1 or times > 2)
            ):
                return _periodic(whole, decimals[:start], tail[:period])
    return None


# ----------------------------------------------------- the words, signs and commands of the grammar
RELATIONS = {
    text: operator
    for operator, texts in {
        "=": "= equals",
        "<": "< \\lt",
        ">": "> \\gt",
        "<=": "\\le \\leq \\leqslant \\leqq",
        ">=": "\\ge \\geq \\geqslant \\geqq",
        "!=": "\\ne \\neq",
        "~": "\\approx \\simeq \\doteq",
        "in": "\\in",
        "==": "\\equiv",
    }.items()
    for text in texts.split()
}
FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp min max gcd lcm "
    "det floor "
    "ceil abs asin acos atan tg ctg arctg cis"
)
ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
ALIASES |= {"tg": "tan", "ctg": "cot", "arctg": "arctan"}
CONSTANTS = {
    "pi": "pi",
    "e": "e",
    "i": "i",
    "infty": "inf",
    "infinity": "inf",
    "inf": "inf",
    "imath": "i",
}
DROPPED = word_set(
    "\\mathit \\mathcal \\mathbf \\boldsymbol \\vec \\overrightarrow \\mathscr \\mathfrak \\bm "
    "\\hat "
    "\\widehat"
)
DECORATED = {
    "\\dot": "dot",
    "\\ddot": "ddot",
    "\\bar": "bar",
    "\\overline": "bar",
    "\\tilde": "tilde",
}
LABELS = {"max": "max", "min": "min", "maximum": "max", "minimum": "min"}
LABELS |= {
    name: name
    for name in word_list(
        "mean median mode range length width height area perimeter volume quotient remainder "
        "vertex center radius diameter slope midpoint focus"
    )
}
"""Names of quantities that stand before their values: `maximum 5`."""
MODULUS = frozenset(("\\pmod", "\\bmod", "\\mod", "mod"))
CURRENCIES = frozenset(("\\dollar", "\\euro", "\\pound", "\\rupee", "\\yen"))
MULTIPLY = frozenset(("*", "\\times", "\\cdot", "\\ast"))
DIVIDE = frozenset(("/", "\\div"))
CLOSING = {"(": (")", "]"), "[": ("]", ")", "["), "]": ("[", "]")}
"""The closing brackets of a group, by its opening one."""
PLAIN_WORDS = word_set(
    "the not and or is are no of yes for any all but if to by in at as an it so we be do on not "
    "one two "
    "six ten"
)
UNEVALUATED = word_set("\\int \\iint \\iiint \\oint \\sum \\prod \\lim \\limsup \\liminf")
UNSUPPORTED = word_set(
    "\\sup \\inf  \\bmod \\mod \\stackrel \\overset \\underset \\substack \\to "
    "\\rightarrow \\mapsto \\cong \\sim \\propto \\perp \\parallel \\subset \\subseteq \\supset "
    "\\forall "
    "\\exists \\neg \\iff \\implies \\Rightarrow \\Leftrightarrow \\oplus \\prime \\aleph \\Re "
    "\\Im \\arg "
    "\\deg \\dim \\ker \\Pr \\notin \\mid \\triangle \\angle \\circ \\sinh"
)
SET_OPERATIONS = {"\\cup": "union", "\\bigcup": "union", "\\cap": "intersection"}
SET_OPERATIONS |= {"\\setminus": "without", "\\backslash": "without"}
FACTOR_COMMANDS = word_set(
    "\\frac \\sqrt \\binom \\tbinom \\dbinom \\lfloor \\lceil \\lvert \\hbar \\ell \\begin "
    "\\langle \\varphi "
    "\\varepsilon \\vartheta"
)
