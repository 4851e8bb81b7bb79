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

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.config.length_curriculum import BOUNDARY_TOKENS
from rlmath.data.chat import Piece, chat_end
from rlmath.data.rows import RowError
from rlmath.data.tokenizer import completion_text
from rlmath.data.tool_outputs import OutputTokens, SampledCall, ShownOutputs, greatest_that_fits
from rlmath.sandbox.calls import LEAST_OUTPUT
from rlmath.sandbox.shown import shown_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKER = "\n```"
_OPENING = re.compile(r"^```python[ \t\r]*\n", re.MULTILINE)
_OUTPUT_START = re.compile(r"\s*```output[ \t\r]*\n")
"""The first line of an output behind the call in a written answer."""
_FENCE = re.compile(r"^```", re.MULTILINE)
_OUTPUT_OPENING = re.compile(r"^```output\b", re.MULTILINE)
_LATEST = 8
"""Tokens in which a marker is looked for that the last of them completes; it has four
characters."""
_CUT_TOKENS = 8
"""Tokens that are left out of a long output at a time, until it fits."""
_OUTPUT_CHARACTERS = 16
"""Most characters of an output for each of its tokens."""
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

        n_cuts = math.ceil(self._max_output_tokens / _CUT_TOKENS)

        def shortened(kept: int) -> str:
            """The text's beginning and end, of which `kept` of n_cuts parts are not left out."""
            length = self._max_output_tokens - _CUT_TOKENS * (n_cuts - kept)
            return self._tokens.cut(text_ids, max(0, length))

        def fits(kept: int) -> bool:
            return len(self._tokens.encoded(_block(head, shortened(kept)))) <= limit

        cut_text = shortened(greatest_that_fits(n_cuts - 1, fits))
        token_ids = self._tokens.encoded(_block(head, cut_text))
        assert len(token_ids) <= limit, "an output of nothing is too long"
        return ShownOutput(token_ids, cut_text, is_cut=True)

    def pieces(self, answer: str) -> list[Piece]:
        """The pieces of a written answer with calls: sampled texts, and outputs as they are given.

        A sampled text ends with its call, and the last one, which may be empty, with the answer. An
        output is cleaned, and a longer one than `max_output_tokens` cut, as sandbox and engine do,
        and has the tokens that the engine puts behind the call. RowError for a call without an
        output, for an output without a call, and for one that has a fence in it or no end."""
        pieces: list[Piece] = []
        closing = self._closing()
        start = 0
        while (call := _call_in(answer, start)) is not None:
            output = _written_output(answer, call, closing)
            printed, _ = shown_text(
                output.printed, 0, most_output_characters(self._max_output_tokens)
            )
            sampled = answer[start : call.end]
            _check_sampled(sampled)
            token_ids = self.output(sampled, printed).token_ids
            pieces.append(Piece(sampled, True))
            pieces.append(Piece(self.text_of(token_ids), False, tuple(token_ids)))
            start = output.end
        _check_sampled(answer[start:])
        return [*pieces, Piece(answer[start:], True)]

    def _closing(self) -> re.Pattern[str]:
        """The last line of an output: three backticks alone, or before the mark of an end."""
        end_ids = (chat_end(self.tokenizer), self.tokenizer.eos_token_id)
        known_ids = [end for end in end_ids if isinstance(end, int)]
        marks = map(str, self.tokenizer.convert_ids_to_tokens(known_ids))
        before_mark = "".join(f"|(?={re.escape(mark)})" for mark in marks)
        return re.compile(rf"```[ \t\r]*(?:\n|\Z{before_mark})")

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
    call = _call_in(turn)
    return None if call is None else call.code


@dataclass(frozen=True)
class _WrittenCall:
    """A call in a text."""

    code: str
    end: int
    """Characters of the text up to the end of the call's marker."""


def _call_in(turn: str, start: int = 0) -> _WrittenCall | None:
    """The first call in a text from `start` on; None where none is complete."""
    opening = _OPENING.search(turn, start)
    if opening is None:
        return None
    marker = turn.find(MARKER, opening.end() - 1)
    if marker < 0:
        return None
    return _WrittenCall(turn[opening.end() : marker], end=marker + len(MARKER))


@dataclass(frozen=True)
class _WrittenOutput:
    """An output in a written answer."""

    printed: str
    end: int
    """Characters of the answer up to the end of the output's last line."""


def _written_output(answer: str, call: _WrittenCall, closing: re.Pattern[str]) -> _WrittenOutput:
    """The output behind a call, whose last line is as `closing`.

    RowError where there is none, and where its first line that begins with a fence is another."""
    start = _OUTPUT_START.match(answer, call.end)
    if start is None:
        raise RowError(
            f"behind the call {call.code[:40]!r} of its answer stands "
            f"{answer[call.end : call.end + 40]!r}; needed is its output, a block that begins with "
            "a line ```output and ends with a line ```. Add it, or name the block other than "
            "python, as every such block is a call with tools.format=fence"
        )
    fence = _FENCE.search(answer, start.end())
    if fence is None:
        raise RowError(
            f"the output of the call {call.code[:40]!r} of its answer has no end; needed is a line "
            "``` behind it. Add it"
        )
    last_line = closing.match(answer, fence.start())
    if last_line is None:
        line = answer[fence.start() : fence.start() + 40].partition("\n")[0]
        raise RowError(
            f"the output of the call {call.code[:40]!r} of its answer has the line {line!r} before "
            "its end; needed is a line ``` and no other fence before it. Add that line, or write "
            "''' for ``` inside the output, as a model is shown it"
        )
    return _WrittenOutput(answer[start.end() : fence.start()], end=last_line.end())


def _check_sampled(text: str) -> None:
    """RowError where a learned text has an output, which a model must not invent."""
    output = _OUTPUT_OPENING.search(text)
    if output is not None:
        raise RowError(
            f"its answer has an output without a call before it: {text[output.start() :][:40]!r}; "
            "needed is a call, a block that begins with a line ```python and ends with a line "
            "```. Add it, or name the block other than output"
        )


def has_output(answer: str) -> bool:
    r"""Whether a call of a written answer has an output behind it.

    >>> has_output("```python\n1\n```\n```output\n1\n```"), has_output("```python\n1\n```")
    (True, False)
    """
    start = 0
    while (call := _call_in(answer, start)) is not None:
        if _OUTPUT_START.match(answer, call.end) is not None:
            return True
        start = call.end
    return False


def most_output_characters(max_output_tokens: int) -> int:
    """Most characters that a sandbox shows of an output, whose tokens are then counted."""
    return max(LEAST_OUTPUT, _OUTPUT_CHARACTERS * max_output_tokens)


def _block(head: str, text: str) -> str:
    """An output in its fence; `head` leads to the beginning of a line."""
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{head}```output\n{text}{end}```\n"
