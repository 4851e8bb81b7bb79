"""The form of calls that a run has (`tools.format`): one face for engine, pictures and metrics.

fence     blocks in plain text, complete at a marker     rlmath.data.tool_fences
chat      the model's chat template, at a turn's end     rlmath.data.tool_chats
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Completion, Prompt
from rlmath.answers.extraction import extract_answer
from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_chats import (
    KEYS,
    CallFrame,
    ChatFormat,
    SettingNames,
    call_frame,
    has_chat_call,
    opened_thinking,
)
from rlmath.data.tool_fences import FenceFormat, code_in
from rlmath.rewards.reward_manager import text_to_verify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


ToolFormat = FenceFormat | ChatFormat
"""Finds calls in sampled tokens, and writes outputs as tokens."""


def open_format(
    tokenizer: PreTrainedTokenizerFast,
    tools: ToolsConfig,
    stop_token_ids: Collection[int] = (),
    *,
    frame: CallFrame | None = None,
) -> ToolFormat:
    """The format of `tools`, which have one.

    `stop_token_ids` end a completion. `frame` is what the tokenizer's chat template writes, where
    that is known. ValueError where the tokenizer or its chat template cannot write a call."""
    if tools.format == "chat":
        return ChatFormat(tokenizer, tools.max_output_tokens, stop_token_ids, frame=frame)
    return FenceFormat(tokenizer, tools.max_output_tokens)


def check_format(
    tokenizer: PreTrainedTokenizerFast,
    tools: ToolsConfig,
    vocab_size: int | None,
    names: SettingNames = KEYS,
) -> None:
    """ValueError where there are tools and the tokenizer cannot write a call.

    So it is where the chat template puts tokens around outputs that a model of `vocab_size` tokens
    does not know; None: that is not checked. `names` are those of settings in errors."""
    if tools.format is None:
        return
    frame = call_frame(tokenizer, names) if tools.format == "chat" else None
    tool_format = open_format(tokenizer, tools, frame=frame)
    if vocab_size is None or not isinstance(tool_format, ChatFormat):
        return
    highest = max(tool_format.frame_ids)
    if highest >= vocab_size:
        raise ValueError(
            f"{names.chat_format} is set, and the chat template puts token {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}) around outputs; the model has "
            f"{vocab_size} (vocab_size in config.json). Use the tokenizer that belongs to the "
            f"model, or {names.fence_format}"
        )


def ends_with_call(prompt: Prompt, completion: Completion, tools: ToolsConfig) -> bool:
    """Whether the last turn of a completion has a call, which was not run."""
    turn = completion.turns[-1]
    if tools.format == "chat":
        return has_chat_call(turn, opened_thinking(prompt.text))
    return code_in(turn) is not None


def has_void_turn(
    prompt: Prompt, completion: Completion, answer_from: str | None, tools: ToolsConfig
) -> bool:
    """Whether the last turn of a completion has neither a call nor an answer.

    `answer_from` is as `reward.answer_from`; None: what ends by itself is an answer."""
    if ends_with_call(prompt, completion, tools):
        return False
    if answer_from is None:
        return completion.finish_reason != "stop"
    *before, turn = completion.turns
    earlier = "" if tools.format == "chat" else "".join(before)
    return extract_answer(text_to_verify(prompt.text + earlier, turn), answer_from) is None
