"""Feedback to a finished answer, as tokens: what stands between two turns of a model's.

    chat     ... The answer is 7.<|im_end|>  \\n<|im_start|>user\\nFEEDBACK<|im_end|>\\n<|im_start|>assistant\\n
    others   ... The answer is 7.<eos>       \\nFEEDBACK\\n

In a chat it is what the model's chat template writes around a user's turn, which must be a pure
extension of what stands before; the end of the answer's turn is sampled, and stays as it is.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlmath.config.schema import Config
from rlmath.data.chat import render, user
from rlmath.data.tool_chats import CallFrame, ChatFormat, feedback_frame
from rlmath.data.tool_fences import most_output_characters
from rlmath.data.tool_outputs import OutputTokens, SampledCall, ShownOutputs
from rlmath.sandbox.shown import shown_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QUESTION = "6 x 7?"


class FeedbackTokens:
    """Writes feedback as tokens, as the prompt of a completion needs it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        max_feedback_tokens: int,
        prompts: Iterable[str],
    ) -> None:
        """`prompts` are the texts of all prompts.

        ValueError where one is a chat whose template does not append, and where the tokenizer has
        no newline."""
        self._most_characters = most_output_characters(max_feedback_tokens)
        plain_frame = _plain_frame(tokenizer)
        self.plain = ChatFormat(tokenizer, max_feedback_tokens, frame=plain_frame)
        self.chat: ChatFormat | None = None
        """None where no prompt is a chat."""
        self._generation = _generation(tokenizer)
        if any(map(self.is_chat, prompts)):
            frame = feedback_frame(tokenizer)
            self.chat = ChatFormat(tokenizer, max_feedback_tokens, frame=frame)

    def is_chat(self, prompt: str) -> bool:
        """Whether a prompt ends as the chat template ends prompts."""
        return bool(self._generation.strip()) and prompt.endswith(self._generation)

    def goes_on(self, prompt: str, last_token: int) -> bool:
        """Whether a further turn can stand behind this end of an answer.

        In a chat it is the end of a turn; another stop token ends the conversation."""
        chat = self.chat if self.is_chat(prompt) else None
        return chat is None or last_token in chat.can_complete

    def behind(self, prompt: str, text: str) -> ShownOutputs:
        """What stands behind an answer to a prompt: the text, cut where it is too long."""
        chat = self.chat if self.is_chat(prompt) else None
        visible, left_out = shown_text(text, 0, self._most_characters)
        outputs = (chat or self.plain).outputs((), [SampledCall("")], [visible])
        return replace(outputs, are_cut=[left_out > 0 or outputs.are_cut[0]])


def check_feedback(
    tokenizer: PreTrainedTokenizerFast, config: Config, prompts: Iterable[str], vocab_size: int
) -> None:
    """ValueError where finished answers go on, and feedback cannot be written behind them.

    So it is where the chat template puts tokens around it that a model of `vocab_size` tokens does
    not know. `prompts` are the texts of prompts."""
    if not config.answers_turns:
        return
    feedback = FeedbackTokens(tokenizer, config.turns.max_feedback_tokens, prompts)
    highest = max((feedback.chat or feedback.plain).frame_ids)
    if highest >= vocab_size:
        raise ValueError(
            f"finished answers go on (turns.feedback, environment.function), and token {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}) stands around what follows; the model "
            f"has {vocab_size} (vocab_size in config.json). Use the tokenizer that belongs to the "
            "model"
        )


def _plain_frame(tokenizer: PreTrainedTokenizerFast) -> CallFrame:
    """A line of its own behind the end of sequence; ValueError for a tokenizer without lines."""
    tokens = OutputTokens(tokenizer)
    if tokens.text_of(tokens.encoded("\n1\n")) != "\n1\n":
        raise ValueError(
            "finished answers go on (turns.feedback, environment.function) with a line of their "
            "own, and the tokenizer of the model has no newline. Use another model, or set "
            "turns.feedback=null and environment.function=null"
        )
    end_id = tokenizer.eos_token_id
    assert isinstance(end_id, int), end_id  # `load_tokenizer` refuses others
    return CallFrame(
        form="an answer",
        opened="",
        end=str(tokenizer.eos_token),
        end_id=end_id,
        head="\n",
        between=None,
        tail="\n",
        example="",
        strips=True,
    )


def _generation(tokenizer: PreTrainedTokenizerFast) -> str:
    """What the chat template writes behind a question; "" without a template that can be asked."""
    if not tokenizer.chat_template:
        return ""
    try:
        text = render([user(_QUESTION)], tokenizer, "a question")
    except ValueError:
        return ""
    return text.rpartition(_QUESTION)[2]
