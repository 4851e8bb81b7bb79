"""The plan of a weight sync: which rank sends which part to which rank's engine, in which round.

It is pure arithmetic.

    training layout + engine layout -> overlaps of their blocks -> local copies, and copies that
    travel -> rounds

Invariants, which the tests assert:

- every element that an engine needs is written exactly once per sync;
- a rank copies locally whatever its own shard holds; only what it lacks travels, which no plan can
  avoid;
- in no round does a rank send or receive more than one bucket, unless a single row is larger;
- the ranks that hold an element share the sending of it evenly, those of the receiver's node first;
- all ranks derive the same plan from the settings, without a message.

The layout repeats itself: so many ranks further on in a pipeline stage, a rank holds the same
weights and has the same place in its engine and on its node. One such period of every stage is a
*cell*. A cell holds everything that its engines need, and all cells are alike, so that a rank plans
its own cell only, however many ranks there are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlmath.checkpoint.hf.weight_map import Rule
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

SLICES_OF_A_BUCKET = 8
"""Large rectangles travel in slices of this fraction of a bucket, so that buckets get full."""

SHARED_BUCKET_BYTES = 16 * 2**20
"""Largest bucket between ranks that share memory (CPU), which keep two of them."""


def bucket_bytes(settings_mib: float, device_kind: str, world_size: int) -> int:
    """Size of a bucket (bytes) where `sync.bucket_mib` is `settings_mib`.

    Several ranks on CPU share memory, in smaller buckets.

    >>> bucket_bytes(64, "cpu", 2) // 2**20, bucket_bytes(64, "cuda", 2) // 2**20
    (16, 64)
    """
    size = int(settings_mib * 2**20)
    return min(size, SHARED_BUCKET_BYTES) if device_kind == "cpu" and world_size > 1 else size


# ---------------------------------------------------------------- the plan


class Copy(NamedTuple):
    """A rectangle of a Hugging Face tensor, copied from a parameter into an engine's parameter."""

    source: int
    target: int
    """Rank of the engine; equal to `source` where nothing travels."""
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
    """The plan of ranks that need nothing from other ranks: those of a cell, or all."""

    local: Mapping[int, tuple[Copy, ...]]
    """What each rank of an engine copies from its own shard."""
    rounds: tuple[tuple[Copy, ...], ...]
    """Copies that travel, one round after the other."""
    missing: Mapping[int, int]
    """Elements that each rank's engine needs and its shard lacks. No plan can send fewer."""
    element_bytes: int
    """Bytes of an element that travels, which it does in the engine's number format."""

    def bytes_copied(self, rank: int) -> int:
        """Bytes that a rank takes from its own shard."""
        return self.element_bytes * sum(copy.elements for copy in self.local[rank])

    def bytes_sent(self, rank: int) -> int:
        sent = (copy.elements for copies in self.rounds for copy in copies if copy.source == rank)
        return self.element_bytes * sum(sent)

    def bytes_received(self, rank: int) -> int:
        received = (
            copy.elements for copies in self.rounds for copy in copies if copy.target == rank
        )
        return self.element_bytes * sum(received)

    @property
    def largest_bucket_bytes(self) -> int:
        """The most that any rank sends in any round."""
        largest = 0
        for copies in self.rounds:
            sent: Counter[int] = Counter()
            for copy in copies:
                sent[copy.source] += copy.elements
            largest = max(largest, max(sent.values(), default=0))
        return self.element_bytes * largest

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
    adapters: tuple[Rule, ...] = (),
    only: Collection[str] | None = None,
) -> SyncPlan:
    """The plan for the cell of `mesh.rank`; None: all ranks are on one node.

    Where engines have ranks of their own, it is that for the first engine, behind all training
    ranks, those of `mesh`: every element travels once to each rank that needs it. `adapters` are
    the rules of those that engines hold (`shard_layouts.engine_adapters`). `only`: the policy's
    parameters that are copied, by `parameter_key`; None: all."""
    if mesh.engine_ranks:
        ranks: Sequence[int] = range(mesh.world_size)
        parts = {mesh.world_size + part: part for part in range(mesh.engine_size)}
        ranks_per_node = (
            mesh.world_size + mesh.engine_size
        )  # nodes make no difference: engines have others
    else:
        ranks = cell_of(mesh, ranks_per_node)
        parts = {rank: rank % mesh.engine_size for rank in ranks}
    coordinates_of = {rank: coordinates(replace(mesh, rank=rank)) for rank in ranks}
    senders = Senders(coordinates_of, ranks_per_node or mesh.world_size)
    regions = by_region(
        {
            at: training_blocks(shape, layout, at, adapters=adapters)
            for at in sorted(set(coordinates_of.values()))
        }
    )
    overlaps_of_part = [
        [
            overlap
            for overlap in intersections(
                engine_blocks(shape, mesh.engine_size, part, adapters=adapters), regions
            )
            if only is None or next(iter(overlap.sources.values())).parameter in only
        ]
        for part in range(mesh.engine_size)
    ]
    needed = {rank: overlaps_of_part[part] for rank, part in parts.items()}
    budget = bucket_bytes // element_bytes
    local: dict[int, list[Copy]] = {rank: [] for rank in parts}
    travelling: list[Copy] = []
    # In the model's order, and within it by rank: all engines are then filled side by side.
    ordered = sorted(
        (number, rank) for rank, overlaps in needed.items() for number in range(len(overlaps))
    )
    for number, rank in ordered:
        overlap = needed[rank][number]
        own_block = overlap.sources.get(coordinates_of[rank]) if rank in coordinates_of else None
        if own_block is not None:
            local[rank].append(_copy(rank, rank, own_block, needed=overlap.target))
            continue
        step = max(1, budget // SLICES_OF_A_BUCKET // overlap.target.cols)
        for start in range(0, overlap.target.rows, step):
            rows = min(step, overlap.target.rows - start)
            source = senders.choose(rank, overlap.sources, rows * overlap.target.cols)
            source_block = overlap.sources[coordinates_of[source]]
            travelling.append(
                _copy(source, rank, source_block, needed=overlap.target, start=start, rows=rows)
            )
    return SyncPlan(
        local={rank: tuple(copies) for rank, copies in local.items()},
        rounds=_in_rounds(travelling, {*coordinates_of, *parts}, budget),
        missing={
            rank: sum(
                overlap.target.elements
                for overlap in needed[rank]
                if coordinates_of.get(rank) not in overlap.sources
            )
            for rank in parts
        },
        element_bytes=element_bytes,
    )


def _copy(
    source: int,
    target: int,
    source_block: Block,
    needed: Block,
    start: int = 0,
    rows: int | None = None,
) -> Copy:
    """The copy of `rows` rows of the needed block, from `start` on; None: all of them."""
    return Copy(
        source,
        target,
        tensor=needed.tensor,
        row=needed.row + start,
        col=needed.col,
        rows=needed.rows if rows is None else rows,
        cols=needed.cols,
        source_parameter=source_block.parameter,
        source_row=source_block.at_row + start,
        source_col=source_block.at_col,
        target_parameter=needed.parameter,
        target_row=needed.at_row + start,
        target_col=needed.at_col,
    )


# ---------------------------------------------------------------- cells: ranks that plan together


def cells(mesh: Mesh, ranks_per_node: int | None = None) -> list[tuple[int, ...]]:
    """The ranks of every cell, in order.

    There is one cell where periods do not fill a stage. Without `ranks_per_node` all ranks are on
    one node.

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
            first + start + offset
            for first in range(0, mesh.world_size, stage)
            for offset in range(period)
        )
        for start in range(0, stage, period)
    ]


def cell_of(mesh: Mesh, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """The cell of the mesh's rank."""
    return next(cell for cell in cells(mesh, ranks_per_node) if mesh.rank in cell)


# ------------------------------------------------------ overlaps of what is held and what is needed


@dataclass(frozen=True)
class Overlap:
    """A block that an engine needs, and the same block in the shards of all ranks that hold it."""

    target: Block
    sources: dict[Coordinates, Block]


Regions = Mapping[str, Mapping[tuple[int, int, int, int], Mapping[Coordinates, Block]]]
"""Who holds a rectangle, and where, by its tensor and (row, column, rows, columns)."""


def by_region(blocks_of_shards: Mapping[Coordinates, Iterable[Block]]) -> Regions:
    """What the shards at some coordinates hold, by rectangle.

    Any two shards hold the same rectangle, or rectangles without overlap."""
    regions: dict[str, dict[tuple[int, int, int, int], dict[Coordinates, Block]]] = defaultdict(
        dict
    )
    for at, blocks in blocks_of_shards.items():
        for block in blocks:
            region = (block.row, block.col, block.rows, block.cols)
            regions[block.tensor].setdefault(region, {})[at] = block
    return regions


def intersections(needed: Iterable[Block], regions: Regions) -> list[Overlap]:
    """The needed blocks, cut along the borders of the shards."""
    overlaps = []
    for need in needed:
        covered = 0
        for holders in regions[need.tensor].values():
            target = _common(need, next(iter(holders.values())))
            if target is None:
                continue
            common = {at: _common(block, need) for at, block in holders.items()}
            overlaps.append(Overlap(target, {at: block for at, block in common.items() if block}))
            covered += target.elements
        assert covered == need.elements, (
            f"{covered} of {need.elements} elements of {need} are held by a rank"
        )
    return overlaps


def _common(block: Block, other: Block) -> Block | None:
    """The part of a block that another has in common with it; None without any."""
    row, col = max(block.row, other.row), max(block.col, other.col)
    rows = min(block.row + block.rows, other.row + other.rows) - row
    cols = min(block.col + block.cols, other.col + other.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    at_row = block.at_row + row - block.row
    at_col = block.at_col + col - block.col
    return replace(block, rows=rows, cols=cols, row=row, col=col, at_row=at_row, at_col=at_col)


# ---------------------------------------------------------------- who sends


class Senders:
    """Chooses who sends, by how much every rank sends already."""

    def __init__(self, coordinates_of: Mapping[int, Coordinates], ranks_per_node: int) -> None:
        """`coordinates_of` are those of every rank that may send."""
        self._ranks_per_node = ranks_per_node
        self._ranks_at: dict[Coordinates, list[int]] = defaultdict(list)
        for rank, at in coordinates_of.items():
            self._ranks_at[at].append(rank)
        self._sent = dict.fromkeys(coordinates_of, 0)
        self._candidates: dict[tuple[tuple[Coordinates, ...], int], list[int]] = {}
        """Ranks that may send, by the holders' coordinates and the target's node."""

    def choose(self, target: int, holders: Iterable[Coordinates], elements: int) -> int:
        """The rank at `holders` that sends least so far; one of the target's node if there is one.

        It is then counted as sending `elements` more."""
        key = tuple(holders), target // self._ranks_per_node
        if key not in self._candidates:
            ranks = [rank for at in holders for rank in self._ranks_at[at]]
            near = [rank for rank in ranks if rank // self._ranks_per_node == key[1]]
            self._candidates[key] = near or ranks
        source = min(self._candidates[key], key=lambda rank: (self._sent[rank], rank))
        self._sent[source] += elements
        return source


# ---------------------------------------------------------------- rounds


def _in_rounds(
    copies: Sequence[Copy], ranks: Iterable[int], budget: int
) -> tuple[tuple[Copy, ...], ...]:
    """Put every copy into the first round in which both its ends have room left.

    Each end has room for `budget` elements in a round."""
    sent = _Fill(ranks, budget)
    received = _Fill(ranks, budget)
    rounds: list[list[Copy]] = []
    for copy in copies:
        number = -1
        later = max(sent.first[copy.source], received.first[copy.target])
        while later != number:
            number = later
            later = sent.room_from(number, copy.source, copy.elements)
            later = received.room_from(later, copy.target, copy.elements)
        sent.add(copy.source, number, copy.elements)
        received.add(copy.target, number, copy.elements)
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(copy)
    return tuple(map(tuple, rounds))


class _Fill:
    """How many elements every rank has in every round, in one direction."""

    def __init__(self, ranks: Iterable[int], budget: int) -> None:
        self.first = dict.fromkeys(ranks, 0)
        """The first round of each rank that is not nearly full."""
        self._budget = budget
        self._filled: dict[int, list[int]] = {rank: [] for rank in ranks}

    def room_from(self, number: int, rank: int, elements: int) -> int:
        """The first round from `number` on with room for `elements`.

        It is empty, or all of them stay within the budget."""
        filled = self._filled[rank]
        while number < len(filled) and filled[number] and filled[number] + elements > self._budget:
            number += 1
        return number

    def add(self, rank: int, number: int, elements: int) -> None:
        filled = self._filled[rank]
        filled.extend([0] * (number + 1 - len(filled)))
        filled[number] += elements
        while self.first[rank] < len(filled) and filled[self.first[rank]] > self._budget * 7 // 8:
            self.first[rank] += 1


# ---------------------------------------------------------------- one rank's part


@dataclass(frozen=True)
class RankRound:
    """What one rank does in one round.

    Both ends list a pair's copies in the same order."""

    sends: dict[int, tuple[Copy, ...]]
    """Copies for each receiving rank."""
    receives: dict[int, tuple[Copy, ...]]
    """Copies from each sending rank."""
    offsets: dict[int, int]
    """Start of this rank's part in all that each sending rank sends in this round (elements)."""
    local: tuple[Copy, ...]
    """Copies within this rank, made while the others travel."""
    complete: tuple[str, ...]
    """Parameters of the engine that have all their elements after this round."""


def rank_rounds(plan: SyncPlan, rank: int) -> list[RankRound]:
    """One rank's part of the plan, at least one round.

    A parameter that also receives copies from other ranks is completed in the round of its last
    received copy, and its local copies are made then. Parameters with local copies only are spread
    over the rounds."""
    rounds = plan.rounds or ((),)
    last_round_of = {
        copy.target_parameter: number
        for number, copies in enumerate(rounds)
        for copy in copies
        if copy.target == rank
    }
    own_copies = plan.local.get(rank, ())
    own_parameters = list(dict.fromkeys(copy.target_parameter for copy in own_copies))
    only_local = [name for name in own_parameters if name not in last_round_of]
    completing_round_of = last_round_of | {
        name: number * len(rounds) // len(only_local) for number, name in enumerate(only_local)
    }
    complete: list[list[str]] = [[] for _ in rounds]
    for name, number in completing_round_of.items():
        complete[number].append(name)
    local: list[list[Copy]] = [[] for _ in rounds]
    for copy in own_copies:
        local[completing_round_of[copy.target_parameter]].append(copy)
    return [
        _rank_round(copies, rank, tuple(local[number]), complete=tuple(complete[number]))
        for number, copies in enumerate(rounds)
    ]


def _rank_round(
    copies: Sequence[Copy], rank: int, local: tuple[Copy, ...], complete: tuple[str, ...]
) -> RankRound:
    """One rank's part of a round's copies."""
    by_pair: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_pair[copy.source, copy.target].append(copy)
    offsets = {}
    sent = defaultdict(int)
    for source, target in sorted(by_pair):
        if target == rank:
            offsets[source] = sent[source]
        sent[source] += sum(copy.elements for copy in by_pair[source, target])
    return RankRound(
        sends={
            target: tuple(by_pair[source, target])
            for source, target in sorted(by_pair)
            if source == rank
        },
        receives={
            source: tuple(by_pair[source, target])
            for source, target in sorted(by_pair)
            if target == rank
        },
        offsets=offsets,
        local=local,
        complete=complete,
    )
