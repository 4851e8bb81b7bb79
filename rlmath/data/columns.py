"""Texts, conversations and tools of a row's columns, checked for a template and a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmath.config.files import parse_json
from rlmath.data.files import MAX_LINE_BYTES
from rlmath.data.rows import RowError, short

Message = Mapping[str, Any]
"""A turn as its row has it: "role", "content", and what else a template may write, such as
"tool_calls". "weight" is for the trainer: `weight_of`."""

MAX_MESSAGES = 100
_MAX_DEPTH = 50
"""Lists and mappings inside each other, in a message or a tool."""
_WEIGHT = "weight"


def checked_text(value: object, name: str) -> str:
    """The value as a text that can be tokenized and is not blank.

    RowError, in which `name` is its column, for other values."""
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name} must be a string that is not blank, got {short(value)}")
    if len(value) > MAX_LINE_BYTES:
        raise RowError(f"{name} has {len(value)} characters, more than {MAX_LINE_BYTES}")
    if (problem := _character_problem(value)) is not None:
        raise RowError(f"{name} has {problem}")
    return value


def text_problem(text: str) -> str | None:
    """The reason why a text cannot be tokenized; None where it can.

    Such texts come from a template or a function of the user's.

    >>> text_problem("1+1?"), text_problem(" ")
    (None, 'is blank')
    """
    if not text.strip():
        return "is blank"
    if len(text) > MAX_LINE_BYTES:
        return f"has {len(text)} characters, more than {MAX_LINE_BYTES}"
    problem = _character_problem(text)
    return None if problem is None else f"has {problem}"


def _character_problem(text: str) -> str | None:
    if "\0" in text:
        return f"a NUL character at character {text.index(chr(0))}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half a surrogate pair at character {error.start}"
    return None


# ---------------------------------------------------------------- conversations


def messages_of(value: object, name: str) -> tuple[Message, ...]:
    """The messages of a chat in the column `name`, with all their keys but those that are null.

    RowError for a value that is no chat of texts."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise RowError(f"{name} must be a list of 1 to {MAX_MESSAGES} messages, got {short(value)}")
    return tuple(_message_of(message, name) for message in value)


def _message_of(value: object, name: str) -> Message:
    """One checked message of the column `name`, without the keys that are null."""
    if not isinstance(value, dict) or value.get("role") is None:
        raise RowError(f"each message of {name} needs role and content, got {short(value)}")
    message = {key: part for key, part in value.items() if part is not None or key == "content"}
    role = checked_text(message["role"], "role")
    if not message.get("tool_calls"):
        if "content" not in message:
            raise RowError(f"each message of {name} needs role and content, got {short(value)}")
        # The content of a tool's message may be blank.
        if role != "tool" or not isinstance(message["content"], str):
            checked_text(message["content"], "content")
    elif not isinstance(message.get("content"), str | None):
        raise RowError(
            f"content must be a string, or null beside tool_calls, got {short(message['content'])}"
        )
    for path, text in _texts_in(message, "message"):
        if (problem := _character_problem(text)) is not None:
            raise RowError(f"{path} has {problem}")
    weight_of(message)
    return message


def weight_of(message: Message) -> int:
    """The weight of a turn: 1 where it is learned, else 0.

    That is its "weight", where it has one; else an assistant's turn has 1. RowError for other
    weights, and for a 1 of a turn that is not the assistant's, which is never learned."""
    is_answer = message["role"] == "assistant"
    weight = message.get(_WEIGHT, int(is_answer))
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RowError(f"weight of a message must be 0 (not learned) or 1, got {short(weight)}")
    if weight == 1 and not is_answer:
        role = message["role"]
        raise RowError(
            f"weight 1 of a message of {role[:40]!r}: only the assistant's turns are learned"
        )
    return int(weight)


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them."""
    return [{key: part for key, part in message.items() if key != _WEIGHT} for message in messages]


def tools_of(value: object) -> tuple[Message, ...]:
    """The tools of a row's column, JSON schemas of functions.

    The column is a list, or the JSON text of one, as tables have it."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RowError(f"tools is a text that is not JSON ({error})") from error
    if value is None or value in ("", []):
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f"tools must be a list of JSON schemas, got {short(value)}")
    for path, text in _texts_in(value, "tools"):
        if (problem := _character_problem(text)) is not None:
            raise RowError(f"{path} has {problem}")
    return tuple(value)


def tool_names(tools: Sequence[Message]) -> list[str]:
    """The names of functions in tools, or in tool calls.

    >>> tool_names([{"type": "function", "function": {"name": "add"}}, {"name": "run"}, {}])
    ['add', 'run']
    """
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    return [name for name in names if isinstance(name, str)]


def texts_of(messages: Sequence[Message]) -> list[str]:
    """All texts of messages or tools, names of keys among them."""
    return [text for message in messages for _, text in _texts_in(message, "")]


def _texts_in(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(where, text) of every text in a value of JSON.

    RowError for what JSON has no word for, and for great depth."""
    if depth > _MAX_DEPTH:
        raise RowError(f"{path[:60]} is nested too deep")
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise RowError(f"a name in {path} is no text, got {short(key)}")
            yield f"a name in {path}", key
            yield from _texts_in(part, f"{path}.{key[:40]!a}", depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_in(part, path, depth + 1)
    elif not isinstance(value, int | float | None):
        raise RowError(f"{path} must be what JSON has, got {short(value)}")
