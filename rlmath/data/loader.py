"""From prompt files to the prompts of every step."""

# Shape legend: P prompts of one step, N prompts kept in all, K places of one epoch.

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from rlmath.data import mixture
from rlmath.data.mixture import Share
from rlmath.data.readers import PromptRow, read_prompts, said
from rlmath.data.report import EXAMPLES, DroppedPrompt, FilterReport
from rlmath.data.rows import PromptFile
from rlmath.data.templates import render
from rlmath.data.tokenizer import prompt_tokens
from rlmath.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["FilterReport", "PromptOrder", "load_prompts", "permutation"]

_CHUNK = 1000
"""Prompts tokenized in one call."""
_START_CHARS = 60


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerFast,
    max_prompt_tokens: int,
    form: str = "auto",
    template: str = "auto",
    max_unusable_share: float = 0.01,
) -> tuple[list[Prompt], FilterReport]:
    """Prompts of the file or folder that have at most `max_prompt_tokens` tokens, in its order.

    Tokenized with the special tokens that the tokenizer adds by itself (often a beginning of sequence, of which a
    template's own is not doubled). Raises ValueError for a file that cannot be read, for more rows that cannot be used
    than the share, and when no prompt is left.
    """
    if max_prompt_tokens < 1:
        raise ValueError(f"data.max_prompt_tokens is {max_prompt_tokens}; it must be at least 1")
    file = read_prompts(path, form)
    check_unusable(path, file, max_unusable_share)
    prompts: list[Prompt] = []
    dropped: list[DroppedPrompt] = []
    for row, text, token_ids in _tokenized(file.rows, template, tokenizer):
        if token_ids and len(token_ids) <= max_prompt_tokens:
            prompts.append(_prompt(row, text, token_ids))
        else:
            reason = "too long" if token_ids else "empty"
            dropped.append(DroppedPrompt(row.query_id, len(token_ids), reason, row.prompt[:_START_CHARS]))
    report = _report(path, file, dropped, max_prompt_tokens)
    if not prompts:
        raise ValueError(
            f"{path}: all {report.read} prompts are longer than"
            f" data.max_prompt_tokens={max_prompt_tokens} tokens (the longest has {report.longest_dropped_tokens})"
            " or have no token at all; raise data.max_prompt_tokens, or give prompts that this tokenizer knows"
        )
    return prompts, report


def _report(
    path: str, file: PromptFile, dropped: list[DroppedPrompt], max_prompt_tokens: int
) -> FilterReport:
    empty = sum(one.reason == "empty" for one in dropped)
    return FilterReport(
        read=len(file.rows),
        kept=len(file.rows) - len(dropped),
        dropped_too_long=len(dropped) - empty,
        longest_dropped_tokens=max((one.tokens for one in dropped), default=0),
        max_prompt_tokens=max_prompt_tokens,
        dropped_empty=empty,
        path=path,
        form=file.form,
        repeated=file.repeated,
        unusable=tuple(file.unusable),
        examples=tuple(dropped[:EXAMPLES]),
    )


def check_unusable(path: str, file: PromptFile, allowed: float) -> None:
    if file.unusable_share > allowed:
        raise ValueError(
            f"{path}: {len(file.unusable)} rows, {100 * file.unusable_share:.3g}% of all, cannot be used, more than "
            f"data.max_unusable_share={allowed:g} allows. The first: {said(file.unusable[:3])}. Mend the file, or "
            "raise data.max_unusable_share"
        )


def _prompt(row: PromptRow, text: str, token_ids: list[int]) -> Prompt:
    return Prompt(row.query_id, text, tuple(token_ids), row.solutions, row.task, row.more_json)


def _tokenized(
    rows: list[PromptRow], template: str, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[PromptRow, str, list[int]]]:
    """(row, text, tokens) of every row."""
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        texts = [render(row, template, tokenizer) for row in chunk]
        yield from zip(chunk, texts, prompt_tokens(texts, tokenizer), strict=True)


class PromptOrder:
    """Which prompts a step uses: a pure function of the step, so that resuming needs no cursor but the step.

    Each epoch has its own order, a permutation drawn from (seed, epoch), of K = N places; with weights K is another
    number, and a prompt may come more than once (see `mixture.epoch_order`). Only whole steps are used: the last
    K modulo P places of every epoch's order are left out; with `shuffle` they are others each epoch, without it they
    are always the last ones.

    >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).batch(3)
    (1, [2, 3])
    """

    def __init__(
        self, n_prompts: int, prompts_per_step: int, seed: int, shuffle: bool, shares: tuple[Share, ...] = ()
    ) -> None:
        """`shares` are the files that the prompts come from, one behind the other; without them, or with weight 1
        for all, every prompt comes once an epoch. Raises ValueError when a step asks for more prompts than an epoch
        has."""
        assert not shares or sum(share.n_prompts for share in shares) == n_prompts, (shares, n_prompts)
        self.shares = shares if any(share.weight != 1 for share in shares) else ()
        self.n_places = sum(share.places for share in self.shares) or n_prompts
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        if prompts_per_step > self.n_places:
            weighted = f", which data.train_weights makes {self.n_places} an epoch" if self.shares else ""
            raise ValueError(
                f"data.prompts_per_step is {prompts_per_step}, but only {n_prompts} prompts are left after"
                f" filtering{weighted}; lower data.prompts_per_step or give more prompts"
            )
        self.n_prompts = n_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle

    @property
    def steps_per_epoch(self) -> int:
        return self.n_places // self.prompts_per_step

    @property
    def left_out_per_epoch(self) -> int:
        """Places of an epoch that fill no whole step."""
        return self.n_places % self.prompts_per_step

    def batch(self, step: int) -> tuple[int, list[int]]:
        """(epoch, P prompt indices) of a step; both step and epoch count from 0 over the whole run."""
        assert step >= 0, step
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.prompts_per_step
        positions = range(first, first + self.prompts_per_step)
        if self.shares:
            order_K = mixture.epoch_order(self.shares, self.seed, epoch, self.shuffle)
            return epoch, [order_K[position] for position in positions]
        if not self.shuffle:
            return epoch, list(positions)
        order_N = permutation(self.n_prompts, self.seed, epoch)
        return epoch, [order_N[position] for position in positions]

    def extra(self, step: int) -> Iterator[int]:
        """All prompts that are not the step's own, in an order drawn from (seed, step): what dynamic sampling takes
        when groups are dropped. They keep their turn in the epochs' orders. Prompts of heavier files come earlier."""
        own = set(self.batch(step)[1])
        name = f"{self.seed}:extra:{step}"
        weighted = bool(self.shares)
        order_N = (
            mixture.weighted_permutation(self.shares, name)
            if weighted
            else mixture.permutation(self.n_prompts, name)
        )
        for index in order_N:
            if index not in own:
                yield index

    def line(self) -> str:
        """One line for the console."""
        left_out = (
            f"; the {self.left_out_per_epoch} that fill no whole step are left out of each epoch"
            if self.left_out_per_epoch
            else ""
        )
        places = f" ({self.n_places} places an epoch by data.train_weights)" if self.shares else ""
        return (
            f"Order: {self.steps_per_epoch} steps per epoch,"
            f" {self.prompts_per_step} of {self.n_prompts} prompts{places} a step,"
            f" {'shuffled anew every epoch' if self.shuffle else 'in the order of the file'}{left_out}."
        )


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """0 .. n-1 in the order of an epoch."""
    return mixture.permutation(n, f"{seed}:{epoch}")
