"""Who sends, where several ranks hold the same: the sending is shared out evenly."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from rlmath.sync.layouts import Coordinates

Places = tuple[Coordinates, ...]


class Senders:
    """Remembers how much every rank sends."""

    def __init__(self, standing: Mapping[int, Coordinates], ranks_per_node: int) -> None:
        """`standing` gives the coordinates of every rank that may send."""
        self._ranks_per_node = ranks_per_node
        self._at: dict[tuple[Coordinates, int | None], list[int]] = defaultdict(list)
        for rank, place in standing.items():
            self._at[place, rank // ranks_per_node].append(rank)
            self._at[place, None].append(rank)
        self._sent = dict.fromkeys(standing, 0)
        # Heaps of (sent, rank), by places and node: what a rank sent since may be missing, as no heap knows the others.
        self._holders: dict[tuple[Places, int | None], list[tuple[int, int]]] = {}

    def choose(self, target: int, places: Places, elements: int) -> int:
        """The rank with least to send so far of those at `places`, of the target's node where there is one; from now on
        it sends `elements` more."""
        heap = self._heap(places, target // self._ranks_per_node) or self._heap(places, None)
        while (now := self._sent[heap[0][1]]) > heap[0][0]:
            heapq.heapreplace(heap, (now, heap[0][1]))
        source = heap[0][1]
        self._sent[source] += elements
        return source

    def _heap(self, places: Places, node: int | None) -> list[tuple[int, int]]:
        heap = self._holders.get((places, node))
        if heap is None:
            ranks = (rank for place in places for rank in self._at.get((place, node), ()))
            heap = self._holders[places, node] = sorted((self._sent[rank], rank) for rank in ranks)
        return heap
