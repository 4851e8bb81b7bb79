"""Which ranks plan a weight sync together. Pure arithmetic.

The layout repeats itself: so many ranks further on in a pipeline stage, a rank holds the same weights and is in the
same place of its engine and of its node. One such period of every stage is a *cell*. It has everything that its engines
need, and all cells are alike, so that a rank plans its own cell only, however many ranks there are.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlmath.config.model_shape import ModelShape
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.shard_layouts import (
    Block,
    Coordinates,
    TrainingLayout,
    coordinates,
    engine_blocks,
    training_blocks,
)


def cells(mesh: Mesh, ranks_per_node: int | None = None) -> list[tuple[int, ...]]:
    """The ranks of every cell, in order. One cell, where periods do not fill a stage. None: all ranks are on one node.

    >>> cells(Mesh(0, 8, 2, 2, 1))
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    stage = mesh.world_size // mesh.pipeline
    node = 1 if ranks_per_node is None or ranks_per_node >= mesh.world_size else ranks_per_node
    period = math.lcm(mesh.tensor, mesh.expert * mesh.expert_tensor, mesh.engine_size, node)
    if stage % period:
        return [tuple(range(mesh.world_size))]
    return [
        tuple(
            first + start + offset for first in range(0, mesh.world_size, stage) for offset in range(period)
        )
        for start in range(0, stage, period)
    ]


def cell_of(mesh: Mesh, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """The cell of the mesh's rank."""
    return next(cell for cell in cells(mesh, ranks_per_node) if mesh.rank in cell)


@dataclass(frozen=True)
class Overlap:
    """A part of what an engine needs, and the same part in the shards of all that hold it."""

    target: Block
    sources: dict[Coordinates, Block]


Regions = Mapping[str, Mapping[tuple[int, int, int, int], Mapping[Coordinates, Block]]]
"""By tensor and (row, column, rows, columns): who holds it, and where."""


def by_region(held: Mapping[Coordinates, Iterable[Block]]) -> Regions:
    """What the shards at some places hold. They either hold the same rectangle or none in common."""
    found: dict[str, dict[tuple[int, int, int, int], dict[Coordinates, Block]]] = defaultdict(dict)
    for place, blocks in held.items():
        for block in blocks:
            region = (block.row, block.col, block.rows, block.cols)
            found[block.tensor].setdefault(region, {})[place] = block
    return found


def intersections(needed: Iterable[Block], held: Regions) -> list[Overlap]:
    """What is needed, cut along the borders of the shards."""
    overlaps = []
    for need in needed:
        covered = 0
        for holders in held[need.tensor].values():
            target = _common(need, next(iter(holders.values())))
            if target is None:
                continue
            common = {place: _common(block, need) for place, block in holders.items()}
            overlaps.append(Overlap(target, {place: block for place, block in common.items() if block}))
            covered += target.elements
        assert covered == need.elements, (
            f"{covered} of {need.elements} elements of {need} are held by someone"
        )
    return overlaps


def missing_elements(overlaps: Sequence[Overlap], place: Coordinates) -> int:
    """Elements that are needed and that a rank at `place` does not hold."""
    return sum(overlap.target.elements for overlap in overlaps if place not in overlap.sources)


def _common(block: Block, other: Block) -> Block | None:
    """The part of `block` that `other` has, too."""
    row, col = max(block.row, other.row), max(block.col, other.col)
    rows = min(block.row + block.rows, other.row + other.rows) - row
    cols = min(block.col + block.cols, other.col + other.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    at_row, at_col = block.at_row + row - block.row, block.at_col + col - block.col
    return Block(block.tensor, row, col, rows, cols, block.parameter, at_row, at_col)


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


SLICES_OF_A_BUCKET = 8
"""Large rectangles travel in slices of this fraction of a bucket, so that buckets get full."""


SHARED_BUCKET_BYTES = 16 * 2**20
"""Largest bucket between ranks that share memory (CPU), who keep two of them."""


def bucket_bytes(settings_mib: float, device_kind: str, world_size: int) -> int:
    """Size of a bucket where `sync.bucket_mib` is `settings_mib`: several ranks on CPU share memory, in smaller ones.

    >>> bucket_bytes(64, "cpu", 2) // 2**20, bucket_bytes(64, "cuda", 2) // 2**20
    (16, 64)
    """
    told = int(settings_mib * 2**20)
    return min(told, SHARED_BUCKET_BYTES) if device_kind == "cpu" and world_size > 1 else told


class Copy(NamedTuple):
    """A rectangle of a Hugging Face tensor on its way from a rank's parameter into a rank's engine."""

    source: int
    target: int
    """Ranks; equal where nothing travels."""
    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    source_parameter: str
    source_row: int
    source_col: int
    target_parameter: str
    target_row: int
    target_col: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class SyncPlan:
    """The plan of some ranks, which need nothing from others: of a cell, or of all."""

    local: Mapping[int, tuple[Copy, ...]]
    """By rank: what it copies from its own shard."""
    rounds: tuple[tuple[Copy, ...], ...]
    """What travels, one round after the other."""
    missing: Mapping[int, int]
    """By rank: elements that its engine needs and its own shard lacks. No plan can send fewer."""
    element_bytes: int
    """Bytes of an element on its way: it travels in the engine's number format."""

    def bytes_copied(self, rank: int) -> int:
        """Bytes that a rank takes from its own shard."""
        return self.element_bytes * sum(copy.elements for copy in self.local[rank])

    def bytes_sent(self, rank: int) -> int:
        return self._bytes("source", rank)

    def bytes_received(self, rank: int) -> int:
        return self._bytes("target", rank)

    def _bytes(self, side: str, rank: int) -> int:
        mine = (copy for copies in self.rounds for copy in copies if getattr(copy, side) == rank)
        return self.element_bytes * sum(copy.elements for copy in mine)

    @property
    def largest_bucket_bytes(self) -> int:
        """Most that any rank sends in any round."""
        sent = [Counter() for _ in self.rounds]
        for count, copies in zip(sent, self.rounds, strict=True):
            for copy in copies:
                count[copy.source] += copy.elements
        return self.element_bytes * max((max(count.values()) for count in sent), default=0)

    @property
    def lower_bound(self) -> int:
        """Bytes that must travel between these ranks, whatever the plan."""
        return self.element_bytes * sum(self.missing.values())


def plan_sync(
    shape: ModelShape,
    layout: TrainingLayout,
    mesh: Mesh,
    element_bytes: int,
    bucket_bytes: int,
    ranks_per_node: int | None = None,
) -> SyncPlan:
    """The plan for all ranks of `mesh`, whose own `rank` does not matter. None: all ranks are on one node.

    For hundreds of ranks it may have millions of copies; a rank needs `plan_cell` only.
    """
    first, *others = cells(mesh, ranks_per_node)
    one = plan_cell(shape, layout, replace(mesh, rank=first[0]), element_bytes, bucket_bytes, ranks_per_node)
    return _joined([one, *(_renumbered(one, dict(zip(first, cell, strict=True))) for cell in others)])


def plan_cell(
    shape: ModelShape,
    layout: TrainingLayout,
    mesh: Mesh,
    element_bytes: int,
    bucket_bytes: int,
    ranks_per_node: int | None = None,
) -> SyncPlan:
    """The plan for the cell of `mesh.rank`. None: all ranks are on one node."""
    standing = {rank: coordinates(replace(mesh, rank=rank)) for rank in cell_of(mesh, ranks_per_node)}
    held = by_region({at: training_blocks(shape, layout, at) for at in sorted(set(standing.values()))})
    found = [
        intersections(engine_blocks(shape, mesh.engine_size, part), held) for part in range(mesh.engine_size)
    ]
    by_rank = {rank: found[rank % mesh.engine_size] for rank in standing}
    senders = Senders(standing, ranks_per_node or mesh.world_size)
    budget = bucket_bytes // element_bytes
    local: dict[int, list[Copy]] = {rank: [] for rank in standing}
    travelling: list[Copy] = []
    # In the model's order, and within it by rank: all engines then fill up side by side.
    ordered = sorted((number, rank) for rank, overlaps in by_rank.items() for number in range(len(overlaps)))
    for number, rank in ordered:
        overlap = by_rank[rank][number]
        own = overlap.sources.get(standing[rank])
        if own is not None:
            local[rank].append(_copy(rank, rank, own, overlap.target))
            continue
        places = tuple(overlap.sources)
        for start, rows in _slices(overlap.target, budget // SLICES_OF_A_BUCKET):
            source = senders.choose(rank, places, rows * overlap.target.cols)
            held_there = overlap.sources[standing[source]]
            travelling.append(_copy(source, rank, held_there, overlap.target, start, rows))
    missing = {rank: missing_elements(by_rank[rank], place) for rank, place in standing.items()}
    rounds = _in_rounds(travelling, standing, budget)
    return SyncPlan({rank: tuple(mine) for rank, mine in local.items()}, rounds, missing, element_bytes)


def _renumbered(plan: SyncPlan, ranks: Mapping[int, int]) -> SyncPlan:
    """The plan of another cell; `ranks` gives its rank for each of this one's."""

    def others(copies: Sequence[Copy]) -> tuple[Copy, ...]:
        return tuple(copy._replace(source=ranks[copy.source], target=ranks[copy.target]) for copy in copies)

    return SyncPlan(
        {ranks[rank]: others(copies) for rank, copies in plan.local.items()},
        tuple(map(others, plan.rounds)),
        {ranks[rank]: elements for rank, elements in plan.missing.items()},
        plan.element_bytes,
    )


def _joined(plans: Sequence[SyncPlan]) -> SyncPlan:
    """Cells that are alike, side by side in each round; by rank."""
    return SyncPlan(
        dict(sorted(itertools.chain(*(plan.local.items() for plan in plans)))),
        tuple(
            tuple(itertools.chain(*side_by_side))
            for side_by_side in zip(*(p.rounds for p in plans), strict=True)
        ),
        dict(sorted(itertools.chain(*(plan.missing.items() for plan in plans)))),
        plans[0].element_bytes,
    )


def _slices(block: Block, budget: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the block's pieces of whole rows that fit the budget (elements)."""
    step = max(1, budget // block.cols)
    for start in range(0, block.rows, step):
        yield start, min(step, block.rows - start)


def _copy(
    source: int, target: int, held: Block, needed: Block, start: int = 0, rows: int | None = None
) -> Copy:
    """Of `rows` rows from `start` on; None: of all."""
    return Copy(
        source,
        target,
        needed.tensor,
        needed.row + start,
        needed.col,
        needed.rows if rows is None else rows,
        needed.cols,
        held.parameter,
        held.at_row + start,
        held.at_col,
        needed.parameter,
        needed.at_row + start,
        needed.at_col,
    )


def _in_rounds(copies: Sequence[Copy], ranks: Iterable[int], budget: int) -> tuple[tuple[Copy, ...], ...]:
    """Every copy in the first round in which both its ends have room left of `budget` elements."""
    sent, received = _Fill(ranks, budget), _Fill(ranks, budget)
    rounds: list[list[Copy]] = []
    for copy in copies:
        number, later = -1, max(sent.first[copy.source], received.first[copy.target])
        while later != number:
            number = later
            later = sent.room_from(number, copy.source, copy.elements)
            later = received.room_from(later, copy.target, copy.elements)
        sent.take(copy.source, number, copy.elements)
        received.take(copy.target, number, copy.elements)
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(copy)
    return tuple(map(tuple, rounds))


class _Fill:
    """How much every rank has in every round, for one direction."""

    def __init__(self, ranks: Iterable[int], budget: int) -> None:
        self.first = dict.fromkeys(ranks, 0)
        """By rank: the first round that is not nearly full."""
        self._budget = budget
        self._taken: dict[int, list[int]] = {rank: [] for rank in ranks}

    def room_from(self, number: int, rank: int, elements: int) -> int:
        """The first round from `number` on that has room for so many: nothing yet, or all of them within the budget."""
        taken = self._taken[rank]
        while number < len(taken) and taken[number] and taken[number] + elements > self._budget:
            number += 1
        return number

    def take(self, rank: int, number: int, elements: int) -> None:
        taken = self._taken[rank]
        taken.extend([0] * (number + 1 - len(taken)))
        taken[number] += elements
        while self.first[rank] < len(taken) and taken[self.first[rank]] > self._budget * 7 // 8:
            self.first[rank] += 1


@dataclass(frozen=True)
class RankRound:
    """What one rank does in one round. Both ends list a pair's copies in the same order."""

    sends: dict[int, tuple[Copy, ...]]
    """By receiving rank."""
    receives: dict[int, tuple[Copy, ...]]
    """By sending rank."""
    offsets: dict[int, int]
    """By sending rank: where its part for this rank starts among all that it sends in this round (elements)."""
    local: tuple[Copy, ...]
    """To be done while the others travel."""
    complete: tuple[str, ...]
    """Parameters of the engine that have all their elements after this round."""


def rank_rounds(plan: SyncPlan, rank: int) -> list[RankRound]:
    """One rank's part, at least one round. Local copies are spread: a parameter's go with the last of its others."""
    rounds = plan.rounds or ((),)
    last = {c.target_parameter: n for n, copies in enumerate(rounds) for c in copies if c.target == rank}
    own = list(dict.fromkeys(copy.target_parameter for copy in plan.local[rank]))
    alone = [name for name in own if name not in last]
    done = last | {name: number * len(rounds) // len(alone) for number, name in enumerate(alone)}
    complete: list[list[str]] = [[] for _ in rounds]
    for name, number in done.items():
        complete[number].append(name)
    local: list[list[Copy]] = [[] for _ in rounds]
    for copy in plan.local[rank]:
        local[done[copy.target_parameter]].append(copy)
    return [
        _rank_round(copies, rank, tuple(local[number]), tuple(complete[number]))
        for number, copies in enumerate(rounds)
    ]


def _rank_round(
    copies: Sequence[Copy], rank: int, local: tuple[Copy, ...], complete: tuple[str, ...]
) -> RankRound:
    by_pair: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_pair[copy.source, copy.target].append(copy)
    offsets, sent = {}, defaultdict(int)
    for source, target in sorted(by_pair):
        if target == rank:
            offsets[source] = sent[source]
        sent[source] += sum(copy.elements for copy in by_pair[source, target])
    return RankRound(
        sends={t: tuple(by_pair[s, t]) for s, t in sorted(by_pair) if s == rank},
        receives={s: tuple(by_pair[s, t]) for s, t in sorted(by_pair) if t == rank},
        offsets=offsets,
        local=local,
        complete=complete,
    )
