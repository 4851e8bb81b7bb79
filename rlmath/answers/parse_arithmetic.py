"""Parses arithmetic: sums, products, powers, numbers and symbols.

Size and depth are limited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

from rlmath.answers import lexer
from rlmath.answers.compare_values import symbols
from rlmath.answers.families import PARAMETERS, explained, operands
from rlmath.answers.lexer import Token
from rlmath.answers.normalize import GREEK, NotMathematics, Unsupported
from rlmath.answers.syntax_tree import (
    Answer,
    Call,
    Expr,
    Group,
    MatrixOf,
    NamedSet,
    Num,
    Scalar,
    Sym,
)

MAX_DEPTH = 40
"""Deepest nesting of brackets, fractions and powers."""
MAX_OPERATIONS = 250
"""Most operations in all, which bounds the depth of the syntax tree."""
MAX_STEPS = 20_000
"""Most tokens that are consumed for one answer, some more than once."""
AFTER_INTERVAL = frozenset(
    ("", ",", ";", ".", "and", "or", "\\cup", "\\cap", "\\setminus", "\\backslash", "}", "\\}")
)


class Arithmetic(ABC):
    """A position among tokens, and a depth, which `with parser:` raises.

    Subclasses have the abstract methods."""

    def __init__(self, tokens: list[Token], outer: Arithmetic | None = None) -> None:
        """An `outer` parser gives a part of its tokens, and both count against the same limits."""
        self.tokens = tokens
        self.position = 0
        self.depth = outer.depth if outer else 0
        self.in_set = 0
        self.in_bars = 0
        # Lists of one element, shared with the inner parsers.
        self._steps_left = outer._steps_left if outer else [MAX_STEPS]
        self._operations_left = outer._operations_left if outer else [MAX_OPERATIONS]

    def token(self, ahead: int = 0) -> Token | None:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index].text if index < len(self.tokens) else ""

    def take(self) -> Token:
        """The token at the position, which is stepped over."""
        token = self.token()
        if token is None:
            raise NotMathematics("it ends too early")
        self.position += 1
        self._steps_left[0] -= 1
        if self._steps_left[0] < 0:
            raise NotMathematics(f"more than {MAX_STEPS} steps to parse it")
        return token

    def count_operation(self) -> None:
        self._operations_left[0] -= 1
        if self._operations_left[0] < 0:
            raise NotMathematics(f"more than {MAX_OPERATIONS} operations")

    def expect(self, *texts: str) -> None:
        for text in texts:
            if self.take().text != text:
                raise NotMathematics(f"{text} is missing")

    def skip(self, *texts: str) -> bool:
        """Steps over the next token if it is one of `texts`."""
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

    @abstractmethod
    def listing(self, ends: frozenset[str]) -> Answer:
        """A list of items, up to one of `ends`."""

    @abstractmethod
    def item(self, ends: frozenset[str]) -> Answer:
        """One item, up to a comma or one of `ends`."""

    @abstractmethod
    def part(self, tokens: list[Token]) -> Answer:
        """The answer that these tokens are, under the same limits."""

    @abstractmethod
    def bracket(self, token: Token) -> Answer:
        """The rest of what an opening bracket or another sign begins."""

    @abstractmethod
    def command(self, token: Token) -> Answer:
        """The rest of what a LaTeX command begins."""

    @abstractmethod
    def function(self, name: str) -> Answer:
        """The rest of a function after its name: base, power and argument."""

    @abstractmethod
    def function_argument(self) -> Expr:
        """The argument of a function."""

    def sum(self) -> Answer:
        """A sum of signed terms; of vectors, their sum."""
        with self:
            first = self._signed_term()
            while self.peek() in ("+", "-", "\\pm", "\\mp") and not isinstance(first, NamedSet):
                self.count_operation()
                sign = self.take().text
                if self.peek() == "\\ldots":
                    first = self._dotted(as_expr(first), "add")
                    continue
                term = self.term()
                if isinstance(first, (Group, MatrixOf)) and isinstance(term, (Group, MatrixOf)):
                    first = vector_sum(
                        first, vector_times(Num(Fraction(-1)), term) if sign == "-" else term
                    )
                    continue
                right = as_expr(term)
                left = as_expr(first)
                if sign == "-":
                    right = Call("neg", (right,))
                first = Scalar(Call("add" if sign in "+-" else sign[1:], (left, right)))
            return first

    def _dotted(self, before: Expr, operation: str) -> Scalar:
        """The sum or product of what is before dots, at which it is, and what is after them."""
        self.position += 1
        terms_after: list[Expr] = []
        while True:
            sign = self.take().text if self.peek() in ("+", "-") and operation == "add" else ""
            if operation == "mul":
                self.skip(*lexer.MULTIPLY)
            if not sign and (operation == "add" or (terms_after and not self._begins_factor())):
                break
            self.count_operation()
            expr = as_expr(self.term() if operation == "add" else self.factor())
            terms_after.append(Call("neg", (expr,)) if sign == "-" else expr)
        return Scalar(explained(operands(before, operation), terms_after, operation))

    def _signed_term(self) -> Answer:
        """A term with its signs."""
        if self.skip("+"):
            with self:
                return self._signed_term()
        if self.skip("-"):
            with self:
                signed = self._signed_term()
            if isinstance(signed, (Group, MatrixOf)):
                return vector_times(Num(Fraction(-1)), signed)
            inner = as_expr(signed)
            if isinstance(inner, Num):
                return Scalar(Num(-inner.value, inner.digits))
            return Scalar(Call("neg", (inner,)))
        if self.peek() in ("\\pm", "\\mp"):
            sign = self.take().text[1:]
            term = self.term()
            return Scalar(Call(sign, (Num(Fraction(0)), as_expr(term))))
        return self.term()

    def term(self) -> Answer:
        first = self.factor()
        while (product := self._next_factor(first)) is not None:
            self.count_operation()
            first = product
        return first

    def _next_factor(self, first: Answer) -> Answer | None:
        """`first` multiplied or divided by the next factor; None at the end of the term."""
        text = self.peek()
        if text == "\\ldots" or (text in lexer.MULTIPLY and self.peek(1) == "\\ldots"):
            self.skip(*lexer.MULTIPLY)
            is_factor = self.peek(1) not in ("", ",", ";", "+", "-", "=") and isinstance(
                first, Scalar
            )
            return self._dotted(as_expr(first), "mul") if is_factor else None
        if self.skip(*lexer.MULTIPLY):
            name = "pow" if text == "*" and self.skip("*") else "mul"
            if name == "mul" and self.peek() in ("(", "\\langle", "\\begin"):
                return self._times(first)
            return Scalar(Call(name, (as_expr(first), self._operand())))
        if self.skip(*lexer.DIVIDE):
            return Scalar(Call("div", (as_expr(first), self._operand())))
        if text in (":", "to") and isinstance(first, Scalar) and not self.in_set:
            items: list[Answer] = [first]
            while self.skip(":", "to"):
                items.append(Scalar(as_expr(self.factor())))
            return Group(":", tuple(items), ":")
        return self._plain_mixed(first) or (self._times(first) if self._begins_factor() else None)

    def _operand(self) -> Expr:
        if self.skip("-"):
            with self:
                return Call("neg", (self._operand(),))
        self.skip("+")
        return as_expr(self.factor())

    def _times(self, left: Answer) -> Answer:
        """A product without a sign; an integer before a fraction of numbers is a mixed number."""
        start = self.position
        right_side = self.factor()
        expr = as_expr(left)
        if isinstance(right_side, (Group, MatrixOf)):
            return vector_times(expr, right_side)
        right = as_expr(right_side)
        if (
            isinstance(expr, Num)
            and expr.digits is None
            and expr.value.denominator == 1
            and start > 0
        ):
            fraction = plain_fraction(right)
            adjacent = (
                self.tokens[start - 1].kind == "number" and self.tokens[start].text == "\\frac"
            )
            if fraction is not None and adjacent:
                return Scalar(Num(expr.value + fraction))
        return Scalar(Call("mul", (expr, right)))

    def _plain_mixed(self, left: Answer) -> Answer | None:
        """`3 1/2`, else None."""
        above = self.token()
        slash = self.peek(1)
        below = self.token(2)
        if (
            above is None
            or below is None
            or above.kind != "number"
            or slash != "/"
            or not above.space
        ):
            return None
        if not (
            isinstance(left, Scalar)
            and isinstance(left.expr, Num)
            and left.expr.value.denominator == 1
        ):
            return None
        fraction = plain_fraction(Call("div", (as_number(above), as_number(below))))
        if fraction is None or self.tokens[self.position - 1].kind != "number":
            return None
        self.position += 3
        return Scalar(Num(left.expr.value + fraction))

    def _begins_factor(self) -> bool:
        """Whether the token at the position begins a factor of a product without a sign."""
        token = self.token()
        if token is None:
            return False
        text = token.text
        if token.kind == "number":
            return self.tokens[self.position - 1].text in (")", "}", "]", "!")
        if token.kind == "word":
            if text.lower() in ("and", "or", "to"):
                return False
            return not token.prose or text in ("e", "i") or text in lexer.FUNCTIONS
        if token.kind == "sign":
            if text == "(" and self.peek(1) in lexer.MODULUS:
                return False
            if text == "[" and self.peek(1) in AFTER_INTERVAL:  # [2, 5[
                return False
            if text == "(" and self.peek(1) == "+":  # 7 (+1)
                return False
            return text in ("(", "{", "[") or (text == "|" and not self.in_bars)
        is_named = any(text[1:] in names for names in (lexer.CONSTANTS, GREEK, lexer.FUNCTIONS))
        return is_named or any(
            text in names
            for names in (lexer.FACTOR_COMMANDS, lexer.DROPPED, lexer.DECORATED, lexer.UNEVALUATED)
        )

    def factor(self) -> Answer:
        with self:
            base = self.base()
            while (postfixed := self._with_postfix(base)) is not None:
                self.count_operation()
                base = postfixed
            return base

    def _with_postfix(self, base: Answer) -> Answer | None:
        """The base with the next postfix operator; None where there is none.

        These are a power, a degree, a factorial, a percent sign or a prime."""
        text = self.peek()
        is_symbol = isinstance(base, Scalar) and isinstance(base.expr, Sym)
        if self._skip_power("\\prime") or (text == "'" and is_symbol):
            self.skip("'")
            symbol = as_expr(base)
            if not isinstance(symbol, Sym):
                raise Unsupported("a derivative")
            return Scalar(Sym(symbol.name + "'"))
        if self._skip_power("\\circ") or self.skip("\\degree"):
            return Scalar(Call("deg", (as_expr(base),)))
        if self.skip("^"):
            return Scalar(Call("pow", (as_expr(base), self._exponent())))
        of_number = isinstance(base, Scalar) and isinstance(base.expr, Num)  # 8!=40320, not x!=1
        token = self.token()
        is_sign = self.peek(1) != "=" or (of_number and token is not None and not token.space)
        if is_sign and self.skip("!"):
            name = "double factorial" if self.skip("!") else "factorial"
            if self.peek() == "!":
                raise NotMathematics("more than a double factorial")
            return Scalar(Call(name, (as_expr(base),)))
        if self.skip("%", "\\%"):
            if (
                isinstance(base, Scalar)
                and isinstance(base.expr, Call)
                and base.expr.name == "percent"
            ):
                raise NotMathematics("a percentage of a percentage")
            return Scalar(Call("percent", (as_expr(base),)))
        return None

    def _skip_power(self, mark: str) -> bool:
        """Steps over `^mark` or `^{mark}`, if it follows."""
        if self.peek() != "^":
            return False
        for texts in (["^", mark], ["^", "{", mark, "}"]):
            if [self.peek(ahead) for ahead in range(len(texts))] == texts:
                self.position += len(texts)
                return True
        return False

    def _exponent(self) -> Expr:
        """The exponent after `^`."""
        if self.peek() == "{":
            return self._braced()
        if self.skip("-"):
            with self:
                inner = self._exponent()
            return Num(-inner.value) if isinstance(inner, Num) else Call("neg", (inner,))
        self.skip("+")
        return as_expr(self.base())

    def _braced(self) -> Expr:
        self.expect("{")
        inner = self._over(self.sum())
        self.expect("}")
        return as_expr(inner)

    def _over(self, above: Answer) -> Answer:
        """`a \\over b` and `n \\choose k` after their first half."""
        for sign, name in (("\\over", "div"), ("\\choose", "binom")):
            if self.skip(sign):
                return Scalar(Call(name, (as_expr(above), as_expr(self.sum()))))
        return above

    def _argument(self) -> Expr:
        """The argument of a command such as \\frac: a group, or one digit, letter or command."""
        with self:
            if self.peek() == "{":
                return self._braced()
            token = self.token()
            if (
                token is not None
                and token.kind == "number"
                and len(token.text) > 1
                and token.text.isdigit()
            ):
                self.tokens[self.position : self.position + 1] = [
                    Token("number", digit, value=Fraction(int(digit))) for digit in token.text
                ]
            return as_expr(self.base())

    def _split_word(self, token: Token) -> None:
        self.tokens[self.position : self.position + 1] = [
            Token("word", letter) for letter in token.text
        ]

    def base(self) -> Answer:
        token = self.take()
        if token.kind == "number":
            return Scalar(as_number(token))
        if token.kind == "word":
            return self._word(token)
        return self.bracket(token) if token.kind == "sign" else self.command(token)

    def _word(self, token: Token) -> Answer:
        """A word as a function, a constant, a symbol, or the product of its letters."""
        text = token.text
        if text.lower() in ("infinity", "inf"):
            return Scalar(Call("inf"))
        if text == "sqrt":
            return Scalar(Call("sqrt", (self.function_argument(),)))
        if text in lexer.FUNCTIONS:
            return self.function(text)
        if text in lexer.CONSTANTS:
            return Scalar(Call(lexer.CONSTANTS[text]))
        if len(text) == 1 or text in GREEK:
            return Scalar(self._symbol(text))
        following = self.token()
        is_apart = (
            token.space or (following is not None and following.space)
        ) and self.peek() != "^"
        if token.prose or len(text) > 3 or (is_apart and text.lower() in lexer.PLAIN_WORDS):
            raise NotMathematics(f"the word {text!r}")
        self.position -= 1
        self._split_word(token)
        return self.factor()

    def _symbol(self, name: str) -> Sym:
        """A symbol with its subscript; `P(0)` is P_0, never a product with 0."""
        if self.peek() == "(" and self.peek(1) == "0" and self.peek(2) == ")":
            self.position += 3
            return Sym(f"{name}_0")
        if self.peek() != "_":
            return Sym(name)
        self.position += 1
        parts = []
        depth = int(self.skip("{"))
        if not depth:
            return Sym(f"{name}_{self.take().text}")
        while depth:
            parts.append(self.take().text)
            depth += (parts[-1] == "{") - (parts[-1] == "}")
        return Sym(f"{name}_{''.join(parts[:-1])}")


def as_number(token: Token) -> Num:
    if token.value is None:
        raise NotMathematics(f"{token.text!r} is not a number")
    return Num(token.value, token.digits)


def as_expr(answer: Answer) -> Expr:
    if isinstance(answer, Scalar) and answer.unit is None:
        return answer.expr
    if isinstance(answer, Scalar) and answer.otherwise is not None:
        return answer.otherwise.expr
    raise NotMathematics("a list, set or relation inside arithmetic")


def vector_times(factor: Expr, vector: Group | MatrixOf) -> Group | MatrixOf:
    """A matrix times an expression, or a point times a number or parameter.

    Examples are `\\frac{1}{3}(7, 2)` and `t(1, 2)`."""
    if isinstance(vector, MatrixOf):
        return MatrixOf(
            tuple(tuple(Call("mul", (factor, entry)) for entry in row) for row in vector.rows)
        )
    if vector.opening + vector.closing != "()" or not symbols(factor) <= PARAMETERS:
        raise NotMathematics("a factor of other than a point")
    return Group(
        "(",
        tuple(Scalar(Call("mul", (factor, as_expr(coordinate)))) for coordinate in vector.items),
        ")",
        computed=True,
    )


def vector_sum(first: Group | MatrixOf, second: Group | MatrixOf) -> Group | MatrixOf:
    if not (isinstance(first, Group) and isinstance(second, Group)) or len(first.items) != len(
        second.items
    ):
        raise NotMathematics("a sum of different things")
    if {first.opening + first.closing, second.opening + second.closing} != {"()"}:
        raise NotMathematics("a sum of other than points")
    terms = zip(map(as_expr, first.items), map(as_expr, second.items), strict=True)
    return Group("(", tuple(Scalar(Call("add", pair)) for pair in terms), ")", computed=True)


def direction(angle: Expr) -> Expr:
    """The complex number of modulus 1 with this angle: `cis`."""
    imaginary = Call("mul", (Call("i"), Call("sin", (angle,))))
    return Call("add", (Call("cos", (angle,)), imaginary))


def plain_fraction(expr: Expr) -> Fraction | None:
    """The value of a proper fraction of two literal numbers, else None."""
    if not (isinstance(expr, Call) and expr.name == "div"):
        return None
    above, below = expr.args
    if not (isinstance(above, Num) and isinstance(below, Num) and above.digits is None):
        return None
    return above.value / below.value if 0 < above.value < below.value else None
