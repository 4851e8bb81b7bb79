"""Who sends what to whom when new weights go from the training layout to the engines: computed once, plain data.

Invariants:
  - every element that an engine needs arrives exactly once;
  - what a rank holds itself is copied, never sent;
  - what it does not hold comes from one holder, of its own node where there is one, the one with least to send;
  - in no round does a rank send or receive more than a bucket (one row of a tensor, if that alone is more).
All ranks compute the same plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlmath.model_shape import ModelShape
from rlmath.parallel.mesh import Mesh
from rlmath.sync.layouts import (
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
"""Largest bucket between ranks that share memory (CPU), who keep two of them."""


def bucket_bytes(settings_mib: float, device_kind: str, world_size: int) -> int:
    """Size of a bucket where `sync.bucket_mib` is `settings_mib`: several ranks on CPU share memory, in smaller ones.

    >>> bucket_bytes(64, "cpu", 2) // 2**20, bucket_bytes(64, "cuda", 2) // 2**20
    (16, 64)
    """
    told = int(settings_mib * 2**20)
    return min(told, SHARED_BUCKET_BYTES) if device_kind == "cpu" and world_size > 1 else told


@dataclass(frozen=True, slots=True)
class Copy:
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
    """The whole plan, the same on every rank."""

    local: tuple[tuple[Copy, ...], ...]
    """By rank: what it copies from its own shard."""
    rounds: tuple[tuple[Copy, ...], ...]
    """What travels, one round after the other."""
    missing: tuple[int, ...]
    """By rank: elements that its engine needs and its own shard lacks. No plan can send fewer."""
    element_bytes: int
    """Bytes of an element on its way: it travels in the engine's number format."""

    @property
    def world_size(self) -> int:
        return len(self.local)

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
        """Bytes that must travel, whatever the plan."""
        return self.element_bytes * sum(self.missing)


def plan_sync(
    shape: ModelShape,
    layout: TrainingLayout,
    mesh: Mesh,
    element_bytes: int,
    bucket_bytes: int,
    ranks_per_node: int | None = None,
) -> SyncPlan:
    """The plan for all ranks of `mesh`, whose own `rank` does not matter. None: all ranks are on one node."""
    places = [replace(mesh, rank=rank) for rank in range(mesh.world_size)]
    standing = [coordinates(place) for place in places]
    parts = [rank % mesh.engine_size for rank in range(mesh.world_size)]
    held = {at: list(training_blocks(shape, layout, at)) for at in sorted(set(standing))}
    found = [
        _intersections(list(engine_blocks(shape, mesh.engine_size, part)), held)
        for part in range(mesh.engine_size)
    ]
    senders = _Senders(standing, ranks_per_node or mesh.world_size)
    local: list[list[Copy]] = [[] for _ in places]
    travelling: list[Copy] = []
    # In the model's order, and within it by rank: all engines then fill up side by side.
    ordered = sorted((number, rank) for rank, part in enumerate(parts) for number in range(len(found[part])))
    for number, rank in ordered:
        overlap = found[parts[rank]][number]
        own = overlap.sources.get(standing[rank])
        if own is not None:
            local[rank].append(_copy(rank, rank, own, overlap.target))
            continue
        for target, sources in _slices(overlap, bucket_bytes // element_bytes // SLICES_OF_A_BUCKET):
            source = senders.choose(rank, sources.keys(), target.elements)
            travelling.append(_copy(source, rank, sources[standing[source]], target))
    missing = tuple(_missing(found[parts[rank]], place) for rank, place in enumerate(standing))
    budget = bucket_bytes // element_bytes
    return SyncPlan(
        tuple(map(tuple, local)), _in_rounds(travelling, mesh.world_size, budget), missing, element_bytes
    )


@dataclass(frozen=True)
class _Overlap:
    """A part of what an engine needs, and the same part in the shards of all that hold it."""

    target: Block
    sources: dict[Coordinates, Block]


def _intersections(needed: Sequence[Block], held: dict[Coordinates, list[Block]]) -> list[_Overlap]:
    """What is needed, cut along the borders of the shards. Shards either hold the same rectangle or none in common."""
    by_tensor: dict[str, dict[tuple[int, int, int, int], dict[Coordinates, Block]]] = defaultdict(dict)
    for place, blocks in held.items():
        for block in blocks:
            region = (block.row, block.col, block.rows, block.cols)
            by_tensor[block.tensor].setdefault(region, {})[place] = block
    overlaps = []
    for need in needed:
        covered = 0
        for holders in by_tensor[need.tensor].values():
            common = {place: _common(block, need) for place, block in holders.items()}
            target = _common(need, next(iter(holders.values())))
            if target is None:
                continue
            overlaps.append(_Overlap(target, {place: block for place, block in common.items() if block}))
            covered += target.elements
        assert covered == need.elements, (
            f"{covered} of {need.elements} elements of {need} are held by someone"
        )
    return overlaps


def _common(block: Block, other: Block) -> Block | None:
    """The part of `block` that `other` has, too."""
    row, col = max(block.row, other.row), max(block.col, other.col)
    rows = min(block.row + block.rows, other.row + other.rows) - row
    cols = min(block.col + block.cols, other.col + other.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    at_row, at_col = block.at_row + row - block.row, block.at_col + col - block.col
    return Block(block.tensor, row, col, rows, cols, block.parameter, at_row, at_col)


def _slices(overlap: _Overlap, budget: int) -> Iterator[tuple[Block, dict[Coordinates, Block]]]:
    """The overlap in pieces of whole rows that fit the budget (elements)."""
    step = max(1, budget // overlap.target.cols)
    for start in range(0, overlap.target.rows, step):
        rows = min(step, overlap.target.rows - start)
        yield (
            _rows(overlap.target, start, rows),
            {place: _rows(block, start, rows) for place, block in overlap.sources.items()},
        )


def _rows(block: Block, start: int, rows: int) -> Block:
    return replace(block, row=block.row + start, at_row=block.at_row + start, rows=rows)


def _copy(source: int, target: int, held: Block, needed: Block) -> Copy:
    return Copy(
        source,
        target,
        needed.tensor,
        needed.row,
        needed.col,
        needed.rows,
        needed.cols,
        held.parameter,
        held.at_row,
        held.at_col,
        needed.parameter,
        needed.at_row,
        needed.at_col,
    )


def _missing(overlaps: Sequence[_Overlap], place: Coordinates) -> int:
    return sum(overlap.target.elements for overlap in overlaps if place not in overlap.sources)


class _Senders:
    """Shares the sending out among the ranks that hold the same."""

    def __init__(self, standing: Sequence[Coordinates], ranks_per_node: int) -> None:
        self._at: dict[Coordinates, list[int]] = defaultdict(list)
        for rank, place in enumerate(standing):
            self._at[place].append(rank)
        self._ranks_per_node = ranks_per_node
        self._sent = [0] * len(standing)

    def choose(
        self, target: int, places: Iterator[Coordinates] | Sequence[Coordinates], elements: int
    ) -> int:
        """The holder with least to send so far, of the target's node where there is one; it sends `elements`."""
        holders = [rank for place in places for rank in self._at[place]]
        node = target // self._ranks_per_node
        near = [rank for rank in holders if rank // self._ranks_per_node == node]
        source = min(near or holders, key=lambda rank: (self._sent[rank], (rank - target) % len(self._sent)))
        self._sent[source] += elements
        return source


def _in_rounds(copies: Sequence[Copy], world_size: int, budget: int) -> tuple[tuple[Copy, ...], ...]:
    """Every copy in the first round in which both its ends have room left of `budget` elements."""
    sent = _Fill(world_size, budget)
    received = _Fill(world_size, budget)
    rounds: list[list[Copy]] = []
    for copy in copies:
        number = max(sent.first[copy.source], received.first[copy.target])
        while not (
            sent.has_room(copy.source, number, copy.elements)
            and received.has_room(copy.target, number, copy.elements)
        ):
            number += 1
        sent.take(copy.source, number, copy.elements)
        received.take(copy.target, number, copy.elements)
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(copy)
    return tuple(map(tuple, rounds))


class _Fill:
    """How much every rank has in every round, for one direction."""

    def __init__(self, world_size: int, budget: int) -> None:
        self.first = [0] * world_size
        """By rank: the first round that is not nearly full."""
        self._budget = budget
        self._taken: list[list[int]] = [[] for _ in range(world_size)]

    def has_room(self, rank: int, number: int, elements: int) -> bool:
        taken = self._taken[rank][number] if number < len(self._taken[rank]) else 0
        return not taken or taken + elements <= self._budget

    def take(self, rank: int, number: int, elements: int) -> None:
        taken = self._taken[rank]
        taken.extend([0] * (number + 1 - len(taken)))
        taken[number] += elements
        while self.first[rank] < len(taken) and taken[self.first[rank]] > self._budget * 7 // 8:
            self.first[rank] += 1
