"""How buckets of weights travel between ranks: by sends and receives, or through shared memory.

Processes of one machine that compute on CPU share memory, without the network stack."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.distributed.collectives import all_gather_objects
from rlmath.rollout.weight_sync.reshard_plan import Copy, RankRound


def run_rounds(
    transport: Messages | SharedBuckets,
    rounds: int,
    on_round: Callable[[int, Callable[[], dict[int, Tensor]]], None],
) -> None:
    """Carry out so many rounds; while one is handled, the next one is on its way.

    `on_round` gets a round's number, and a function that waits for its buckets and returns them by
    their senders."""
    transport.start(0)
    for number in range(rounds):
        if number + 1 < rounds:
            transport.start(number + 1)
        on_round(number, partial(transport.finish, number))
    transport.close()


Packer = Callable[[int, int, Tensor], None]
"""Writes what a round, by its number, sends to a rank into a bucket: copies one after the other."""


def elements(copies: Sequence[Copy]) -> int:
    return sum(copy.elements for copy in copies)


Waits = list[Callable[[], object]]
"""Functions that each wait for one operation."""
Exchange = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], Waits]
"""Starts sends and receives, each with the rank at the other end."""


def exchange_in_world(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> Waits:
    """Exchange over the default process group, in one group of operations."""
    operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    return [work.wait for work in dist.batch_isend_irecv(operations)] if operations else []


class Messages:
    """Grouped sends and receives, double-buffered: while one bucket is unpacked, the next travels.

    `start` of the next round may be called before `finish` of this one, which gives, by sending
    rank, its copies one after the other."""

    def __init__(
        self,
        rounds: Sequence[RankRound],
        pack: Packer,
        dtype: torch.dtype,
        at: torch.device,
        exchange: Exchange = exchange_in_world,
    ) -> None:
        """Buckets are at the device `at`."""
        self._rounds = rounds
        self._pack = pack
        self._exchange = exchange
        most_sent = max(sum(map(elements, round_.sends.values())) for round_ in rounds)
        most_received = max(sum(map(elements, round_.receives.values())) for round_ in rounds)
        self._out = [torch.empty(most_sent, dtype=dtype, device=at) for _ in range(2)]
        self._in = [torch.empty(most_received, dtype=dtype, device=at) for _ in range(2)]
        self._under_way: dict[int, tuple[Waits, dict[int, Tensor]]] = {}

    def start(self, number: int) -> None:
        """Pack a round's buckets, and start its sends and receives."""
        turn = number % 2
        round_ = self._rounds[number]
        sends = []
        for peer, bucket in _segments(round_.sends, self._out[turn]):
            self._pack(number, peer, bucket)
            sends.append((peer, bucket))
        receives = _segments(round_.receives, self._in[turn])
        self._under_way[number] = (self._exchange(sends, receives), dict(receives))

    def finish(self, number: int) -> dict[int, Tensor]:
        waits, arrived = self._under_way.pop(number)
        for wait in waits:
            wait()
        return arrived

    def close(self) -> None:
        self._out = []
        self._in = []


def _segments(by_peer: dict[int, tuple[Copy, ...]], buffer: Tensor) -> list[tuple[int, Tensor]]:
    """Pairs of the rank at the other end and its part of the buffer."""
    start = 0
    parts = []
    for peer, copies in by_peer.items():
        stop = start + elements(copies)
        parts.append((peer, buffer[start:stop]))
        start = stop
    return parts


class SharedBuckets:
    """Every rank packs into memory of its own, which the others read.

    With two buckets, a barrier per round suffices: all have read a bucket before it is written
    again, since all have passed the barrier of the round between."""

    def __init__(
        self,
        rounds: Sequence[RankRound],
        pack: Packer,
        dtype: torch.dtype,
        memory: Sequence[torch.UntypedStorage],
        bucket_elements: int,
    ) -> None:
        self._rounds = rounds
        self._pack = pack
        self._buckets = [
            torch.empty(0, dtype=dtype)
            .set_(storage)[: 2 * bucket_elements]
            .view(2, bucket_elements)
            for storage in memory
        ]

    def start(self, number: int) -> None:
        """Nothing to do: the others read this rank's memory in `finish`."""

    def finish(self, number: int) -> dict[int, Tensor]:
        """Pack this rank's parts; what the senders have packed, by rank, once all have."""
        round_ = self._rounds[number]
        turn = number % 2
        for peer, part in _segments(round_.sends, self._buckets[dist.get_rank()][turn]):
            self._pack(number, peer, part)
        dist.barrier()
        return {
            peer: self._buckets[peer][turn][round_.offsets[peer] :][: elements(copies)]
            for peer, copies in round_.receives.items()
        }

    def close(self) -> None:
        # No rank may write the next sync's first bucket while another still reads it.
        dist.barrier()


def share_memory(size: int) -> list[torch.UntypedStorage] | None:
    """Memory of each rank, mapped by every rank; `size` bytes, which may differ between ranks.

    A collective. None, on all ranks, where that is impossible: ranks on several machines or in
    several containers, another user, no memory left."""
    fd = -1
    name = f"rlmath-{uuid.uuid4().hex}"
    try:
        fd = os.memfd_create(name)
        os.posix_fallocate(fd, 0, max(size, 1))
        offer = (os.getpid(), fd, name, max(size, 1))
    except OSError:
        offer = None
    offers = all_gather_objects(offer)
    mapped = _map(offers)
    agreed = all(all_gather_objects(mapped is not None))
    if fd >= 0:
        os.close(fd)
    return mapped if agreed else None


def _map(offers: list[tuple[int, int, str, int] | None]) -> list[torch.UntypedStorage] | None:
    """The memory of all ranks, mapped by this one; None where that is impossible."""
    storages = []
    for offer in offers:
        if offer is None:
            return None
        pid, fd, name, size = offer
        try:
            # In another container, or on another machine, the same numbers are another process's
            # file, or none.
            path = f"/proc/{pid}/fd/{fd}"
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                return None
            storages.append(torch.UntypedStorage.from_file(path, shared=True, nbytes=size))
        except (OSError, RuntimeError):
            return None
    return storages
