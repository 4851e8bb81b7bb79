"""The collectives of the control plane: pickled objects and sums of metrics. Tensors do not use these."""

from __future__ import annotations

import hmac
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlmath.distributed.signed_store import SignedStore, environment_secret

T = TypeVar("T")


_run_stores: WeakKeyDictionary[dist.ProcessGroup, SignedStore] = WeakKeyDictionary()


def run_store() -> SignedStore:
    """This run's values in the store of its process group. The first call is a collective: the ranks share a secret."""
    group = dist.group.WORLD
    if group not in _run_stores:
        secret = new_secret()
        _run_stores[group] = SignedStore(distributed_c10d._get_default_store(), "rlmath", secret)
    return _run_stores[group]


def use_run_store(store: dist.Store, secret: bytes) -> None:
    """Make `run_store` the same for the ranks of all process groups that have this store and secret."""
    _run_stores[dist.group.WORLD] = SignedStore(store, "rlmath", secret)


def new_secret(broadcast: Callable[[bytes], bytes] | None = None) -> bytes:
    """A random secret of all ranks, which passes over the connections of the process group and not through the store;
    `broadcast` where it has to reach further ranks. A collective."""
    shared = (broadcast or broadcast_from_rank_zero)(secrets.token_bytes(32))
    return hmac.digest(environment_secret(), shared, "sha256")


def shared_store(name: str) -> SignedStore:
    """The values of this run whose keys begin with `name`."""
    return run_store().under(name)


def all_gather_objects(mine: T) -> list[T]:
    """What every rank holds, in order of ranks, on every rank. Objects travel pickled between our own processes."""
    content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(sizes, torch.tensor([len(content)]))
    return [pickle.loads(part.numpy()) for part in _gather(content, sizes.tolist())]


def gathered_bytes(sizes: Sequence[int]) -> tuple[bool, int]:
    """How objects of so many pickled bytes are gathered: whether by a sum, and how many bytes a rank then sends.

    Gathering fills every rank's part up to the largest. Where few ranks have much, a sum over a buffer with room for
    all, in which each rank has written its part, costs less: it sends twice the buffer.

    >>> gathered_bytes([800, 4, 4, 4]), gathered_bytes([300, 200, 200, 300])
    ((True, 1624), (False, 1200))
    """
    filled_up, summed = len(sizes) * max(sizes), 2 * sum(sizes)
    return summed < filled_up, min(summed, filled_up)


def _gather(mine: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """The bytes of all ranks, by rank."""
    rank, largest = dist.get_rank(), max(sizes)
    by_sum, _ = gathered_bytes(sizes)
    if not by_sum:
        padded, everything = mine.new_zeros(largest), mine.new_empty(len(sizes), largest)
        padded[: len(mine)] = mine
        dist.all_gather_single(everything.view(-1), padded)
        return [row[:size] for row, size in zip(everything, sizes, strict=True)]
    everything = mine.new_zeros(sum(sizes))
    parts = everything.split(list(sizes))
    parts[rank].copy_(mine)
    dist.all_reduce(everything)
    return parts


def broadcast_from_rank_zero(mine: T) -> T:
    """What rank 0 holds, on every rank."""
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_to_rank_zero(mine: T) -> list[T] | None:
    """What every rank holds, in order of ranks, on rank 0; None elsewhere."""
    gathered: list[T] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    return gathered


def first_error(mine: str | None) -> str | None:
    """The first error of any rank, on all ranks."""
    return next((error for error in all_gather_objects(mine) if error is not None), None)


def reduce_over_ranks(
    sums: Mapping[str, float], maxima: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums by key and largest values by key over all ranks, in float64, by one gather over gloo. Every rank must name
    the same keys in the same order."""
    mine = torch.tensor([*sums.values(), *maxima.values()], dtype=torch.float64)
    by_rank = mine.new_empty(dist.get_world_size(), len(mine))
    dist.all_gather_single(by_rank.view(-1), mine)
    summed, largest = by_rank[:, : len(sums)].sum(0), by_rank[:, len(sums) :].amax(0)
    return dict(zip(sums, summed.tolist(), strict=True)), dict(zip(maxima, largest.tolist(), strict=True))


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """`reduce_over_ranks` of sums alone."""
    return reduce_over_ranks(values, {})[0]


def max_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """`reduce_over_ranks` of maxima alone."""
    return reduce_over_ranks({}, values)[1]
