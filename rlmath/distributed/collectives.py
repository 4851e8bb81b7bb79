"""The collectives of the control plane: pickled objects and sums of metrics.

Tensors do not use these."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlmath.distributed.run_store import RunStore

T = TypeVar("T")

_stores_of_all_worlds: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


def use_run_store(store: dist.Store) -> None:
    """Make `shared_store` the same for the ranks of all process groups that have this store."""
    _stores_of_all_worlds[dist.group.WORLD] = store


def shared_store(name: str) -> RunStore:
    """The values of this run whose keys begin with `name`."""
    store = _stores_of_all_worlds.get(dist.group.WORLD) or distributed_c10d._get_default_store()
    return RunStore(store, f"rlmath/{name}")


def all_gather_objects(local_object: T) -> list[T]:
    """The objects of all ranks, in order of ranks, on every rank.

    Objects travel pickled between our own processes."""
    content = torch.frombuffer(bytearray(pickle.dumps(local_object)), dtype=torch.uint8)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(content)]))
    return [pickle.loads(part.numpy()) for part in _gather(content, sizes.tolist())]


def gathered_bytes(sizes: Sequence[int]) -> tuple[bool, int]:
    """Whether objects of so many pickled bytes are gathered by a sum, and the bytes a rank sends.

    Gathering fills every rank's part up to the largest. If few ranks have much, a sum over a buffer
    with room for all, in which each rank has written its part, costs less: it sends twice the
    buffer.

    >>> gathered_bytes([800, 4, 4, 4]), gathered_bytes([300, 200, 200, 300])
    ((True, 1624), (False, 1200))
    """
    filled_up = len(sizes) * max(sizes)
    summed = 2 * sum(sizes)
    return summed < filled_up, min(summed, filled_up)


def _gather(local_bytes: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """The bytes of all ranks, whose numbers are `sizes`, in order of ranks."""
    rank = dist.get_rank()
    largest = max(sizes)
    by_sum, _ = gathered_bytes(sizes)
    if not by_sum:
        padded = local_bytes.new_zeros(largest)
        gathered = local_bytes.new_empty(len(sizes), largest)
        padded[: len(local_bytes)] = local_bytes
        dist.all_gather_single(gathered.view(-1), padded)
        return [row[:size] for row, size in zip(gathered, sizes, strict=True)]
    gathered = local_bytes.new_zeros(sum(sizes))
    parts = gathered.split(list(sizes))
    parts[rank].copy_(local_bytes)
    dist.all_reduce(gathered)
    return parts


def broadcast_from_rank_zero(local_object: T) -> T:
    """The object of rank 0, on every rank."""
    box = [local_object]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_to_rank_zero(local_object: T) -> list[T] | None:
    """The objects of all ranks, in order of ranks, on rank 0; None elsewhere."""
    gathered: list[T] | None = (
        [local_object] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    dist.gather_object(local_object, gathered, dst=0)
    return gathered


def first_error(local_error: str | None) -> str | None:
    """The first error of any rank, on all ranks."""
    return next((error for error in all_gather_objects(local_error) if error is not None), None)


def reduce_over_ranks(
    sums: Mapping[str, float], maxima: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums by key and largest values by key over all ranks, in float64, by one gather over gloo.

    Every rank must name the same keys in the same order."""
    local_numbers = torch.tensor([*sums.values(), *maxima.values()], dtype=torch.float64)
    by_rank = local_numbers.new_empty(dist.get_world_size(), len(local_numbers))
    dist.all_gather_single(by_rank.view(-1), local_numbers)
    summed = by_rank[:, : len(sums)].sum(0)
    largest = by_rank[:, len(sums) :].amax(0)
    return dict(zip(sums, summed.tolist(), strict=True)), dict(
        zip(maxima, largest.tolist(), strict=True)
    )
