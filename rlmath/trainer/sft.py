"""Supervised training: one step, in the order in which this file reads.

    sequences -> schedule -> packing -> forward, loss on completions, backward -> optimizer step ->
    metrics

Every rank runs it; the control plane is computed alike everywhere, only tensors are sharded. The
life cycle around the step is in `rlmath.run.loop`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import ClassVar

from rlmath.data.dataset import SftInputs
from rlmath.data.micro_batches import plan_minibatches, training_cost
from rlmath.data.packing import MicroBatch, pack
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.models.build import build_sft_actor
from rlmath.telemetry.reporter import StepRecord
from rlmath.trainer.base import Trainer
from rlmath.trainer.context import RankContext
from rlmath.trainer.metrics import loss_scale_metrics


class SftTrainer(Trainer):
    """Trains by cross-entropy on the completions of written solutions.

    Held-out ones are evaluated between steps."""

    kind: ClassVar = "sft"

    def __init__(self, context: RankContext[SftInputs]) -> None:
        super().__init__(context)
        self.inputs = context.inputs
        context.on_phase("build model")
        self.actor = build_sft_actor(
            self.config, self.shape, self.mesh, device=self.device, total_updates=self.total_steps
        )
        self.actor.forward_backward.on_microbatch = context.on_progress
        self.cost = training_cost(self.shape, frozen=self.config.lora.rank > 0)
        self.held_out = self.pack(self.inputs.held_out) if self.inputs.held_out else []

    @property
    def layout(self) -> str:
        return self.mesh.training_layout

    def step(self, number: int) -> StepRecord:
        """Make step `number`, from 0 over the whole run, and the evaluation due after it."""
        started = time.perf_counter()
        self.timers.reset()
        _, indices = self.order.batch(number)
        sequences = [self.inputs.sequences[index] for index in indices]
        with self.timers.phase("pack"):
            batches = self.pack(sequences)
        with self.timers.phase("update"):
            result = self.actor.learner.learn(batches)
        evaluated = self.evaluate() if self.is_due(number + 1) else {}
        seconds = self.timers.seconds() | {"step": time.perf_counter() - started}
        tokens = sum(sequence.length for sequence in sequences)
        metrics = {
            "train/loss": result.sums["loss"] / result.sums["tokens"],
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/skipped_updates": float(result.discarded is not None),
            **loss_scale_metrics([result]),
            "n_seqs": float(len(sequences)),
            "n_tokens": float(tokens),
            "n_valid_tokens": float(sum(sequence.n_learned for sequence in sequences)),
            "avg_seq_len": tokens / len(sequences),
        }
        metrics |= {f"seconds/{phase}": value for phase, value in seconds.items()}
        metrics |= {
            f"tokens_per_second/{phase}": tokens / seconds[phase] for phase in ("update", "step")
        }
        if self.peak_flops is not None:
            trained = sum(self.cost.of(sequence.length) for sequence in sequences)
            metrics["train/mfu"] = trained / (seconds["update"] * self.peak_flops)
        return StepRecord(metrics | evaluated, results=[result])

    def evaluate_before_training(self) -> dict[str, float]:
        return self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """Loss (nats per token), perplexity and share of likeliest tokens on held-out sequences.

        {} without any."""
        if not self.held_out:
            return {}
        with self.timers.phase("evaluate"):
            sums = self.actor.learner.evaluate(self.held_out)
        loss = sums["loss"] / sums["tokens"]
        return {
            "held_out/loss": loss,
            "held_out/perplexity": math.exp(min(loss, 700.0)),
            "held_out/token_accuracy": sums["hits"] / sums["tokens"],
        }

    def is_due(self, steps_done: int) -> bool:
        every = self.config.sft.eval_every_steps
        return every is not None and (steps_done % every == 0 or steps_done == self.total_steps)

    def pack(self, sequences: Sequence[WrittenSequence]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches."""
        config = self.config
        mesh = self.mesh
        (plan,) = plan_minibatches(
            [sequence.length for sequence in sequences],
            n_minibatches=1,
            data_size=mesh.data,
            max_tokens=config.policy.max_tokens_per_microbatch,
            seed=0,
            cost=self.cost,
            count_multiple=mesh.microbatch_multiple,
            shuffle=False,
        )
        samples = [sequence.sample() for sequence in sequences]
        multiple = mesh.tensor if config.parallel.sequence else 1
        return [
            pack(samples, indices, multiple)
            for indices in plan.microbatches_by_rank[mesh.data_rank]
        ]
