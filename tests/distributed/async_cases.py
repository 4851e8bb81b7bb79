"""What the ranks do in the tests of asynchronous training.

Some train, the others have engines of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.config.schema import (
    Config,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    SyncConfig,
)
from rlmath.data.packing import pack
from rlmath.distributed.bridge import open_worlds
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.planning.memory_estimate import engine_mesh_of, mesh_of
from rlmath.run.prepared import PreparedRun
from tests.distributed import partial_rollout_cases as partial
from tests.distributed.tool_cases import open_late_sandboxes

LEARNS = OptimizerConfig(kind="sgd", lr=0.05, distributed=False)
ADAPTERS_LEARN = replace(LEARNS, lr=20.0)
ASYNC = RolloutConfig(
    ranks=1,
    max_staleness=2,
    group_size=partial.GROUP,
    max_new_tokens=partial.LONGEST,
    max_num_seqs=6,
    cpu_kv_cache_gib=0.1,
    progress_bar=False,
)


@dataclass
class Run:
    """What the trainers did; None on the other ranks."""

    groups: list[list[ScoredGroup]] = field(default_factory=list)
    """The groups that it learned from, by step."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    in_flight: list[list[int]] = field(default_factory=list)
    """The draws that a step left in flight, by step."""
    validated: list[dict[str, float]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    """Unfinished completions with tokens in what a checkpoint would hold, by step."""
    scored: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Log-probs of every sampled segment of a completion, in pairs.

    As sampled, and by the policy of the segment's version, which reads the whole sequence."""


def run(
    folder: Path, place: Path, steps: int, rollout: RolloutConfig, more: Mapping[str, Any]
) -> Run | None:
    """All steps of a small run.

    With `rollout.ranks` 0 the same without ranks of the engines' own. Where these have tools,
    results of calls come late, in any order. "score" in `more`: compute the log-probs of all
    sampled segments with the weights of their versions; "snapshots": take one after every step;
    "paced": the engine, the only one, waits for new weights in the middle of the next steps'
    completions."""
    for_this = ("score", "snapshots", "paced")
    sections = {name: value for name, value in more.items() if name not in for_this}
    learns = ADAPTERS_LEARN if "lora" in sections else LEARNS
    config = partial.config_of(folder, place, steps, rollout, {"optimizer": learns} | sections)
    prepared = partial.prepared_run(config)
    world = environment_world_size()
    rank = environment_rank()
    device = open_device("cpu")
    if rank >= world - rollout.ranks:
        _sample(prepared, world, rank, device, bool(more.get("paced")))
        return None
    return _train(prepared, world, rank, device, steps, more)


def _store() -> dist.Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=environment_rank() == 0,
        wait_for_workers=False,
    )


def _sample(prepared: PreparedRun[Any], world: int, rank: int, device: Any, paced: bool) -> None:
    from rlmath.rollout import engine_tools
    from rlmath.rollout.engine_loop import EngineLoop
    from rlmath.run.engine_rank import EngineRank
    from rlmath.trainer.rollouts.engines import open_engine_workers

    class Paced(EngineLoop):
        """Stops sampling while the trainer has all that it needs for its step.

        It goes on when it gets the next weights."""

        needed = 0
        """Draws that the trainer needs for the step of the weights that it has."""

        def _take_weights(self, message: Any) -> None:
            super()._take_weights(message)
            self.needed = partial.PER_STEP * (message.step + 1)

        def _begin(self, draw: int, samples: Any) -> None:
            super()._begin(draw, samples)
            self.begun = draw + 1

        def _begin_groups(self) -> None:
            super()._begin_groups()
            while self._running.busy and self._status is None and self._is_ahead():
                time.sleep(0.01)
                self._finish_scored()
                self._queue += self._read_messages()
                self._handle_messages()

        def _is_ahead(self) -> bool:
            return 0 < self.needed <= self.begun and all(
                draw >= self.needed for draw in self._groups or ()
            )

    config = prepared.config
    mesh = engine_mesh_of(config.rollout, world, rank)
    with open_engine_workers(config, mesh) as workers:
        bridge = open_worlds(device, 120.0, _store(), config.rollout.ranks)
        context = prepared.on_rank(mesh, device, workers=workers, bridge=bridge)
        with mock.patch.object(engine_tools, "open_sandboxes", open_late_sandboxes):
            engine_rank = EngineRank(context)
        if paced:
            engine_rank._loop.__class__ = Paced
        steps: list[int] = []
        assert engine_rank.run(steps.append) == 7 and steps == sorted(set(steps)), steps
        engine_rank.close()


def _train(
    prepared: PreparedRun[Any],
    world: int,
    rank: int,
    device: Any,
    steps: int,
    more: Mapping[str, Any],
) -> Run:
    from rlmath.trainer.grpo import GrpoTrainer

    config: Config = prepared.config
    mesh = mesh_of(config.parallel, config.rollout, world, rank=rank)
    history = Run()
    bridge = None
    store = _store()
    with GrpoTrainer.open_workers(config, mesh) as workers:
        if config.rollout.ranks:
            bridge = open_worlds(device, 120.0, store, config.rollout.ranks)
        else:
            init_process_group(device, 120.0, store)
        trainer = GrpoTrainer(prepared.on_rank(mesh, device, workers=workers, bridge=bridge))
        partial.begin(trainer)
        weights = {}
        for number in range(steps):
            weights[trainer.actor.learner.updates] = _copy_of(trainer)
            record = trainer.step(number)
            history.groups.append(list(record.groups))
            history.metrics.append(record.metrics)
            history.validated.append({} if record.validation is None else record.validation.metrics)
            unfinished = getattr(trainer.rollouts, "_unfinished", None)
            history.in_flight.append(
                [] if unfinished is None else [group.draw for group in unfinished.groups]
            )
            if more.get("snapshots") and rank == 0:
                history.left.append(_unfinished_in(trainer.rollouts.files(), prepared))
        trainer.close(7)
        if more.get("score"):
            history.scored = _score_segments(trainer, history.groups, weights)
    return history


def _copy_of(trainer: Any) -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor.detach().clone() for name, tensor in chunk.named_parameters()}
        for chunk in trainer.actor.chunks
    ]


def _unfinished_in(files: dict[str, bytes], prepared: PreparedRun[Any]) -> int:
    from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished

    config = prepared.config
    shape = prepared.shapes.policy
    unfinished = read_unfinished(
        files[UNFINISHED], config.rollout.group_size, shape.vocab_size, lambda *_: ""
    )
    return sum(
        bool(group.parts[g].token_ids) for group in unfinished.groups for g in group.unfinished
    )


@torch.no_grad()
def _score_segments(
    trainer: Any, groups: list[list[ScoredGroup]], weights: dict[int, list[dict[str, torch.Tensor]]]
) -> list[tuple[list[float], list[float]]]:
    """Log-probs of every sampled segment by its version's policy, which reads the whole sequence.

    For one rank that trains."""
    scores = []
    for group in (group for step in groups for group in step):
        for completion in group.completions:
            start = 0
            sample = Sample(group.prompt.token_ids, completion.token_ids, completion.logprobs, 0.0)
            batch = pack([sample], [0], 1)
            for segment in completion.segments:
                end = start + segment.tokens
                if not segment.sampled:
                    start = end
                    continue
                for chunk, saved in zip(
                    trainer.actor.chunks, weights[segment.policy_version], strict=True
                ):
                    for name, tensor in chunk.named_parameters():
                        tensor.copy_(saved[name])
                (logprobs_T,) = trainer.actor.forward_backward.logprobs([batch])
                row = logprobs_T.tolist()[len(group.prompt.token_ids) :]
                scores.append((list(completion.logprobs[start:end]), row[start:end]))
                start = end
    return scores


def layout_of(lora: LoraConfig | None = None, **sizes: int) -> dict[str, Any]:
    """Sections of a run with this training layout, whose probe looks at every step."""
    adapters = {} if lora is None else {"lora": lora}
    return adapters | {"parallel": ParallelConfig(**sizes), "sync": SyncConfig(probe_every=1)}


def with_engines(**changes: Any) -> RolloutConfig:
    return replace(ASYNC, **changes)
