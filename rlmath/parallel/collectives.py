"""The few collectives of the control plane: plain objects and sums of metrics. Tensors travel elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")


def shared_store(name: str) -> dist.Store:
    """The key-value store that torchrun's ranks found each other by; its keys are those of `name` alone.

    Waiting for a key ends after the process group's timeout with `dist.DistStoreError`.
    """
    return dist.PrefixStore(f"rlmath/{name}", distributed_c10d._get_default_store())


def gather_objects(mine: T) -> list[T]:
    """What every rank holds, in order of ranks, on every rank. Objects travel pickled between our own processes."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered  # type: ignore[return-value]


def from_rank_zero(mine: T) -> T:
    """What rank 0 holds, on every rank."""
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def to_rank_zero(mine: T) -> list[T] | None:
    """What every rank holds, in order of ranks, on rank 0; None elsewhere."""
    gathered: list[T] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    return gathered


def first_error(mine: str | None) -> str | None:
    """The first error of any rank, on all ranks."""
    return next((error for error in gather_objects(mine) if error is not None), None)


def sum_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Sums by key over all ranks, in float64. Every rank must name the same keys in the same order."""
    total = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def max_over_ranks(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Largest value by key over all ranks; same keys in the same order everywhere."""
    top = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return dict(zip(values, top.tolist(), strict=True))
