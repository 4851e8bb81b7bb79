"""The supervised loop.

    sequences -> schedule -> pack -> forward, loss on completions, backward -> optimizer step

Every rank runs it; the control plane is computed alike everywhere, only tensors are sharded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.algorithms.types import MicroBatch
from rlmath.data.batch_schedule import plan_minibatches, training_cost
from rlmath.data.dataset import SftInputs
from rlmath.data.packing import pack
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.models.learner import SftLearner
from rlmath.trainer.checkpointing import Training


@dataclass(frozen=True)
class SftStep:
    """What a step leaves for telemetry."""

    epoch: int
    metrics: dict[str, float]
    skipped: str | None
    """Why there was no update; None where there was one."""


class SftTrainer:
    """Makes steps, one after the other, and evaluates between them."""

    def __init__(self, training: Training, inputs: SftInputs) -> None:
        self._training = training
        self._inputs = inputs
        self._learner: SftLearner = training.actor.learner
        self._cost = training_cost(training.shape)
        self._held_out = self._pack(inputs.held_out) if inputs.held_out else []

    def step(self, number: int) -> SftStep:
        """Step `number`, counted from 0 over the whole run, with the evaluation that is due behind it."""
        started = time.perf_counter()
        timers = self._training.timers
        timers.reset()
        epoch, indices = self._inputs.order.batch(number)
        sequences = [self._inputs.sequences[index] for index in indices]
        with timers.phase("pack"):
            batches = self._pack(sequences)
        with timers.phase("update"):
            result = self._learner.learn(batches)
        measured = self.evaluate() if self._is_due(number + 1) else {}
        seconds = timers.seconds() | {"step": time.perf_counter() - started}
        metrics = {
            "train/loss": result.sums["loss"] / result.sums["tokens"],
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/skipped_updates": float(result.discarded is not None),
        }
        return SftStep(
            epoch, metrics | _sizes(sequences) | _pace(seconds, sequences) | measured, result.discarded
        )

    def evaluate(self) -> dict[str, float]:
        """Loss (nats per token), perplexity and share of likeliest tokens on what is held out; nothing where there is
        nothing."""
        if not self._held_out:
            return {}
        with self._training.timers.phase("evaluate"):
            sums = self._learner.evaluate(self._held_out)
        loss = sums["loss"] / sums["tokens"]
        return {
            "held_out/loss": loss,
            "held_out/perplexity": math.exp(min(loss, 700.0)),
            "held_out/token_accuracy": sums["hits"] / sums["tokens"],
        }

    def _is_due(self, steps_done: int) -> bool:
        every = self._training.config.sft.eval_every_steps
        return every is not None and (steps_done % every == 0 or steps_done == self._inputs.total_steps)

    def _pack(self, sequences: Sequence[WrittenSequence]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches."""
        config, mesh = self._training.config, self._training.mesh
        (plan,) = plan_minibatches(
            [one.length for one in sequences],
            n_minibatches=1,
            data_size=mesh.data,
            max_tokens=config.policy.max_tokens_per_microbatch,
            seed=0,
            cost=self._cost,
            count_multiple=mesh.microbatch_multiple,
            shuffle=False,
        )
        samples = [one.sample() for one in sequences]
        multiple = mesh.tensor if config.parallel.sequence else 1
        return [pack(samples, indices, multiple) for indices in plan.microbatches_by_rank[mesh.data_rank]]


def _sizes(sequences: Sequence[WrittenSequence]) -> dict[str, float]:
    tokens, learned = _tokens(sequences), sum(len(one.completion_ids) for one in sequences)
    return {
        "n_seqs": float(len(sequences)),
        "n_tokens": float(tokens),
        "n_valid_tokens": float(learned),
        "avg_seq_len": tokens / len(sequences),
    }


def _pace(seconds: dict[str, float], sequences: Sequence[WrittenSequence]) -> dict[str, float]:
    tokens = _tokens(sequences)
    paces = {f"tokens_per_second/{phase}": tokens / seconds[phase] for phase in ("update", "step")}
    return {f"seconds/{phase}": value for phase, value in seconds.items()} | paces


def _tokens(sequences: Sequence[WrittenSequence]) -> int:
    return sum(one.length for one in sequences)
