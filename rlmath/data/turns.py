"""Checks of a row's turns: roles that the chat template knows, and texts that make no other turns.

    marks_of(tokenizer, None) -> Marks       what makes turns in the template of this tokenizer
    check_turns(messages, tools, marks)      RowError for a row that would make other turns
    check_rendered(text, messages, ...)      RowError where the template joins its texts to a mark

A mark is one of the tokenizer's added tokens or a text of the template's own, such as Llama 2's
`[INST]`. Which ones make turns is seen in a conversation of the template's, not in the flags of
tokens: `<|im_end|>` is an ordinary added token in many folders, and `<think>`, which an answer may
well contain, a special one in some.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlmath.data.chat import CHATML_END, assistant, chat_end, render, role_names, user
from rlmath.data.columns import Message, texts_of
from rlmath.data.rows import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a row may have; a template that has no such turn refuses it, or leaves it out, which
is refused, too."""
_SHAPE = r"<[|｜][^\s<>|｜]{1,60}[|｜]>"
_IN_TEXT = re.compile(rf"{_SHAPE}|\[/?[A-Z][A-Z_]+\]|<</?[A-Z]+>>|<(?:start|end)_of_\w+>")
"""Marks as templates write them, be they tokens or text."""
_TAG = re.compile(r"<(?P<closes>/?)(?P<name>[^<>|｜/]+)>")


@dataclass(frozen=True)
class Marks:
    """The texts that make turns."""

    in_prompts: re.Pattern[str]
    """Pattern of marks in a system's, a user's or a tool's turn: marks of turns, and every
    special token."""
    in_answers: re.Pattern[str]
    """Pattern of marks in an assistant's turn, which has special tokens of its own: marks of
    turns, and the ends and beginnings of a sequence."""
    tokens: frozenset[str]
    """The marks that are tokens."""
    roles: frozenset[str]
    tokenizer: PreTrainedTokenizerFast


def marks_of(tokenizer: PreTrainedTokenizerFast, written: str | None) -> Marks:
    """The marks of a tokenizer and of the text `written` around a problem.

    `written` is None for the tokenizer's chat template."""
    return _marks_of(tokenizer, str(tokenizer.chat_template or ""), written, len(tokenizer))


@lru_cache(maxsize=8)
def _marks_of(
    tokenizer: PreTrainedTokenizerFast, template: str, written: str | None, _vocabulary: int
) -> Marks:
    """The marks of `marks_of`; template and size of the vocabulary are keys of the cache."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    names = {token.content for token in added}
    if written is not None:
        of_turns = set(_IN_TEXT.findall(f"{written}{CHATML_END}"))
    else:
        of_turns = _marks_of_turns(tokenizer, template, names)
    of_sequence = {str(token) for token in (tokenizer.eos_token, tokenizer.bos_token) if token}
    end = chat_end(tokenizer)
    if end is not None:
        of_sequence.add(str(tokenizer.convert_ids_to_tokens(end)))
    special = {
        token.content for token in added if token.special or re.fullmatch(_SHAPE, token.content)
    }
    in_answers = of_turns | of_sequence
    return Marks(
        in_prompts=_pattern(_with_normalized(in_answers | special, tokenizer)),
        in_answers=_pattern(_with_normalized(in_answers, tokenizer)),
        tokens=frozenset(names),
        roles=frozenset(ROLES) | role_names(template),
        tokenizer=tokenizer,
    )


def _with_normalized(marks: Collection[str], tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """The marks, and what the tokenizer's normalizer makes of them, as it does of texts."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalized = () if normalizer is None else map(normalizer.normalize_str, marks)
    return {*marks, *filter(str.strip, normalized)}


def _pattern(marks: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


def _marks_of_turns(
    tokenizer: PreTrainedTokenizerFast, template: str, added: Collection[str]
) -> set[str]:
    """The marks that the chat template writes around turns.

    Of its tags, such as `<think>`, those alone whose partner is around another turn: thinking is
    opened and closed within an answer."""
    question = "6 x 7 = ?"
    answer = "forty-two"
    tokens = _pattern(added)
    conversation = [user(question), assistant(answer), user(question)]
    marks = _in_system_turn(tokenizer, tokens)
    try:
        text = render(conversation, tokenizer, "a question", prompt=False)
        before, question_text, remainder = text.partition(question)
        header, answered, remainder = remainder.partition(answer)
        behind = remainder if question_text and answered else ""
    except RowError:
        before = ""
        header = template
        behind = ""
    marks_around = set(_found(f"{before}\n{behind}", tokens))
    for mark in _found(header, tokens):
        tag = _TAG.fullmatch(mark)
        partner = "" if tag is None else f"<{'' if tag['closes'] else '/'}{tag['name']}>"
        if partner not in added or partner in marks_around:
            marks.add(mark)
    return marks | marks_around


def _in_system_turn(tokenizer: PreTrainedTokenizerFast, tokens: re.Pattern[str]) -> set[str]:
    """The marks that the template writes between a system's turn and a user's."""
    instruction = "Be brief, please."
    question = "6 x 7 = ?"
    try:
        messages = [{"role": "system", "content": instruction}, user(question)]
        text = render(messages, tokenizer, "a system turn", prompt=False)
    except RowError:
        return set()
    return set(_found(text.partition(instruction)[2].partition(question)[0], tokens))


def _found(text: str, tokens: re.Pattern[str]) -> Iterator[str]:
    yield from tokens.findall(text)
    yield from _IN_TEXT.findall(text)


# ---------------------------------------------------------------- a row's turns


def check_turns(messages: Sequence[Message], tools: Sequence[Message], marks: Marks) -> None:
    """RowError for an unknown role, and for a mark in any text of a message or a tool.

    Known are the roles of the template, and ROLES."""
    for message in messages:
        role = message["role"]
        if role not in marks.roles:
            raise RowError(
                f"the role {role[:60]!r} is unknown; known: {', '.join(sorted(marks.roles))}"
            )
    for message in messages:
        is_answer = message["role"] == "assistant"
        pattern = marks.in_answers if is_answer else marks.in_prompts
        _check_texts(texts_of([message]), pattern, marks, part="answer" if is_answer else "problem")
    _check_texts(texts_of(tools), marks.in_prompts, marks, part="tools")


def _check_texts(texts: Iterable[str], pattern: re.Pattern[str], marks: Marks, part: str) -> None:
    """RowError for a text that has a mark, as it stands or normalised."""
    normalizer = marks.tokenizer.backend_tokenizer.normalizer
    for text in texts:
        match = pattern.search(text)
        if match is None and normalizer is not None:
            match = pattern.search(normalizer.normalize_str(text))
        if match is not None:
            raise RowError(
                f"its {part} would end or change the turn, as it has {_named(match[0], marks)}"
            )


def _named(mark: str, marks: Marks) -> str:
    kind = "tokenizer's special token" if mark in marks.tokens else "template's mark"
    return f"the {kind} {mark!r}"


# ---------------------------------------------------------------- marks that a template puts together


def check_rendered(
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    is_prompt: bool,
) -> None:
    """RowError for a row whose texts become a mark in the chat template, which no text has.

    A template may join "<|im_" and "end|>", or take out what stands between them. `text` is what it
    wrote, as a prompt or not: it has more marks then than the same turns with other texts."""
    marks = marks_of(tokenizer, None)
    plain = json.dumps([_plain(messages), _plain(tools)])
    template_marks = _template_marks(
        tokenizer, str(tokenizer.chat_template), plain, is_prompt=is_prompt
    )
    joined = None if template_marks is None else _counted(text, marks) - template_marks
    if joined:
        raise RowError(
            "its texts would end or change the turn, as the chat template makes "
            f"{_named(next(iter(joined)), marks)} of parts of them"
        )


@lru_cache(maxsize=256)
def _template_marks(
    tokenizer: PreTrainedTokenizerFast, template: str, plain: str, is_prompt: bool
) -> Counter[str] | None:
    """The marks that the template writes around turns; None where it does not take them.

    `plain` is JSON of the messages and the tools; `template` is a key of the cache."""
    messages, tools = json.loads(plain)
    try:
        text = render(messages, tokenizer, "plain turns", prompt=is_prompt, tools=tools)
    except ValueError:  # a template may ask for an id of nine characters
        return None
    return _counted(text, marks_of(tokenizer, None))


def _counted(text: str, marks: Marks) -> Counter[str]:
    """How often a text has each mark of turns and sequences, as it stands and normalised."""
    counts = Counter(marks.in_answers.findall(text))
    normalizer = marks.tokenizer.backend_tokenizer.normalizer
    if normalizer is not None:
        counts += Counter(marks.in_answers.findall(normalizer.normalize_str(text)))
    return counts


def _plain(value: Any, in_arguments: bool = False) -> Any:
    """A value of JSON with "x" for every text but roles and what is blank.

    Numbers in the arguments of calls are 0."""
    if isinstance(value, str):
        return "x" if value.strip() else value
    if isinstance(value, Mapping):
        return {
            key: part if key == "role" else _plain(part, in_arguments or key == "arguments")
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(part, in_arguments) for part in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0 if in_arguments and is_number else value
