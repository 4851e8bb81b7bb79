"""Weights that trainers offer and engines on ranks of their own take, over a bridge.

All ranks are threads of this process; models have the shapes of Megatron's and vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import placed_tensors
from rlmath.config.model_shape import ModelShape
from rlmath.distributed.bridge import Bridge, Mailbox
from rlmath.distributed.collectives import use_run_store
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.weight_sync.offer import OfferPlans, WeightReceiver, WeightSender
from rlmath.rollout.weight_sync.reshard_plan import plan_sync
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes, parameter_key
from tests.rollout.bare_models import model_with
from tests.rollout.weight_sync.oracle import (
    SMALL,
    Layout,
    engine_parameters,
    training_parameters,
    whole_tensors,
)

T = TypeVar("T")

CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
LAYOUT = Layout(tensor=2)
TRAINERS = LAYOUT.ranks
BUCKET_BYTES = 2000
"""Weights take several rounds."""
LEARNING = ".2."
"""Part of the names of the layer that learns; all ranks hold its norms, any may send them."""
SECONDS = 20.0


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls that wait for one another.

    TimeoutError where one of them waits for a thread that has failed."""
    futures: list[Future[T]] = [Future() for _ in calls]

    def run(call: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # of any kind: the main thread raises it
            future.set_exception(error)

    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=(call, future), daemon=True).start()
    return [future.result(SECONDS) for future in futures]


def learns(name: str) -> bool:
    return LEARNING in name


def chunk_of(shape: ModelShape, rank: int, layout: Layout = LAYOUT) -> torch.nn.Module:
    """A training rank's model, with Megatron's names, in whose matrices no two numbers are alike."""
    matrices = training_parameters(shape, whole_tensors(shape), layout, rank)
    names = {
        placed.rule.megatron[0].format(m=placed.layer): matrices[parameter_key(placed)]
        for placed in placed_tensors(shape)
    }
    chunk = model_with({name: tuple(matrix.shape) for name, matrix in names.items()})
    for name, matrix in names.items():
        chunk.get_parameter(name).data.copy_(matrix)
    layers = [getattr(chunk.decoder.layers, str(m)) for m in range(shape.num_layers)]
    for number, layer in enumerate(layers):
        layer.layer_number = number + 1
    chunk.decoder.layers = torch.nn.ModuleList(layers)
    return chunk


@dataclass
class Worlds:
    """Two trainers that share every matrix, and engines."""

    chunks: list[torch.nn.Module]
    senders: list[WeightSender]
    receivers: list[WeightReceiver]
    weights: list[EngineWeights]
    """The weights of every rank of the engines."""
    rounds: list[int]
    """How often each engine's rank has reported progress."""
    engine_size: int

    def offer(self, scale: float) -> None:
        """Offer weights that are so many times the first ones."""
        for rank, chunk in enumerate(self.chunks):
            for parameter, first in zip(
                chunk.parameters(), chunk_of(SMALL, rank).parameters(), strict=True
            ):
                parameter.data.copy_(first * scale)
        # A trainer waits until all engines have the weights before these.
        side_by_side([sender.offer for sender in self.senders])

    def take(self) -> None:
        side_by_side([receiver.take for receiver in self.receivers])


def counting(counts: list[int], rank: int) -> Callable[[], None]:
    def count() -> None:
        counts[rank] += 1

    return count


@pytest.fixture(params=[1, 2], ids=["two-engines", "one-engine-of-two"])
def worlds(request: pytest.FixtureRequest, process_group: None) -> Iterator[Worlds]:
    engine_size = request.param
    engine_ranks = 2
    world_size = TRAINERS + engine_ranks
    leaders = list(range(TRAINERS, world_size, engine_size))
    use_run_store(dist.HashStore())
    store = dist.HashStore()
    mesh = replace(LAYOUT.mesh(engine_size), engine_ranks=engine_ranks)
    names = [parameter_key(placed) for placed in placed_tensors(SMALL)]
    learning = [name for name in names if learns(name)]
    whole, part = (
        plan_sync(
            SMALL,
            LAYOUT.training(),
            mesh,
            element_bytes=4,
            bucket_bytes=BUCKET_BYTES,
            only=only,
        )
        for only in (None, learning)
    )
    plans = OfferPlans(first=whole, later=part)
    bridges = side_by_side(
        [
            partial(
                Bridge,
                store,
                rank,
                world_size=world_size,
                engine_ranks=engine_ranks,
                timeout_seconds=SECONDS,
            )
            for rank in range(world_size)
        ]
    )
    boxes = {
        rank: Mailbox(bridges[rank], leaders if rank < TRAINERS else range(TRAINERS))
        for rank in (*range(TRAINERS), *leaders)
    }
    chunks = [chunk_of(SMALL, rank) for rank in range(TRAINERS)]
    senders = [
        WeightSender(
            [chunks[rank]],
            SMALL,
            plans,
            mesh=replace(mesh, rank=rank),
            device=CPU,
            dtype=torch.float32,
            bridge=bridges[rank],
            mailbox=boxes[rank],
        )
        for rank in range(TRAINERS)
    ]
    shapes = engine_shapes(SMALL, engine_size)
    weights = [EngineWeights(model_with(shapes, filled=7.0), shapes) for _ in range(engine_ranks)]
    rounds = [0] * engine_ranks
    receivers = [
        WeightReceiver(
            weights[rank],
            plans,
            Mesh(rank, engine_ranks, 1, 1, engine_size=engine_size),
            device=CPU,
            bridge=bridges[TRAINERS + rank],
            mailbox=boxes.get(TRAINERS + rank),
            on_progress=counting(rounds, rank),
        )
        for rank in range(engine_ranks)
    ]
    yield Worlds(
        chunks,
        senders,
        receivers,
        weights=weights,
        rounds=rounds,
        engine_size=engine_size,
    )
    for sender in senders:
        sender.close()
    side_by_side([box.close for box in boxes.values()])


def expected(engine_size: int, rank: int) -> dict[str, Tensor]:
    """An engine rank's parameters with the first weights."""
    whole = {name: tensor.float() for name, tensor in whole_tensors(SMALL).items()}
    return engine_parameters(SMALL, whole, engine_size, rank % engine_size)


def test_engines_take_what_was_offered_all_first_and_then_what_learns(worlds: Worlds) -> None:
    """What trainers learn after an offer is in the next one; each engine takes every offer."""
    for number, scale in enumerate((1.0, 3.0, 0.5)):
        worlds.offer(scale)
        for chunk in worlds.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)
        before = list(worlds.rounds)
        worlds.take()
        assert all(rounds > earlier for rounds, earlier in zip(worlds.rounds, before, strict=True))
        for rank, weights in enumerate(worlds.weights):
            for name, matrix in expected(worlds.engine_size, rank).items():
                wanted = matrix * scale if learns(name) else matrix
                assert torch.equal(weights.matrix(name), wanted), (number, rank, name)
