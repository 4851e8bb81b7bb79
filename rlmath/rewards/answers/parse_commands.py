"""Brackets, commands, environments and functions."""

from __future__ import annotations

from fractions import Fraction

from rlmath.rewards.answers.lexer import Token
from rlmath.rewards.answers.normalize import GREEK, NotMathematics, Unevaluated, Unsupported
from rlmath.rewards.answers.parse_arithmetic import Arithmetic
from rlmath.rewards.answers.parser_base import as_expr, as_matrix
from rlmath.rewards.answers.syntax_tree import (
    Answer,
    Call,
    Described,
    Expr,
    Group,
    Known,
    Listing,
    MatrixOf,
    Name,
    Num,
    Piecewise,
    Relation,
    Scalar,
    SetOf,
    Sym,
)
from rlmath.rewards.answers.vocabulary import (
    ALIASES,
    CANNOT,
    CLOSING,
    CONSTANTS,
    DECORATED,
    DROPPED,
    FUNCTIONS,
    UNEVALUATED,
)


class Commands(Arithmetic):
    """Brackets, LaTeX commands, environments and functions."""

    def bracket(self, token: Token) -> Answer:
        text = token.text
        if text == "|":
            self.in_bars += 1
            inner = as_expr(self.sum())
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
        closings = CLOSING[opening]
        if opening == "[" and self.peek() == "[":
            return self._nested_matrix()
        inner = self.listing(frozenset(closings))
        closing = self.take().text
        if closing not in closings:
            raise NotMathematics("a bracket is not closed")
        self.in_bars = bars
        if isinstance(inner, Listing):
            return Group(opening, inner.items, closing)
        if opening + closing == "()" or (opening + closing == "[]" and isinstance(inner, (Scalar, MatrixOf))):
            return inner
        raise NotMathematics("one item in half-open brackets")

    def _nested_matrix(self) -> Answer:
        rows = []
        while self.skip("["):
            row = self.listing(frozenset("]"))
            self.expect("]")
            items = row.items if isinstance(row, Listing) else (row,)
            rows.append(tuple(as_expr(item) for item in items))
            self.skip(",")
        self.expect("]")
        return as_matrix(rows)

    def command(self, token: Token) -> Answer:
        text = token.text
        name = text[1:]
        if name in CONSTANTS:
            return Scalar(Call(CONSTANTS[name]))
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK or text in ("\\varphi", "\\varepsilon", "\\vartheta", "\\varrho"):
            return Scalar(self._symbol(name.removeprefix("var")))
        handler = _HANDLERS.get(text)
        if handler is not None:
            return handler(self)
        if text in DROPPED:
            argument = self._argument()
            return Scalar(Sym("vector i") if argument == Call("i") else argument)
        if text in DECORATED:
            argument = self._argument()
            if not isinstance(argument, Sym):
                raise Unsupported(text)
            return Scalar(self._symbol(f"{DECORATED[text]} {argument.name}"))
        if text in UNEVALUATED:
            raise Unevaluated(text)
        if text in CANNOT:
            raise Unsupported(text)
        raise NotMathematics(f"the command {text}")

    def _frac(self) -> Answer:
        above, below = self._argument(), self._argument()
        if (
            above == Sym("d")
            and isinstance(below, Call)
            and below.name == "mul"
            and below.args[0] == Sym("d")
        ):
            raise Unevaluated("a derivative")
        return Scalar(Call("div", (above, below)))

    def _sqrt(self) -> Answer:
        if self.skip("["):
            index = as_expr(self.sum())
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
        inner = as_expr(self.sum())
        self.expect(closing)
        return Scalar(Call(name, (inner,)))

    def _set(self) -> Answer:
        if self.skip("\\}"):
            return Known("empty")
        self.in_bars += 1  # a bar is no absolute value here, but "such that", and a colon no ratio
        self.in_set += 1
        inner = self.listing(frozenset(("\\}", "\\mid", ":", "|")))
        self.in_bars -= 1
        self.in_set -= 1
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
        if kind == "vmatrix":
            raise Unevaluated("a determinant")
        if kind not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"):
            raise Unsupported(f"\\begin{{{kind}}}")
        if kind == "array" and self.skip("{"):
            while self.take().text != "}":
                pass
        rows: list[tuple[Expr, ...]] = []
        row: list[Expr] = []
        while True:
            row.append(as_expr(self.sum()))
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
        return as_matrix(rows)

    def _cases(self) -> Answer:
        """A system of equations, or a function by cases."""
        equations: list[Answer] = []
        branches: list[tuple[Expr, str]] = []
        ends = frozenset(("\\\\", "\\end", "&"))
        while self.peek() != "\\end":
            row = self.item(ends)
            self.skip(",", ";")
            if self.skip("&"):
                branches.append((as_expr(row), self._condition()))
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
            token = self.take()
            text = str(token.value) if token.value is not None else token.text
            if text.lower() not in ("if", "for", "when", "is", ",", ".", "\\text"):
                words.append({"\\leq": "\\le", "\\geq": "\\ge"}.get(text, text))
        return "".join(words)

    def function(self, name: str) -> Answer:
        name = ALIASES.get(name, name)
        base: Expr | None = None
        power: Expr | None = None
        if self.skip("_"):
            base = self._argument()
        if self.peek() == "^" and not self._degree_follows():
            self.position += 1
            power = self._exponent()
        if name == "det":
            raise Unevaluated("a determinant")
        if name in ("min", "max", "gcd", "lcm"):
            return Scalar(Call(name, self._arguments()))
        argument = self.function_argument()
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
        return tuple(as_expr(item) for item in items)

    def function_argument(self) -> Expr:
        """What a function is applied to: a group alone, else a product up to a sign or the next function."""
        with self:
            if self.peek() in ("(", "{", "[", "|"):
                return as_expr(self.factor())
            if self.skip("-"):
                return Call("neg", (self.function_argument(),))
            result = as_expr(self.factor())
            while self._begins_factor() and not self._function_begins() and self.peek() not in ("(", "["):
                result = Call("mul", (result, as_expr(self.factor())))
            if self.peek() == "/" and self._only_number_follows():
                self.position += 1
                result = Call("div", (result, as_expr(self.factor())))
            return result

    def _only_number_follows(self) -> bool:
        token = self.token(1)
        return token is not None and token.kind == "number"

    def _function_begins(self) -> bool:
        return self.peek().removeprefix("\\") in FUNCTIONS


_HANDLERS = {
    "\\frac": Commands._frac,
    "\\sqrt": Commands._sqrt,
    "\\binom": Commands._binom,
    "\\tbinom": Commands._binom,
    "\\dbinom": Commands._binom,
    "\\lfloor": Commands._floor,
    "\\lceil": Commands._ceil,
    "\\lvert": Commands._bars,
    "\\{": Commands._set,
    "\\mathbb": Commands._known_set,
    "\\R": Commands._reals,
    "\\emptyset": Commands._empty,
    "\\varnothing": Commands._empty,
    "\\langle": Commands._angle_group,
    "\\begin": Commands._environment,
    "\\hbar": Commands._hbar,
    "\\ell": Commands._ell,
}


def _set_builder(element: Answer, condition: Answer) -> Answer:
    """`{x | condition}` of real numbers."""
    if isinstance(element, Relation):
        if element.ops != ("in",) or element.sides[1] != Known("R"):
            raise NotMathematics("a set of other than real numbers")
        element = element.sides[0]
    name = element.expr if isinstance(element, (Name, Scalar)) else None
    if isinstance(name, Sym) and isinstance(condition, (Relation, Listing)):
        return Described(name.name, condition)
    raise NotMathematics("a set described by a condition")
