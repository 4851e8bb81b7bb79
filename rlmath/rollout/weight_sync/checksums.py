"""Checks that engines have the policy's weights, by checksums of every Hugging Face tensor.

The checksum of a tensor is the sum over its elements of a hash of the element's bits, in the
engine's number format, and of its position: a wrong value, a missing one, and a right one in the
wrong place all change it. Sums over the ranks that share a tensor give that of the whole tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import Rule
from rlmath.config.model_shape import ModelShape
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.shard_layouts import (
    TIED_HEAD,
    Block,
    Coordinates,
    TrainingLayout,
    coordinates,
    engine_blocks,
    training_blocks,
)

MASK = 2**40 - 1
"""Checksums are compared modulo this plus one, so that sums over many ranks do not overflow."""

_AT_ONCE = 2**20
"""Elements that are hashed at a time."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def rectangle_checksum(values: Tensor, row: int, col: int, width: int) -> int:
    """Checksum of a rectangle that lies at (row, col) of a tensor with `width` columns."""
    total = 0
    step = max(1, _AT_ONCE // values.shape[1])
    columns = torch.arange(col, col + values.shape[1], device=values.device)
    for start in range(0, values.shape[0], step):
        part = values[start : start + step].contiguous()
        bits = part.view(_BITS[part.element_size()]).long()
        rows = torch.arange(row + start, row + start + len(part), device=values.device)
        total += int((_mixed(bits, rows[:, None] * width + columns) & MASK).sum())
    return total & MASK


def _mixed(bits: Tensor, places: Tensor) -> Tensor:
    """A hash of every element with its position (int64).

    Each bit of both changes about half of all bits: multiply and shift, as in splitmix64 (Steele,
    Lea and Flood, OOPSLA 2014)."""
    mixed = bits * 0x1F123BB5 + places * 0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 29)


class SyncChecksums:
    """Compares the two sides of one sync.

    Every rank makes one for the sync, adds both sides, and calls `differing`."""

    def __init__(
        self,
        shape: ModelShape,
        layout: TrainingLayout,
        mesh: Mesh,
        device: Device,
        adapters: tuple[Rule, ...] = (),
        only: Collection[str] | None = None,
    ) -> None:
        """`adapters` and `only` are those of the sync's plan (`reshard_plan.plan_sync`)."""
        self._mesh = mesh
        self._device = device
        part = mesh.rank % mesh.engine_size
        held = partial(training_blocks, shape, layout, adapters=adapters)
        needed = partial(engine_blocks, shape, adapters=adapters)
        self._widths = {block.tensor: block.cols for block in needed(1, 0)}
        """Columns of every Hugging Face tensor."""
        self._held = [
            block for block in _counted(held, mesh) if only is None or block.parameter in only
        ]
        self._needed: dict[str, list[Block]] = defaultdict(list)
        for block in needed(mesh.engine_size, part):
            self._needed[block.parameter].append(block)
        self._copies = _copies(needed, mesh.engine_size)
        self._names = sorted(self._widths)
        self._sums = {side: dict.fromkeys(self._names, 0) for side in ("policy", "engine")}

    def add_engine(self, name: str, matrix: Tensor) -> None:
        """Add a parameter of this rank's engine, as it was written."""
        self._add("engine", self._needed[name], matrix, dtype=matrix.dtype)

    def add_policy(self, matrix_of: Callable[[str], Tensor], dtype: torch.dtype) -> None:
        """Add this rank's shard, by the plan's names; `dtype` is the engine's."""
        for parameter, blocks in groupby(self._held, attrgetter("parameter")):
            self._add("policy", blocks, matrix_of(parameter), dtype=dtype)

    def _add(self, side: str, blocks: Iterable[Block], matrix: Tensor, dtype: torch.dtype) -> None:
        for block in blocks:
            part = matrix[block.at_row :, block.at_col :][: block.rows, : block.cols].to(dtype)
            checksum = rectangle_checksum(
                part, block.row, block.col, width=self._widths[block.tensor]
            )
            self._sums[side][block.tensor] += checksum

    def differing(self) -> list[str]:
        """Tensors that differ between the policy and an engine, with the engines, on all ranks."""
        mesh = self._mesh
        table = torch.zeros(1 + mesh.num_engines, len(self._names), dtype=torch.int64)
        table[0] = torch.tensor(
            [self._sums["policy"][name] * self._copies[name] & MASK for name in self._names]
        )
        table[1 + mesh.engine_index] = torch.tensor(
            [self._sums["engine"][name] & MASK for name in self._names]
        )
        table = table.to(self._device.torch_device)
        dist.all_reduce(table)
        wrong = (((table[1:] - table[:1]) & MASK) != 0).cpu()
        return [
            f"{name} in engine {', '.join(map(str, wrong[:, n].nonzero().flatten().tolist()))}"
            for n, name in enumerate(self._names)
            if wrong[:, n].any()
        ]


def _copies(needed: Callable[[int, int], Iterable[Block]], engine_size: int) -> dict[str, int]:
    """How often an engine has each element of a tensor.

    Its ranks may split it, or each hold all of it. `needed` gives the blocks of an engine's rank,
    by the engine's size and the rank's part."""
    elements_by_tensor: Counter[str] = Counter()
    for part in range(engine_size):
        for block in needed(engine_size, part):
            elements_by_tensor[block.tensor] += block.elements
    return {
        block.tensor: elements_by_tensor[block.tensor] // block.elements for block in needed(1, 0)
    }


def _counted(held: Callable[[Coordinates], Iterable[Block]], mesh: Mesh) -> list[Block]:
    """The blocks whose rectangle no earlier rank of this rank's stage holds.

    So every element is counted once. `held` gives the blocks at a rank's coordinates."""
    first = mesh.pipeline_rank * (mesh.world_size // mesh.pipeline)
    before = {coordinates(replace(mesh, rank=rank)) for rank in range(first, mesh.rank)}
    if coordinates(mesh) in before:
        return []
    blocks = [block for block in held(coordinates(mesh)) if block.parameter != TIED_HEAD]
    rectangle = attrgetter("tensor", "row", "col", "rows", "cols")
    seen = {rectangle(block) for at in before for block in held(at)}
    return [block for block in blocks if rectangle(block) not in seen]
