"""New weights for engines on ranks of their own: trainers offer a version, every engine takes it.

    trainer   offer(): copies its parameters, tells nobody, trains on
              its thread serves one engine after the other from that copy
    engine    take(): draws a turn, asks all trainers, receives its parts in rounds, writes them in place

Trainers serve engines in the order of their turns, which is the same on all of them: two engines
that wait for each other's senders cannot happen. Weights are offered when all engines have those
before, and every engine takes all that are offered, so that both sides count them alike. (Versions
would not do: where a step learned nothing, the next one offers the same.)

The plan (`reshard_plan.plan_sync`) is the same for every engine but for its ranks. Buckets travel
over the bridge, through the memory of the hosts. These engines never sleep: after the first offer
only what learns is copied and sent, with LoRA the adapters, or the matrices that they are merged
into.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import NO_LORA, LoraConfig
from rlmath.distributed.bridge import Bridge, Mailbox
from rlmath.distributed.collectives import shared_store
from rlmath.distributed.device import Device, synchronize
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.weight_sync.reshard_plan import SyncPlan, rank_rounds
from rlmath.rollout.weight_sync.transport import Messages, run_rounds
from rlmath.rollout.weight_sync.weight_sync import (
    SourceMatrices,
    pack,
    planned_rows,
    runs_of_round,
    source_matrices,
    unpack,
)

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OfferPlans:
    """What travels to the first engine (`reshard_plan.plan_sync`)."""

    first: SyncPlan
    """Plan of the first offer: all weights."""
    later: SyncPlan
    """Plan of later offers: the weights that learn."""


@dataclass(frozen=True)
class WeightsWanted:
    """An engine asks a training rank for the weights that were offered last."""

    turn: int
    """Place in the order in which engines are served, counted from 0 over the whole start."""
    engine: int
    offer: int
    """Number of the offer, counted from 1 over the whole start."""


class WeightSender:
    """A training rank's side: holds the offered weights and sends them to engines that ask."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        shape: ModelShape,
        plans: OfferPlans,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype,
        bridge: Bridge,
        mailbox: Mailbox,
        lora: LoraConfig = NO_LORA,
    ) -> None:
        """`dtype` is the engines' number format."""
        self._sources = source_matrices(chunks, shape, lora)
        self._copies = dict[str, Tensor]()
        self.kept_metrics = dict[str, float]()
        """The last offer's `SourceMatrices.kept_metrics`."""
        self._mesh = mesh
        self._device = device
        self._dtype = dtype
        self._bridge = bridge
        self._follow(plans.first)
        self._later = plans.later
        self._mailbox = mailbox
        self._wanted = mailbox.box(WeightsWanted)
        self._offered = 0
        self._to_serve = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name="send-weights", daemon=True).start()

    @torch.no_grad()
    def offer(self) -> float:
        """Copy the parameters once all engines have the last copy; the time waited (seconds).

        A collective. RuntimeError where the thread has failed."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._to_serve == 0 or self._error is not None)
            if self._error is not None:
                raise RuntimeError("sending weights to the engines failed") from self._error
            waited = time.perf_counter() - started
            if self._offered == 1:
                self._follow(self._later)
            for name, copy in self._copies.items():
                copy.copy_(self._sources.matrix(name), non_blocking=True)
            synchronize(self._device)
            self._offered += 1
            self._to_serve = self._mesh.num_engines
            self._changed.notify_all()
        self.kept_metrics = self._sources.kept_metrics()
        return waited

    def _follow(self, plan: SyncPlan) -> None:
        """Send by this plan from the next offer on; only what it reads has a copy.

        Of what several ranks hold, it may read other ranks' than the plan before."""
        self._rounds = rank_rounds(plan, self._mesh.rank)
        self._runs = [runs_of_round(round_) for round_ in self._rounds]
        read = {
            copy.source_parameter
            for round_ in self._rounds
            for copies in round_.sends.values()
            for copy in copies
        }
        self._copies = {
            name: self._copies[name] if name in self._copies else self._new_copy(name)
            for name in self._sources.parameters
            if name in read
        }
        self.bytes_sent = plan.bytes_sent(self._mesh.rank) * self._mesh.num_engines
        """What this rank sends of an offer to all engines (bytes)."""

    def _new_copy(self, name: str) -> Tensor:
        return torch.empty(
            self._sources.parameters[name].shape,
            dtype=self._dtype,
            device=HOST,
            pin_memory=self._device.kind == "cuda",
        )

    def close(self) -> None:
        """End the thread.

        Call it when no engine asks any more."""
        self._wanted.put(None)

    def _serve(self) -> None:
        """Serve engines in the order of their turns, in the thread."""
        turn = 0
        waiting = dict[int, WeightsWanted]()
        try:
            while True:
                while turn not in waiting:
                    request = self._wanted.get()
                    if request is None:
                        self._mailbox.raise_if_lost()
                        return
                    waiting[request.message.turn] = request.message
                request = waiting.pop(turn)
                with self._changed:
                    self._changed.wait_for(lambda number=request.offer: self._offered == number)
                self._send(request.engine)
                turn += 1
                with self._changed:
                    self._to_serve -= 1
                    self._changed.notify_all()
        except BaseException as error:  # of any kind: `offer` raises it in the main thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @torch.no_grad()
    def _send(self, engine: int) -> None:
        shift = engine * self._mesh.engine_size

        def exchange(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list:
            return self._bridge.exchange(
                [(rank + shift, bucket) for rank, bucket in sends], receives
            )

        transport = Messages(self._rounds, self._pack, self._dtype, at=HOST, exchange=exchange)
        run_rounds(transport, len(self._rounds), lambda number, wait: wait())

    def _pack(self, number: int, peer: int, bucket: Tensor) -> None:
        pack(bucket, self._runs[number].sends[peer], SourceMatrices(self._copies))


class WeightReceiver:
    """An engine rank's side: writes offered weights into the engine's."""

    def __init__(
        self,
        weights: EngineWeights,
        plans: OfferPlans,
        mesh: Mesh,
        device: Device,
        bridge: Bridge,
        mailbox: Mailbox | None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`mesh` is that of the engines' world; the first rank of an engine has the `mailbox`.

        `on_progress` is called for every round."""
        self._weights = weights
        self._mesh = mesh
        self._device = device
        self._bridge = bridge
        self._mailbox = mailbox
        self._on_progress = on_progress
        self._plans = plans
        self._store = shared_store("weights")
        self._taken = 0

    @torch.no_grad()
    def take(self) -> float:
        """Take the next offer's weights into the engine; how long that took (seconds).

        All ranks of the engine call it."""
        started = time.perf_counter()
        self._taken += 1
        if self._mailbox is not None:
            request = WeightsWanted(
                self._store.fetch_add("turns"), self._mesh.engine_index, self._taken
            )
            for rank in range(self._bridge.training_ranks):
                self._mailbox.send(rank, request)
        synchronize(self._device)  # what still computes with the old ones
        if self._taken == 1:
            self._follow(self._plans.first)
            self._weights.begin(planned_rows(self._rounds))
        elif self._taken == 2:
            self._follow(self._plans.later)
        transport = Messages(
            self._rounds,
            lambda number, peer, bucket: None,
            self._weights.dtype,
            at=HOST,
            exchange=self._bridge.exchange,
        )
        run_rounds(transport, len(self._rounds), self._write)
        self._weights.end()
        synchronize(self._device)
        return time.perf_counter() - started

    def _follow(self, plan: SyncPlan) -> None:
        rank = self._bridge.training_ranks + self._mesh.rank % self._mesh.engine_size
        self._rounds = rank_rounds(plan, rank)
        self._runs = [runs_of_round(round_) for round_ in self._rounds]

    def _write(self, number: int, wait: Callable[[], Mapping[int, Tensor]]) -> None:
        for source, bucket in wait().items():
            unpack(bucket, self._runs[number].receives[source], self._weights)
        for name in self._rounds[number].complete:
            self._weights.complete(name)
        self._on_progress()
