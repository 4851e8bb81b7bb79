"""Parses brackets, LaTeX commands, environments and functions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from rlmath.answers import lexer
from rlmath.answers.families import repeated
from rlmath.answers.lexer import Token
from rlmath.answers.normalize import GREEK, NotMathematics, Unevaluated, Unsupported
from rlmath.answers.parse_arithmetic import Arithmetic, as_expr, direction
from rlmath.answers.syntax_tree import (
    Answer,
    Call,
    Expr,
    Group,
    Listing,
    MatrixOf,
    Name,
    NamedSet,
    Num,
    Piecewise,
    Relation,
    Scalar,
    SetBuilder,
    SetOf,
    Sym,
)

SYSTEMS = ("cases", "aligned", "align", "alignedat", "gathered", "gather", "split", "eqnarray")
"""Environments whose rows are equations."""


class Commands(Arithmetic):
    """Brackets, LaTeX commands, environments and functions."""

    def bracket(self, token: Token) -> Answer:
        """The rest of what an opening bracket or bar begins."""
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
            return SetOf(inner.items) if isinstance(inner, Listing) else inner
        if text in ("(", "[", "]"):
            return self._group(text)
        raise NotMathematics(f"{text!r} is not expected")

    def _group(self, opening: str) -> Answer:
        """The rest of a group in round or square brackets, or of an interval."""
        bars = self.in_bars
        self.in_bars = 0
        closings = lexer.CLOSING[opening]
        if opening == "[" and self.peek() == "[":
            return self._nested_matrix()
        inner = self.listing(frozenset(closings))
        closing = self.take().text
        if closing not in closings:
            raise NotMathematics("a bracket is not closed")
        self.in_bars = bars
        if isinstance(inner, Listing):
            return Group(opening, inner.items, closing)
        if opening + closing == "()" or (
            opening + closing == "[]" and isinstance(inner, (Scalar, MatrixOf))
        ):
            return inner
        raise NotMathematics("one item in half-open brackets")

    def _nested_matrix(self) -> Answer:
        """The rest of a matrix such as `[[1, 2], [3, 4]]`."""
        rows = []
        while self.skip("["):
            row = self.listing(frozenset("]"))
            self.expect("]")
            rows.append(tuple(as_expr(entry) for entry in _items(row)))
            self.skip(",")
        self.expect("]")
        return _as_matrix(rows)

    def command(self, token: Token) -> Answer:
        """The rest of what a LaTeX command begins."""
        text = token.text
        name = text[1:]
        if name in lexer.CONSTANTS:
            return Scalar(Call(lexer.CONSTANTS[name]))
        if name in lexer.FUNCTIONS:
            return self.function(name)
        if name in GREEK or text in ("\\varphi", "\\varepsilon", "\\vartheta", "\\varrho"):
            return Scalar(self._symbol(name.removeprefix("var")))
        handler = _HANDLERS.get(text)
        if handler is not None:
            return handler(self)
        if text in lexer.DROPPED:
            argument = self._argument()
            return Scalar(Sym("vector i") if argument == Call("i") else argument)
        if text in lexer.DECORATED:
            argument = self._argument()
            if not isinstance(argument, Sym):
                raise Unsupported(text)
            return Scalar(self._symbol(f"{lexer.DECORATED[text]} {argument.name}"))
        if text in lexer.UNEVALUATED:
            raise Unevaluated(text)
        if text in lexer.UNSUPPORTED:
            raise Unsupported(text)
        raise NotMathematics(f"the command {text}")

    def _frac(self) -> Answer:
        above = self._argument()
        below = self._argument()
        first = below.args[0] if isinstance(below, Call) and below.name == "mul" else None
        if above == first == Sym("d"):
            raise Unevaluated("a derivative")
        return Scalar(Call("div", (above, below)))

    def _sqrt(self) -> Answer:
        if self.skip("["):
            index = as_expr(self.sum())
            self.expect("]")
            return Scalar(Call("root", (self._argument(), index)))
        return Scalar(Call("sqrt", (self._argument(),)))

    def _repeated(self, name: str) -> Answer:
        """The rest of `\\sum_{k=1}^n k`.

        Raises Unevaluated for sums of other forms."""
        try:
            letter, low, high = self._bounds()
            body = as_expr(self.term())
        except NotMathematics as error:
            raise Unevaluated(f"\\{name}") from error
        return Scalar(repeated(name, letter, low, high=high, body=body))

    def _bounds(self) -> tuple[str, Expr, Expr]:
        """Steps over (index, its first value, its last value) of a sum."""
        high = self._exponent() if self.skip("^") else None
        self.expect("_", "{")
        letter = self.take()
        relation = self.take().text
        if letter.kind != "word" or len(letter.text) != 1:
            raise NotMathematics("an index of other than one letter")
        low = as_expr(self.sum())
        self.expect("}")
        if self.skip("^"):
            high = self._exponent()
        if relation != "=" or high is None:
            raise NotMathematics("bounds of another form")
        return letter.text, low, high

    def _between(self, name: str, closing: str) -> Answer:
        inner = as_expr(self.sum())
        self.expect(closing)
        return Scalar(Call(name, (inner,)))

    def _set(self) -> Answer:
        """The rest of a set in braces, or of a system of equations."""
        if self.skip("\\}"):
            return NamedSet("empty")
        if self.peek() == "\\begin" and self.peek(2) in ("array", *SYSTEMS):
            self.expect("\\begin")  # behind a brace that nothing closes
            inner = self._environment()
            if self.skip("."):
                self.skip("\\}")
            return inner
        self.in_bars += 1  # a bar or colon means "such that" here, not an absolute value or a ratio
        self.in_set += 1
        inner = self.listing(frozenset(("\\}", "\\mid", ":", "|")))
        self.in_bars -= 1
        self.in_set -= 1
        if self.skip("\\mid", ":", "|"):
            such_that = self.listing(frozenset(("\\}",)))
            self.expect("\\}")
            return _set_builder(inner, such_that)
        self.expect("\\}")
        return SetOf(_items(inner))

    def _named_set(self) -> Answer:
        """The rest of `\\mathbb{R}`, with its part such as `^+`."""
        braced = self.skip("{")
        name = self.take().text
        if braced:
            self.expect("}")
        if name not in ("R", "Z", "N", "Q", "C"):
            raise Unsupported("\\mathbb")
        return NamedSet(name + self._part_of_set(name))

    def _part_of_set(self, name: str) -> str:
        """Steps over `^+`, `_{\\ge 0}` and the like after a named set."""
        if self.peek() not in ("^", "_"):
            return ""
        texts = [self.take().text]
        if self.skip("{"):
            while self.peek() != "}":
                texts.append({"\\geq": "\\ge", "\\geqslant": "\\ge"}.get(self.peek(), self.peek()))
                self.take()
            self.expect("}")
        else:
            texts.append(self.take().text)
        part = "".join(texts[1:])
        kind = {"+": "+", ">0": "+", "\\ge0": "0", "\\ge1": "+", "*": "+", "0": "0"}.get(part)
        if (
            kind is None
            or (name != "Z" and name != "R")
            or (name == "R" and part in ("*", "0", "\\ge1"))
        ):
            raise Unsupported("a part of a named set")
        return kind

    def _angle_group(self) -> Answer:
        inner = self.listing(frozenset(("\\rangle",)))
        self.expect("\\rangle")
        return Group("(", _items(inner), ")")

    def _environment(self) -> Answer:
        """The rest of an environment: a matrix, a system, or a function by cases."""
        self.expect("{")
        kind = self.take().text
        self.skip("*")
        self.expect("}")
        if kind in SYSTEMS or (kind == "array" and self._has_relation()):
            return self._system(kind)
        if kind == "vmatrix":
            raise Unevaluated("a determinant")
        if kind not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"):
            raise Unsupported(f"\\begin{{{kind}}}")
        if kind == "array" and self.skip("{"):
            while self.take().text != "}":
                pass
        rows: list[tuple[Expr, ...]] = []
        row: list[Expr] = []
        token = ""
        while token != "\\end":
            row.append(as_expr(self.sum()))
            token = self.take().text
            if token == "&":
                continue
            if token not in ("\\\\", "\\end"):
                raise NotMathematics("a matrix with malformed rows")
            rows.append(tuple(row))
            row = []
            if token == "\\\\" and self.skip("\\end"):
                break
        self.expect("{", kind)
        self.skip("*")
        self.expect("}")
        return _as_matrix(rows)

    def _has_relation(self) -> bool:
        for token in self.tokens[self.position :]:
            if token.text in lexer.RELATIONS:
                return True
            if token.text == "\\end":
                return False
        return False

    def _system(self, kind: str) -> Answer:
        """A system of equations, or a piecewise function."""
        if self.skip("{"):  # the columns of an array
            while self.take().text != "}":
                pass
        equations: list[list[Token]] = []
        branches: list[tuple[Expr, str]] = []
        for cells in self._rows(kind):
            conditional = len(cells) == 2 and cells[1] and cells[1][0].text not in lexer.RELATIONS
            if conditional and kind in ("cases", "array"):
                branches.append((as_expr(self.part(_without_end(cells[0]))), _condition(cells[1])))
                continue
            row = _without_end([token for cell in cells for token in cell])
            if row:
                equations.append(row)
        if branches and not equations:
            return Piecewise(tuple(branches))
        if not equations or branches:
            raise Unsupported("cases of both kinds")
        parts = tuple(self.part(row) for row in equations)
        return parts[0] if len(parts) == 1 else Listing(parts, "and")

    def _rows(self, kind: str) -> list[list[list[Token]]]:
        """Steps over the rows of an environment: per row its cells, per cell its tokens."""
        rows: list[list[list[Token]]] = [[[]]]
        depth = 0
        while depth or self.peek() != "\\end":
            token = self.take()
            depth += {"\\begin": 1, "\\end": -1}.get(token.text, 0)
            if depth or token.text not in ("&", "\\\\"):
                rows[-1][-1].append(token)
            elif token.text == "&":
                rows[-1].append([])
            else:
                rows.append([[]])
        self.expect("\\end", "{", kind)
        self.skip("*")
        self.expect("}")
        return [cells for cells in rows if any(cells)]

    def function(self, name: str) -> Answer:
        """The rest of a function after its name: base, power and argument."""
        name = lexer.ALIASES.get(name, name)
        base = self._argument() if self.skip("_") else None
        power = self._exponent() if not self._skip_power("\\circ") and self.skip("^") else None
        if name == "det":
            raise Unevaluated("a determinant")
        if name in ("min", "max", "gcd", "lcm"):
            return Scalar(Call(name, self._arguments()))
        argument = self.function_argument()
        if name == "cis" and base is None and power is None:
            return Scalar(direction(argument))
        if name == "log" and base is not None:
            call = Call("logbase", (argument, base))
        elif base is not None:
            raise Unsupported(f"{name} with a subscript")
        elif power == Num(Fraction(-1)) and name in ("sin", "cos", "tan"):
            return Scalar(Call("arc" + name, (argument,)))
        else:
            call = Call(name, (argument,))
        return Scalar(call if power is None else Call("pow", (call, power)))

    def _arguments(self) -> tuple[Expr, ...]:
        if not self.skip("(", "\\{"):
            raise Unsupported("a function without brackets")
        inner = self.listing(frozenset((")", "\\}")))
        if not self.skip(")", "\\}"):
            raise NotMathematics("a bracket is not closed")
        return tuple(as_expr(argument) for argument in _items(inner))

    def function_argument(self) -> Expr:
        """The argument of a function: a group, else a product up to a sign or the next function."""
        with self:
            if self.peek() in ("(", "{", "[", "|"):
                return as_expr(self.factor())
            if self.skip("-"):
                return Call("neg", (self.function_argument(),))
            argument = as_expr(self.factor())
            while self._begins_factor() and self.peek() not in ("(", "["):
                if self.peek().removeprefix("\\") in lexer.FUNCTIONS:
                    break
                argument = Call("mul", (argument, as_expr(self.factor())))
            divisor = self.token(1)
            if self.peek() == "/" and divisor is not None and divisor.kind == "number":
                self.position += 1
                argument = Call("div", (argument, as_expr(self.factor())))
            return argument


_HANDLERS: dict[str, Callable[[Commands], Answer]] = {
    "\\frac": Commands._frac,
    "\\sqrt": Commands._sqrt,
    "\\sum": lambda parser: parser._repeated("sum"),
    "\\prod": lambda parser: parser._repeated("prod"),
    "\\binom": lambda parser: Scalar(Call("binom", (parser._argument(), parser._argument()))),
    "\\tbinom": lambda parser: Scalar(Call("binom", (parser._argument(), parser._argument()))),
    "\\dbinom": lambda parser: Scalar(Call("binom", (parser._argument(), parser._argument()))),
    "\\lfloor": lambda parser: parser._between("floor", "\\rfloor"),
    "\\lceil": lambda parser: parser._between("ceil", "\\rceil"),
    "\\lvert": lambda parser: parser._between("abs", "\\rvert"),
    "\\{": Commands._set,
    "\\mathbb": Commands._named_set,
    "\\R": lambda _: NamedSet("R"),
    "\\emptyset": lambda _: NamedSet("empty"),
    "\\varnothing": lambda _: NamedSet("empty"),
    "\\langle": Commands._angle_group,
    "\\begin": Commands._environment,
    "\\hbar": lambda parser: Scalar(parser._symbol("hbar")),
    "\\ell": lambda parser: Scalar(parser._symbol("l")),
}


def _without_end(row: list[Token]) -> list[Token]:
    """A row without the comma or "and" at its end."""
    size = len(row)
    while size and row[size - 1].text.lower() in (",", ";", ".", "and"):
        size -= 1
    return row[:size]


def _condition(cell: list[Token]) -> str:
    """The condition of a case, without filler words."""
    words = []
    for token in cell:
        text = str(token.value) if token.value is not None else token.text
        text = "otherwise" if text.lower() == "else" else text
        if text.lower() not in ("if", "for", "when", "is", ",", ".", "\\text"):
            words.append({"\\leq": "\\le", "\\geq": "\\ge"}.get(text, text))
    return " ".join(words)


def _as_matrix(rows: list[tuple[Expr, ...]]) -> MatrixOf:
    if not rows or len({len(row) for row in rows}) != 1:
        raise NotMathematics("a matrix with rows of unequal length")
    return MatrixOf(tuple(rows))


def _items(answer: Answer) -> tuple[Answer, ...]:
    return answer.items if isinstance(answer, Listing) else (answer,)


def _set_builder(element: Answer, condition: Answer) -> Answer:
    """`{x | condition}` of real numbers."""
    whole = False
    if isinstance(element, Relation):
        if element.ops != ("in",) or element.sides[1] not in (NamedSet("R"), NamedSet("Z")):
            raise NotMathematics("a set of other than real or whole numbers")
        whole = element.sides[1] == NamedSet("Z")
        element = element.sides[0]
    name = element.expr if isinstance(element, (Name, Scalar)) else None
    if (
        isinstance(condition, Relation)
        and condition.ops == ("in",)
        and isinstance(element, (Group, Scalar))
    ):
        return Listing((element, condition), ",")  # {5k + 2 | k in Z}
    if isinstance(name, Sym) and isinstance(condition, (Relation, Listing)):
        return SetBuilder(name.name, condition, whole)
    raise NotMathematics("a set described by a condition")
