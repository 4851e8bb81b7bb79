"""Words in an answer, read before its mathematics: number words, sets of parameters, remarks.

It takes linear time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from rlmath.answers.lexer import Token
from rlmath.answers.normalize import GREEK, KnownWords, singular, word_list, word_set
from rlmath.answers.syntax_tree import NamedSet, Relation, Scalar, Sym
from rlmath.answers.units import TURNING_WORDS, may_name

# ---------------------------------------------------------------- number words
_SMALL = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = word_list("twenty thirty forty fifty sixty seventy eighty ninety")
NUMBER_WORDS = {word: number for number, word in enumerate(_SMALL)}
NUMBER_WORDS |= {word: 10 * number for number, word in enumerate(_TENS, start=2)}
_POWERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_COUNTED = _POWERS | {"dozen": 12}
"""Words that may follow an article: `a dozen`, `a hundred`."""
_PARTS = {
    "half": 2,
    "quarter": 4,
    **{
        word: number
        for number, word in enumerate(
            word_list("third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"),
            start=3,
        )
    },
    "twentieth": 20,
    "hundredth": 100,
    "thousandth": 1000,
}
_SEVERAL_PARTS = {"halves": 2} | {
    f"{word}s": number for word, number in _PARTS.items() if word != "half"
}
_MINUS = word_set("minus negative")
_BEFORE_ONE = word_set("exactly minus negative and or to is equals")
"""Words before a "one" that counts; in "the smallest one" it does not."""
_MOST_NUMBER_WORDS = 12


def with_numbers(tokens: list[Token]) -> list[Token]:
    """The tokens with number words as numbers.

    Examples are `twenty-one`, `minus two thirds` and `one and a half`."""
    with_digits: list[Token] = []
    position = 0
    while position < len(tokens):
        number = _number(tokens, position)
        if number is None and _is_sign_in_words(tokens, position):
            with_digits.append(Token("sign", "-", tokens[position].space, tokens[position].prose))
            position += 1
            continue
        if number is None:
            with_digits.append(tokens[position])
            position += 1
            continue
        value, after = number
        first = tokens[position]
        if value < 0:
            with_digits.append(Token("sign", "-", first.space, first.prose))
        text = str(abs(value))
        with_digits.append(Token("number", text, first.space, prose=first.prose, value=abs(value)))
        position = after
    return with_digits


_BEFORE_SIGN = word_set("= : , ; and or is to equals ( \\approx")


def _is_sign_in_words(tokens: Sequence[Token], position: int) -> bool:
    """Whether a word is the sign of the number in digits behind it: `negative 7`."""
    if _word(tokens[position]) not in _MINUS or position + 1 == len(tokens):
        return False
    following = tokens[position + 1]
    begins = position == 0 or tokens[position - 1].text.lower() in _BEFORE_SIGN
    return begins and (
        following.kind == "number" or following.text in ("\\frac", "\\sqrt", "\\pi", "\\dollar")
    )


def has_number_word(texts: Iterable[str]) -> bool:
    return any(
        text in NUMBER_WORDS or text in _PARTS or text in _COUNTED or text in _MINUS
        for text in texts
    )


def _number(tokens: Sequence[Token], start: int) -> tuple[Fraction, int] | None:
    """(value, position after it) of the number in words that starts here, else None."""
    words = [_word(token) for token in tokens[start : start + _MOST_NUMBER_WORDS]]
    word_before = _word(tokens[start - 1]) if start else ""
    if words[0] in _MINUS and len(words) > 1:
        inner = _number(tokens, start + 1) if words[1] not in _MINUS else None
        return (-inner[0], inner[1]) if inner else None
    if words[0] == "one" and word_before and word_before not in _BEFORE_ONE:
        return None
    whole, size = _cardinal(words)
    if size == 0:
        article = words[0] in ("a", "an") and len(words) > 1 and words[1] in _PARTS
        if words[0] == "a" and len(words) > 1 and words[1] in _COUNTED and start == 0:
            return Fraction(_COUNTED[words[1]]), start + 2
        is_half = words[0] == "half" and (start == 0 or word_before in _MINUS)
        if article or is_half:
            return Fraction(1, _PARTS[words[article]]), start + 1 + article
        return None
    assert whole is not None
    next_index = size + (words[size : size + 1] == ["-"])
    following = words[next_index] if next_index < len(words) else ""
    parts = _PARTS.get(following) if whole == 1 else _SEVERAL_PARTS.get(following)
    if parts is not None:
        return whole / parts, start + next_index + 1
    is_sum = following == "and" and next_index + 1 < len(words)
    if is_sum and (part := _number(tokens, start + next_index + 1)) and 0 < part[0] < 1:
        return whole + part[0], part[1]
    if words[size : size + 1] == ["of"]:  # "one of them"
        return None
    return whole, start + size


def _word(token: Token) -> str:
    return token.text.lower() if token.kind == "word" else token.text if token.text == "-" else ""


def _cardinal(words: Sequence[str]) -> tuple[Fraction | None, int]:
    """(value, number of words) of a whole number, `two hundred five`; (None, 0) without one."""
    total = current = position = 0
    last = 10**12  # the size of the word before: a smaller one may follow
    while position < len(words):
        word = words[position]
        if word == "-" and 20 <= last < 100 and words[position + 1 : position + 2]:
            position += 1
            word = words[position]
        if word in NUMBER_WORDS:
            number = NUMBER_WORDS[word]
            if not (last >= 100 or (20 <= last < 100 and 0 < number < 10)):
                break
            current = current + number
            last = number
        elif word in _POWERS and position > 0 and current > 0:
            power = _POWERS[word]
            if power == 100 <= current:
                break
            total, current = (
                (total, current * power) if power == 100 else (total + current * power, 0)
            )
            last = power
        else:
            break
        position += 1
    return (Fraction(total + current), position) if position else (None, 0)


# ---------------------------------------------------------------- sets of numbers in words
_DETERMINERS = word_set("any all some every each an a arbitrary the given")
_ADJECTIVES = word_set("nonnegative positive real natural rational complex arbitrary free nonzero")
_NOUNS = {
    "integer": "Z",
    "real": "R",
    "natural": "N",
    "rational": "Q",
    "number": "",
    "constant": "",
    "value": "",
}
_NOUNS |= {"parameter": ""}
_PREPOSITIONS = word_set("for where with when and attained achieved reached at \\forall")
_MOMENTS = word_set("when attained achieved reached at")
_OF_DOMAIN = (
    _DETERMINERS
    | _ADJECTIVES
    | _PREPOSITIONS
    | word_set("in of domain its possible both such other and or")
)
_LONGEST_QUALIFIER = 14
_TRIGGERS = word_set(
    "for where with when integer integers real reals natural all every any attained achieved "
    "reached at "
    "\\in \\forall"
)


def split_set(tokens: Sequence[Token]) -> tuple[NamedSet, int] | None:
    """(set, number of tokens) of `all real numbers` or `any integer n` at the start, else None."""
    if tokens[0].text.lower() not in ("all", "any", "every"):
        return None
    name, at = _set_in_words(tokens, 1)
    if not name:
        return None
    return NamedSet(name), at + (at < len(tokens) and _is_letter(tokens[at]))


def split_qualifiers(
    tokens: list[Token], known_words: KnownWords | None
) -> tuple[list[Token], list[Relation]]:
    """(tokens without the sets of their parameters, these sets): `for any integer k`.

    A domain, `for all x`, is cut. Its words are `known_words`; None: any."""
    memberships: list[Relation] = []
    texts = {token.text.lower() for token in tokens[-_LONGEST_QUALIFIER:]}
    for _ in range(3):
        if not texts & _TRIGGERS:
            break
        for start in range(max(1, len(tokens) - _LONGEST_QUALIFIER), len(tokens)):
            if tokens[start].text.lower() in _PREPOSITIONS or tokens[start].text in (",", "("):
                qualifier = _qualifier(tokens[start:], known_words)
                if qualifier is not None:
                    tokens_to_read, membership = qualifier
                    tokens = [*tokens[:start], *tokens_to_read]
                    memberships += membership
                    break
        else:
            break
        if tokens_to_read:
            break
    return tokens, memberships


def _qualifier(
    part: Sequence[Token], known_words: KnownWords | None
) -> tuple[list[Token], list[Relation]] | None:
    """(tokens to be read after a comma, memberships) of the whole part, else None."""
    comma = Token("sign", ",")
    if part[0].text == ",":
        part = part[1:]
    if len(part) > 2 and part[0].text == "(" and part[-1].text == ")":
        part = part[1:-1]
    at = 0
    while at < len(part) and part[at].text.lower() in _PREPOSITIONS:
        at += 1
    spoken = at
    while at < len(part) and part[at].text.lower() in _DETERMINERS and len(part[at].text) > 1:
        at += 1
    if at >= len(part):
        return None
    name, after = _set_in_words(part, at)
    letters = [token for token in part[after:] if token.text not in (",", "and")]
    if name and 0 < len(letters) < 4 and all(map(_is_letter, letters)):
        return [], [_membership(letter, name) for letter in letters]
    if part[0].text in _MOMENTS and is_equation_of_letter(part[at:]):
        return [], []
    if _is_letter(part[at]):
        if len(part) > at + 2 and part[at + 1].text == "\\in":
            return [comma, *part[at:]], []
        verb = (
            at
            + 1
            + (at + 1 < len(part) and part[at + 1].text.lower() in ("is", "are", "be", "being"))
        )
        while verb < len(part) and part[verb].text.lower() in _DETERMINERS:
            verb += 1
        name, after = _set_in_words(part, verb)
        if name and after == len(part):
            return [], [_membership(part[at], name)]
    is_domain = 0 < spoken < at and part[0].text.lower() == "for"
    return (
        ([], []) if is_domain and all(_is_of_domain(token, known_words) for token in part) else None
    )


def _is_of_domain(token: Token, known_words: KnownWords | None) -> bool:
    """Whether a token may be part of a domain in words.

    An example of one is `for all positive integers n in the domain`."""
    word = token.text.lower()
    if token.kind != "word" or known_words is None or len(word) == 1:
        return token.kind == "word"
    return word in _OF_DOMAIN or singular(word) in _NOUNS or word in known_words


def is_equation_of_letter(tokens: Sequence[Token]) -> bool:
    """Whether tokens are `x = 2` or `x = y = 1`, and nothing else."""
    texts = [token.text for token in tokens]
    plain = all(
        text not in (",", ";") and text.lower() not in ("or", "and", "else", "otherwise")
        for text in texts
    )
    return len(texts) > 2 and _is_letter(tokens[0]) and texts[1] == "=" and plain


def _set_in_words(tokens: Sequence[Token], at: int) -> tuple[str, int]:
    """(name of the set that is described here, position after it); the name is "" for none.

    `nonnegative integers` is "Z0"."""
    start = at
    words = []
    while at < len(tokens) and tokens[at].kind == "word":
        word = tokens[at].text.lower()
        if word not in _ADJECTIVES and word.removesuffix("s") not in _NOUNS:
            break
        words.append(word.removesuffix("s"))
        at += 1
    names = {_NOUNS[word] for word in words if _NOUNS.get(word)}
    names |= {"C"} if "complex" in words else set()
    if not words or len(names) > 1 or "nonzero" in words:
        return "", start
    name = names.pop() if names else ("R" if "constant" in words or "parameter" in words else "")
    signed = [word for word in words if word in ("positive", "nonnegative")]
    if signed and name in ("Z", "N", "R"):
        name = (
            {"positive": "R+", "nonnegative": "R0"}[signed[0]]
            if name == "R"
            else ({"positive": "Z+", "nonnegative": "Z0"}[signed[0]])
        )
    return name, at if name else start


def _is_letter(token: Token) -> bool:
    return (token.kind == "word" and len(token.text) == 1) or token.text[1:] in GREEK


def _membership(letter: Token, name: str) -> Relation:
    return Relation((Scalar(Sym(letter.text.removeprefix("\\"))), NamedSet(name)), ("in",))


# ---------------------------------------------------------------- names
_NAMES = word_set(
    "value solution root result number way sum product area perimeter volume length radius "
    "diameter center centre vertex point maximum minimum max min probability total limit integral "
    "function equation slope domain range set difference ratio distance height width speed "
    "velocity cost price age angle triangle measure coordinate remainder quotient degree "
    "coefficient expression derivative period amplitude mean median mode average interval "
    "element zero answer ans final solution the and of required greatest smallest largest least "
    "expected variance focus midpoint constant count amount rate force energy power mass "
    "work percentage side base"
)
"""Words for what has a value: `Area = 5`."""


def is_name(token: Token, known_words: KnownWords | None) -> bool:
    """Whether a token may be part of a name before "=": letters do, and words for quantities.

    Other words than such are `known_words`; None: any."""
    text = token.text
    if (
        known_words is None
        or token.kind != "word"
        or len(text) < 2
        or (text.isupper() and len(text) < 5)
    ):
        return True
    return singular(text) in _NAMES or (text in known_words and may_name(text))


# ---------------------------------------------------------------- remarks
_CHANGES = word_set(
    "or nor not no none never but either neither maybe perhaps possibly wrong false incorrect "
    "invalid "
    "impossible reject rejected extraneous discarded unless except excluding instead rather "
    "approximately "
    "approx about around nearly almost over under more less fewer greater above below base binary "
    "octal "
    "hexadecimal mod modulo am pm squared cubed square cube twice half third quarter times minus "
    "plus "
    "negative per cannot undefined unknown unclear if vs versus dozen gross score lakh crore"
)
_CHANGES |= TURNING_WORDS
"""Words that make another answer of it, or take it back."""
_REASONS = word_set("since because")
_CIRCUMSTANCES = word_set(
    "attained achieved reached when at where for with occurs since because as"
)
_COMMENTS = _CIRCUMSTANCES | word_set(
    "the a an of in is are this that it both and one only single unique smallest largest least "
    "greatest minimum maximum minimal maximal multiplicity double triple root solution value "
    "answer number result total exact exactly"
)
"""Words of a remark that are known to change nothing of the value before it."""


def is_remark(inside: Sequence[Token], may_calculate: bool, known_words: KnownWords | None) -> bool:
    """Whether the text in brackets after a value only comments on it.

    Examples are `(the smallest one)` and `(attained at x = 2)`. Other words than such are
    `known_words`; None: any."""
    words = [token.text.lower() for token in inside if token.kind == "word"]
    if inside[0].kind != "word" or len(words[0]) < 2:
        return False
    if known_words is not None and not all(
        len(word) < 2 or word in _COMMENTS or word in known_words for word in words
    ):
        return False
    changes = _CHANGES - {"not", "no"} if words[0] in _REASONS else _CHANGES
    if (
        not changes.isdisjoint(words)
        or any(word in _POWERS for word in words)
        or words in (["double"], ["root"])
    ):
        return False
    if not {("at", "least"), ("at", "most")}.isdisjoint(itertools.pairwise(words)):
        return False
    only_words = all(token.kind == "word" or token.text in (",", ".", "'", "-") for token in inside)
    if only_words:
        return any(len(word) > 2 for word in words) and not any(
            word in NUMBER_WORDS for word in words if word != "one"
        )
    return may_calculate or words[0] in _CIRCUMSTANCES or words == ["multiplicity"]
