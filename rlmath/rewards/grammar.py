"""The grammar of answers: tokens become a tree of our own, and nothing else is ever evaluated.

    answer     := item (("," | ";" | and | or) item)*
    item       := side (relation side)*            x = 5, 1 < x <= 2, x in [1, 2]
    side       := sum ((union | intersection | without) sum)*
    sum        := term (("+" | "-" | plus-minus) term)*
    term       := factor (("*" | "/" | nothing) factor)*
    factor     := base ("^" ... | "!" | "%" | degree)*

Depth and length are bounded, so that parsing takes time linear in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from rlmath.rewards.notation import GREEK, NotMathematics, Reading, Token, Unevaluated, Unsupported, tokenize
from rlmath.rewards.units import DEGREE, PARTS_OF_DEGREE, Unit, read_unit

MAX_DEPTH = 40
"""Deepest nesting of brackets, fractions and powers."""

MAX_CHAIN = 100
"""Most terms of one sum, factors of one product and marks behind one base."""

# ---------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Num:
    value: Fraction
    digits: int | None = None
    """Significant digits, when it was written with a decimal point."""
    open_ended: bool = False
    """Written with dots: the digits go on."""


@dataclass(frozen=True)
class Sym:
    name: str


@dataclass(frozen=True)
class Call:
    """An operation or function: "add", "mul", "div", "pow", "neg", "pm", "sqrt", "sin", "pi" (no arguments) ..."""

    name: str
    args: tuple[Expr, ...] = ()


Expr = Num | Sym | Call

# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Scalar:
    """One value, maybe with a unit."""

    expr: Expr
    unit: Unit | None = None
    otherwise: Scalar | None = None
    """A second reading: `5 m` is 5 metres, or 5 times m."""


@dataclass(frozen=True)
class Group:
    """Items in brackets, or a ratio: a point, an interval, a vector."""

    opening: str
    items: tuple[Answer, ...]
    closing: str


@dataclass(frozen=True)
class SetOf:
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Listing:
    """Items side by side, without brackets."""

    items: tuple[Answer, ...]
    joiner: str
    """"," "and" or "or"."""


@dataclass(frozen=True)
class Relation:
    """`sides[0] ops[0] sides[1] ...`; ops are "=", "<", "<=", ">", ">=", "!=", "~" and "in"."""

    sides: tuple[Answer, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Name:
    """What a value is given to: `x`, `f(x)`, `m_{max}`, `(x, y)`."""

    text: str
    expr: Expr | None = None
    """As an expression, where it is one."""


@dataclass(frozen=True)
class SetOperation:
    op: str
    """"union", "intersection" or "without"."""
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class MatrixOf:
    rows: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Known:
    """A set with a name: "R", "Z", "N", "Q", "C" or "empty"."""

    name: str


@dataclass(frozen=True)
class Piecewise:
    """A function by cases: (value, condition) in any order."""

    branches: tuple[tuple[Expr, str], ...]


Answer = Scalar | Group | SetOf | Listing | Relation | Name | SetOperation | MatrixOf | Known | Piecewise


# ---------------------------------------------------------------- words and commands

_RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "\\lt": "<",
    "\\gt": ">",
    "\\le": "<=",
    "\\leq": "<=",
    "\\leqslant": "<=",
    "\\leqq": "<=",
    "\\ge": ">=",
    "\\geq": ">=",
    "\\geqslant": ">=",
    "\\geqq": ">=",
    "\\ne": "!=",
    "\\neq": "!=",
    "\\approx": "~",
    "\\simeq": "~",
    "\\doteq": "~",
    "\\in": "in",
    "\\equiv": "==",
}
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp min max gcd lcm det floor ceil abs"
    " asin acos atan".split()
)
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infty": "inf", "infinity": "inf", "inf": "inf", "imath": "i"}
_DROPPED = frozenset(
    "\\mathit \\mathcal \\mathbf \\boldsymbol \\vec \\overrightarrow \\mathscr \\mathfrak \\bm \\hat \\widehat".split()
)
_DECORATED = {"\\dot": "dot", "\\ddot": "ddot", "\\bar": "bar", "\\overline": "bar", "\\tilde": "tilde"}
_CURRENCIES = frozenset(("\\dollar", "\\euro", "\\pound"))
_MULTIPLY = frozenset(("*", "\\times", "\\cdot", "\\ast"))
_DIVIDE = frozenset(("/", "\\div"))
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",), "]": ("[",), "\\lbrack": ("\\rbrack",)}
_PLAIN_WORDS = frozenset(
    "the not and or is are no of yes for any all but if to by in at as an it so we be do on not one two six ten".split()
)
_UNEVALUATED = frozenset("\\int \\iint \\iiint \\oint \\sum \\prod \\lim \\limsup \\liminf".split())
_CANNOT = frozenset(
    "\\sup \\inf \\partial \\nabla \\bmod \\mod"
    " \\stackrel \\overset \\underset \\substack \\to \\rightarrow \\mapsto \\cong \\sim \\propto \\perp \\parallel"
    " \\subset \\subseteq \\supset \\forall \\exists \\neg \\iff \\implies \\Rightarrow \\Leftrightarrow \\oplus \\prime"
    " \\aleph \\Re \\Im \\arg \\deg \\dim \\ker \\Pr \\notin \\mid \\triangle \\angle \\circ \\sinh".split()
)


def parse_answer(text: str, reading: Reading = Reading()) -> Answer:
    """The tree of an answer.

    >>> parse_answer("(1, 2]").closing
    ']'

    Raises NotMathematics or Unsupported.
    """
    tokens = tokenize(text, reading)
    while tokens and tokens[-1].text in (".", ",", ";", "!") and tokens[-1].kind == "sign" and len(tokens) > 1:
        if tokens[-1].text == "!":
            break
        tokens.pop()
    if not tokens:
        raise NotMathematics("nothing")
    parser = _Parser(tokens)
    answer = parser.listing(frozenset())
    if parser.position < len(parser.tokens):
        raise NotMathematics(f"{parser.peek()!r} is not expected")
    return answer


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.in_bars = 0

    # ---- looking at tokens

    def token(self, ahead: int = 0) -> Token | None:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def peek(self, ahead: int = 0) -> str:
        token = self.token(ahead)
        return token.text if token else ""

    def take(self) -> Token:
        token = self.token()
        if token is None:
            raise NotMathematics("it ends too early")
        self.position += 1
        return token

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise NotMathematics(f"{text} is missing")

    def skip(self, *texts: str) -> bool:
        if self.peek() in texts:
            self.position += 1
            return True
        return False

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotMathematics(f"nested deeper than {MAX_DEPTH}")

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    # ---- lists

    def listing(self, ends: frozenset[str]) -> Answer:
        with self:
            items, joiner = [self.item(ends)], ""
            while self.token() is not None and self.peek() not in ends:
                found = self._joiner()
                if found is None:
                    break
                joiner = found if found != "," or not joiner else joiner
                if self.token() is None or self.peek() in ends:
                    raise NotMathematics("an item is missing")
                items.append(self.item(ends))
        return items[0] if len(items) == 1 else Listing(tuple(items), joiner)

    def _joiner(self) -> str | None:
        """Steps over what stands between two items: a comma, "and", "or", or a comma and one of them."""
        found = None
        if self.skip(",", ";"):
            found = ","
        word = self.peek().lower()
        if word in ("and", "or", "\\land", "\\lor", "&"):
            self.position += 1
            found = {"\\land": "and", "\\lor": "or", "&": "and"}.get(word, word)
        return found

    def item(self, ends: frozenset[str]) -> Answer:
        """One item; words at its end are a unit."""
        end = self._item_end(ends)
        bare = self._with_unit(self.position, end)
        left = len(self.tokens) - end  # counted from the end, since numbers may be split on the way
        try:
            whole = self.relation()
            if len(self.tokens) - self.position != left:
                raise NotMathematics(f"{self.peek()!r} is not expected")
        except (NotMathematics, Unsupported):
            if bare is None:
                raise
            self.position = len(self.tokens) - left
            return bare
        if bare is not None and isinstance(whole, Scalar):
            return Scalar(bare.expr, bare.unit, whole)
        return whole

    def _item_end(self, ends: frozenset[str]) -> int:
        """Where the item that begins here ends: before the next joiner outside of brackets, or the group's end."""
        depth, index = 0, self.position
        while index < len(self.tokens):
            text = self.tokens[index].text
            if depth == 0 and (text in (",", ";", "\\land", "\\lor") or text.lower() in ("and", "or") or text in ends):
                break
            if text in ("(", "[", "{", "\\{", "\\langle", "\\begin", "\\lfloor", "\\lceil"):
                depth += 1
            elif text in (")", "]", "}", "\\}", "\\rangle", "\\end", "\\rfloor", "\\rceil"):
                depth = max(0, depth - 1)
            index += 1
        return index

    def _with_unit(self, start: int, end: int) -> Scalar | None:
        """The item as a number with a unit or a currency sign, else None."""
        tokens = self.tokens[start:end]
        if len(tokens) > 1 and tokens[0].text == "-" and tokens[1].text in _CURRENCIES:
            amount = self._with_unit(start + 1, end)
            return Scalar(Call("neg", (amount.expr,)), amount.unit) if amount else None
        if tokens and tokens[0].text in _CURRENCIES:
            currency = read_unit([tokens[0]])
            assert currency is not None
            inner = self._constant(start + 1, end)
            if inner is None and (tail := self._with_unit(start + 1, end)):
                dimensions = tail.unit.dimensions if tail.unit else ()
                nouns = tail.unit.nouns if tail.unit else ()
                inner = tail.expr if dimensions in ((), currency.dimensions) else None
                currency = replace(currency, nouns=nouns)
            return Scalar(inner, currency) if inner is not None else None
        for cut in range(max(1, len(tokens) - 8), len(tokens)):
            first = tokens[cut]
            glued = len(first.text) == 1 and not (first.space or first.prose)
            if first.text not in ("%", "^", "/") and (first.kind in ("number", "sign") or glued):
                continue
            unit = read_unit(tokens[cut:])
            if unit is None:
                continue
            inner = self._constant(start, start + cut)
            if inner is not None:
                return _quantity(inner, unit)
        return self._composite(start, end)

    def _composite(self, start: int, end: int) -> Scalar | None:
        """Several amounts side by side, `1 hour 30 minutes` or `22^\\circ 30'`, in the first one's unit."""
        starts = [index for index in range(start, end) if self.tokens[index].kind == "number"]
        if len(starts) < 2 or len(starts) > 4 or starts[0] != start:
            return None
        total, first = Fraction(0), None
        for begin, stop in zip(starts, [*starts[1:], end], strict=True):
            number, behind = self.tokens[begin], [t for t in self.tokens[begin + 1 : stop] if t.text not in (",", "and")]
            marks = PARTS_OF_DEGREE.get("".join(token.text for token in behind))
            if marks is not None and first == DEGREE:
                unit: Unit | None = replace(DEGREE, factor=marks)
            else:
                unit = read_unit(behind)
            if unit is None or not unit.dimensions or unit.nouns or number.value is None:
                return None
            first = first or unit
            if unit.dimensions != first.dimensions:
                return None
            total += number.value * unit.factor / first.factor
        return Scalar(Num(total), first)

    def _constant(self, start: int, end: int) -> Expr | None:
        """The tokens from start to end as an expression, None where they are none."""
        inner = _Parser(self.tokens[start:end])
        inner.depth = self.depth
        try:
            with inner:
                side = inner.side()
        except (NotMathematics, Unsupported):
            return None
        return side.expr if isinstance(side, Scalar) and inner.position == len(inner.tokens) else None

    # ---- relations and sets

    def relation(self) -> Answer:
        sides: list[Answer] = []
        ops: list[str] = []
        if self.peek() in ("\\approx", "\\simeq", "=", ":"):
            self.position += 1
        while True:
            sides.append(self._name() or self.side())
            op = self._relation_sign()
            if op is None:
                break
            ops.append(op)
        if len(ops) > 12:
            raise NotMathematics("too many relations")
        if "==" in ops:
            return self._congruence(sides, ops)
        return Relation(tuple(sides), tuple(ops)) if ops else sides[0]

    def _congruence(self, sides: list[Answer], ops: list[str]) -> Answer:
        """`a \\equiv b \\pmod m`; without a modulus it says that two functions are equal."""
        bracket = self.peek() == "(" and self.peek(1) in ("\\bmod", "\\mod", "mod")
        if bracket:
            self.position += 1
        if self.peek() not in ("\\pmod", "\\bmod", "\\mod", "mod"):
            return Relation(tuple(sides), tuple("=" if op == "==" else op for op in ops))
        self.position += 1
        modulus = self._argument() if self.peek() == "{" else _expr(self.sum())
        if bracket:
            self.expect(")")
        if len(sides) != 2:
            raise Unsupported("a chain of congruences")
        return Relation((*sides, Scalar(modulus)), ("mod",))

    def _relation_sign(self) -> str | None:
        text = self.peek()
        if text in ("<", ">", "!") and self.peek(1) == "=":
            self.position += 2
            return text + "="
        op = _RELATIONS.get(text)
        if op is not None:
            self.position += 1
        return op

    def _name(self) -> Name | None:
        """A name before "=", "in" or ":", such as `f(x)`, `m_{max}`, `(x, y)`, `AB` or `Area`, else None."""
        start = self.position
        words = self._name_tokens()
        after, following = self.position, self.peek()
        self.position = start
        relation = _RELATIONS.get(following)
        if not words or not (relation in ("=", "in", "~", "==") or (following == ":" and len(words[0]) > 1)):
            return None
        expr = None if "(" in words else self._constant(start, after)
        self.position = after
        if following == ":":
            self.tokens[after] = Token("sign", "=")
        return Name("".join(words).replace("\\", ""), expr)

    def _name_tokens(self) -> list[str]:
        """Steps over the tokens of a name; an empty list where none begins."""
        words: list[str] = []
        while (token := self.token()) is not None and _part_of_name(token) and len(words) < 6:
            if words and not (token.prose or words[-1] in ("\\angle", "\\triangle", "angle", "the")):
                return []
            words.append(self.take().text)
        if words and self.peek() == "_":
            self.position -= 1
            token = self.take()
            symbol = self._symbol(token.text)
            assert isinstance(symbol, Sym)
            words[-1] = symbol.name
        if words and [self.peek(ahead) for ahead in range(5)] == ["^", "{", "-", "1", "}"]:
            words.append("^-1")
            self.position += 5
        while words and self.peek() == "'":
            words.append(self.take().text)
        if self.peek() == "(":
            words += self._letters_in_brackets()
        return words

    def _letters_in_brackets(self) -> list[str]:
        inside = [self.take().text]
        while (token := self.token()) is not None and token.text != ")" and len(inside) < 12:
            if not (token.text == "," or token.kind in ("word", "number") or token.text[1:] in GREEK):
                break
            inside.append(self.take().text)
        if self.peek() != ")":
            self.position = len(self.tokens)
            return []
        return [*inside, self.take().text]

    def side(self) -> Answer:
        parts, op = [self.sum()], None
        while (found := _SET_OPERATIONS.get(self.peek())) is not None:
            if op not in (None, found):
                raise Unsupported("mixed set operations")
            op = found
            self.position += 1
            parts.append(self.sum())
        return SetOperation(op, tuple(parts)) if op else parts[0]

    # ---- arithmetic

    def sum(self) -> Answer:
        with self:
            first = self._signed_term()
            length = 0
            while self.peek() in ("+", "-", "\\pm", "\\mp"):
                length = _longer(length)
                sign = self.take().text
                if sign == "+" and self.peek() == "/" and self.peek(1) == "-":
                    self.position += 2
                    sign = "\\pm"
                right = _expr(self.term())
                left = _expr(first)
                if sign == "+":
                    first = Scalar(Call("add", (left, right)))
                elif sign == "-":
                    first = Scalar(Call("add", (left, Call("neg", (right,)))))
                else:
                    first = Scalar(Call(sign[1:], (left, right)))
            return first

    def _signed_term(self) -> Answer:
        if self.skip("+"):
            if self.peek() == "/" and self.peek(1) == "-":
                self.position += 2
                return Scalar(Call("pm", (Num(Fraction(0)), _expr(self.term()))))
            return self._signed_term_again()
        if self.skip("-"):
            inner = _expr(self._signed_term_again())
            if isinstance(inner, Num):
                return Scalar(Num(-inner.value, inner.digits, inner.open_ended))
            return Scalar(Call("neg", (inner,)))
        if self.peek() in ("\\pm", "\\mp"):
            sign = self.take().text[1:]
            return Scalar(Call(sign, (Num(Fraction(0)), _expr(self.term()))))
        return self.term()

    def _signed_term_again(self) -> Answer:
        with self:
            return self._signed_term()

    def term(self) -> Answer:
        first = self.factor()
        length = 0
        while True:
            length = _longer(length)
            text = self.peek()
            if text in _MULTIPLY:
                self.position += 1
                if text == "*" and self.peek() == "*":
                    self.position += 1
                    first = Scalar(Call("pow", (_expr(first), self._operand())))
                    continue
                first = Scalar(Call("mul", (_expr(first), self._operand())))
            elif text in _DIVIDE:
                self.position += 1
                first = Scalar(Call("div", (_expr(first), self._operand())))
            elif text in (":", "to") and isinstance(first, Scalar):
                return self._ratio(first)
            elif (mixed := self._plain_mixed(first)) is not None:
                first = mixed
            elif self._begins_factor():
                first = self._times(first)
            else:
                return first

    def _operand(self) -> Expr:
        if self.skip("-"):
            return Call("neg", (self._operand_again(),))
        self.skip("+")
        return _expr(self.factor())

    def _operand_again(self) -> Expr:
        with self:
            return self._operand()

    def _times(self, left: Answer) -> Answer:
        """A product without a sign; a whole number before a fraction of numbers is a mixed number."""
        start = self.position
        right_side = self.factor()
        expr = _expr(left)
        if isinstance(right_side, MatrixOf):
            return MatrixOf(tuple(tuple(Call("mul", (expr, entry)) for entry in row) for row in right_side.rows))
        right = _expr(right_side)
        if isinstance(expr, Num) and expr.digits is None and expr.value.denominator == 1 and start > 0:
            whole_token = self.tokens[start - 1]
            fraction = _plain_fraction(right)
            if fraction is not None and whole_token.kind == "number" and self.tokens[start].text in ("\\frac",):
                return Scalar(Num(expr.value + fraction))
        return Scalar(Call("mul", (expr, right)))

    def _plain_mixed(self, left: Answer) -> Answer | None:
        """`3 1/2`, else None."""
        above, slash, below = self.token(), self.peek(1), self.token(2)
        if above is None or below is None or above.kind != "number" or slash != "/" or not above.space:
            return None
        if not (isinstance(left, Scalar) and isinstance(left.expr, Num) and left.expr.value.denominator == 1):
            return None
        fraction = _plain_fraction(Call("div", (_number(above), _number(below))))
        if fraction is None or self.tokens[self.position - 1].kind != "number":
            return None
        self.position += 3
        return Scalar(Num(left.expr.value + fraction))

    def _ratio(self, first: Scalar) -> Answer:
        items: list[Answer] = [first]
        while self.skip(":", "to"):
            items.append(Scalar(_expr(self.factor())))
        return Group(":", tuple(items), ":")

    def _begins_factor(self) -> bool:
        token = self.token()
        if token is None:
            return False
        text = token.text
        if token.kind == "number":
            return self.tokens[self.position - 1].text in (")", "}", "]", "!")
        if token.kind == "word":
            if text.lower() in ("and", "or", "to"):
                return False
            return not token.prose or text in ("e", "i") or text in _FUNCTIONS
        if token.kind == "sign":
            return text in ("(", "{", "[") or (text == "|" and not self.in_bars)
        return (
            text[1:] in _CONSTANTS
            or text[1:] in GREEK
            or text[1:] in _FUNCTIONS
            or text in _FACTOR_COMMANDS
            or text in _DROPPED
            or text in _DECORATED
            or text in _UNEVALUATED
        )

    def factor(self) -> Answer:
        with self:
            base = self.base()
            length = MAX_CHAIN - 10
            while True:
                length = _longer(length)
                text = self.peek()
                if text == "^" and self._degree_follows():
                    base = Scalar(Call("deg", (_expr(base),)))
                elif text == "^" and self.peek(1) == "\\prime":
                    self.position += 2
                    base = Scalar(_primed(base))
                elif text == "^" and [self.peek(ahead) for ahead in (1, 2, 3)] == ["{", "\\prime", "}"]:
                    self.position += 4
                    base = Scalar(_primed(base))
                elif text == "^":
                    self.position += 1
                    base = Scalar(Call("pow", (_expr(base), self._exponent())))
                elif text == "\\degree":
                    self.position += 1
                    base = Scalar(Call("deg", (_expr(base),)))
                elif text == "!" and self.peek(1) != "=":
                    self.position += 1
                    if self.skip("!"):
                        base = Scalar(Call("factorial2", (_expr(base),)))
                        continue
                    base = Scalar(Call("factorial", (_expr(base),)))
                elif text in ("%", "\\%"):
                    self.position += 1
                    base = Scalar(Call("percent", (_expr(base),)))
                elif text == "'" and isinstance(base, Scalar) and isinstance(base.expr, Sym):
                    self.position += 1
                    base = Scalar(_primed(base))
                else:
                    return base

    def _degree_follows(self) -> bool:
        """Steps over `^\\circ` or `^{\\circ}`, if that is what comes."""
        if self.peek(1) == "\\circ":
            self.position += 2
            return True
        if self.peek(1) == "{" and self.peek(2) == "\\circ" and self.peek(3) == "}":
            self.position += 4
            return True
        return False

    def _exponent(self) -> Expr:
        if self.peek() == "{":
            return self._braced()
        if self.skip("-"):
            inner = self._exponent_again()
            return Num(-inner.value) if isinstance(inner, Num) else Call("neg", (inner,))
        self.skip("+")
        return _expr(self.base())

    def _exponent_again(self) -> Expr:
        with self:
            return self._exponent()

    def _braced(self) -> Expr:
        self.expect("{")
        inner = self._over(self.sum())
        self.expect("}")
        return _expr(inner)

    def _over(self, above: Answer) -> Answer:
        """`a \\over b` and `n \\choose k`, whose first half was read."""
        name = {"\\over": "div", "\\choose": "binom"}.get(self.peek())
        if name is None:
            return above
        self.position += 1
        return Scalar(Call(name, (_expr(above), _expr(self.sum()))))

    def _argument(self) -> Expr:
        """What a command such as \\frac takes: a group, or one digit, letter or command."""
        with self:
            if self.peek() == "{":
                return self._braced()
            token = self.token()
            if token is not None and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
                self.tokens[self.position : self.position + 1] = [
                    Token("number", digit, value=Fraction(int(digit))) for digit in token.text
                ]
            elif token is not None and token.kind == "word" and len(token.text) > 1:
                self._split_word(token)
            return _expr(self.base())

    def _split_word(self, token: Token) -> None:
        self.tokens[self.position : self.position + 1] = [Token("word", letter) for letter in token.text]

    def base(self) -> Answer:
        token = self.take()
        if token.kind == "number":
            return Scalar(_number(token))
        if token.kind == "word":
            return self._word(token)
        if token.kind == "sign":
            return self._bracket(token)
        return self._command(token)

    def _word(self, token: Token) -> Answer:
        text = token.text
        if text.lower() in ("infinity", "inf"):
            return Scalar(Call("inf"))
        if text == "sqrt":
            return Scalar(Call("sqrt", (self._function_argument(),)))
        if text in _FUNCTIONS:
            return self._function(text)
        if text in _CONSTANTS:
            return Scalar(Call(_CONSTANTS[text]))
        if len(text) == 1:
            return Scalar(self._symbol(text))
        if text in GREEK:
            return Scalar(self._symbol(text))
        following = self.token()
        alone = token.space or (following is not None and following.space)
        if token.prose or len(text) > 3 or (alone and text.lower() in _PLAIN_WORDS):
            raise NotMathematics(f"the word {text!r}")
        self.position -= 1
        self._split_word(token)
        return self.factor()

    def _symbol(self, name: str) -> Expr:
        """A symbol with its subscript."""
        if self.peek() != "_":
            return Sym(name)
        self.position += 1
        parts = []
        if self.skip("{"):
            depth = 1
            while depth:
                part = self.take().text
                depth += (part == "{") - (part == "}")
                if depth:
                    parts.append(part)
        else:
            parts.append(self.take().text)
        return Sym(f"{name}_{''.join(parts)}")

    # ---- brackets

    def _bracket(self, token: Token) -> Answer:
        text = token.text
        if text == "|":
            self.in_bars += 1
            inner = _expr(self.sum())
            self.in_bars -= 1
            self.expect("|")
            return Scalar(Call("abs", (inner,)))
        if text == "{":
            inner = self._over(self.listing(frozenset(("}", "\\over", "\\choose"))))
            self.expect("}")
            if isinstance(inner, Listing):
                return SetOf(inner.items)
            return inner
        if text in ("(", "[", "]"):
            return self._group(text)
        raise NotMathematics(f"{text!r} is not expected")

    def _group(self, opening: str) -> Answer:
        bars, self.in_bars = self.in_bars, 0
        closings = _CLOSING[opening]
        if opening == "[" and self.peek() == "[":
            return self._nested_matrix()
        inner = self.listing(frozenset(closings))
        closing = self.take().text
        if closing not in closings:
            raise NotMathematics("a bracket is not closed")
        self.in_bars = bars
        if isinstance(inner, Listing):
            return Group(opening, inner.items, closing)
        if isinstance(inner, (Scalar, MatrixOf)) and (opening, closing) in (("(", ")"), ("[", "]")):
            return inner
        if (opening, closing) == ("(", ")"):
            return inner
        raise NotMathematics("one item in half-open brackets")

    def _nested_matrix(self) -> Answer:
        rows = []
        while self.skip("["):
            row = self.listing(frozenset("]"))
            self.expect("]")
            items = row.items if isinstance(row, Listing) else (row,)
            rows.append(tuple(_expr(item) for item in items))
            self.skip(",")
        self.expect("]")
        return _matrix(rows)

    # ---- commands

    def _command(self, token: Token) -> Answer:
        text = token.text
        name = text[1:]
        if name in _CONSTANTS:
            return Scalar(Call(_CONSTANTS[name]))
        if name in _FUNCTIONS:
            return self._function(name)
        if name in GREEK or text in ("\\varphi", "\\varepsilon", "\\vartheta", "\\varrho"):
            return Scalar(self._symbol(name.removeprefix("var")))
        handler = _HANDLERS.get(text)
        if handler is not None:
            return handler(self)
        if text in _DROPPED:
            argument = self._argument()
            return Scalar(Sym("vector i") if argument == Call("i") else argument)
        if text in _DECORATED:
            argument = self._argument()
            if not isinstance(argument, Sym):
                raise Unsupported(text)
            return Scalar(self._symbol(f"{_DECORATED[text]} {argument.name}"))
        if text in _UNEVALUATED:
            raise Unevaluated(text)
        if text in _CANNOT:
            raise Unsupported(text)
        raise NotMathematics(f"the command {text}")

    def _frac(self) -> Answer:
        above = self._argument()
        return Scalar(Call("div", (above, self._argument())))

    def _sqrt(self) -> Answer:
        if self.skip("["):
            index = _expr(self.sum())
            self.expect("]")
            return Scalar(Call("root", (self._argument(), index)))
        return Scalar(Call("sqrt", (self._argument(),)))

    def _binom(self) -> Answer:
        above = self._argument()
        return Scalar(Call("binom", (above, self._argument())))

    def _floor(self) -> Answer:
        return self._between("floor", "\\rfloor")

    def _ceil(self) -> Answer:
        return self._between("ceil", "\\rceil")

    def _bars(self) -> Answer:
        return self._between("abs", "\\rvert")

    def _between(self, name: str, closing: str) -> Answer:
        inner = _expr(self.sum())
        self.expect(closing)
        return Scalar(Call(name, (inner,)))

    def _set(self) -> Answer:
        if self.skip("\\}"):
            return Known("empty")
        self.in_bars += 1  # a bar is no absolute value here, but "such that"
        inner = self.listing(frozenset(("\\}", "\\mid", ":", "|")))
        self.in_bars -= 1
        if self.skip("\\mid", ":", "|"):
            such_that = self.listing(frozenset(("\\}",)))
            self.expect("\\}")
            return _set_builder(inner, such_that)
        self.expect("\\}")
        return SetOf(inner.items if isinstance(inner, Listing) else (inner,))

    def _known_set(self) -> Answer:
        braced = self.skip("{")
        name = self.take().text
        if braced:
            self.expect("}")
        if name not in ("R", "Z", "N", "Q", "C"):
            raise Unsupported("\\mathbb")
        if self.peek() in ("^", "_"):
            raise Unsupported("a part of a known set")
        return Known(name)

    def _reals(self) -> Answer:
        return Known("R")

    def _hbar(self) -> Answer:
        return Scalar(self._symbol("hbar"))

    def _ell(self) -> Answer:
        return Scalar(self._symbol("l"))

    def _empty(self) -> Answer:
        return Known("empty")

    def _angle_group(self) -> Answer:
        inner = self.listing(frozenset(("\\rangle",)))
        self.expect("\\rangle")
        return Group("(", inner.items if isinstance(inner, Listing) else (inner,), ")")

    def _environment(self) -> Answer:
        self.expect("{")
        kind = self.take().text
        self.skip("*")
        self.expect("}")
        if kind == "cases":
            return self._cases()
        if kind not in ("pmatrix", "bmatrix", "matrix", "array", "vmatrix", "smallmatrix", "Bmatrix"):
            raise Unsupported(f"\\begin{{{kind}}}")
        if kind == "array" and self.skip("{"):
            while self.take().text != "}":
                pass
        rows: list[tuple[Expr, ...]] = []
        row: list[Expr] = []
        while True:
            row.append(_expr(self.sum()))
            token = self.take().text
            if token == "&":
                continue
            if token not in ("\\\\", "\\end"):
                raise NotMathematics("a matrix of broken rows")
            rows.append(tuple(row))
            row = []
            if token == "\\\\" and self.peek() != "\\end":
                continue
            if token == "\\\\":
                self.position += 1
            break
        self.expect("{")
        self.expect(kind)
        self.skip("*")
        self.expect("}")
        matrix = _matrix(rows)
        if kind == "vmatrix":
            raise Unsupported("a determinant")
        return matrix

    def _cases(self) -> Answer:
        """A system of equations, or a function by cases."""
        equations: list[Answer] = []
        branches: list[tuple[Expr, str]] = []
        ends = frozenset(("\\\\", "\\end", "&"))
        while self.peek() != "\\end":
            row = self.item(ends)
            self.skip(",", ";")
            if self.skip("&"):
                branches.append((_expr(row), self._condition()))
            else:
                equations.append(row)
            self.skip("\\\\")
        for text in ("\\end", "{", "cases", "}"):
            self.expect(text)
        if branches and not equations:
            return Piecewise(tuple(branches))
        if equations and not branches:
            return Listing(tuple(equations), "and")
        raise Unsupported("cases of both kinds")

    def _condition(self) -> str:
        """What stands behind the & of a case, without filling words."""
        words = []
        while self.peek() not in ("\\\\", "\\end"):
            text = self.take().text
            if text.lower() not in ("if", "for", "when", "is", ",", ".", "\\text"):
                words.append({"\\leq": "\\le", "\\geq": "\\ge"}.get(text, text))
        return "".join(words)

    # ---- functions

    def _function(self, name: str) -> Answer:
        name = _ALIASES.get(name, name)
        base: Expr | None = None
        power: Expr | None = None
        if self.skip("_"):
            base = self._argument()
        if self.peek() == "^" and not self._degree_follows():
            self.position += 1
            power = self._exponent()
        if name in ("min", "max", "gcd", "lcm", "det"):
            return Scalar(Call(name, self._arguments()))
        argument = self._function_argument()
        if name == "log" and base is not None:
            result = Call("logbase", (argument, base))
        elif base is not None:
            raise Unsupported(f"{name} with a subscript")
        elif power == Num(Fraction(-1)) and name in ("sin", "cos", "tan"):
            return Scalar(Call("arc" + name, (argument,)))
        else:
            result = Call(name, (argument,))
        return Scalar(result if power is None else Call("pow", (result, power)))

    def _arguments(self) -> tuple[Expr, ...]:
        if not self.skip("(", "\\{"):
            raise Unsupported("a function without brackets")
        inner = self.listing(frozenset((")", "\\}")))
        if not self.skip(")", "\\}"):
            raise NotMathematics("a bracket is not closed")
        items = inner.items if isinstance(inner, Listing) else (inner,)
        return tuple(_expr(item) for item in items)

    def _function_argument(self) -> Expr:
        """What a function is applied to: a group alone, else a product up to a sign or the next function."""
        with self:
            if self.peek() in ("(", "{", "[", "|"):
                return _expr(self.factor())
            if self.skip("-"):
                return Call("neg", (self._function_argument(),))
            result = _expr(self.factor())
            while self._begins_factor() and not self._function_begins() and self.peek() not in ("(", "["):
                result = Call("mul", (result, _expr(self.factor())))
            if self.peek() == "/" and self._only_number_follows():
                self.position += 1
                result = Call("div", (result, _expr(self.factor())))
            return result

    def _only_number_follows(self) -> bool:
        token = self.token(1)
        return token is not None and token.kind == "number"

    def _function_begins(self) -> bool:
        return self.peek().removeprefix("\\") in _FUNCTIONS


_SET_OPERATIONS = {
    "\\cup": "union",
    "\\bigcup": "union",
    "\\cap": "intersection",
    "\\setminus": "without",
    "\\backslash": "without",
}
_HANDLERS = {
    "\\frac": _Parser._frac,
    "\\sqrt": _Parser._sqrt,
    "\\binom": _Parser._binom,
    "\\tbinom": _Parser._binom,
    "\\dbinom": _Parser._binom,
    "\\lfloor": _Parser._floor,
    "\\lceil": _Parser._ceil,
    "\\lvert": _Parser._bars,
    "\\{": _Parser._set,
    "\\lbrace": _Parser._set,
    "\\mathbb": _Parser._known_set,
    "\\R": _Parser._reals,
    "\\emptyset": _Parser._empty,
    "\\varnothing": _Parser._empty,
    "\\langle": _Parser._angle_group,
    "\\begin": _Parser._environment,
    "\\hbar": _Parser._hbar,
    "\\ell": _Parser._ell,
}
_FACTOR_COMMANDS = frozenset(
    "\\frac \\sqrt \\binom \\tbinom \\dbinom \\lfloor \\lceil \\lvert \\hbar \\ell \\begin \\varphi \\varepsilon \\vartheta".split()
)


def _part_of_name(token: Token) -> bool:
    """Whether a token may be (part of) a name: a letter, AB, Area, or a Greek letter; `xy` is a product."""
    if token.kind == "command":
        return token.text[1:] in GREEK - {"pi"} or token.text in ("\\angle", "\\triangle", "\\varphi", "\\max", "\\min")
    text = token.text
    if token.kind != "word" or text.lower() in _PLAIN_WORDS or text in _FUNCTIONS or text in ("e", "i", "pi"):
        return False
    return token.prose or len(text) == 1 or len(text) > 3 or text.isupper()


def _set_builder(element: Answer, condition: Answer) -> Answer:
    """`{x | condition}` of real numbers is its condition."""
    if isinstance(element, Relation):
        if element.ops != ("in",) or element.sides[1] != Known("R"):
            raise Unsupported("a set of other than real numbers")
        element = element.sides[0]
    if isinstance(element, (Name, Scalar)) and isinstance(condition, (Relation, Listing)):
        return SetOf((condition,))
    raise Unsupported("a set described by a condition")


def _quantity(number: Expr, unit: Unit) -> Scalar:
    """A number with its unit; a million belongs to the number."""
    if unit.multiplier != 1:
        number = Call("mul", (number, Num(Fraction(unit.multiplier))))
        unit = replace(unit, multiplier=1)
    return Scalar(number, unit if unit.dimensions or unit.nouns else None)


def _primed(base: Answer) -> Sym:
    expr = _expr(base)
    if not isinstance(expr, Sym):
        raise Unsupported("a derivative")
    return Sym(expr.name + "'")


def _longer(length: int) -> int:
    if length > MAX_CHAIN:
        raise NotMathematics(f"a chain of more than {MAX_CHAIN} operations")
    return length + 1


def _number(token: Token) -> Num:
    if token.value is None:
        raise NotMathematics(f"{token.text!r} is no number")
    return Num(token.value, token.digits, token.open_ended)


def _expr(answer: Answer) -> Expr:
    if isinstance(answer, Scalar) and answer.unit is None:
        return answer.expr
    if isinstance(answer, Scalar) and answer.otherwise is not None:
        return answer.otherwise.expr
    raise NotMathematics("a list, set or relation inside arithmetic")


def _plain_fraction(expr: Expr) -> Fraction | None:
    if not (isinstance(expr, Call) and expr.name == "div"):
        return None
    above, below = expr.args
    if isinstance(above, Num) and isinstance(below, Num) and above.digits is None and 0 < above.value < below.value:
        return above.value / below.value
    return None


def _matrix(rows: list[tuple[Expr, ...]]) -> MatrixOf:
    if not rows or len({len(row) for row in rows}) != 1:
        raise NotMathematics("a matrix with rows of unequal length")
    return MatrixOf(tuple(rows))
