"""One optimizer step on one minibatch, or none: what all learners do, whatever their loss is."""

# Shape legend: V vocabulary shard, T packed tokens of one micro-batch.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmath.parallel.collectives import max_over_ranks, sum_over_ranks
from rlmath.policy.executor import Executor
from rlmath.policy.optimizer import learning_rate
from rlmath.types import MicroBatch

OnLogits = Callable[[int, MicroBatch, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(index, micro-batch, logits_TV) to (loss sum, count for the denominator, metrics)."""
Reason = Callable[[Mapping[str, float], float], str | None]
"""(sums of the minibatch, gradient norm) to why it must be discarded, None where it need not be."""


@dataclass(frozen=True)
class MinibatchResult:
    """What one minibatch did, equal on all ranks. Sums are over all loss tokens of the minibatch; "loss" is weighted
    and belongs to "denominator", the others to "tokens"."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Before clipping (L2)."""
    learning_rate: float
    discarded: str | None
    """Why it was discarded; None when it was learned from."""


class OptimizingLearner:
    """An executor whose weights an optimizer moves. A subclass has the loss."""

    def __init__(self, executor: Executor, optimizer: Any, scheduler: Any) -> None:
        self.executor = executor
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.updates = 0
        """Optimizer steps so far: the version of the weights."""

    def goes_on_after(self, updates: int) -> None:
        """Stand where the schedule is after so many optimizer steps, whose weights and state were loaded."""
        self.scheduler.step(increment=updates - self.updates)
        self.updates = updates

    def _optimize(
        self,
        batches: Sequence[MicroBatch],
        on_logits: OnLogits,
        discard_reason: Reason,
        summed: Sequence[str],
        topped: Sequence[str] = (),
    ) -> MinibatchResult:
        """One optimizer step on a minibatch, or none where `discard_reason` has one: then parameters, optimizer and
        schedule stay bit-identical. The loss is summed over tokens and divided by the minibatch's global count, by
        Megatron, once. `summed` and `topped` as in `_reduce`."""
        self.executor.zero_grad()
        self.optimizer.zero_grad()
        sums, maxima = self._reduce(self.executor.run(batches, on_logits, forward_only=False), summed, topped)
        lr = learning_rate(self.optimizer)
        grad_norm = self._grad_norm()
        reason = discard_reason(sums, grad_norm)
        if reason is None:
            self.optimizer.step()
            self.scheduler.step(increment=1)
            self.updates += 1
        self.executor.zero_grad()
        self.optimizer.zero_grad()
        return MinibatchResult(sums, maxima, grad_norm, lr, reason)

    def _reduce(
        self, metrics: Sequence[dict[str, Tensor]], summed: Sequence[str], topped: Sequence[str] = ()
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Over micro-batches and data-parallel ranks: the sums of some metrics, and the largest of others. Every rank
        learns them. A collective."""
        counted = metrics if self.executor.mesh.speaks_for_loss else []
        at = self.executor.device.torch_device
        names = (*summed, *topped)
        # One transfer from the device for each micro-batch, not one for each number.
        rows = [torch.stack([m[name].float() for name in names]).tolist() for m in counted]
        columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
        sums = {name: sum(columns.get(name, (0.0,))) for name in summed}
        maxima = {name: max(columns.get(name, (0.0,))) for name in topped}
        return sum_over_ranks(sums, at), max_over_ranks(maxima, at) if maxima else {}

    def _grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())
