"""Samples packed into bins under a token budget. Pure and deterministic.

A bin is a list of sample indices, later a micro-batch. Sums are taken in Python, in the order of the list: numpy's
order of addition differs between processors, and all ranks must come to the same plan.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        """Alike ones by index."""
        return sorted(members, key=lambda index: (-self.lengths[index], index))


def pack_tightly(budget: Budget, members: Sequence[int]) -> list[Bin]:
    """As few bins as best-fit decreasing finds: the longest sample first, each into the fullest bin with room.

    >>> pack_tightly(Budget([4, 6, 3, 7], [4.0, 6.0, 3.0, 7.0], 10), range(4))
    [[3, 2], [1, 0]]
    """
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (room, number of the bin), the fullest bin first
    for index in budget.longest_first(members):
        length = budget.lengths[index]
        place = bisect.bisect_left(rooms, (length, 0))
        if place == len(rooms):
            room, number = budget.max_tokens, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(index)
        bisect.insort(rooms, (room - length, number))
    return bins


def pack_evenly(budget: Budget, members: Sequence[int], n_bins: int) -> list[Bin] | None:
    """`n_bins` bins of about equal cost: the longest sample first, each into the cheapest bin with room.

    None where a sample finds no room in any bin.

    >>> pack_evenly(Budget([5, 1, 4, 2], [5.0, 1.0, 4.0, 2.0], 9), range(4), 2)
    [[0, 1], [2, 3]]
    """
    bins: list[Bin] = [[] for _ in range(n_bins)]
    rooms, costs = [budget.max_tokens] * n_bins, [0.0] * n_bins
    open_: list[tuple[float, int]] = []  # a heap of (cost, number): bins with room for the sample at hand
    full = [(-room, number) for number, room in enumerate(rooms)]  # a heap, those with most room first
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
