"""Two worlds in one run: ranks that train and ranks that have the engines.

Each world has process groups of its own:

    ranks 0 to T-1 of torchrun   PrefixStore("training")     Megatron's world
    ranks T to N-1               PrefixStore("generation")   vLLM's world
    all N ranks                  PrefixStore("bridge")       messages between the two, and weights

In its own world a rank is numbered from 0: neither library sees the ranks of the other. The default
process group of torch is that of the world; the bridge is a gloo group beside it, which no library
knows.

Messages are our own dataclasses, pickled. A thread of every rank with a `Mailbox` reads them; what
is sent arrives in order, and sending does not wait for the receiver's main thread. The heartbeat
knows whether the other side lives.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.distributed.collectives import use_run_store
from rlmath.distributed.device import Device, init_process_group, let_gloo_connect_lazily
from rlmath.distributed.fault_tolerance.failure import may_be_caused_by_peer
from rlmath.distributed.ranks import environment_rank, environment_world_size

T = TypeVar("T")

PATIENCE = timedelta(days=30)
"""The timeout of messages and weights, which wait as long as the heartbeat lets the run live."""
MOST_UNSENT_BYTES = 256 * 2**20
"""A rank with more on its way waits until the oldest message has been read."""
_HEADS = 1
_BODIES = 2
_TENSORS = 3


class Envelope(NamedTuple):
    """A message that has arrived."""

    source: int
    """Rank of the run."""
    message: Any
    arrived_at: float
    """Time by the monotonic clock of the rank that received it (seconds)."""


class UnreadableMessageError(Exception):
    """A message has arrived that cannot be read."""


class Bridge:
    """The group of all ranks of a run with two worlds.

    Ranks are those of the run."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        engine_ranks: int,
        timeout_seconds: float,
    ) -> None:
        """A collective of all ranks, of at most `timeout_seconds`.

        The last `engine_ranks` have the engines."""
        self.rank = rank
        self.world_size = world_size
        self.training_ranks = world_size - engine_ranks
        let_gloo_connect_lazily()
        timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("bridge", store), rank, world_size, timeout
        )

    @property
    def trains(self) -> bool:
        """Whether this rank is one of those that train."""
        return self.rank < self.training_ranks

    @property
    def world(self) -> str:
        return "training" if self.trains else "generation"

    @property
    def rank_in_world(self) -> int:
        return self.rank if self.trains else self.rank - self.training_ranks

    @property
    def size_of_world(self) -> int:
        return self.training_ranks if self.trains else self.world_size - self.training_ranks

    def broadcast(self, local_object: T) -> T:
        """The object of rank 0 of the run, on every rank of the run.

        A collective."""
        content = torch.frombuffer(bytearray(pickle.dumps(local_object)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._group.broadcast([size], dist.BroadcastOptions()).wait()
        if self.rank != 0:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._group.broadcast([content], dist.BroadcastOptions()).wait()
        return pickle.loads(content.numpy())

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[Callable[[], object]]:
        """Start sending tensors of the host to ranks, and receiving others.

        Both sides name them in the same order. Each returned function waits for one tensor."""
        works = [self._group.send([tensor], rank, _TENSORS) for rank, tensor in sends]
        works += [self._group.recv([tensor], rank, _TENSORS) for rank, tensor in receives]
        return [partial(work.wait, PATIENCE) for work in works]

    @contextmanager
    def as_own_world(self) -> Iterator[None]:
        """Set the launcher's variables to those of this rank's world, and reset them at the end.

        A library reads them."""
        variables = {"RANK": str(self.rank_in_world), "WORLD_SIZE": str(self.size_of_world)}
        earlier_variables = {name: os.environ[name] for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.update(earlier_variables)


def open_worlds(
    device: Device, timeout_seconds: float, store: dist.Store, engine_ranks: int
) -> Bridge:
    """Join the bridge and the process group of this rank's world.

    The run's store becomes that of all ranks. A collective of all ranks of the run."""
    bridge = Bridge(
        store,
        environment_rank(),
        environment_world_size(),
        engine_ranks=engine_ranks,
        timeout_seconds=timeout_seconds,
    )
    world_store = dist.PrefixStore(bridge.world, store)
    init_process_group(
        device, timeout_seconds, world_store, place=(bridge.rank_in_world, bridge.size_of_world)
    )
    use_run_store(store)
    return bridge


class Mailbox:
    """The messages of one rank to and from some others.

    `close` is a collective of them. Where a message breaks off all methods raise RuntimeError, and
    UnreadableMessageError where one cannot be read."""

    def __init__(self, bridge: Bridge, partners: Sequence[int]) -> None:
        """`partners` are the ranks with which it exchanges messages.

        Each of them has this rank among its own partners."""
        self._bridge = bridge
        self._partners = list(partners)
        self._arrived: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self._boxes: dict[type, queue.SimpleQueue[Envelope | None]] = {}
        self._unsent: deque[tuple[list[dist.Work], int]] = deque()
        self._unsent_bytes = 0
        self._lock = threading.Lock()
        self._box_lock = threading.Lock()
        self._error: BaseException | None = None
        self._reader = threading.Thread(target=self._read, name="mailbox", daemon=True)
        self._reader.start()

    def box(self, kind: type) -> queue.SimpleQueue[Envelope | None]:
        """A queue of its own for all messages of a kind, for another thread.

        None follows when no more messages can be read. Call it before the first one may arrive."""
        with self._box_lock:
            self.raise_if_lost()
            return self._boxes.setdefault(kind, queue.SimpleQueue())

    def send(self, rank: int, message: Any) -> None:
        """Send a message to one of the partners.

        From any thread."""
        self.raise_if_lost()
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        group = self._bridge._group
        head = torch.tensor([len(content)])
        with self._lock:
            works = [group.send([head], rank, _HEADS), group.send([content], rank, _BODIES)]
            self._unsent.append((works, len(content)))
            self._unsent_bytes += len(content)
            while self._unsent_bytes > MOST_UNSENT_BYTES or len(self._unsent) > 1024:
                self._wait_for_oldest()

    def send_all(self, message: Any) -> None:
        for rank in self._partners:
            self.send(rank, message)

    def receive(self, seconds: float = 0.0) -> list[Envelope]:
        """All messages that have arrived, except those with a box of their own.

        Waits up to `seconds` for the first."""
        self.raise_if_lost()
        envelopes: list[Envelope] = []
        try:
            envelopes.append(
                self._arrived.get(timeout=seconds) if seconds else self._arrived.get_nowait()
            )
            while True:
                envelopes.append(self._arrived.get_nowait())
        except queue.Empty:
            self.raise_if_lost()
            return envelopes

    def close(self) -> None:
        """Wait until all that was sent has been read, and the partners have sent their last."""
        self.send_all(None)
        with self._lock:
            while self._unsent:
                self._wait_for_oldest()
        self._reader.join()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise the error that ended the reading of messages, if there is one."""
        error = self._error
        rank = self._bridge.rank
        if error is None:
            return
        if may_be_caused_by_peer(error):
            text = f"rank {rank} lost one of the ranks {self._partners} of the other world: {error}"
            raise RuntimeError(text) from error
        raise UnreadableMessageError(f"rank {rank} could not read a message: {error!r}") from error

    def _wait_for_oldest(self) -> None:
        works, size = self._unsent.popleft()
        for work in works:
            work.wait(PATIENCE)
        self._unsent_bytes -= size

    def _read(self) -> None:
        try:
            self._read_until_all_have_closed()
        except BaseException as error:  # of any kind: the callers' threads raise it
            with self._box_lock:
                self._error = error
                for box in self._boxes.values():
                    box.put(None)

    def _read_until_all_have_closed(self) -> None:
        """Put every message into its queue until all partners have sent None."""
        group = self._bridge._group
        closed_partners = 0
        while closed_partners < len(self._partners):
            head = torch.empty(1, dtype=torch.int64)
            work = group.recv_anysource([head], _HEADS)
            work.wait(PATIENCE)
            source = work._source_rank()
            content = torch.empty(int(head), dtype=torch.uint8)
            group.recv([content], source, _BODIES).wait(PATIENCE)
            message = pickle.loads(content.numpy())
            if message is None:
                closed_partners += 1
            else:
                self._boxes.get(type(message), self._arrived).put(
                    Envelope(source, message, time.monotonic())
                )
