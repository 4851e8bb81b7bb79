"""The base of the parser: the position among the tokens, the limits of size, and conversions of parsed parts."""

from __future__ import annotations

from fractions import Fraction

from rlmath.rewards.answers.lexer import Token
from rlmath.rewards.answers.normalize import NotMathematics, Unsupported
from rlmath.rewards.answers.syntax_tree import Answer, Call, Expr, MatrixOf, Num, Scalar, Sym

MAX_DEPTH = 40
"""Deepest nesting of brackets, fractions and powers."""

MAX_CHAIN = 100
"""Most terms of one sum, factors of one product and postfix operators of one base."""

MAX_OPERATIONS = 250
"""Most operations of all chains together, which bounds the depth of the syntax tree."""

MAX_STEPS = 20_000
"""Most tokens that are consumed for one answer, some more than once."""


class ParserBase:
    """Tokens, a position among them, and the nesting depth; `with parser:` nests one level deeper."""

    def __init__(self, tokens: list[Token], outer: ParserBase | None = None) -> None:
        """With `outer` it parses a part of that one's tokens, and counts against the same limits."""
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
        token = self.token(ahead)
        return token.text if token else ""

    def take(self) -> Token:
        token = self.token()
        if token is None:
            raise NotMathematics("it ends too early")
        self.position += 1
        self._steps_left[0] -= 1
        if self._steps_left[0] < 0:
            raise NotMathematics(f"more than {MAX_STEPS} steps to parse it")
        return token

    def count_operation(self, length: int) -> int:
        """Counts an operation in a chain of `length` operations; returns its new length."""
        self._operations_left[0] -= 1
        if length > MAX_CHAIN or self._operations_left[0] < 0:
            raise NotMathematics("too many operations in one chain")
        return length + 1

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


def as_number(token: Token) -> Num:
    if token.value is None:
        raise NotMathematics(f"{token.text!r} is not a number")
    return Num(token.value, token.digits, token.open_ended)


def as_expr(answer: Answer) -> Expr:
    if isinstance(answer, Scalar) and answer.unit is None:
        return answer.expr
    if isinstance(answer, Scalar) and answer.otherwise is not None:
        return answer.otherwise.expr
    raise NotMathematics("a list, set or relation inside arithmetic")


def plain_fraction(expr: Expr) -> Fraction | None:
    """The value of a proper fraction of two literal numbers, else None."""
    if not (isinstance(expr, Call) and expr.name == "div"):
        return None
    above, below = expr.args
    if not (isinstance(above, Num) and isinstance(below, Num) and above.digits is None):
        return None
    return above.value / below.value if 0 < above.value < below.value else None


def as_matrix(rows: list[tuple[Expr, ...]]) -> MatrixOf:
    if not rows or len({len(row) for row in rows}) != 1:
        raise NotMathematics("a matrix with rows of unequal length")
    return MatrixOf(tuple(rows))


def primed(base: Answer) -> Sym:
    expr = as_expr(base)
    if not isinstance(expr, Sym):
        raise Unsupported("a derivative")
    return Sym(expr.name + "'")
