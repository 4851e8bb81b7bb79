"""Calls of Python as fences in plain text, for models that have no tool format of their own.

    We compute it.
    ```python                  a line that opens so begins a call
    print(6 * 7)
    ```                        complete here: a newline and three backticks, whatever follows
    ```output                  given from here, what the program showed,
    42
    ```                        to here
    The answer is \\boxed{42}.

What is sampled stays as it was sampled, to the last character of the token that completes the call.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.config.length_curriculum import BOUNDARY_TOKENS
from rlmath.data.tokenizer import completion_text
from rlmath.data.tool_outputs import OutputTokens, SampledCall, ShownOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKER = "\n```"
_OPENING = re.compile(r"^```python[ \t\r]*\n", re.MULTILINE)
_LATEST = 8
"""Tokens in which a marker is looked for that the last of them completes; it has four
characters."""
_EXAMPLE = "```python\nprint(1)\n```\n```output\n1\n```\n"


@dataclass(frozen=True)
class ShownOutput:
    """The output of a call as the model reads it."""

    token_ids: list[int]
    """The fence around it included."""
    text: str
    """Without the fence, as the tokens say it."""
    is_cut: bool
    """Whether a part of it was left out."""


class FenceFormat:
    """Finds calls in sampled tokens, and writes outputs as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_output_tokens: int) -> None:
        """ValueError where the tokenizer cannot write a call."""
        self.tokenizer = tokenizer
        self._max_output_tokens = max_output_tokens
        self.can_complete = frozenset(
            token_id
            for token, token_id in tokenizer.get_vocab().items()
            if "`" in token or token == "<0x60>"
        )
        """Tokens that can be the last one of a call."""
        self.example = "We compute it.\n```python\nprint(6 * 7)\n```"
        self._tokens = OutputTokens(tokenizer)
        if (read := self.text_of(self._tokens.encoded(_EXAMPLE))) != _EXAMPLE:
            raise ValueError(
                f'tools.format is "fence", and the tokenizer of the model reads {_EXAMPLE!r} as '
                f"{read!r}. Needed is a tokenizer with newlines and backticks; or set "
                "tools.format=null."
            )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, the last of which is no end."""
        return completion_text(self.tokenizer, token_ids, stopped=False)

    def call_in(self, turn_ids: Sequence[int]) -> str | None:
        """The code of the call in these sampled tokens; None where no call is complete.

        They are those since the last output. Ask for every token of `can_complete`."""
        if MARKER not in self.text_of(turn_ids[-_LATEST:]):
            return None
        return code_in(self.text_of(turn_ids))

    def output(self, turn: str, printed: str) -> ShownOutput:
        """What the model is shown behind a turn that ended with a call.

        It has at most `max_output_tokens` and BOUNDARY_TOKENS tokens: of a longer text the
        beginning and the end, with the number of tokens that are left out between them. The text
        can neither end its fence nor make a special token."""
        text = self._tokens.as_read(printed)
        while "```" in text:
            text = self._tokens.as_read(text.replace("```", "'''"))
        head = "" if turn.endswith("\n") else "\n"
        limit = self._max_output_tokens + BOUNDARY_TOKENS
        token_ids = self._tokens.encoded(_block(head, text))
        if len(token_ids) <= limit:
            return ShownOutput(token_ids, text, is_cut=False)
        text_ids = self._tokens.encoded(text)
        cut_text = text
        length = self._max_output_tokens
        while len(token_ids) > limit:
            length = max(0, length - 8)
            cut_text = self._tokens.cut(text_ids, length)
            token_ids = self._tokens.encoded(_block(head, cut_text))
            assert length or len(token_ids) <= limit, "an output of nothing is too long"
        return ShownOutput(token_ids, cut_text, is_cut=True)

    def turn_text(self, turn_ids: Sequence[int]) -> str:
        """The text of a turn that ended with a call."""
        return self.text_of(turn_ids)

    def calls_in(self, turn_ids: Sequence[int]) -> tuple[SampledCall, ...]:
        """The call in these sampled tokens; () where no call is complete."""
        code = self.call_in(turn_ids)
        return () if code is None else (SampledCall(code),)

    def outputs(
        self, turn_ids: Sequence[int], calls: Sequence[SampledCall], printed: Sequence[str]
    ) -> ShownOutputs:
        """What the model is shown behind a turn, whose single call `printed` a text."""
        (text,) = printed
        output = self.output(self.text_of(turn_ids), text)
        return ShownOutputs(output.token_ids, [output.text], [output.is_cut])


def code_in(turn: str) -> str | None:
    r"""The code of the first call in the text of a turn; None where none is complete.

    >>> code_in("So:\n```python\nprint(1)\n```"), code_in("```python\nprint(1)\n``")
    ('print(1)', None)
    """
    opening = _OPENING.search(turn)
    if opening is None:
        return None
    end = turn.find(MARKER, opening.end() - 1)
    return None if end < 0 else turn[opening.end() : end]


def _block(head: str, text: str) -> str:
    """An output in its fence; `head` leads to the beginning of a line."""
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{head}```output\n{text}{end}```\n"
