"""Several files of prompts as one: how often each file's prompts come, and names that stay unique."""

# Shape legend: N prompts kept in all, K places of one epoch.

# Shape legend: P prompts of one step, N prompts kept in all, K places of one epoch.

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Prompt
from rlmath.data.filter_report import EXAMPLES, DroppedPrompt, FilterReport
from rlmath.data.readers import PromptRow, read_prompts, said
from rlmath.data.rows import PromptFile
from rlmath.data.templates import render
from rlmath.data.tokenizer import prompt_tokens


@dataclass(frozen=True)
class Share:
    """One file of a mixture.

    >>> Share(n_prompts=10, weight=0.25).places
    3
    """

    n_prompts: int
    weight: float
    """How often its prompts come in one epoch: 1 once, 0.5 half of them, 2 twice."""

    @property
    def places(self) -> int:
        """Prompts that it gives to every epoch: weight x prompts, rounded up from a half on, at least 1."""
        return max(1, math.floor(self.weight * self.n_prompts + 0.5))


def shares_of(counts: Sequence[int], weights: Sequence[float]) -> tuple[Share, ...]:
    """One for each file; without weights all prompts come once."""
    return tuple(Share(*one) for one in zip(counts, weights or [1.0] * len(counts), strict=True))


def shuffled_range(n: int, name: str) -> tuple[int, ...]:
    """0 .. n-1 in the order of the SHA-256 of "name:index": whatever the libraries' versions."""

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{name}:{index}".encode()).digest()

    return tuple(sorted(range(n), key=key))


@lru_cache(maxsize=2)
def epoch_order(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    """K prompt indices of an epoch, counted over all files one behind the other.

    Each file has an endless sequence of its prompts, one permutation after the other, and gives the next of them to
    each epoch: with weight 0.5 an epoch has one half, and the next epoch the other. Then all are shuffled. Without
    `shuffle` the sequence is the file over and over, and the files stand one behind the other.
    """
    indices: list[int] = []
    first = 0
    for number, share in enumerate(shares):
        places = range(epoch * share.places, (epoch + 1) * share.places)
        indices += (
            first + index for index in _in_turn(share.n_prompts, places, f"{seed}:file{number}", shuffle)
        )
        first += share.n_prompts
    if not shuffle:
        return tuple(indices)
    return tuple(indices[place] for place in shuffled_range(len(indices), f"{seed}:{epoch}"))


def _in_turn(n: int, places: range, name: str, shuffle: bool) -> Iterator[int]:
    """The prompts at some places of a file's endless sequence."""
    for turn in range(places.start // n, (places.stop - 1) // n + 1):
        order = shuffled_range(n, f"{name}:{turn}") if shuffle else range(n)
        yield from order[max(0, places.start - turn * n) : places.stop - turn * n]


def weighted_permutation(shares: Sequence[Share], name: str) -> list[int]:
    """All prompts, those of heavier files likelier to come early (Efraimidis and Spirakis 2006)."""
    keyed: list[tuple[float, int]] = []
    for share in shares:
        for index in range(len(keyed), len(keyed) + share.n_prompts):
            digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
            uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
            keyed.append((-math.log(uniform) / share.weight, index))
    return [index for _, index in sorted(keyed)]


def check_weights(paths: Sequence[str], weights: Sequence[float]) -> None:
    """ValueError where there is not one weight for each file, or a file comes twice."""
    if weights and len(weights) != len(paths):
        raise ValueError(
            f"data.train_weights has {len(weights)} numbers for {len(paths)} files (data.train_path, then "
            "data.more_train_paths); give one for each, or none"
        )
    places = [os.path.realpath(path) for path in paths]
    twice = [path for number, path in enumerate(paths) if places[number] in places[:number]]
    if twice:
        raise ValueError(
            f"data.more_train_paths: {twice[0]!r} is there twice; to have its prompts more often, use "
            "data.train_weights"
        )


def with_unique_names(files: Sequence[tuple[str, Sequence[Prompt]]]) -> list[Prompt]:
    """The prompts of all (path, prompts); a name that an earlier file has, too, gets its file's name before it."""
    used: set[str] = set()
    found: list[Prompt] = []
    for number, (path, prompts) in enumerate(files, start=1):
        own = {prompt.prompt_id for prompt in prompts}
        for prompt in prompts:
            name = prompt.prompt_id
            if name in used:
                name = f"{Path(path).stem}/{name}"
                if name in used or name in own:
                    name = f"{number}:{name}"
                while name in used or name in own:
                    name += "'"
            used.add(name)
            found.append(prompt if name == prompt.prompt_id else replace(prompt, prompt_id=name))
    return found


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
    number, and a prompt may come more than once (see `epoch_order`). Only whole steps are used: the last
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
            order_K = epoch_order(self.shares, self.seed, epoch, self.shuffle)
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
            weighted_permutation(self.shares, name) if weighted else shuffled_range(self.n_prompts, name)
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
    return shuffled_range(n, f"{seed}:{epoch}")
