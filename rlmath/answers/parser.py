"""The grammar of answers: tokens become our own syntax tree, and only that is ever evaluated.

    answer     := item (("," | ";" | and | or) item)* [the set of a parameter in words]
    item       := side (relation side)* [unit] ["(" remark ")"]   x = 5 cm, 1 < x <= 2, x in [1, 2]
    side       := sum ((union | intersection | without) sum)*
    sum        := term (("+" | "-" | plus-minus) term)*
    term       := factor (("*" | "/" | nothing) factor)*
    factor     := base ("^" ... | "!" | "%" | degree)*

Each rule is a method: lists to sets are here, sums to bases in `parse_arithmetic`, brackets,
commands and functions in `parse_commands`; words are read by `phrases`. Depth and length are
bounded, so that parsing takes linear time.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from rlmath.answers.compare_values import mentions, symbols
from rlmath.answers.lexer import (
    AS_WRITTEN,
    CURRENCIES,
    FUNCTIONS,
    LABELS,
    MODULUS,
    PLAIN_WORDS,
    RELATIONS,
    SET_OPERATIONS,
    Reading,
    Token,
    tokenize,
)
from rlmath.answers.normalize import GREEK, NotMathematics, Unsupported
from rlmath.answers.parse_arithmetic import AFTER_INTERVAL, as_expr
from rlmath.answers.parse_commands import Commands
from rlmath.answers.phrases import (
    has_number_word,
    is_name,
    is_remark,
    split_qualifiers,
    split_set,
    with_numbers,
)
from rlmath.answers.syntax_tree import (
    DOTS,
    Answer,
    Call,
    Expr,
    Listing,
    Name,
    NamedSet,
    Num,
    Relation,
    Scalar,
    SetOf,
    SetOperation,
)
from rlmath.answers.units import DEGREE, PARTS_OF_DEGREE, Unit, is_known_noun, read_unit

MAX_UNIT_TOKENS = 12
"""Longest unit behind a number."""


_SEPARATORS = frozenset((",", ";", "\\land", "\\lor"))
_OPENING = frozenset(("(", "[", "{", "\\{", "\\langle", "\\begin", "\\lfloor", "\\lceil"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rangle", "\\end", "\\rfloor", "\\rceil"))


def parse_answer(text: str, reading: Reading = AS_WRITTEN) -> Answer:
    """The syntax tree of an answer.

    Raises NotMathematics or Unsupported.

    >>> parse_answer("(1, 2]").closing
    ']'
    """
    tokens = tokenize(text, reading)
    while len(tokens) > 1 and tokens[-1].text in (".", ",", ";"):
        tokens.pop()
    if not tokens:
        raise NotMathematics("no tokens")
    words = [token.text.lower() for token in tokens if token.kind == "word"]
    if has_number_word(words):
        tokens = with_numbers(tokens)
    if not words:
        return _Parser(tokens).whole()
    in_words = _set_in_words(tokens, reading)
    if in_words is not None:
        return in_words
    tokens, memberships = split_qualifiers(tokens, reading.known_words)
    answer = _Parser(tokens, reading=reading).whole()
    if not memberships:
        return answer
    items = answer.items if isinstance(answer, Listing) else (answer,)
    return Listing((*items, *memberships), answer.joiner if isinstance(answer, Listing) else ",")


def _set_in_words(tokens: list[Token], reading: Reading) -> Answer | None:
    """`all real numbers except 2`, `all odd integers` or `multiples of 6`, else None."""
    if len(tokens) < 2:
        return None
    set_and_size = split_set(tokens)
    if set_and_size is None:
        return None
    named_set, size = set_and_size
    remaining = tokens[size:]
    if not remaining:
        return named_set
    if remaining[0].text.lower() not in ("except", "excluding") or len(remaining) < 2:
        return None
    after = 2 if remaining[1].text == "for" and len(remaining) > 2 else 1
    excluded = _Parser(remaining[after:], reading=reading).whole()
    points = excluded.items if isinstance(excluded, Listing) else (excluded,)
    return SetOperation("without", (named_set, SetOf(tuple(map(_value_of_name, points)))))


def _value_of_name(answer: Answer) -> Answer:
    """The 2 of `x = 2`."""
    is_value = (
        isinstance(answer, Relation) and answer.ops == ("=",) and isinstance(answer.sides[0], Name)
    )
    return answer.sides[1] if is_value and isinstance(answer, Relation) else answer


class _Parser(Commands):
    """Lists, items, units, relations and sets."""

    def __init__(
        self, tokens: list[Token], outer: _Parser | None = None, reading: Reading = AS_WRITTEN
    ) -> None:
        super().__init__(tokens, outer)
        self.with_remark = reading.with_remark and outer is None
        self.known_words = reading.known_words if outer is None else outer.known_words

    def whole(self) -> Answer:
        answer = self.listing(frozenset())
        if self.position < len(self.tokens):
            raise NotMathematics(f"{self.peek()!r} is not expected")
        return answer

    def part(self, tokens: list[Token]) -> Answer:
        inner = _Parser(tokens, self)
        with inner:
            return inner.whole()

    def listing(self, ends: frozenset[str]) -> Answer:
        """A list of items up to one of `ends`; one item is itself."""
        with self:
            items = [self.item(ends)]
            joiners = []
            while self.token() is not None and self.peek() not in ends:
                joiner = self._joiner()
                if joiner is None:
                    break
                joiners.append(joiner)
                if self.token() is None or self.peek() in ends:
                    raise NotMathematics("an item is missing")
                items.append(self.item(ends))
        return items[0] if len(items) == 1 else _listing(items, joiners)

    def _joiner(self) -> str | None:
        """Steps over the separator of two items.

        It is a comma, "and", "or", or a comma and one of them."""
        joiner = None
        if self.peek() in (",", ";"):
            joiner = self.take().text
        word = self.peek().lower()
        if word in ("and", "or", "\\land", "\\lor", "&"):
            self.position += 1
            joiner = {"\\land": "and", "\\lor": "or", "&": "and"}.get(word, word)
        return joiner

    def item(self, ends: frozenset[str]) -> Answer:
        """One item; words at its end are a unit."""
        if self.peek() == "\\ldots" and self._item_end(ends) == self.position + 1:
            self.position += 1
            return DOTS
        end = self._without_remark(self._item_end(ends))
        bare = self._with_unit(self.position, end)
        # Counted from the end, because parsing may split tokens.
        tokens_after = len(self.tokens) - end
        try:
            whole = self.relation(end)
            if len(self.tokens) - self.position != tokens_after:
                raise NotMathematics(f"{self.peek()!r} is not expected")
        except (NotMathematics, Unsupported):
            if bare is None:
                raise
            self.position = len(self.tokens) - tokens_after
            return bare
        if bare is not None and isinstance(whole, Scalar) and not mentions(bare.expr, FUNCTIONS):
            return Scalar(bare.expr, bare.unit, whole)
        return whole

    def _without_remark(self, end: int) -> int:
        """Removes a remark in brackets from the end of an item, or the brackets around its unit.

        Returns the end of the item."""
        if self.tokens[end - 1].text != ")" or end - self.position < 4:
            return end
        start = next(
            (i for i in range(end - 2, self.position, -1) if self.tokens[i].text in ("(", ")")),
            None,
        )
        if start is None or self.tokens[start].text != "(" or end - start < 3:
            return end
        if self.tokens[start - 1].text == "/":  # J/(mol K)
            return end
        inside = self.tokens[start + 1 : end - 1]
        if inside[0].kind != "word" or inside[0].text in FUNCTIONS:
            return end
        in_words = [replace(token, space=True, prose=True) for token in inside]
        unit = read_unit(in_words, self.known_words)
        behind_number = self.tokens[start - 1].kind == "number"
        if unit is not None and (unit.dimensions or unit.multiplier > 1 or behind_number):
            inside = in_words
        elif is_remark(inside, self.with_remark, self.known_words):
            inside = []
        else:
            return end
        self.tokens[start:end] = inside
        return start + len(inside)

    def _item_end(self, ends: frozenset[str]) -> int:
        """The end of the item at this position.

        It is before the next separator outside brackets, or at the group's end."""
        depth = 0
        for index in range(self.position, len(self.tokens)):
            text = self.tokens[index].text
            if text == "]" and depth == 0 and self._opens(index):
                depth = 1  # ]3, 4]
                continue
            if text == "[" and depth and self._closes(index):
                depth -= 1  # [3, 4[
                continue
            if depth == 0 and (
                text in _SEPARATORS or text in ends or text.lower() in ("and", "or")
            ):
                return index
            if text in _OPENING:
                depth += 1
            elif text in _CLOSING:
                depth = max(0, depth - 1)
        return len(self.tokens)

    def _opens(self, index: int) -> bool:
        """Whether the "]" there opens an interval: `]3, 4]`."""
        before = self.tokens[index - 1].text if index > self.position else "="
        return before in RELATIONS or before in SET_OPERATIONS

    def _closes(self, index: int) -> bool:
        """Whether the "[" there closes an interval: `[3, 4[`."""
        return index + 1 == len(self.tokens) or self.tokens[index + 1].text in AFTER_INTERVAL

    def _with_unit(self, start: int, end: int) -> Scalar | None:
        """The item as a number with a unit or a currency sign, else None."""
        tokens = self.tokens[start:end]
        lead = next(
            (
                index
                for index, token in enumerate(tokens)
                if not is_known_noun(token, self.known_words)
            ),
            0,
        )
        if lead and tokens[lead].kind == "number":
            value = self._with_unit(start + lead, end) or self._constant(start + lead, end)
            return value if isinstance(value, Scalar) or value is None else Scalar(value)
        if len(tokens) > 1 and tokens[0].text == "-" and tokens[1].text in CURRENCIES:
            amount = self._money(start + 1, end)
            return Scalar(Call("neg", (amount.expr,)), amount.unit) if amount else None
        if tokens and tokens[0].text in CURRENCIES:
            return self._money(start, end)
        for cut in range(max(1, len(tokens) - MAX_UNIT_TOKENS), len(tokens)):
            first = tokens[cut]
            glued = len(first.text) == 1 and not (first.space or first.prose)
            if first.text not in ("%", "^", "/") and (first.kind in ("number", "sign") or glued):
                continue
            unit = read_unit(tokens[cut:], self.known_words)
            if unit is None:
                continue
            signed = cut == 2 and tokens[0].text in ("-", "+")
            behind_number = tokens[cut - 1].kind == "number" and (cut == 1 or signed)
            if len(first.text) == 1 and first.text.isalpha() and not (first.prose or behind_number):
                continue
            inner = self._constant(start, start + cut)
            if inner is not None and (first.prose or not symbols(inner)):
                return _quantity(inner, unit)
        return self._composite(start, end)

    def _money(self, start: int, end: int) -> Scalar | None:
        """An amount after a currency sign, with an optional multiplier or noun.

        An example is `\\$1.2 million`."""
        currency = read_unit([self.tokens[start]])
        assert currency is not None
        inner = self._constant(start + 1, end)
        if inner is not None:
            return Scalar(inner, currency)
        amount = self._with_unit(start + 1, end)
        if amount is None:
            return None
        unit = amount.unit or Unit()
        dimensions = tuple(sorted((*currency.dimensions, *unit.dimensions)))
        priced = replace(
            unit,
            dimensions=dimensions,
            factor=currency.factor * unit.factor,
            parts=currency.parts | unit.parts,
            below=unit.below | (unit.parts - currency.parts),  # `\\$5 an hour`
        )
        return Scalar(amount.expr, priced)

    def _composite(self, start: int, end: int) -> Scalar | None:
        """A sequence of amounts in the unit of the first.

        Examples are `1 hour 30 minutes` and `22^\\circ 30'`."""
        starts = [index for index in range(start, end) if self.tokens[index].kind == "number"]
        if len(starts) < 2 or len(starts) > 4 or starts[0] != start:
            return None
        total = Fraction(0)
        first = None
        smallest = None
        for begin, stop in zip(starts, [*starts[1:], end], strict=True):
            number = self.tokens[begin]
            unit_tokens = [
                token for token in self.tokens[begin + 1 : stop] if token.text not in (",", "and")
            ]
            marks = PARTS_OF_DEGREE.get("".join(token.text for token in unit_tokens))
            is_part = marks is not None and first == DEGREE
            unit = (
                replace(DEGREE, factor=marks)
                if is_part
                else read_unit(unit_tokens, self.known_words)
            )
            if unit is None or not unit.dimensions or unit.nouns or number.value is None:
                return None
            if any(
                token.kind == "sign" and token.text not in ("^", "{", "}", "'")
                for token in unit_tokens
            ):
                return None
            first = first or unit
            if unit.dimensions != first.dimensions or (
                smallest is not None and unit.factor >= smallest
            ):
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
        return (
            side.expr if isinstance(side, Scalar) and inner.position == len(inner.tokens) else None
        )

    def relation(self, end: int = 0) -> Answer:
        """Sides and the signs between them; up to `end` a side may have a unit."""
        sides: list[Answer] = []
        ops: list[str] = []
        self.skip("\\approx", "\\simeq", "=", ":")
        if (label := self._label()) is not None:
            sides = [label]
            ops = ["="]
        tokens_after = len(self.tokens) - end
        has_sign = any(token.text in RELATIONS for token in self.tokens[self.position : end])
        while True:
            side = self._name()
            if side is None and ops[-1:] == ["in"] and self.peek() in ("R", "Z", "N", "Q", "C"):
                side = NamedSet(self.take().text)
            if side is None and (ops or has_sign):
                side = self._amount(len(self.tokens) - tokens_after)
            sides.append(side or self.side())
            op = self._relation_sign()
            if op is None:
                break
            ops.append(op)
        if "==" in ops or self._at_modulus():
            return self._congruence(sides, ops)
        return Relation(tuple(sides), tuple(ops)) if ops else sides[0]

    def _label(self) -> Name | None:
        """Steps over a quantity's name before its value: `maximum` in `maximum 5`; else None."""
        token = self.token()
        name = (
            LABELS.get(token.text.lower()) if token is not None and token.kind == "word" else None
        )
        following = self.token(1)
        if name is None or following is None:
            return None
        size = 1 + (following.text == "value")
        size += self.peek(size) in (":", "=", "is", "of")
        value = self.token(size)
        if value is None or not (
            value.kind == "number" or value.text in ("-", "\\frac", "\\sqrt", "\\pi", "(")
        ):
            return None
        self.position += size
        return Name(name)

    def _amount(self, end: int) -> Scalar | None:
        """Steps over the side of a relation that is a number with a unit, else None."""
        start = self.position
        stop = next((i for i in range(start, end) if self.tokens[i].text in RELATIONS), end)
        last = self.tokens[stop - 1] if stop > start else None
        if last is None or not (
            last.kind == "word" or last.text[-1] in "%}1234" or stop - start < 4
        ):
            return None
        bare = self._with_unit(start, stop)
        if bare is None:
            return None
        tokens_after = len(self.tokens) - stop
        plain = self._constant(start, stop)
        self.position = len(self.tokens) - tokens_after
        if plain is None or mentions(bare.expr, FUNCTIONS):
            return bare
        return Scalar(bare.expr, bare.unit, Scalar(plain))

    def _at_modulus(self) -> bool:
        texts = (self.peek(), self.peek(1))
        return texts[0] in MODULUS or (texts[0] == "(" and texts[1] in MODULUS)

    def _congruence(self, sides: list[Answer], ops: list[str]) -> Answer:
        """A congruence `a \\equiv b \\pmod m`, or the class `b \\pmod m`.

        Without a modulus it stays open; a list may end in one."""
        if not self._at_modulus():
            return Relation(tuple(sides), tuple(ops))
        bracket = self.skip("(")
        self.position += 1
        modulus = self._argument() if self.peek() == "{" else as_expr(self.sum())
        if bracket:
            self.expect(")")
        if len(sides) > 2 or ops not in ([], ["=="], ["="]):
            raise Unsupported("a chain of congruences")
        return Relation((*sides, Scalar(modulus)), ("mod",))

    def _relation_sign(self) -> str | None:
        """Steps over the sign of a relation; None where there is none."""
        text = self.peek()
        if text in ("<", ">", "!") and self.peek(1) == "=":
            self.position += 2
            return text + "="
        op = RELATIONS.get(text)
        if op is not None:
            self.position += 1
        return op

    def _name(self) -> Name | None:
        """A name before "=", "in" or ":", else None.

        Examples are `f(x)`, `m_{max}`, `(x, y)`, `AB` and `Area`."""
        start = self.position
        words = self._name_tokens()
        after = self.position
        following = self.peek()
        self.position = start
        relation = RELATIONS.get(following)
        if not words or not (
            relation in ("=", "in", "~", "==") or (following == ":" and len(words[0]) > 1)
        ):
            return None
        expr = None if "(" in words else self._constant(start, after)
        self.position = after
        if following == ":":
            self.tokens[after] = Token("sign", "=")
        name = "".join(words).replace("\\", "")
        return Name(LABELS.get(name.lower(), name), expr)

    def _name_tokens(self) -> list[str]:
        """Steps over the tokens of a name; an empty list if there is none."""
        words = self._segment()
        if words:
            return words
        while (token := self.token()) is not None and _part_of_name(token) and len(words) < 6:
            if words and not (
                token.prose or words[-1] in ("\\angle", "\\triangle", "angle", "the")
            ):
                return []
            if not is_name(token, self.known_words):
                return []
            words.append(self.take().text)
        if words and self.peek() == "_":
            self.position -= 1
            words[-1] = self._symbol(self.take().text).name
        if (
            words
            and self.peek() == "^"
            and [self.peek(ahead) for ahead in range(5)] == ["^", "{", "-", "1", "}"]
        ):
            words.append("^-1")
            self.position += 5
        while words and self.peek() == "'":
            words.append(self.take().text)
        if self.peek() == "(":
            words += self._in_brackets()
        return words

    def _in_brackets(self) -> list[str]:
        """Steps over the brackets after a name, `(x)`, `(A \\cap B)`.

        Returns an empty list if they nest."""
        ends = ("(", ")") if self.peek(-1) == "P" else ("(", ")", "=")
        inside = [self.take().text]
        while (token := self.token()) is not None and token.text not in ends and len(inside) < 12:
            inside.append(self.take().text)
        if self.peek() != ")":
            self.position = len(self.tokens)
            return []
        return [*inside, self.take().text]

    def _segment(self) -> list[str]:
        """Steps over `|AB|` or `\\overline{AB}`, the length of a segment.

        Returns an empty list if there is none."""
        if self.peek() not in ("|", "\\overline"):
            return []
        for opening, closing in ((["|"], ["|"]), (["\\overline", "{"], ["}"])):
            size = len(opening)
            texts = [self.peek(ahead) for ahead in range(size + 2)]
            middle = self.token(size)
            is_named = (
                middle is not None
                and middle.kind == "word"
                and (len(middle.text) > 1 or opening == ["|"])
            )
            if (
                is_named
                and texts[size].isupper()
                and texts[:size] == opening
                and texts[size + 1 :] == closing
            ):
                self.position += size + 2
                is_single = len(texts[size]) == 1  # `|A|` is not A
                return [f"|{texts[size]}|" if is_single else texts[size]]
        return []

    def side(self) -> Answer:
        """A side of a relation: sums, with operations on sets between them."""
        parts = [self.sum()]
        op = None
        while (operation := SET_OPERATIONS.get(self.peek())) is not None:
            if op not in (None, operation):
                raise Unsupported("mixed set operations")
            op = operation
            self.position += 1
            parts.append(self.sum())
        return SetOperation(op, tuple(parts)) if op else parts[0]


def _listing(items: list[Answer], joiners: list[str]) -> Answer:
    """A list without brackets; `x = 1, y = 2 or x = 2, y = 1` is a list of lists."""
    kinds = set(joiners)
    outer = "or" if "or" in kinds else ";"
    if outer in kinds and kinds & {",", "and"} and all(map(_is_equation, items)):
        groups = []
        start = 0
        for index in [*(i + 1 for i, joiner in enumerate(joiners) if joiner == outer), len(items)]:
            group = items[start:index]
            groups.append(group[0] if len(group) == 1 else Listing(tuple(group), "and"))
            start = index
        if len({len(group.items) if isinstance(group, Listing) else 1 for group in groups}) == 1:
            return Listing(tuple(groups), "or")
    words = [joiner for joiner in joiners if joiner not in (",", ";")]
    return Listing(_with_modulus(items), words[-1] if words else ",")


def _is_equation(answer: Answer) -> bool:
    return (
        isinstance(answer, Relation) and answer.ops == ("=",) and isinstance(answer.sides[0], Name)
    )


def _with_modulus(items: list[Answer]) -> tuple[Answer, ...]:
    """The items, each with the modulus that is written after the last.

    An example is `x \\equiv 1, 4 \\pmod 5`."""
    last = items[-1]
    is_class = isinstance(last, Relation) and last.ops == ("mod",)
    if not is_class or any(
        isinstance(part, Relation) and part.ops == ("mod",) for part in items[:-1]
    ):
        return tuple(items)
    assert isinstance(last, Relation)
    first = items[0]
    letter = (
        first.sides[:1] if isinstance(first, Relation) and first.ops == ("==",) else last.sides[:-2]
    )
    congruences: list[Answer] = []
    for part in items:
        value = part.sides[-1 - (part is last)] if isinstance(part, Relation) else part
        congruences.append(Relation((*letter, value, last.sides[-1]), ("mod",)))
    return tuple(congruences)


def _part_of_name(token: Token) -> bool:
    """Whether a token may be (part of) a name: a letter, AB, Area, or a Greek letter.

    `xy` is a product."""
    if token.kind == "command":
        commands = ("\\angle", "\\triangle", "\\varphi", "\\max", "\\min")
        return token.text[1:] in GREEK - {"pi"} or token.text in commands
    text = token.text
    if (
        token.kind != "word"
        or text.lower() in PLAIN_WORDS
        or text in FUNCTIONS
        or text in ("e", "i", "pi")
    ):
        return False
    return (
        token.prose
        or len(text) == 1
        or len(text) > 3
        or text.isupper()
        or (text.istitle() and len(text) > 2)
    )


def _quantity(number: Expr, unit: Unit) -> Scalar:
    if unit.multiplier != 1:
        number = Call("mul", (number, Num(Fraction(unit.multiplier))))
        unit = replace(unit, multiplier=1)
    return Scalar(number, unit if unit.dimensions or unit.nouns else None)
