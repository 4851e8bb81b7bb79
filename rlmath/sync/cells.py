"""Which ranks plan a weight sync together. Pure arithmetic.

The layout repeats itself: so many ranks further on in a pipeline stage, a rank holds the same weights and is in the
same place of its engine and of its node. One such period of every stage is a *cell*. It has everything that its engines
need, and all cells are alike, so that a rank plans its own cell only, however many ranks there are.
"""

from __future__ import annotations

import math

from rlmath.parallel.mesh import Mesh


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
