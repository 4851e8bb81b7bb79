"""Calls that a model samples, and what they show it, as tokens: text, whatever it says.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.data.tokenizer import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def greatest_that_fits(most: int, fits: Callable[[int], bool]) -> int:
    """The greatest number from 1 to `most` that fits, where those below one that fits do too.

    0 where none does. It asks about log2(most) times.

    >>> greatest_that_fits(1000, lambda number: number <= 7)
    7
    """
    if fits(most):
        return most
    fitting = 0
    too_great = most
    while too_great - fitting > 1:
        middle = (fitting + too_great) // 2
        if fits(middle):
            fitting = middle
        else:
            too_great = middle
    return fitting


_BEFORE = ("a", "\n", "(", "1")
"""Texts behind which a part of a text is tokenized, the first with which it does not merge."""


@dataclass(frozen=True)
class SampledCall:
    """A call that a model has written."""

    code: str
    call_id: str = ""
    """The name that the model gave the call; "" without one."""


@dataclass(frozen=True)
class ShownOutputs:
    """The outputs of the calls of a turn, as the model reads them."""

    token_ids: list[int]
    """All that is put behind the turn, what stands around the outputs included."""
    texts: list[str]
    """The outputs alone, as the tokens say them."""
    are_cut: list[bool]
    """Whether a part of each was left out."""


class OutputTokens:
    """Writes texts as tokens of a tokenizer, none of which is special or was added."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.control = frozenset({**added, **special})
        """Tokens that no output may have."""
        self.control_texts = tuple(
            sorted({*added.values(), *special.values()} - {""}, key=len, reverse=True)
        )
        self._before_ids = {before: self.ids_of(before, splits_special=True) for before in _BEFORE}
        self._pattern = re.compile("|".join(map(re.escape, self.control_texts)) or r"(?!)")

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, the last of which is no end."""
        return completion_text(self._tokenizer, token_ids, stopped=False)

    def as_read(self, printed: str) -> str:
        """A printed text as its tokens say it: the tokenizer may change or not know characters."""
        return self.text_of(self.encoded(f"\n{printed}")).removeprefix("\n")

    def encoded(self, text: str) -> list[int]:
        """Tokens of a text inside of a completion.

        Characters that the tokenizer does not know are left out."""
        token_ids = [token_id for part in self.split(text) for token_id in self.part_ids(part)]
        return [token_id for token_id in token_ids if token_id not in self.control]

    def cut(self, text_ids: Sequence[int], length: int) -> str:
        """The text of the first and the last of some tokens, `length` in all."""
        left_out = len(text_ids) - length
        first = self.text_of(text_ids[: length // 2]).rstrip("\ufffd")
        last = self.text_of(text_ids[length // 2 + left_out :]).lstrip("\ufffd")
        return f"{first}\n[... {left_out:,} tokens left out ...]\n{last}"

    def split(self, text: str) -> Iterator[str]:
        """The text, cut inside of every text of a control token."""
        start = 0
        while (control := self._pattern.search(text, start)) is not None:
            yield text[start : control.start() + 1]
            start = control.start() + 1
        yield text[start:]

    def part_ids(self, part: str, splits_special: bool = True) -> list[int]:
        """Tokens of a part of a text, without the space that tokenizers put before a text.

        A special token's text is text where it `splits_special`, else it is that token."""
        for before, before_ids in self._before_ids.items():
            token_ids = self.ids_of(before + part, splits_special)
            if before_ids and token_ids[: len(before_ids)] == before_ids:
                return token_ids[len(before_ids) :]
        return self.ids_of(part, splits_special)

    def ids_of(self, text: str, splits_special: bool = False) -> list[int]:
        """Tokens of a text, as the tokenizer has them."""
        return self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=splits_special, verbose=False
        )["input_ids"]
