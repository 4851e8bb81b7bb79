"""The grammar of answers: tokens become our own syntax tree, and only that is ever evaluated.

    answer     := item (("," | ";" | and | or) item)*
    item       := side (relation side)*            x = 5, 1 < x <= 2, x in [1, 2]
    side       := sum ((union | intersection | without) sum)*
    sum        := term (("+" | "-" | plus-minus) term)*
    term       := factor (("*" | "/" | nothing) factor)*
    factor     := base ("^" ... | "!" | "%" | degree)*

Each rule is a method: lists to sets are here, sums to bases in `parse_arithmetic`, brackets, commands and functions in
`parse_commands`. Depth and length are bounded, so that the time of parsing is linear in the text.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from rlmath.rewards.answers.evaluate import mentions, symbols
from rlmath.rewards.answers.lexer import AS_WRITTEN, Reading, Token, tokenize
from rlmath.rewards.answers.normalize import GREEK, NotMathematics, Unsupported
from rlmath.rewards.answers.parse_arithmetic import as_expr
from rlmath.rewards.answers.parse_commands import Commands
from rlmath.rewards.answers.syntax_tree import (
    Answer,
    Call,
    Expr,
    Listing,
    Name,
    Num,
    Relation,
    Scalar,
    SetOperation,
)
from rlmath.rewards.answers.units import DEGREE, PARTS_OF_DEGREE, Unit, read_unit
from rlmath.rewards.answers.vocabulary import CURRENCIES, FUNCTIONS, PLAIN_WORDS, RELATIONS, SET_OPERATIONS


def parse_answer(text: str, reading: Reading = AS_WRITTEN) -> Answer:
    """The syntax tree of an answer.

    >>> parse_answer("(1, 2]").closing
    ']'

    Raises NotMathematics or Unsupported.
    """
    tokens = tokenize(text, reading)
    while len(tokens) > 1 and tokens[-1].text in (".", ",", ";"):
        tokens.pop()
    if not tokens:
        raise NotMathematics("no tokens")
    parser = _Parser(tokens)
    answer = parser.listing(frozenset())
    if parser.position < len(parser.tokens):
        raise NotMathematics(f"{parser.peek()!r} is not expected")
    return answer


class _Parser(Commands):
    """Lists, items, units, relations and sets."""

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
        """Steps over the separator of two items: a comma, "and", "or", or a comma and one of them."""
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
        left = len(self.tokens) - end  # counted from the end, because parsing may split tokens
        try:
            whole = self.relation()
            if len(self.tokens) - self.position != left:
                raise NotMathematics(f"{self.peek()!r} is not expected")
        except (NotMathematics, Unsupported):
            if bare is None:
                raise
            self.position = len(self.tokens) - left
            return bare
        if bare is not None and isinstance(whole, Scalar) and not mentions(bare.expr, FUNCTIONS):
            return Scalar(bare.expr, bare.unit, whole)
        return whole

    def _item_end(self, ends: frozenset[str]) -> int:
        """The end of the item at this position: before the next separator outside brackets, or the group's end."""
        depth = 0
        separators = (",", ";", "\\land", "\\lor", "and", "or", *ends)
        for index in range(self.position, len(self.tokens)):
            text = self.tokens[index].text
            if depth == 0 and (text in separators or text.lower() in ("and", "or")):
                return index
            if text in ("(", "[", "{", "\\{", "\\langle", "\\begin", "\\lfloor", "\\lceil"):
                depth += 1
            elif text in (")", "]", "}", "\\}", "\\rangle", "\\end", "\\rfloor", "\\rceil"):
                depth = max(0, depth - 1)
        return len(self.tokens)

    def _with_unit(self, start: int, end: int) -> Scalar | None:
        """The item as a number with a unit or a currency sign, else None."""
        tokens = self.tokens[start:end]
        if len(tokens) > 1 and tokens[0].text == "-" and tokens[1].text in CURRENCIES:
            amount = self._money(start + 1, end)
            return Scalar(Call("neg", (amount.expr,)), amount.unit) if amount else None
        if tokens and tokens[0].text in CURRENCIES:
            return self._money(start, end)
        for cut in range(max(1, len(tokens) - 8), len(tokens)):
            first = tokens[cut]
            glued = len(first.text) == 1 and not (first.space or first.prose)
            if first.text not in ("%", "^", "/") and (first.kind in ("number", "sign") or glued):
                continue
            unit = read_unit(tokens[cut:])
            if unit is None:
                continue
            behind_number = tokens[cut - 1].kind == "number" and cut == 1
            if len(first.text) == 1 and first.text.isalpha() and not (first.prose or behind_number):
                continue
            inner = self._constant(start, start + cut)
            if inner is not None and (first.prose or not symbols(inner)):
                return _quantity(inner, unit)
        return self._composite(start, end)

    def _money(self, start: int, end: int) -> Scalar | None:
        """An amount after a currency sign, with an optional multiplier or noun: `\\$1.2 million`."""
        currency = read_unit([self.tokens[start]])
        assert currency is not None
        inner = self._constant(start + 1, end)
        if inner is not None:
            return Scalar(inner, currency)
        amount = self._with_unit(start + 1, end)
        if amount is None:
            return None
        unit = amount.unit or Unit()
        if unit.dimensions not in ((), currency.dimensions):
            return None
        return Scalar(amount.expr, replace(currency, nouns=unit.nouns))

    def _composite(self, start: int, end: int) -> Scalar | None:
        """A sequence of amounts, `1 hour 30 minutes` or `22^\\circ 30'`, in the unit of the first."""
        starts = [index for index in range(start, end) if self.tokens[index].kind == "number"]
        if len(starts) < 2 or len(starts) > 4 or starts[0] != start:
            return None
        total, first, smallest = Fraction(0), None, None
        for begin, stop in zip(starts, [*starts[1:], end], strict=True):
            number = self.tokens[begin]
            rest = [token for token in self.tokens[begin + 1 : stop] if token.text not in (",", "and")]
            marks = PARTS_OF_DEGREE.get("".join(token.text for token in rest))
            is_part = marks is not None and first == DEGREE
            unit = replace(DEGREE, factor=marks) if is_part else read_unit(rest)
            if unit is None or not unit.dimensions or unit.nouns or number.value is None:
                return None
            if any(token.kind == "sign" and token.text not in ("^", "{", "}", "'") for token in rest):
                return None
            first = first or unit
            if unit.dimensions != first.dimensions or (smallest is not None and unit.factor >= smallest):
                return None
            smallest = unit.factor
            total += number.value * unit.factor / first.factor
        return Scalar(Num(total), first)

    def _constant(self, start: int, end: int) -> Expr | None:
        """The tokens from start to end as an expression, None if they are not one."""
        inner = _Parser(self.tokens[start:end], self)
        try:
            with inner:
                side = inner.side()
        except (NotMathematics, Unsupported):
            return None
        return side.expr if isinstance(side, Scalar) and inner.position == len(inner.tokens) else None

    def relation(self) -> Answer:
        sides: list[Answer] = []
        ops: list[str] = []
        self.skip("\\approx", "\\simeq", "=", ":")
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
        """`a \\equiv b \\pmod m`; without a modulus it is an equality of two functions."""
        bracket = self.peek(1) in ("\\bmod", "\\mod", "mod") and self.skip("(")
        if not self.skip("\\pmod", "\\bmod", "\\mod", "mod"):
            return Relation(tuple(sides), tuple("=" if op == "==" else op for op in ops))
        modulus = self._argument() if self.peek() == "{" else as_expr(self.sum())
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
        op = RELATIONS.get(text)
        if op is not None:
            self.position += 1
        return op

    def _name(self) -> Name | None:
        """A name before "=", "in" or ":", such as `f(x)`, `m_{max}`, `(x, y)`, `AB` or `Area`, else None."""
        start = self.position
        words = self._name_tokens()
        after, following = self.position, self.peek()
        self.position = start
        relation = RELATIONS.get(following)
        if not words or not (relation in ("=", "in", "~", "==") or (following == ":" and len(words[0]) > 1)):
            return None
        expr = None if "(" in words else self._constant(start, after)
        self.position = after
        if following == ":":
            self.tokens[after] = Token("sign", "=")
        return Name("".join(words).replace("\\", ""), expr)

    def _name_tokens(self) -> list[str]:
        """Steps over the tokens of a name; an empty list if there is none."""
        words = self._segment()
        if words:
            return words
        while (token := self.token()) is not None and _part_of_name(token) and len(words) < 6:
            if words and not (token.prose or words[-1] in ("\\angle", "\\triangle", "angle", "the")):
                return []
            words.append(self.take().text)
        if words and self.peek() == "_":
            self.position -= 1
            words[-1] = self._symbol(self.take().text).name
        if words and [self.peek(ahead) for ahead in range(5)] == ["^", "{", "-", "1", "}"]:
            words.append("^-1")
            self.position += 5
        while words and self.peek() == "'":
            words.append(self.take().text)
        if self.peek() == "(":
            words += self._in_brackets()
        return words

    def _in_brackets(self) -> list[str]:
        """Steps over the brackets after a name: `(x)`, `(A \\cap B)`; an empty list if they nest."""
        inside = [self.take().text]
        while (token := self.token()) is not None and token.text not in ("(", ")", "=") and len(inside) < 12:
            inside.append(self.take().text)
        if self.peek() != ")":
            self.position = len(self.tokens)
            return []
        return [*inside, self.take().text]

    def _segment(self) -> list[str]:
        """Steps over `|AB|` or `\\overline{AB}`, the length of a segment; an empty list if there is none."""
        for opening, closing in ((["|"], ["|"]), (["\\overline", "{"], ["}"])):
            size = len(opening)
            texts = [self.peek(ahead) for ahead in range(size + 2)]
            middle = self.token(size)
            named = middle is not None and middle.kind == "word" and len(middle.text) > 1
            if named and texts[size].isupper() and texts[:size] == opening and texts[size + 1 :] == closing:
                self.position += size + 2
                return [texts[size]]
        return []

    def side(self) -> Answer:
        parts, op = [self.sum()], None
        while (found := SET_OPERATIONS.get(self.peek())) is not None:
            if op not in (None, found):
                raise Unsupported("mixed set operations")
            op = found
            self.position += 1
            parts.append(self.sum())
        return SetOperation(op, tuple(parts)) if op else parts[0]


def _part_of_name(token: Token) -> bool:
    """Whether a token may be (part of) a name: a letter, AB, Area, or a Greek letter; `xy` is a product."""
    if token.kind == "command":
        commands = ("\\angle", "\\triangle", "\\varphi", "\\max", "\\min")
        return token.text[1:] in GREEK - {"pi"} or token.text in commands
    text = token.text
    if token.kind != "word" or text.lower() in PLAIN_WORDS or text in FUNCTIONS or text in ("e", "i", "pi"):
        return False
    return token.prose or len(text) == 1 or len(text) > 3 or text.isupper()


def _quantity(number: Expr, unit: Unit) -> Scalar:
    """A number with its unit, multiplied by the unit's multiplier."""
    if unit.multiplier != 1:
        number = Call("mul", (number, Num(Fraction(unit.multiplier))))
        unit = replace(unit, multiplier=1)
    return Scalar(number, unit if unit.dimensions or unit.nouns else None)
