"""Conversations in a tokenizer's chat template: prompts, learned answers and ends of turns.

    messages -> render -> the text that the model continues                       (GRPO, validation, evaluation)
    messages -> conversation -> pieces of the text, those that are learned marked  (supervised training)

A chat template is a program of the model folder's, in a sandbox that bounds neither time nor
memory: both are here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from rlmath.config.files import read_regular
from rlmath.config.help import nearest_word
from rlmath.config.schema import DataConfig
from rlmath.config.terminal import excerpt
from rlmath.data.columns import (
    CALL_FORMS,
    CallForm,
    Message,
    arguments_text,
    calls_of,
    for_template,
    in_form,
    text_problem,
    tool_names,
    weight_of,
)
from rlmath.data.rows import RowError

if TYPE_CHECKING:
    from jinja2.nodes import Template
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

CHAT_SECONDS = 10.0
"""Longest that a chat template may take for one text."""
REPEAT_SECONDS = 0.1
"""Interval at which the template is interrupted from then on: an exception is lost where it is
raised in a destructor."""
CHAT_BYTES = 2**30
"""Most memory that it may take meanwhile (bytes)."""
TEMPLATE_DATE = date(2024, 7, 26)
"""The date that a chat template takes for today, as Llama 3's does by itself.

So a run that is resumed later has the same prompts."""
MAX_TEMPLATE_BYTES = 2**20
CHATML_END = "<|im_end|>"

MOST_OBJECTS = 32
"""JSON objects behind the name of a call that are read to find its arguments."""
_GIVEN_ROLES = ("user", "tool")
"""Roles of the turns between which the texts of calls stand."""

CHANGE = "use another data.template"
CHANGE_CALLS = (
    "give as data.chat_template one that writes tool_calls and tool turns, or write calls as "
    "fences in the text (tools.format=fence)"
)


def user(content: str) -> Message:
    """A turn that asks.

    >>> user("1+1?")
    {'role': 'user', 'content': '1+1?'}
    """
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A turn that answers."""
    return {"role": "assistant", "content": content}


@dataclass(frozen=True)
class Piece:
    """A part of a conversation's text that is tokenized by itself."""

    text: str
    learned: bool
    """Whether the piece is learned: what the assistant's turn adds, with the mark that ends it."""
    token_ids: tuple[int, ...] | None = None
    """The tokens of an output of a tool, as an engine puts it behind a call; None: what the
    tokenizer makes of the text."""


_NOT_JSON = ("None", "True", "yes", "on", "False", "no", "off")
"""Words of Python and YAML that a template would take for texts, which are true."""


@dataclass(frozen=True)
class ChatSettings:
    """A run's settings of conversations, beside data.template."""

    template: str | None = None
    """Name of one of the tokenizer's chat templates, or path of a .jinja file; None: the
    tokenizer's default."""
    kwargs: Sequence[str] = ()
    """Variables of the template, "name=value"."""
    system_prompt: str | None = None
    """The system turn of conversations that begin without one."""
    names: tuple[str, str, str] = (
        "data.chat_template",
        "data.chat_template_kwargs",
        "data.system_prompt",
    )
    """Names of the three settings in errors."""
    tool: Message | None = None
    """The schema of the tool that all prompts show; None: those of their rows."""

    @property
    def head(self) -> str:
        """Statements that are set before the first line of the template.

        ValueError for an assignment that is none.

        >>> ChatSettings(kwargs=["x=false", "effort=high"]).head
        "{%- set x = False %}{%- set effort = 'high' +%}"
        """
        lines = []
        for assignment in self.kwargs:
            name, equals, written = assignment.partition("=")
            if not name.isidentifier() or not equals:
                raise ValueError(
                    f'{self.names[1]} has {assignment!r}; needed: "name=value", such as '
                    "enable_thinking=false"
                )
            if written in _NOT_JSON:
                raise ValueError(
                    f"{self.names[1]} has {assignment!r}; needed: true, false, null, or a text "
                    "in quotes"
                )
            try:
                value = json.loads(written, parse_constant=str)
            except ValueError:
                value = written
            lines.append(f"{{%- set {name} = {value!r} %}}")
        if self.system_prompt is not None:
            turn = repr([{"role": "system", "content": self.system_prompt}])
            lines.append("{%- if messages[0].role != 'system' %}{%- set messages = ")
            lines.append(f"{turn} + messages %}}{{%- endif %}}")
        if self.tool is not None:
            refusal = "the row has tools of its own, and tools.format=chat has Python alone"
            lines.append(f"{{%- if tools %}}{{{{ raise_exception({refusal!r}) }}}}{{%- endif %}}")
            # SmolLM3's template names its tools by how they are called.
            lines.append(f"{{%- set tools = {[self.tool]!r} %}}{{%- set xml_tools = tools %}}")
        # Without the "+" the template would lose a line's end after the head.
        return "".join(lines).removesuffix("%}") + "+%}" * bool(lines)

    def named_template(self, tokenizer: PreTrainedTokenizerFast) -> str | None:
        """The template that `template` names; None where it names none.

        The tokenizer is one that `set_template` gave these settings."""
        return (
            str(tokenizer.chat_template).removeprefix(self.head)
            if self.template is not None
            else None
        )

    @property
    def given(self) -> list[str]:
        """Names of the settings that are set."""
        values = (self.template is not None, bool(self.kwargs), self.system_prompt is not None)
        return [name for name, is_given in zip(self.names, values, strict=True) if is_given]


def chat_settings(data: DataConfig) -> ChatSettings:
    return ChatSettings(data.chat_template, tuple(data.chat_template_kwargs), data.system_prompt)


def set_template(tokenizer: PreTrainedTokenizerFast, settings: ChatSettings, folder: str) -> None:
    """Give the tokenizer of `folder` the one chat template that the settings name.

    It comes with their variables and system prompt. ValueError where there is no such template, and
    for one that refuses or leaves out the system turn."""
    template = _named_template(tokenizer.chat_template, settings, folder)
    if template is None:
        if settings.given:
            given_settings = (
                f"{' and '.join(settings.given)} {'are' if settings.given[1:] else 'is'} given"
            )
            raise ValueError(
                f"{given_settings}, and the model's tokenizer has no chat template; leave it out"
            )
        return
    is_file = settings.template is not None and settings.template.endswith(".jinja")
    if settings.kwargs:
        source = settings.template if settings.template is not None and is_file else folder
        _check_variables(template, settings, source)
    tokenizer.chat_template = settings.head + template
    if settings.template is None and settings.system_prompt is None:
        return
    system_prompt = settings.system_prompt or ""
    given_settings = " with ".join(settings.given[::2])
    given_settings = given_settings.replace(
        settings.names[0], f"{settings.names[0]}={settings.template}"
    )
    change = "correct the file" if is_file else CHANGE
    try:
        text = render([user("6 x 7?")], tokenizer, "a question")
        if _squeezed(system_prompt) not in _squeezed(text):
            raise _left_out("its system turn", text)
    except ValueError as error:
        raise ValueError(
            f"{given_settings}: {str(error).removesuffix(CHANGE)}{change}, or leave it out"
        ) from error


_GIVEN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
"""Names that the program gives to a template."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags of transformers', which say what an assistant wrote."""


def _check_variables(template: str, settings: ChatSettings, source: str) -> None:
    """ValueError for a variable of the settings that cannot be given to the template of `source`.

    The template does not read it, the program gives it already, or it is given twice. `source` is a
    folder or file."""
    from jinja2 import meta
    from jinja2.defaults import DEFAULT_NAMESPACE

    setting = settings.names[1]
    names = [assignment.partition("=")[0] for assignment in settings.kwargs]
    assert settings.head, "each entry is a variable"
    try:
        undeclared = _limited(lambda: meta.find_undeclared_variables(_parsed(template)))
    except Exception as error:  # whatever Jinja raises where a template is no program
        raise ValueError(
            f"{setting}: the chat template of {source!r} cannot be read: {_reason(error)}"
        ) from error
    variables = undeclared - {*DEFAULT_NAMESPACE, *_GIVEN}
    for name in names:
        if name in _GIVEN:
            raise ValueError(
                f"{setting} has {name!r}, which the program gives to the template; leave it out"
            )
        if names.count(name) > 1:
            raise ValueError(f"{setting} has {name!r} {names.count(name)} times; give it once")
        if name not in variables:
            variable_names = ", ".join(sorted(variables)) or "none"
            raise ValueError(
                f"{setting} has {name!r}, and the chat template of {source!r} reads no such "
                "variable."
                f"{nearest_word(name, variables)} Those that it reads: {variable_names}. "
                "Leave it out, or write the name as the template does"
            )


def _parsed(template: str) -> Template:
    """The syntax tree of a template.

    Jinja's errors where it is none."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION.sub("", template))


@lru_cache(maxsize=4)
def role_names(template: str) -> frozenset[str]:
    """Roles that a template names, as it compares them with those of messages.

    >>> sorted(role_names("{% if messages[0].role in ['tool', 'ipython'] %}{% endif %}"))
    ['ipython', 'tool']
    """
    from jinja2 import nodes

    try:
        compared = _limited(lambda: list(_parsed(template).find_all(nodes.Compare)))
    except Exception:  # what Jinja raises where a template is no program: `render` says so
        return frozenset()
    names: set[str] = set()
    for comparison in compared:
        attributes = [node.attr for node in comparison.find_all(nodes.Getattr)]
        keys = [node.arg for node in comparison.find_all(nodes.Getitem)]
        attributes += [key.value for key in keys if isinstance(key, nodes.Const)]
        if "role" in attributes:
            words = {node.value for node in comparison.find_all(nodes.Const)} - {"role"}
            names |= {word for word in words if isinstance(word, str) and word.isidentifier()}
    return frozenset(names)


def _named_template(templates: Any, settings: ChatSettings, folder: str) -> str | None:
    """The template that the settings name, or the default; None where the tokenizer has none.

    `templates` is what the tokenizer has: a template, several by name, or none."""
    named: dict[str, str] = (
        templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    )
    available = ", ".join(map(repr, named)) or "none"
    setting = settings.names[0]
    name = settings.template or "default"
    if name in named:
        return named[name]
    if settings.template is None:
        if named:
            raise ValueError(
                f"the tokenizer in {folder!r} has the chat templates {available}, and no default; "
                f"name one as {setting}"
            )
        return None
    if not name.endswith(".jinja"):
        raise ValueError(
            f"{setting} is {name!r}; needed: a chat template of the tokenizer in {folder!r} "
            f"({available}), or the path of "
            "a .jinja file"
        )
    try:
        return read_regular(name, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{setting}: {name!r} cannot be read ({reason}); give a file of UTF-8 text"
        ) from error


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    *,
    prompt: bool = True,
    tools: Sequence[Message] = (),
) -> str:
    """The text of messages in the tokenizer's chat template, with all their keys and the tools.

    A `prompt` ends where the answer begins, and has the text of every turn but the assistant's.
    Calls are written in the first of their forms of which the template writes all calls; a template
    that leaves calls out gets the first form that it takes.

    Errors, in which `name` is the messages': RowError where the template refuses them, leaves a
    part out, or makes what is no text; ValueError where it is no template at all, takes too long or
    too much memory."""
    text, _ = _in_first_form(
        messages, tokenizer, name, is_prompt=prompt, tools=tools, are_learned=False
    )
    return text


def _in_first_form(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    is_prompt: bool,
    tools: Sequence[Message],
    are_learned: bool,
) -> tuple[str, CallForm]:
    """The text of messages, and the form of their calls; see `render`.

    Where they `are_learned`, a text without one of the calls is a RowError."""
    change = CHANGE_CALLS if are_learned and _has_calls_or_outputs(messages) else CHANGE
    errors: list[RowError] = []
    tried: list[Sequence[Message]] = []
    without_calls: tuple[str, CallForm] | None = None
    for form in CALL_FORMS:
        written = in_form(messages, form)
        if written in tried:
            continue
        tried.append(written)
        try:
            text = _rendered(
                written, tokenizer, name, is_prompt=is_prompt, tools=tools, change=change
            )
        except RowError as error:
            errors.append(error)
            continue
        try:
            _require_calls(messages, text, name)
            return text, form
        except RowError as error:
            errors.append(error)
            without_calls = without_calls or (text, form)
    if without_calls is not None and not are_learned:
        return without_calls
    raise _most_telling(errors)


def _most_telling(errors: Sequence[RowError]) -> RowError:
    """The last of the forms' errors that does not come of a wrong form, else the first."""
    from jinja2 import UndefinedError

    telling = [
        error for error in errors if not isinstance(error.__cause__, TypeError | UndefinedError)
    ]
    return telling[-1] if telling else errors[0]


def _rendered(
    written: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    is_prompt: bool,
    tools: Sequence[Message],
    change: str,
) -> str:
    """The text that the template makes of the messages as they are `written`; see `render`.

    `change` is the remedy of its errors."""
    from jinja2 import TemplateSyntaxError

    def rendered() -> str:
        return str(
            tokenizer.apply_chat_template(
                for_template(written),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                strftime_now=TEMPLATE_DATE.strftime,
            )
        )

    try:
        text = _limited(rendered)
    except (TimeoutError, MemoryError, TemplateSyntaxError) as error:
        raise ValueError(
            f"the chat template cannot take {name}: {_reason(error)}; {CHANGE}"
        ) from error
    except Exception as error:  # whatever the template's code raises, as for an unknown role
        raise RowError(
            f"the chat template cannot take {name}: {_reason(error)}; {change}"
        ) from error
    problem = text_problem(text)
    if problem is not None and not (is_prompt and problem == "is blank"):
        raise RowError(f"the chat template makes of {name} a text that {problem}; {CHANGE}")
    if is_prompt:
        _require_turns(written, tools, text, name)
    return text


def _has_calls_or_outputs(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def _reason(error: Exception) -> str:
    """Why a template fails, and in which of its lines."""
    if isinstance(error, MemoryError):
        return f"more than {CHAT_BYTES / 2**30:g} GiB"
    frames = traceback.extract_tb(error.__traceback__)
    line = getattr(error, "lineno", None)  # of Jinja's syntax errors
    for frame in frames:
        line = frame.lineno if frame.filename == "<template>" else line
    return excerpt(str(error).removesuffix("."), 200) + (f" (line {line})" if line else "")


def generation_prompt(
    messages: Sequence[Message],
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    tools: Sequence[Message] = (),
) -> str:
    """The text that the template writes after the messages for an answer to begin.

    "" where `text` does not begin with the messages."""
    try:
        conversation_text = render(messages, tokenizer, "the prompt", prompt=False, tools=tools)
    except ValueError:
        return ""
    return text[len(conversation_text) :] if text.startswith(conversation_text) else ""


# --------------------------------------------------------------- what a template must not leave out


def _require_turns(
    messages: Sequence[Message], tools: Sequence[Message], text: str, name: str
) -> None:
    """RowError for a prompt without the text of one of its turns or of a tool's name.

    The assistant's turns are left out of this check: a template may take thinking out of them. The
    answer of a tool may be there as JSON."""
    squeezed = _squeezed(text)
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            continue
        if not any(form in squeezed for form in _content_forms(message)):
            part = (
                "the problem"
                if number == len(messages)
                else f"the turn of {message['role'][:40]!r}"
            )
            raise _left_out(f"{part} of {name}", text)
    if any(_squeezed(tool_name) not in squeezed for tool_name in tool_names(tools)):
        raise _left_out(f"the tools of {name}", text)


def _content_forms(message: Message) -> list[str]:
    """Texts, without white space, that a template may write for the content of a turn."""
    content = message["content"]
    forms = [content]
    if message["role"] == "tool":
        forms += [json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]]
    return [_squeezed(form) for form in forms]


def _require_answer(answer: Message, text: str, name: str) -> None:
    """RowError for a text without a part of an answer."""
    missing = _missing_parts(answer, text)
    if not missing:
        return
    if not calls_of(answer):
        raise _left_out(f"a part of the answer of {name}", text)
    if missing == ["reasoning_content"]:
        raise RowError(
            f"the chat template leaves out the reasoning_content beside a call of {name}: it makes "
            f"{text[-60:]!r} of its last turns; take reasoning_content out of the message, or give "
            "as data.chat_template one that writes it"
        )
    raise RowError(
        f"the chat template leaves out the text beside a call of {name}: it makes {text[-60:]!r} "
        f"of its last turns; take content out of the message, or {CHANGE_CALLS}"
    )


def _missing_parts(answer: Message, text: str) -> list[str]:
    """The keys of what an answer says, beside its calls, that a text has not."""
    squeezed = _squeezed(text)
    return [
        key
        for key in ("content", "reasoning_content")
        if isinstance(answer.get(key), str) and _squeezed(answer[key]) not in squeezed
    ]


def _require_calls(messages: Sequence[Message], text: str, name: str) -> None:
    """RowError for a text without one of the calls, between the turns before it and behind it."""
    if not any(map(calls_of, messages)):
        return
    try:
        call = _limited(lambda: _missing_call(messages, _squeezed(text)))
    except (TimeoutError, MemoryError) as error:
        raise RowError(f"the calls of {name} cannot be looked for: {_reason(error)}") from error
    if call is None:
        return
    function = call["function"]
    raise RowError(
        f"the chat template leaves out the call of {name}: it makes {text[-60:]!r} of its last "
        f"turns; needed are the name {function['name'][:40]!r} and behind it the arguments "
        f"{arguments_text(function['arguments'])[:60]}; {CHANGE_CALLS}"
    )


def _missing_call(messages: Sequence[Message], text: str) -> Message | None:
    """The first call that a text without white space has not in its place; None: it has all."""
    start = 0
    for message, stop in zip(messages, _latest_ends(messages, text), strict=True):
        if message["role"] in _GIVEN_ROLES:
            places = [(text.find(form, start), len(form)) for form in _content_forms(message)]
            start = min((place + length for place, length in places if place >= 0), default=start)
        for call in calls_of(message):
            end = _end_of_call(call, text, start, stop)
            if end is None:
                return call
            start = end
    return None


def _latest_ends(messages: Sequence[Message], text: str) -> list[int]:
    """The position in a text without white space at which each of the messages has ended.

    It is the last one at which the next turn without calls can begin."""
    ends: list[int] = []
    latest = len(text)
    for message in reversed(messages):
        ends.append(latest)
        is_answer = message["role"] == "assistant" and not calls_of(message)
        if message["role"] in _GIVEN_ROLES or (
            is_answer and isinstance(message.get("content"), str)
        ):
            place = max(text.rfind(form, 0, latest) for form in _content_forms(message))
            latest = place if place >= 0 else latest
    return ends[::-1]


def _end_of_call(call: Message, text: str, start: int, stop: int) -> int | None:
    """The end of a call in a text without white space, between `start` and `stop`.

    None: it is not there. Its name comes first. Arguments are a JSON object, or each name of an
    argument with its value behind it, but neither a dict of Python's nor a JSON text in quotes."""
    function = call["function"]
    function_name = _squeezed(function["name"])
    place = text.find(function_name, start, stop)
    if place < 0:
        return None
    position = place + len(function_name)
    arguments = function["arguments"]
    texts = (arguments_text(arguments), *_json_texts(arguments))
    for form in map(_squeezed, texts):
        place = text.find(form, position, stop)
        if place >= 0:
            return place + len(form)
    end = _end_of_object(arguments, text, position, stop)
    if end is not None or not arguments:
        return position if end is None else end
    in_quotes = [json.dumps(form, ensure_ascii=False)[1:-1] for form in (str(arguments), *texts)]
    wrong_forms = (str(arguments), *in_quotes)
    if any(text.find(_squeezed(form), position, stop) >= 0 for form in wrong_forms):
        return None
    end = position
    for argument, value in arguments.items():
        # Mostly they stand in the row's order; a template may sort them.
        starts = (end, position)
        pair_ends = (_end_of_pair(argument, value, text, at=at, stop=stop) for at in starts)
        pair_end = next((pair_end for pair_end in pair_ends if pair_end is not None), None)
        if pair_end is None:
            return None
        end = max(end, pair_end)
    return end


def _json_texts(value: Any) -> list[str]:
    """JSON of a value, with and without escapes for what is not ASCII."""
    return [json.dumps(value, ensure_ascii=False), json.dumps(value)]


def _end_of_object(arguments: Message, text: str, position: int, stop: int) -> int | None:
    """The end of a JSON object that is the arguments, but for white space and order.

    None: it is not among the first MOST_OBJECTS."""
    decoder = json.JSONDecoder()
    needed = _squeezed_value(arguments)
    opening = text.find('{"', position, stop)
    for _ in range(MOST_OBJECTS):
        if opening < 0:
            return None
        try:
            value, end = decoder.raw_decode(text, opening)
            if end <= stop and _squeezed_value(value) == needed:
                return end
        except (ValueError, RecursionError):
            pass
        opening = text.find('{"', opening + 1, stop)
    return None


def _squeezed_value(value: Any) -> Any:
    """A value of JSON with all texts without white space."""
    if isinstance(value, str):
        return _squeezed(value)
    if isinstance(value, dict):
        return {_squeezed(key): _squeezed_value(part) for key, part in value.items()}
    return [_squeezed_value(part) for part in value] if isinstance(value, list) else value


def _end_of_pair(argument: str, value: Any, text: str, at: int, stop: int) -> int | None:
    """The end of an argument's value behind its name, searched from `at`; None: it is not there.

    The value is JSON, a text also without quotes, or a word of Python's."""
    argument_name = _squeezed(argument)
    place = text.find(argument_name, at, stop)
    if place < 0:
        return None
    forms = [form[1:-1] if isinstance(value, str) else form for form in _json_texts(value)]
    if not isinstance(value, dict | list):
        forms = [str(value), *forms]
    behind_name = place + len(argument_name)
    ends = [
        value_place + len(form)
        for form in map(_squeezed, forms)
        if (value_place := text.find(form, behind_name, stop)) >= 0
    ]
    return min(ends, default=None)


def _left_out(part: str, text: str) -> RowError:
    return RowError(f"the chat template leaves out {part}: it makes {text[:60]!r} of it; {CHANGE}")


def _squeezed(text: str) -> str:
    """A text without white space, which templates strip and add."""
    return "".join(text.split())


# ---------------------------------------------------------------- conversations that are learned


def conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    tools: Sequence[Message] = (),
) -> tuple[str, list[Piece]]:
    """The template's text of a conversation that ends with the assistant's turn, and its pieces.

    The pieces end with the mark that ends the last learned turn. An assistant's turn is learned
    from where its generation begins, unless it has weight 0, or is an earlier one that the template
    changes: Qwen3's takes the thinking out. One with calls is learned as the whole conversation has
    it, where that has all of the turn.

    RowError where the text does not begin with the last turn's prompt, where a call behind the last
    question cannot be learned, and where no turn is left to learn; other errors: as `render`."""
    token = chat_end(tokenizer)
    end = "" if token is None else str(tokenizer.convert_ids_to_tokens(token))
    ends = tuple(filter(None, (end, str(tokenizer.eos_token or ""))))
    messages = [without_end(message, ends) for message in messages]
    whole, form = _in_first_form(
        messages, tokenizer, name, is_prompt=False, tools=tools, are_learned=True
    )
    change = CHANGE_CALLS if _has_calls_or_outputs(messages) else CHANGE
    written = in_form(messages, form)
    rendered = functools.partial(
        _rendered, tokenizer=tokenizer, name=name, tools=tools, change=change
    )
    pieces: list[Piece] = []
    position = 0
    last_question = max(
        (turn for turn, message in enumerate(messages) if message["role"] == "user"), default=0
    )
    for turn in [turn for turn, message in enumerate(messages) if turn > 0 and weight_of(message)]:
        is_last = turn == len(messages) - 1
        start = rendered(written[:turn], is_prompt=True)
        text_so_far = whole
        if not is_last:
            text_so_far = rendered(written[: turn + 1], is_prompt=False)
        if is_last and not whole.startswith(start):
            raise RowError(
                f"the chat template does not continue the prompt of {name}: the prompt ends "
                f"{start[-60:]!r}, and the whole conversation has "
                f"{_behind_common(start, whole)!r} there. A model that "
                f"learned it would never see that prompt; {CHANGE}, or give rows with prompt and "
                "completion"
            )
        stop = _end_of_turn(text_so_far, len(start), end, tokenizer)
        has_calls = bool(calls_of(messages[turn]))
        if is_last or has_calls:
            _require_answer(messages[turn], text_so_far, name)
        is_kept = whole.startswith(text_so_far[:stop]) and text_so_far.startswith(start)
        if not is_kept and has_calls:
            stop = whole.find(end, len(start)) + len(end)
            is_kept = (
                whole.startswith(start)
                and end in text_so_far[len(start) :]
                and _has_calls_and_texts(messages[turn], whole[len(start) : stop])
            )
            if not is_kept and turn > last_question:
                raise RowError(
                    f"the chat template writes the call in turn {turn + 1} of {name} otherwise "
                    f"where more turns follow: its prompt ends {start[-60:]!r}, and the whole "
                    f"conversation has {_behind_common(start, whole)!r} there, so that the call "
                    "cannot be learned. Needed is a template that only appends: use another "
                    "data.chat_template or data.chat_template_kwargs, or give the turn weight 0"
                )
        if is_kept:
            pieces.append(Piece(whole[position : len(start)], False))
            pieces.append(Piece(whole[len(start) : stop], True))
            position = stop
    if not pieces:
        raise RowError(
            f"{name} has no turn that is learned: they have weight 0, or the template changes them"
        )
    return whole, pieces


def _end_of_turn(text: str, start: int, end: str, tokenizer: PreTrainedTokenizerFast) -> int:
    """The position behind the mark that ends a text's last turn, which begins at `start`.

    The mark is `end`, as answers have it, else an added token with which the text ends: calls have
    one of their own in some templates. Without a mark it is the end of the text."""
    position = text.rfind(end, start) if end else -1
    if position >= 0:
        return position + len(end)
    ended = text.rstrip()
    is_mark = ended.endswith(tuple(filter(str.strip, tokenizer.added_tokens_encoder)))
    return len(ended) if is_mark and len(ended) > start else len(text)


def _has_calls_and_texts(message: Message, text: str) -> bool:
    """Whether a text has what a turn says and all its calls, in their order."""
    squeezed = _squeezed(text)
    end: int | None = 0
    for call in calls_of(message):
        end = None if end is None else _end_of_call(call, squeezed, end, len(squeezed))
    return end is not None and not _missing_parts(message, text)


def without_end(message: Message, ends: tuple[str, ...]) -> Message:
    """An assistant's turn without the marks of an end that its row writes out; others as they are.

    The template writes such a mark itself."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    while mark := next(filter(content.rstrip().endswith, ends), None):
        content = content.rstrip().removesuffix(mark)
    return {**message, "content": content}


def chat_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token that ends the assistant's turn in the chat template.

    It is the token after an answer, where that is one of the tokenizer's added tokens. A tokenizer
    without a template, whose prompts are Qwen's, has `<|im_end|>` or none."""
    return _chat_end(tokenizer, str(tokenizer.chat_template or ""))


@lru_cache(maxsize=4)
def _chat_end(tokenizer: PreTrainedTokenizerFast, template: str) -> int | None:
    """The token of `chat_end`.

    `template` is the tokenizer's; it is a key of the cache, as the tokenizer may be given
    another."""
    added = tokenizer.added_tokens_encoder
    if not template:
        return added.get(CHATML_END)
    answer = "forty-two"
    try:
        text = render([user("6 x 7?"), assistant(answer)], tokenizer, "an answer", prompt=False)
    except ValueError:
        return None
    _, answer_text, behind_answer = text.rpartition(answer)
    behind = (
        tokenizer(behind_answer.lstrip(), add_special_tokens=False)["input_ids"]
        if answer_text
        else []
    )
    return behind[0] if behind and behind[0] in added.values() else None


def _behind_common(first: str, second: str) -> str:
    """The text of `second` from 20 characters before it begins to differ from `first`."""
    common_length = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(first, second, strict=False)
        )
    )
    return second[max(0, common_length - 20) :][:80]


class _OutOfTime(BaseException):
    """Raised where a template takes too long.

    It is no Exception, as Jinja and templates swallow some of these."""


def _limited(call: Callable[[], T]) -> T:
    """The result of a call that is limited in time and memory.

    TimeoutError or MemoryError where it takes more than CHAT_SECONDS or CHAT_BYTES; main thread
    only."""

    def inside() -> T:
        return call()

    def too_late(_number: int, frame: FrameType | None) -> None:
        # Raised only while the call goes on: a second exception must not reach what catches the first.
        while frame is not None:
            if frame.f_code is inside.__code__:
                raise _OutOfTime
            frame = frame.f_back

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    handler = signal.signal(signal.SIGALRM, too_late)
    try:
        if soft == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (used_bytes + CHAT_BYTES, hard))
        signal.setitimer(signal.ITIMER_REAL, CHAT_SECONDS, REPEAT_SECONDS)
        return inside()
    except _OutOfTime:
        raise TimeoutError(f"it takes more than {CHAT_SECONDS:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
