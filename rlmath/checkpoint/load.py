"""Checkpoints in: parameters, optimizer and random states of a rank, whatever layout they were saved from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from megatron_patches import checkpointing
from rlmath.checkpoint.directory import Checkpoint
from rlmath.checkpoint.rng_state import random_rows, random_states, restore_random_states
from rlmath.checkpoint.run_progress import Progress
from rlmath.checkpoint.safe_metadata import SafeReader
from rlmath.checkpoint.sharded_state import (
    MASTER,
    OPTIMIZER_PREFIX,
    Piece,
    held_by,
    make_room,
    model_pieces,
    optimizer_pieces,
)
from rlmath.distributed.device import Device


def load_checkpoint(
    chunks: Sequence[Any], optimizer: Any, device: Device, checkpoint: Checkpoint, progress: Progress
) -> None:
    """Bring parameters, optimizer and, with as many ranks as then, random states back. A collective. ValueError where
    the checkpoint does not fit the model."""
    checkpointing.patch(SafeReader)
    pieces, _ = model_pieces(chunks)
    make_room(optimizer, progress.optimizer_tensors, progress.updates)
    states: dict[str, torch.Tensor] = {}
    if progress.world_size == dist.get_world_size():
        states = {name: torch.empty_like(state) for name, state in random_states(device).items()}
        states = states if set(states) == set(progress.random_states) else {}
    wanted = [*_weights(optimizer, pieces, progress), *random_rows(states)]
    by_number: dict[str, Any] = {str(number): one for number, one in enumerate(wanted)}
    try:
        dist_checkpointing.load(by_number, str(checkpoint.state), validate_access_integrity=False)
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ValueError(f"the checkpoint {checkpoint.folder} does not fit the model: {error}") from error
    if states:
        restore_random_states(states, device)


def _weights(optimizer: Any, pieces: Sequence[Piece], progress: Progress) -> list[ShardedTensor]:
    """Model and optimizer. Weights are read with all the digits there are: a bfloat16 run has float32 copies of its
    parameters beside them, a float32 run has not."""
    there = {name for held in held_by(optimizer) for name in held.tensors()}
    stored = [name for name in progress.optimizer_tensors if name in there]
    found = optimizer_pieces(optimizer, pieces, stored)
    if MASTER in progress.optimizer_tensors and MASTER not in there:
        return [*(_renamed(piece.sharded, f"{_MASTERS}{piece.sharded.key}") for piece in pieces), *found]
    if MASTER in there and MASTER not in stored:
        copies = optimizer_pieces(optimizer, pieces, [MASTER])
        found += [_renamed(one, one.key.removeprefix(_MASTERS)) for one in copies]
    return [*(piece.sharded for piece in pieces), *found]


_MASTERS = f"{OPTIMIZER_PREFIX}.{MASTER}."


def _renamed(sharded: ShardedTensor, key: str) -> ShardedTensor:
    return replace(sharded, key=key)
