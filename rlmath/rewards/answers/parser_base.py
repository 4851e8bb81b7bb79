"""Steps through tokens, and what every stage of the grammar needs."""

from __future__ import annotations

from fractions import Fraction

from rlmath.rewards.answers.lexer import Token
from rlmath.rewards.answers.normalize import NotMathematics, Unsupported
from rlmath.rewards.answers.syntax_tree import Answer, Call, Expr, MatrixOf, Num, Scalar, Sym

MAX_DEPTH = 40
"""Deepest nesting of brackets, fractions and powers."""

MAX_CHAIN = 100
"""Most terms of one sum, factors of one product and marks behind one base."""

MAX_OPERATIONS = 250
"""Most operations of all chains together, so that no tree is too deep to be walked."""

MAX_STEPS = 20_000
"""Most tokens that are taken, some more than once, until an answer is read."""


class ParserBase:
    """Tokens, a position among them, and how deep the parser is."""

    def __init__(self, tokens: list[Token], outer: ParserBase | None = None) -> None:
        """With `outer` it reads a part of that one's tokens: depth, and what may still be read, go on."""
        self.tokens = tokens
        self.left = outer.left if outer else [MAX_STEPS]
        self.operations = outer.operations if outer else [MAX_OPERATIONS]
        self.in_set = 0
        self.position = 0
        self.depth = outer.depth if outer else 0
        self.in_bars = 0

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
        self.left[0] -= 1
        if self.left[0] < 0:
            raise NotMathematics(f"more than {MAX_STEPS} steps to read it")
        return token

    def longer(self, length: int) -> int:
        """One more operation in a chain of so many."""
        self.operations[0] -= 1
        if length > MAX_CHAIN or self.operations[0] < 0:
            raise NotMathematics("too many operations in one chain")
        return length + 1

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


def as_number(token: Token) -> Num:
    if token.value is None:
        raise NotMathematics(f"{token.text!r} is no number")
    return Num(token.value, token.digits, token.open_ended)


def as_expr(answer: Answer) -> Expr:
    if isinstance(answer, Scalar) and answer.unit is None:
        return answer.expr
    if isinstance(answer, Scalar) and answer.otherwise is not None:
        return answer.otherwise.expr
    raise NotMathematics("a list, set or relation inside arithmetic")


def plain_fraction(expr: Expr) -> Fraction | None:
    if not (isinstance(expr, Call) and expr.name == "div"):
        return None
    above, below = expr.args
    if (
        isinstance(above, Num)
        and isinstance(below, Num)
        and above.digits is None
        and 0 < above.value < below.value
    ):
        return above.value / below.value
    return None


def as_matrix(rows: list[tuple[Expr, ...]]) -> MatrixOf:
    if not rows or len({len(row) for row in rows}) != 1:
        raise NotMathematics("a matrix with rows of unequal length")
    return MatrixOf(tuple(rows))


def primed(base: Answer) -> Sym:
    expr = as_expr(base)
    if not isinstance(expr, Sym):
        raise Unsupported("a derivative")
    return Sym(expr.name + "'")
