"""What an engine needs, cut along the borders of the training shards. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmath.sync.layouts import Block, Coordinates


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
