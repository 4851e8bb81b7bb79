"""Texts, conversations and tools of a row's columns, checked for a template and a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def messages_of(value: object, name: str, *, are_learned: bool = False) -> tuple[Message, ...]:
    """The messages of a chat in the column `name`, with all their keys but those that are null.

    RowError for a value that is no chat of texts, and where they `are_learned` for calls that are
    none; in a prompt such calls go to the template as the row has them."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise RowError(f"{name} must be a list of 1 to {MAX_MESSAGES} messages, got {short(value)}")
    return tuple(_message_of(message, name, are_learned) for message in value)


def _message_of(value: object, name: str, is_learned: bool) -> Message:
    """One checked message of the column `name`, without the keys that are null."""
    if not isinstance(value, dict) or value.get("role") is None:
        raise RowError(f"each message of {name} needs role and content, got {short(value)}")
    message = {key: part for key, part in value.items() if part is not None or key == "content"}
    written_calls = message.pop("tool_calls", None)
    role = checked_text(message["role"], "role")
    try:
        calls = _calls_of(written_calls)
    except RowError:
        if is_learned:
            raise
        calls = written_calls
    if calls:
        content = message.get("content")
        message = {**message, "content": "" if content is None else content, "tool_calls": calls}
    if calls and is_learned and role != "assistant":
        raise RowError(
            f"a message of {role[:40]!r} has tool_calls; needed: calls in the assistant's turns "
            "alone. Take them out, or correct the role"
        )
    if not calls:
        if "content" not in message:
            raise RowError(f"each message of {name} needs role and content, got {short(value)}")
        # The content of a tool's message may be blank.
        if role != "tool" or not isinstance(message["content"], str):
            checked_text(message["content"], "content")
    elif not isinstance(message["content"], str):
        raise RowError(
            f"content must be a string, or null beside tool_calls, got {short(message['content'])}"
        )
    for path, text in _texts_in(message, "message"):
        if (problem := _character_problem(text)) is not None:
            raise RowError(f"{path} has {problem}")
    weight_of(message)
    return message


def _calls_of(value: object) -> list[dict[str, Any]]:
    """The calls of a message, each as {"type", "function": {"name", "arguments"}} and its id.

    `value` is a list, or the JSON text of one, as tables have it; a call may also be the function
    alone. Arguments are an object, or the JSON text of one, and become the object. RowError for
    what is none of these."""
    value = _parsed_json(value, "tool_calls")
    if not value:
        return []
    if not isinstance(value, list):
        raise RowError(f"tool_calls must be a list of calls, got {short(value)}")
    return [_call_of(call) for call in value]


def _call_of(value: object) -> dict[str, Any]:
    """One call of a message; see `_calls_of`."""
    function = (value.get("function") or value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping) or name is None:
        raise RowError(
            f"each of tool_calls needs a function with its name and arguments, got {short(value)}"
        )
    name = checked_text(name, "the name of a call")
    arguments_name = f"the arguments of the call of {name[:40]!r}"
    written = function.get("arguments")
    arguments = _parsed_json(written, arguments_name)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise RowError(
            f"{arguments_name} must be a JSON object, or the text of one, got {short(arguments)}"
        )
    if not all(map(math.isfinite, _numbers_in(arguments))):
        raise RowError(
            f"{arguments_name} have a number that is not finite, such as NaN or 1e400, which JSON "
            "has no word for; give a finite number, null or a text"
        )
    other_keys = {
        key: part
        for key, part in value.items()
        if key not in ("function", "name", "arguments") and part is not None
    }
    is_text = isinstance(written, str) and bool(written.strip())
    return {
        "type": "function",
        **other_keys,
        "function": {"name": name, "arguments": Arguments(arguments, written if is_text else None)},
    }


class Arguments(dict[str, Any]):
    """The arguments of a call, of which the row may have the text."""

    def __init__(self, values: Mapping[str, Any], text: str | None) -> None:
        """`text` is the row's JSON of the values; None: the row has an object."""
        super().__init__(values)
        self._text = text  # a name that templates, which read keys as attributes, cannot see


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """The JSON text of a call's arguments: the row's own where it has one.

    >>> arguments_text({"a": 0.1}), arguments_text(Arguments({"a": 0.1}, '{"a":0.10}'))
    ('{"a": 0.1}', '{"a":0.10}')
    """
    text = arguments._text if isinstance(arguments, Arguments) else None
    return json.dumps(arguments, ensure_ascii=False) if text is None else text


def _numbers_in(value: object) -> Iterator[float]:
    """All fractions in a value of JSON."""
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, float):
            yield part
        elif isinstance(part, Mapping):
            values += part.values()
        elif isinstance(part, list):
            values += part


def calls_of(message: Message) -> Sequence[Message]:
    """The calls of an assistant's message; none where they are not as `messages_of` has them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or message["role"] != "assistant":
        return ()
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    are_known = all(
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), Mapping)
        for function in functions
    )
    return calls if are_known else ()


def _parsed_json(value: object, name: str) -> Any:
    """The value that a JSON text stands for; other values as they are, and None for a blank text.

    RowError, in which `name` is the value's, for a text that is not JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except ValueError as error:
        raise RowError(f"{name} is a text that is not JSON ({error})") from error


@dataclass(frozen=True)
class CallForm:
    """A form in which templates take calls."""

    has_null: bool
    """Whether a blank content beside calls is null."""
    has_texts: bool
    """Whether arguments are JSON texts, as OpenAI has them."""


CALL_FORMS = tuple(
    CallForm(has_null, has_texts) for has_texts in (False, True) for has_null in (False, True)
)
"""The forms in the order in which they are tried."""


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with calls in a form; without calls they are as they were.

    >>> call = {"function": {"name": "add", "arguments": {"a": 1}}}
    >>> turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    >>> for form in CALL_FORMS:
    ...     (written,) = in_form([turn], form)
    ...     written["content"], written["tool_calls"][0]["function"]["arguments"]
    ('', {'a': 1})
    (None, {'a': 1})
    ('', '{"a": 1}')
    (None, '{"a": 1}')
    """
    return [
        _in_form(message, form) if message.get("tool_calls") else message for message in messages
    ]


def _in_form(message: Message, form: CallForm) -> Message:
    """A turn with calls in a form."""
    if form.has_null and not message["content"]:
        message = {**message, "content": None}
    if form.has_texts and calls_of(message):
        message = {**message, "tool_calls": [_with_text(call) for call in calls_of(message)]}
    return message


def _with_text(call: Message) -> Message:
    """A call with the JSON text of its arguments."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_text(function["arguments"])}}


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
    value = _parsed_json(value, "tools")
    if value is None or value == []:
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
