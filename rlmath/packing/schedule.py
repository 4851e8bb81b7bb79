"""Who computes which sample, in which minibatch and micro-batch. Pure and deterministic.

Invariants, each a test:
- every sample is in exactly one micro-batch of one rank of one minibatch;
- minibatches have equal sample counts, the first ones one more where it does not divide;
- all ranks of a minibatch have the same number of micro-batches (some may be empty);
- no micro-batch exceeds the token budget.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: for every data-parallel rank its micro-batches, each a tuple of sample indices."""

    microbatches_by_rank: tuple[tuple[tuple[int, ...], ...], ...]


def plan_minibatches(
    lengths: Sequence[int], n_minibatches: int, data_size: int, max_tokens: int, seed: int
) -> list[Minibatch]:
    """Shuffle samples into minibatches and spread each over `data_size` ranks under `max_tokens` a micro-batch.

    `lengths` are tokens of each sample. ValueError if one sample alone is over the budget, or there are fewer
    samples than minibatches.
    """
    assert n_minibatches >= 1 and data_size >= 1, (n_minibatches, data_size)
    if len(lengths) < n_minibatches:
        raise ValueError(f"{len(lengths)} samples cannot fill {n_minibatches} minibatches")
    if max(lengths) > max_tokens:
        raise ValueError(
            f"a sample has {max(lengths)} tokens, more than the micro-batch budget of {max_tokens}; "
            "raise policy.max_tokens_per_microbatch"
        )
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    size, extra = divmod(len(order), n_minibatches)
    minibatches, start = [], 0
    for number in range(n_minibatches):
        end = start + size + (number < extra)
        minibatches.append(_plan_one(order[start:end], lengths, data_size, max_tokens))
        start = end
    return minibatches


def _plan_one(members: list[int], lengths: Sequence[int], data_size: int, max_tokens: int) -> Minibatch:
    per_rank = balance(members, lengths, data_size)
    fullest = max(sum(lengths[i] for i in rank_members) for rank_members in per_rank)
    count = max(1, -(-fullest // max_tokens))
    while True:
        packed = [balance(rank_members, lengths, count) for rank_members in per_rank]
        if all(sum(lengths[i] for i in bin_) <= max_tokens for bins in packed for bin_ in bins):
            return Minibatch(tuple(tuple(tuple(bin_) for bin_ in bins) for bins in packed))
        count += 1


def balance(members: Sequence[int], lengths: Sequence[int], n_bins: int) -> list[list[int]]:
    """Spread samples over bins with about equal token sums: the longest first, always into the emptiest bin.

    >>> balance([0, 1, 2, 3], [5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    heap = [(0, number) for number in range(n_bins)]
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (tokens + lengths[index], number))
    return bins
