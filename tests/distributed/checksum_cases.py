"""What the ranks do in the tests of the checksums.

They spoil an engine's weights, or a policy's, and ask what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.rollout.weight_sync.shard_layouts import training_layout
from tests.distributed.policy_cases import Case, build
from tests.distributed.sync_cases import Target, target


def flip_a_bit(matrix: Tensor) -> None:
    """The lowest one of an element in the middle."""
    bits = matrix.view({2: torch.int16, 4: torch.int32}[matrix.element_size()]).view(-1)
    bits[len(bits) // 2] ^= 1


def swap_rows(matrix: Tensor) -> None:
    matrix[[0, 1]] = matrix[[1, 0]]


def lose_a_slice(matrix: Tensor) -> None:
    """Leave the slice as it would be if it had never arrived."""
    matrix[:2] = 0.0


SPOIL: dict[str, Callable[[Tensor], None]] = {
    "bit": flip_a_bit,
    "rows": swap_rows,
    "slice": lose_a_slice,
}


def spoiled(
    folder: Path,
    case: Case,
    engine_size: int,
    dtype: torch.dtype,
    where: list[tuple[str, str, int]],
) -> list[list[str]]:
    """Differences after each damage (kind, parameter, rank); without one there are none."""
    stage = build(folder, case)
    sync_target = target(stage, engine_size, dtype)
    sync_target.sync.run(check=True)
    differences = []
    for kind, name, rank in where:
        if rank == sync_target.mesh.rank:
            undamaged = sync_target.parameters[name].clone()
            SPOIL[kind](sync_target.parameters[name])
        differences.append(differing(sync_target))
        if rank == sync_target.mesh.rank:
            sync_target.parameters[name].copy_(undamaged)
    assert differing(sync_target) == []
    return differences


def differing(one: Target) -> list[str]:
    """Both sides' checksums, compared, of the target as it is now."""
    from rlmath.rollout.weight_sync.checksums import SyncChecksums

    stage = one.stage
    parallel = one.stage.config.parallel
    layout = training_layout(stage.shape.num_layers, one.mesh, parallel)
    checksums = SyncChecksums(stage.shape, layout, one.mesh, stage.device)
    for name, parameter in one.parameters.items():
        matrix = parameter if parameter.dim() == 2 else parameter[:, None]
        checksums.add_engine(name, matrix)
    checksums.add_policy(one.sync._sources.matrix, next(iter(one.parameters.values())).dtype)
    return checksums.differing()


def replica_astray(folder: Path, case: Case, engine_size: int, rank: int) -> dict[str, Any]:
    """Let one data-parallel replica's weights differ by one bit.

    The result is what a checked sync reports; an unchecked one before it raises nothing."""
    from rlmath.checkpoint.hf.weight_map import placed_tensors
    from rlmath.checkpoint.hf.weights import local_parameter

    stage = build(folder, case)
    sync_target = target(stage, engine_size)
    (placed,) = [
        p for p in placed_tensors(stage.shape) if "mlp.down_proj" in p.hf_names[0] and p.layer == 2
    ]
    parameter = local_parameter(stage.actor.chunks, placed)
    if stage.mesh.rank == rank and parameter is not None:
        flip_a_bit(parameter.data)
    sync_target.sync.run(check=False)
    try:
        sync_target.sync.run(check=True)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}
