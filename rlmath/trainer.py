"""The GRPO loop.

    prompts -> rollout and reward -> advantage -> schedule -> pack -> log-probs -> minibatches -> weights to the engine

Every rank runs it; the control plane is computed alike everywhere, only tensors are sharded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlmath.algo.advantages import group_normalised
from rlmath.config import Config
from rlmath.data.loader import PromptOrder
from rlmath.model_shape import ModelShape
from rlmath.packing.pack import pack
from rlmath.packing.schedule import plan_minibatches
from rlmath.parallel.mesh import Mesh
from rlmath.policy.actor import Actor
from rlmath.policy.executor import Executor, TokenLogprobs
from rlmath.policy.learner import MinibatchResult
from rlmath.rollout.collect import Collector, RolloutSeed
from rlmath.rollout.engine import Engine
from rlmath.step_metrics import mismatch_metrics, pace_metrics, rollout_metrics, update_metrics
from rlmath.sync.transfer import sync_weights
from rlmath.telemetry.timers import PhaseTimers
from rlmath.types import MicroBatch, Prompt, Sample, ScoredGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves for telemetry."""

    epoch: int
    metrics: dict[str, float]
    groups: list[ScoredGroup]
    advantages: list[list[float]]


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, built by `launch/train_grpo.py`."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    prompts: Sequence[Prompt]
    order: PromptOrder
    actor: Actor
    reference: Executor | None
    engine: Engine
    collector: Collector


class Trainer:
    """Makes steps, one after the other."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._timers = PhaseTimers()

    def step(self, number: int) -> StepRecord:
        """Step `number`, counted from 0 over the whole run."""
        started = time.perf_counter()
        self._timers.reset()
        parts, timed = self._parts, self._timers.phase
        epoch, indices = parts.order.batch(number)
        with timed("sync"):
            parts.engine.memory.wake_weights()
            sync_weights(parts.actor.model, parts.engine, parts.shape, parts.mesh)
        with timed("wake"):
            parts.engine.memory.wake_kv_cache()
        with timed("rollout"):
            seed = RolloutSeed(parts.config.run.seed, number)
            groups = parts.collector.collect([parts.prompts[i] for i in indices], seed)
        with timed("sleep"):
            parts.engine.memory.sleep()
        advantages = group_advantages(groups, parts.config.algorithm.advantage_eps)
        samples = make_samples(groups, advantages)
        results = self._update(samples, number)
        seconds = self._timers.seconds() | {"step": time.perf_counter() - started}
        return StepRecord(epoch, self._metrics(groups, samples, results, seconds), groups, advantages)

    def _update(self, samples: list[Sample], number: int) -> list[MinibatchResult]:
        parts, timed = self._parts, self._timers.phase
        with timed("pack"):
            minibatches = self._pack(samples, number)
        flat = [batch for minibatch in minibatches for batch in minibatch]
        old: list[TokenLogprobs] | None = None
        reference: list[TokenLogprobs] | None = None
        if parts.config.algorithm.recompute_logprobs:
            with timed("logprobs"):
                old = parts.actor.executor.logprobs(flat)
        if parts.reference is not None:
            with timed("reference"):
                reference = parts.reference.logprobs(flat)
        results, start = [], 0
        with timed("update"):
            for minibatch in minibatches:
                mine = slice(start, start + len(minibatch))
                start += len(minibatch)
                result = parts.actor.learner.learn(
                    minibatch, old and old[mine], reference and reference[mine]
                )
                if result.discarded is not None:
                    logger.info(
                        "step %d: minibatch %d discarded: %s", number + 1, len(results) + 1, result.discarded
                    )
                results.append(result)
        return results

    def _pack(self, samples: list[Sample], number: int) -> list[list[MicroBatch]]:
        """This data-parallel rank's micro-batches of every minibatch."""
        config, mesh = self._parts.config, self._parts.mesh
        plan = plan_minibatches(
            [sample.length for sample in samples],
            config.algorithm.n_minibatches,
            mesh.data,
            config.policy.max_tokens_per_microbatch,
            seed=config.run.seed * 1_000_003 + number,
        )
        pad_to_multiple = mesh.tensor if config.parallel.sequence else 1
        return [
            [
                pack(samples, indices, pad_to_multiple)
                for indices in minibatch.microbatches_by_rank[mesh.data_rank]
            ]
            for minibatch in plan
        ]

    def _metrics(
        self,
        groups: list[ScoredGroup],
        samples: list[Sample],
        results: list[MinibatchResult],
        seconds: dict[str, float],
    ) -> dict[str, float]:
        algorithm = self._parts.config.algorithm
        metrics = rollout_metrics(groups, samples)
        metrics |= update_metrics(results, algorithm.kl_coef, metrics["task_reward"])
        metrics |= mismatch_metrics(results, only_first=not algorithm.recompute_logprobs)
        return metrics | pace_metrics(seconds, metrics["n_tokens"], metrics["n_valid_tokens"])


def group_advantages(groups: Sequence[ScoredGroup], eps: float) -> list[list[float]]:
    """Advantage of every completion, by prompt and sample."""
    rewards_PG = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    return group_normalised(rewards_PG, eps).tolist()


def make_samples(groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float]]) -> list[Sample]:
    """All P * G sequences to train on, in order of prompt and sample."""
    return [
        Sample(group.prompt.token_ids, completion.token_ids, completion.logprobs, advantage)
        for group, row in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]
