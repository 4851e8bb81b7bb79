"""Assignment of a step's samples to minibatches, data-parallel ranks and micro-batches, by lengths.

Pure and deterministic.

    samples -> minibatches (optimizer steps) -> micro-batches under a token budget -> ranks with
    about equal work

Invariants, which the tests assert:

- every sample is in one micro-batch of one rank of one minibatch;
- no micro-batch has more tokens than the budget;
- all ranks have the same number of micro-batches in a minibatch, a multiple of what the pipeline
  schedule needs, and as few as best-fit decreasing finds;
- the same arguments give the same plan on every rank and every machine. Sums are therefore taken in
  Python, in the order of the list: numpy's order of addition differs between processors.

A bin is a list of sample indices, later a micro-batch.
"""

# Shape legend: H samples of the rank with more work, K samples of the rank with less, or none.

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlmath.config.model_shape import ModelShape

# ---------------------------------------------------------------- the work of a sample


@dataclass(frozen=True)
class Cost:
    """`linear * n + quadratic * n^2` of a sample of n tokens, in FLOPs (or tokens, see `TOKENS`).

    >>> Cost(2.0, 0.5).of(10)
    70.0
    """

    linear: float
    """Cost per token: the matrix multiplications with parameters."""
    quadratic: float
    """Cost per pair of tokens: attention."""

    def of(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


TOKENS = Cost(1.0, 0.0)
"""Every token costs the same: accurate where attention is a small part of the work."""


def training_cost(shape: ModelShape, frozen: bool = False) -> Cost:
    """FLOPs of forward and backward pass, without recomputation of activations.

    6 per parameter and token, 4 of `frozen` ones (LoRA), of which only the input has a gradient; of
    experts those that the router picks. The output layer counts, the look-up of embeddings and
    adapters' own products do not. The two products of attention take 12 * n^2 * num_heads *
    head_dim per layer, and half of that where no token attends to later ones. A sliding window is
    not taken off.

    Sources: PaLM, arXiv:2204.02311, appendix B (6N + 12LHQT per token); Megatron-LM,
    arXiv:2104.04473, section 5.1. They do not take the half of causal attention; kernels such as
    FlashAttention do.
    """
    query_size = shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query_size + 2 * kv_size)
    mlp = 3 * shape.hidden_size * shape.ffn_size
    if shape.num_experts:
        mlp = shape.experts_per_token * mlp + shape.hidden_size * shape.num_experts
    output = shape.hidden_size * shape.outputs
    parameters = shape.num_layers * (attention + mlp) + output
    return Cost(
        (4.0 if frozen else 6.0) * parameters, quadratic=12.0 * shape.num_layers * query_size / 2
    )


def forward_cost(shape: ModelShape) -> Cost:
    """FLOPs of a forward pass: a third of those of forward and backward."""
    cost = training_cost(shape)
    return Cost(cost.linear / 3, cost.quadratic / 3)


# ---------------------------------------------------------------- minibatches, ranks, micro-batches


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer step: every data-parallel rank's micro-batches, as tuples of sample indices."""

    microbatches_by_rank: tuple[tuple[tuple[int, ...], ...], ...]


def plan_minibatches(
    lengths: Sequence[int],
    n_minibatches: int,
    data_size: int,
    max_tokens: int,
    seed: int,
    cost: Cost = TOKENS,
    count_multiple: int = 1,
    shuffle: bool = True,
) -> list[MinibatchPlan]:
    """Cut samples into minibatches and spread each over `data_size` ranks.

    A micro-batch has `max_tokens` at most.

    `lengths` are tokens of each sample; `cost` is what is balanced. `count_multiple` is the
    pipeline size under an interleaved pipeline schedule, which needs a multiple of it; more
    micro-batches are then smaller ones. Without `shuffle` minibatches are consecutive samples.
    ValueError if one sample alone is over the budget, or there are fewer samples than minibatches.
    """
    assert n_minibatches >= 1 and data_size >= 1 and count_multiple >= 1
    if len(lengths) < n_minibatches:
        raise ValueError(f"{len(lengths)} samples cannot fill {n_minibatches} minibatches")
    if max(lengths) > max_tokens:
        raise ValueError(
            f"a sample has {max(lengths)} tokens, more than the micro-batch budget of "
            f"{max_tokens}; "
            "raise policy.max_tokens_per_microbatch"
        )
    budget = Budget(lengths, [cost.of(length) for length in lengths], max_tokens)
    return [
        _plan_minibatch(budget, members, data_size, count_multiple)
        for members in cut_minibatches(len(lengths), n_minibatches, seed if shuffle else None)
    ]


def cut_minibatches(n_samples: int, n_minibatches: int, seed: int | None) -> list[list[int]]:
    """Sample indices of every minibatch, in shuffled order or, with no seed, in order of arrival.

    >>> cut_minibatches(5, 2, seed=None)
    [[0, 1, 2], [3, 4]]
    """
    order = list(range(n_samples))
    if seed is not None:
        random.Random(seed).shuffle(order)
    size, extra = divmod(n_samples, n_minibatches)
    starts = [number * size + min(number, extra) for number in range(n_minibatches + 1)]
    return [order[start:end] for start, end in itertools.pairwise(starts)]


def _plan_minibatch(
    budget: Budget, members: list[int], data_size: int, count_multiple: int
) -> MinibatchPlan:
    """The plan of one minibatch with the samples `members`."""
    tight = pack_tightly(budget, members)
    count = -(-len(tight) // (data_size * count_multiple)) * count_multiple
    bins = pack_evenly(budget, members, data_size * count)
    if bins is None:
        bins = tight + [[] for _ in range(data_size * count - len(tight))]
    ranks = assign_bins(budget, bins, data_size)
    balance_ranks(budget, ranks)
    return MinibatchPlan(tuple(tuple(tuple(sorted(bin_)) for bin_ in rank) for rank in ranks))


# ---------------------------------------------------------------- bins under a token budget

Bin = list[int]


@dataclass(frozen=True)
class Budget:
    """The samples of a step by their index, and how much of them a bin may hold."""

    lengths: Sequence[int]
    """Tokens of every sample."""
    costs: Sequence[float]
    """Work of every sample, growing with its length."""
    max_tokens: int
    """Most tokens of a bin."""

    def tokens(self, members: Iterable[int]) -> int:
        return sum(self.lengths[index] for index in members)

    def cost(self, members: Iterable[int]) -> float:
        return sum((self.costs[index] for index in members), 0.0)

    def longest_first(self, members: Iterable[int]) -> list[int]:
        """Samples of equal length by index."""
        return sorted(members, key=lambda index: (-self.lengths[index], index))


def pack_tightly(budget: Budget, members: Sequence[int]) -> list[Bin]:
    """Bins as few as best-fit decreasing finds.

    The longest sample comes first, and each goes into the fullest bin with room.

    >>> pack_tightly(Budget([4, 6, 3, 7], [4.0, 6.0, 3.0, 7.0], 10), range(4))
    [[3, 2], [1, 0]]
    """
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (room, number of the bin), the fullest bin first
    for index in budget.longest_first(members):
        length = budget.lengths[index]
        place = bisect.bisect_left(rooms, (length, 0))
        if place == len(rooms):
            room = budget.max_tokens
            number = len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(index)
        bisect.insort(rooms, (room - length, number))
    return bins


def pack_evenly(budget: Budget, members: Sequence[int], n_bins: int) -> list[Bin] | None:
    """`n_bins` bins of about equal cost; None if a sample finds no bin with room.

    The longest sample comes first, and each goes into the cheapest bin with room.

    >>> pack_evenly(Budget([5, 1, 4, 2], [5.0, 1.0, 4.0, 2.0], 9), range(4), 2)
    [[0, 1], [2, 3]]
    """
    bins: list[Bin] = [[] for _ in range(n_bins)]
    rooms = [budget.max_tokens] * n_bins
    costs = [0.0] * n_bins
    # A heap of (cost, number): bins with room for the sample at hand.
    open_: list[tuple[float, int]] = []
    # A heap of (-room, number), most room first.
    full = [(-room, number) for number, room in enumerate(rooms)]
    for index in budget.longest_first(members):
        length = budget.lengths[index]
        while full and -full[0][0] >= length:
            _, number = heapq.heappop(full)
            heapq.heappush(open_, (costs[number], number))
        if not open_:
            return None
        _, number = heapq.heappop(open_)
        bins[number].append(index)
        rooms[number] -= length
        costs[number] += budget.costs[index]
        # The next sample is not longer: a bin that has room for this one has it for all to come.
        if rooms[number] >= length:
            heapq.heappush(open_, (costs[number], number))
        else:
            heapq.heappush(full, (-rooms[number], number))
    return bins


# ---------------------------------------------------------------- balancing ranks

_TOLERANCE = 0.005
"""Difference between the ranks' costs, as a part of their mean, that is left as it is."""

_EXCHANGES_PER_RANK = 4

_TRIES_PER_RANK = 16
"""Pairs of ranks, for each rank, between which an exchange is tried: with 64 to 512 ranks and 64
samples for each, twice as many would bring the ranks with most and least work closer by less
than 0.1% of the mean."""

_MOST_CANDIDATES = 1024
"""Samples of a rank that an exchange considers; bounds time and memory (8 MiB a matrix)."""


def assign_bins(budget: Budget, bins: Sequence[Bin], n_ranks: int) -> list[list[Bin]]:
    """Bins by rank, assigned in rounds of one bin to each rank.

    A round takes the most costly bins that are left, and the most costly of them goes to the rank
    with the least work so far. The number of bins is a multiple of `n_ranks`.

    >>> assign_bins(Budget([5, 4, 3, 1], [5.0, 4.0, 3.0, 1.0], 9), [[0], [1], [2], [3]], 2)
    [[[0], [3]], [[1], [2]]]
    """
    ranks: list[list[Bin]] = [[] for _ in range(n_ranks)]
    work = [0.0] * n_ranks
    costly_first = sorted(bins, key=lambda bin_: (-budget.cost(bin_), bin_))
    for start in range(0, len(bins), n_ranks):
        lightest_first = sorted(range(n_ranks), key=lambda rank: (work[rank], rank))
        for rank, bin_ in zip(lightest_first, costly_first[start : start + n_ranks], strict=True):
            ranks[rank].append(bin_)
            work[rank] += budget.cost(bin_)
    return ranks


def balance_ranks(budget: Budget, ranks: list[list[Bin]]) -> None:
    """Exchange samples between ranks in place, then sort the bins.

    It ends when costs are within tolerance or nothing helps."""
    lightest_first = sorted((_work(budget, rank), number) for number, rank in enumerate(ranks))
    close_enough = _TOLERANCE * sum(work for work, _ in lightest_first) / len(ranks)
    tries = _TRIES_PER_RANK * len(ranks)
    for _ in range(_EXCHANGES_PER_RANK * len(ranks)):
        most_work, heavy = lightest_first.pop()
        if not lightest_first or most_work - lightest_first[0][0] <= close_enough:
            break
        for place, (work, light) in enumerate(lightest_first[:tries]):
            tries -= 1
            if _exchange(budget, ranks[heavy], ranks[light], gap=most_work - work):
                del lightest_first[place]
                for number in (heavy, light):
                    bisect.insort(lightest_first, (_work(budget, ranks[number]), number))
                break
        else:
            break
    for rank in ranks:
        rank.sort(key=lambda bin_: (-budget.cost(bin_), bin_))


def _work(budget: Budget, rank: Sequence[Bin]) -> float:
    return sum(map(budget.cost, rank))


def _exchange(budget: Budget, heavy: list[Bin], light: list[Bin], gap: float) -> bool:
    """Swap two samples, or move one, so that the costs come closest, where there is room.

    False if nothing helps."""
    heavy_samples = [(bin_, index) for bin_ in heavy for index in bin_][:_MOST_CANDIDATES]
    light_samples = [(bin_, part) for bin_ in light for part in (None, *bin_)][:_MOST_CANDIDATES]
    costs_H = [budget.costs[index] for _, index in heavy_samples]
    costs_K = [0.0 if part is None else budget.costs[part] for _, part in light_samples]
    rooms = [budget.max_tokens - budget.tokens(bin_) for bin_ in light]
    freed_by = zip(light, rooms, strict=True)
    room_K = [
        room + length
        for bin_, room in freed_by
        for length in (0, *(budget.lengths[i] for i in bin_))
    ]
    moved_HK = np.subtract.outer(costs_H, costs_K)
    tokens_H = [budget.lengths[index] for _, index in heavy_samples]
    moved_HK[np.greater.outer(tokens_H, room_K[:_MOST_CANDIDATES])] = 0.0
    h, k = divmod(int(np.abs(moved_HK - gap / 2).argmin()), len(light_samples))
    if not 0 < moved_HK[h, k] < gap:
        return False
    (from_bin, to_light), (to_bin, to_heavy) = heavy_samples[h], light_samples[k]
    from_bin.remove(to_light)
    if to_heavy is not None:
        to_bin.remove(to_heavy)
        from_bin.append(to_heavy)
    to_bin.append(to_light)
    return True
