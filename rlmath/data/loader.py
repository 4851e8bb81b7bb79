"""From a prompt file to the prompts of every step."""

# Shape legend: P prompts of one step, N prompts kept in all.

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rlmath.data.readers import PromptRow, read_boba
from rlmath.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHUNK = 1000
"""Prompts tokenized in one call."""


@dataclass(frozen=True)
class FilterReport:
    """What the length filter did. Lengths are tokens, never characters."""

    read: int
    kept: int
    dropped_too_long: int
    longest_dropped_tokens: int
    """0 when nothing was dropped."""
    max_prompt_tokens: int
    dropped_empty: int = 0
    """Prompts of which the tokenizer makes no token at all."""

    def line(self) -> str:
        """One line for the console."""
        empty = f" {self.dropped_empty} dropped because without any token." if self.dropped_empty else ""
        return self._length_line() + empty

    def _length_line(self) -> str:
        if not self.dropped_too_long and not self.dropped_empty:
            return (
                f"Prompts: {self.read} read, all kept; none is longer than"
                f" data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in tokens)."
            )
        share = 100 * self.dropped_too_long / self.read
        return (
            f"Prompts: {self.read} read, {self.kept} kept, {self.dropped_too_long} dropped ({share:.1f}%)"
            f" because longer than data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in"
            f" tokens, not characters; the longest has {self.longest_dropped_tokens} tokens)."
        )


def _prompt(row: PromptRow, token_ids: list[int]) -> Prompt:
    return Prompt(row.query_id, row.prompt, tuple(token_ids), row.solutions, row.task, row.more_json)


def load_prompts(
    path: str, tokenizer: PreTrainedTokenizerFast, max_prompt_tokens: int
) -> tuple[list[Prompt], FilterReport]:
    """Prompts of the file that have at most `max_prompt_tokens` tokens, in the file's order.

    Tokenized as they stand, with the special tokens that the tokenizer adds by itself (often a beginning of
    sequence). Raises ValueError for a file that cannot be read and when no prompt is left.
    """
    if max_prompt_tokens < 1:
        raise ValueError(f"data.max_prompt_tokens is {max_prompt_tokens}; it must be at least 1")
    rows = read_boba(path)
    prompts: list[Prompt] = []
    longest_dropped, empty = 0, 0
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        for row, token_ids in zip(chunk, _tokenize([row.prompt for row in chunk], tokenizer), strict=True):
            if len(token_ids) > max_prompt_tokens:
                longest_dropped = max(longest_dropped, len(token_ids))
            elif not token_ids:
                empty += 1
            else:
                prompts.append(_prompt(row, token_ids))
    if not prompts:
        raise ValueError(
            f"{path}: all {len(rows)} prompts are longer than"
            f" data.max_prompt_tokens={max_prompt_tokens} tokens (the longest has {longest_dropped})"
            " or have no token at all; raise data.max_prompt_tokens, or give prompts that this tokenizer knows"
        )
    too_long = len(rows) - len(prompts) - empty
    return prompts, FilterReport(len(rows), len(prompts), too_long, longest_dropped, max_prompt_tokens, empty)


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[
        "input_ids"
    ]


class PromptOrder:
    """Which prompts a step uses: a pure function of the step, so that resuming needs no cursor but the step.

    Each epoch has its own order, a permutation drawn from (seed, epoch). Only whole steps are used: the last
    N modulo P prompts of every epoch's order are left out; with `shuffle` they are others each epoch, without
    it they are always the file's last ones.

    >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).batch(3)
    (1, [2, 3])
    """

    def __init__(self, n_prompts: int, prompts_per_step: int, seed: int, shuffle: bool) -> None:
        """Raises ValueError when a step asks for more prompts than there are."""
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        if prompts_per_step > n_prompts:
            raise ValueError(
                f"data.prompts_per_step is {prompts_per_step}, but only {n_prompts} prompts are left after"
                " filtering; lower data.prompts_per_step or give more prompts"
            )
        self.n_prompts = n_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle

    @property
    def steps_per_epoch(self) -> int:
        return self.n_prompts // self.prompts_per_step

    @property
    def left_out_per_epoch(self) -> int:
        """Prompts of an epoch that fill no whole step."""
        return self.n_prompts % self.prompts_per_step

    def batch(self, step: int) -> tuple[int, list[int]]:
        """(epoch, P prompt indices) of a step; both step and epoch count from 0 over the whole run."""
        assert step >= 0, step
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.prompts_per_step
        positions = range(first, first + self.prompts_per_step)
        if not self.shuffle:
            return epoch, list(positions)
        order_N = permutation(self.n_prompts, self.seed, epoch)
        return epoch, [order_N[position] for position in positions]

    def extra(self, step: int) -> Iterator[int]:
        """All prompts that are not the step's own, in an order drawn from (seed, step): what dynamic sampling takes
        when groups are dropped. They keep their turn in the epochs' orders."""
        own = set(self.batch(step)[1])
        for index in _shuffled(self.n_prompts, f"{self.seed}:extra:{step}"):
            if index not in own:
                yield index

    def line(self) -> str:
        """One line for the console."""
        left_out = (
            f"; the {self.left_out_per_epoch} that fill no whole step are left out of each epoch"
            if self.left_out_per_epoch
            else ""
        )
        return (
            f"Order: {self.steps_per_epoch} steps per epoch,"
            f" {self.prompts_per_step} of {self.n_prompts} prompts a step,"
            f" {'shuffled anew every epoch' if self.shuffle else 'in the order of the file'}{left_out}."
        )


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """0 .. n-1 in the order of an epoch."""
    return _shuffled(n, f"{seed}:{epoch}")


def _shuffled(n: int, name: str) -> tuple[int, ...]:
    """0 .. n-1 in the order of the SHA-256 of "name:index": whatever the libraries' versions."""

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{name}:{index}".encode()).digest()

    return tuple(sorted(range(n), key=key))
