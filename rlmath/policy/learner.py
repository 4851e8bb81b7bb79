"""How the policy learns from a minibatch, or discards it."""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlmath.algo.early_stop import discard_reason
from rlmath.algo.losses import TokenInputs, grpo_loss
from rlmath.parallel.collectives import max_over_ranks, sum_over_ranks
from rlmath.policy.executor import Executor, TokenLogprobs
from rlmath.policy.optimizer import learning_rate
from rlmath.types import MicroBatch


@dataclass(frozen=True)
class LossSettings:
    """What shapes the update; see `AlgorithmConfig`."""

    clip_ratio: float
    kl_coef: float
    early_stop_ratio: float | None
    early_stop_ratio_low: float | None


@dataclass(frozen=True)
class MinibatchResult:
    """What one minibatch did, equal on all ranks. Sums are over all loss tokens of the minibatch."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Before clipping (L2)."""
    learning_rate: float
    discarded: str | None
    """Why it was discarded; None when it was learned from."""


class Learner:
    """The actor: an executor whose weights an optimizer moves."""

    def __init__(self, executor: Executor, optimizer: Any, scheduler: Any, settings: LossSettings) -> None:
        self.executor = executor
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings

    def learn(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
    ) -> MinibatchResult:
        """One optimizer step on a minibatch, or none: then parameters, optimizer and schedule stay bit-identical.

        `old` are the proximal log-probs, None to use the engine's; `reference` None leaves KL out. The loss is summed
        over tokens and divided by the minibatch's global token count, by Megatron, once.
        """
        self.executor.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        on_logits = partial(self._loss, old, reference)
        metrics = self.executor.run(batches, on_logits, forward_only=False)
        sums, maxima = self._reduce(metrics)
        lr = learning_rate(self.optimizer)
        grad_norm, overflow = self._grad_norm()
        reason = discard_reason(
            sums["ratio"],
            sums["tokens"],
            sums["loss"],
            grad_norm,
            self.settings.early_stop_ratio,
            self.settings.early_stop_ratio_low,
        )
        if reason is None and overflow:
            reason = "a gradient is not finite"
        if reason is None:
            self.optimizer.step()
            self.scheduler.step(increment=1)
        self.executor.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return MinibatchResult(sums, maxima, grad_norm, lr, reason)

    def _loss(
        self,
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
        index: int,
        batch: MicroBatch,
        logits_TV: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        at = self.executor.device.torch_device
        logprobs_T, entropy_T = self.executor.logprobs_of(batch, logits_TV)
        weights_T = batch.loss_weights_T.to(at)
        behaviour_T = batch.behaviour_logprobs_T.to(at)
        terms = grpo_loss(
            TokenInputs(
                logprobs_T=logprobs_T,
                old_logprobs_T=behaviour_T if old is None else old[index].logprobs_T,
                reference_logprobs_T=None if reference is None else reference[index].logprobs_T,
                advantages_T=batch.advantages_T.to(at),
                weights_T=weights_T,
            ),
            self.settings.clip_ratio,
            self.settings.kl_coef,
        )
        counted_T = weights_T > 0
        proximal_T = logprobs_T.detach() if old is None else old[index].logprobs_T
        mismatch_T = torch.where(counted_T, (proximal_T - behaviour_T).abs(), 0.0)
        # Copies: Megatron divides the loss in place, and metrics must not share its storage.
        metrics = {
            "loss": terms.loss.detach().clone(),
            "surrogate": terms.surrogate,
            "ratio": terms.ratio,
            "clipped": terms.clipped,
            "approx_kl": terms.approx_kl,
            "reference_kl": terms.reference_kl,
            "entropy": torch.where(counted_T, entropy_T, 0.0).sum(),
            "mismatch": mismatch_T.sum(),
            "tokens": weights_T.sum(),
            "mismatch_max": mismatch_T.max(),
        }
        return terms.loss, counted_T.sum().int(), metrics

    def _reduce(self, metrics: list[dict[str, Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums over micro-batches and data-parallel ranks; every rank learns them."""
        counts = self.executor.mesh.speaks_for_loss
        at = self.executor.device.torch_device
        sums = {name: sum(float(m[name]) for m in metrics) if counts else 0.0 for name in SUMMED}
        top = {
            "mismatch_max": max((float(m["mismatch_max"]) for m in metrics), default=0.0) if counts else 0.0
        }
        return sum_over_ranks(sums, at), max_over_ranks(top, at)

    def _grad_norm(self) -> tuple[float, bool]:
        """Global gradient norm before clipping, and whether Megatron found a value that is not finite."""
        overflow = self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        return float(norm), bool(overflow)


SUMMED = (
    "loss",
    "surrogate",
    "ratio",
    "clipped",
    "approx_kl",
    "reference_kl",
    "entropy",
    "mismatch",
    "tokens",
)
"""Metrics that `Learner` adds up over tokens."""
