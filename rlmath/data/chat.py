"""Conversations in a tokenizer's chat template: what a prompt is, what an answer adds to it, what ends a turn.

    messages -> render -> the text that the model continues                       (GRPO, validation, evaluation)
    messages -> conversation -> pieces of the text, those that are learned marked  (supervised training)

A chat template is a program of the model folder's, in a sandbox that bounds neither time nor memory: both are here.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlmath.config.files import read_regular
from rlmath.config.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_SECONDS = 10.0
"""Longest that a chat template may take for one text."""
CHAT_BYTES = 2**30
"""Most memory that it may take meanwhile (bytes)."""
TEMPLATE_DATE = date(2024, 7, 26)
"""What a chat template takes for today, as Llama 3's does by itself: a run resumed later has the same prompts."""
MAX_TEMPLATE_BYTES = 2**20
CHATML_END = "<|im_end|>"

CHANGE = "use another data.template"

Messages = Sequence[tuple[str, str]]
"""(role, content) of every turn."""


@dataclass(frozen=True)
class Piece:
    """A part of a conversation's text that is tokenized by itself."""

    text: str
    learned: bool
    """What the assistant's turn adds, with the mark that ends it."""


_NOT_JSON = ("None", "True", "yes", "on", "False", "no", "off")
"""Words of Python and YAML that a template would take for texts, which are true."""


@dataclass(frozen=True)
class ChatSettings:
    """What a run says of its conversations, beside data.template."""

    template: str | None = None
    """Name of one of the tokenizer's chat templates, or path of a .jinja file; None: the tokenizer's default."""
    kwargs: Sequence[str] = ()
    """Variables of the template, "name=value"."""
    system_prompt: str | None = None
    """The system turn of conversations that begin without one."""
    names: tuple[str, str, str] = ("data.chat_template", "data.chat_template_kwargs", "data.system_prompt")
    """What the three are called in errors."""

    @property
    def head(self) -> str:
        """What is set before the first line of the template. ValueError for what is no variable.

        >>> ChatSettings(kwargs=["x=false", "effort=high"]).head
        "{%- set x = False %}{%- set effort = 'high' +%}"
        """
        lines = []
        for entry in self.kwargs:
            name, equals, written = entry.partition("=")
            if not name.isidentifier() or not equals:
                raise ValueError(
                    f'{self.names[1]} has {entry!r}; needed: "name=value", such as enable_thinking=false'
                )
            if written in _NOT_JSON:
                raise ValueError(
                    f"{self.names[1]} has {entry!r}; needed: true, false, null, or a text in quotes"
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
        return "".join(lines).removesuffix("%}") + "+%}" * bool(lines)  # else a line's end behind it would go

    def named_template(self, tokenizer: PreTrainedTokenizerFast) -> str | None:
        """What `template` names, of a tokenizer that `set_template` gave these settings; None where it names none."""
        return str(tokenizer.chat_template).removeprefix(self.head) if self.template is not None else None

    @property
    def given(self) -> list[str]:
        values = (self.template is not None, bool(self.kwargs), self.system_prompt is not None)
        return [name for name, is_given in zip(self.names, values, strict=True) if is_given]


def chat_settings(data: DataConfig) -> ChatSettings:
    return ChatSettings(data.chat_template, tuple(data.chat_template_kwargs), data.system_prompt)


def set_template(tokenizer: PreTrainedTokenizerFast, settings: ChatSettings, folder: str) -> None:
    """Give the tokenizer of `folder` the one chat template that the settings name, with their variables and system
    prompt. ValueError where there is none, and for one that refuses or leaves out the system turn."""
    template = _named_template(tokenizer.chat_template, settings, folder)
    if template is None:
        if settings.given:
            given = f"{' and '.join(settings.given)} {'are' if settings.given[1:] else 'is'} given"
            raise ValueError(f"{given}, and the model's tokenizer has no chat template; leave it out")
        return
    for entry in settings.kwargs:
        if entry.partition("=")[0] not in template:
            raise ValueError(
                f"{settings.names[1]} has {entry!r}, and the chat template of {folder!r} has no such variable; leave "
                "it out, or write the name as the template does"
            )
    tokenizer.chat_template = settings.head + template
    if settings.template is None and settings.system_prompt is None:
        return
    asked, given = settings.system_prompt or "", " with ".join(settings.given[::2])
    try:
        _require(asked, render([("user", "6 x 7?")], tokenizer, "a question"), "its system turn")
    except ValueError as error:
        raise ValueError(f"{given}: {error}, or leave it out") from error


def _named_template(held: Any, settings: ChatSettings, folder: str) -> str | None:
    """`held` is what the tokenizer has: a template, several by name, or none."""
    named: dict[str, str] = held if isinstance(held, dict) else {"default": held} if held else {}
    there = ", ".join(map(repr, named)) or "none"
    setting, name = settings.names[0], settings.template or "default"
    if name in named:
        return named[name]
    if settings.template is None:
        if named:
            raise ValueError(
                f"the tokenizer in {folder!r} has the chat templates {there}, and no default; name one as {setting}"
            )
        return None
    if not name.endswith(".jinja"):
        raise ValueError(
            f"{setting} is {name!r}; needed: a chat template of the tokenizer in {folder!r} ({there}), or the path of "
            "a .jinja file"
        )
    try:
        return read_regular(name, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{setting}: {name!r} cannot be read ({error}); give a file of UTF-8 text"
        ) from error


def render(messages: Messages, tokenizer: PreTrainedTokenizerFast, name: str, prompt: bool = True) -> str:
    """The messages in the tokenizer's chat template; a `prompt` ends where the answer begins. ValueError, in which
    `name` is theirs, where it refuses them, takes too long or too much memory, or leaves a prompt's last one out."""
    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        with _limits():
            text = str(
                tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=prompt, strftime_now=TEMPLATE_DATE.strftime
                )
            )
    except Exception as error:  # whatever the template's own code raises, such as for an unknown role
        reason = f"more than {CHAT_BYTES / 2**30:g} GiB" if isinstance(error, MemoryError) else error
        raise ValueError(f"the tokenizer's chat template cannot take {name}: {reason}; {CHANGE}") from error
    if prompt:
        _require(messages[-1][1], text, f"the problem of {name}")
    return text


def generation_prompt(messages: Messages, text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the template writes behind the messages for an answer to begin; "" where `text` does not begin with them."""
    try:
        without = render(messages, tokenizer, "the prompt", prompt=False)
    except ValueError:
        return ""
    return text[len(without) :] if text.startswith(without) else ""


def _require(content: str, text: str, name: str) -> None:
    if "".join(content.split()) not in "".join(text.split()):
        raise ValueError(
            f"the tokenizer's chat template leaves out {name}: it makes {text[:60]!r} of it; {CHANGE}"
        )


def conversation(messages: Messages, tokenizer: PreTrainedTokenizerFast, name: str) -> list[Piece]:
    """The template's own text of a conversation whose last turn is the assistant's, cut behind the mark that ends it.
    The assistant's turns are learned, each from where its generation begins; earlier ones that the template changes are
    not, as Qwen3's, which takes their thinking out. ValueError where the text does not begin with the last turn's
    prompt."""
    token = chat_end(tokenizer)
    end = "" if token is None else str(tokenizer.convert_ids_to_tokens(token))
    ends = tuple(filter(None, (end, str(tokenizer.eos_token or ""))))
    messages = [(role, _without(ends, text) if role == "assistant" else text) for role, text in messages]
    whole = render(messages, tokenizer, name, prompt=False)
    pieces: list[Piece] = []
    done = 0
    for turn in [turn for turn, (role, _) in enumerate(messages) if role == "assistant" and turn > 0]:
        is_last = turn == len(messages) - 1
        start = render(messages[:turn], tokenizer, name)
        written = whole if is_last else render(messages[: turn + 1], tokenizer, name, prompt=False)
        if is_last and not whole.startswith(start):
            raise ValueError(
                f"the tokenizer's chat template does not continue the prompt of {name}: the prompt ends "
                f"{start[-60:]!r}, and the whole conversation has {_behind_common(start, whole)!r} there. A model that "
                f"learned it would never see that prompt; {CHANGE}, or give rows with prompt and completion"
            )
        stop = written.rfind(end, len(start)) + len(end)
        if not end or stop < len(start):
            stop = len(written)
        if is_last:
            _require(messages[turn][1], whole, f"a part of the answer of {name}")
        if whole.startswith(written[:stop]) and written.startswith(start):
            pieces += [Piece(whole[done : len(start)], False), Piece(whole[len(start) : stop], True)]
            done = stop
    return pieces


def chat_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token that ends the assistant's turn in the chat template: what stands behind an answer, where that is one of
    the tokenizer's added tokens. A tokenizer without a template, whose prompts are Qwen's, has `<|im_end|>` or none."""
    return _chat_end(tokenizer, str(tokenizer.chat_template or ""))


@lru_cache(maxsize=4)
def _chat_end(tokenizer: PreTrainedTokenizerFast, template: str) -> int | None:
    """`template` is the tokenizer's, which may be given another."""
    added = tokenizer.added_tokens_encoder
    if not template:
        return added.get(CHATML_END)
    answer = "forty-two"
    try:
        text = render([("user", "6 x 7?"), ("assistant", answer)], tokenizer, "an answer", prompt=False)
    except ValueError:
        return None
    _, shown, rest = text.rpartition(answer)
    behind = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if shown else []
    return behind[0] if behind and behind[0] in added.values() else None


def _without(ends: tuple[str, ...], text: str) -> str:
    """A text without the marks of an end that a row writes out; the template writes one."""
    while mark := next(filter(text.rstrip().endswith, ends), None):
        text = text.rstrip().removesuffix(mark)
    return text


def _behind_common(first: str, second: str) -> str:
    """What `second` has where it begins to differ from `first`, and 20 characters before."""
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
    return second[max(0, same - 20) :][:80]


@contextmanager
def _limits() -> Iterator[None]:
    """TimeoutError or MemoryError where what is inside takes more than CHAT_SECONDS or CHAT_BYTES; main thread only."""

    def too_late(_number: int, _frame: Any) -> NoReturn:
        raise TimeoutError(f"it takes more than {CHAT_SECONDS:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    handler = signal.signal(signal.SIGALRM, too_late)
    try:
        if soft == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (held + CHAT_BYTES, hard))
        signal.setitimer(signal.ITIMER_REAL, CHAT_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
