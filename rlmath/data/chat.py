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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_SECONDS = 10.0
"""Longest that a chat template may take for one text."""
CHAT_BYTES = 2**30
"""Most memory that it may take meanwhile (bytes)."""
TEMPLATE_DATE = date(2024, 7, 26)
"""What a chat template takes for today, so that a run that is resumed on another day has the same prompts. Llama 3's
template writes this date where it is told none."""
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


def with_variables(template: str | None, variables: Sequence[str], setting: str) -> str | None:
    """The chat template with variables, "name=value", set before its first line; `setting` is where they are from.
    ValueError for what is no variable, and without a template.

    >>> with_variables("{{ x }}", ["x=false", "effort=high"], "data.chat_template_kwargs")
    "{%- set x = False %}{%- set effort = 'high' %}{{ x }}"
    """
    if variables and not isinstance(template, str):
        raise ValueError(f"{setting} is given, and the model's tokenizer has no chat template; leave it out")
    lines = []
    for entry in variables:
        name, equals, written = entry.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f'{setting} has {entry!r}; needed: "name=value", such as enable_thinking=false')
        try:
            value = json.loads(written)
        except ValueError:
            value = written
        lines.append(f"{{%- set {name} = {value!r} %}}")
    return "".join(lines) + template if template else template


def render(messages: Messages, tokenizer: PreTrainedTokenizerFast, name: str, prompt: bool = True) -> str:
    """The messages in the tokenizer's chat template; a `prompt` ends where the assistant's answer begins.

    ValueError where the template cannot take them, takes too long or too much memory, or leaves a prompt's last one
    out; `name` says there what they are.
    """
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


def _require(content: str, text: str, name: str) -> None:
    if "".join(content.split()) not in "".join(text.split()):
        raise ValueError(
            f"the tokenizer's chat template leaves out {name}: it makes {text[:60]!r} of it; {CHANGE}"
        )


def conversation(messages: Messages, tokenizer: PreTrainedTokenizerFast, name: str) -> list[Piece]:
    """The template's own text of a whole conversation whose last turn is the assistant's, cut behind the mark that ends
    that turn. The assistant's turns are learned, each from where its generation begins.

    An earlier turn is learned where the template leaves it as the model wrote it; Qwen3's takes the thinking out of it,
    and then it is context. ValueError where the whole text does not begin with the prompt of the last turn.
    """
    end = _mark_of(chat_end(tokenizer), tokenizer)
    messages = [(role, _without(end, text) if role == "assistant" else text) for role, text in messages]
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
    behind = tokenizer(text[text.rindex(answer) + len(answer) :].lstrip(), add_special_tokens=False)[
        "input_ids"
    ]
    return behind[0] if behind and behind[0] in added.values() else None


def _mark_of(token: int | None, tokenizer: PreTrainedTokenizerFast) -> str:
    return "" if token is None else str(tokenizer.convert_ids_to_tokens(token))


def _without(end: str, text: str) -> str:
    """A text without the marks of an end that a row writes out; the template writes one."""
    while end and text.rstrip().endswith(end):
        text = text.rstrip().removesuffix(end)
    return text


def _behind_common(first: str, second: str) -> str:
    """What `second` has where it begins to differ from `first`, and 20 characters before."""
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
    return second[max(0, same - 20) :][:80]


@contextmanager
def _limits() -> Iterator[None]:
    """TimeoutError or MemoryError where the code inside takes more than CHAT_SECONDS, or CHAT_BYTES of address space.
    Main thread only."""

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
