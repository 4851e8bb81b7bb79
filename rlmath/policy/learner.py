"""How the policy learns from a minibatch, or discards it."""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlmath.algo.early_stop import EarlyStop, MinibatchSums, discard_reason
from rlmath.algo.losses import LossSettings, TokenInputs, TokenLoss, token_loss
from rlmath.parallel.collectives import max_over_ranks, sum_over_ranks
from rlmath.policy.executor import Executor, TokenLogprobs
from rlmath.policy.optimizer import learning_rate
from rlmath.types import MicroBatch


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


class Learner:
    """The actor: an executor whose weights an optimizer moves."""

    def __init__(
        self, executor: Executor, optimizer: Any, scheduler: Any, settings: LossSettings, bounds: EarlyStop
    ) -> None:
        self.executor = executor
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings
        self.bounds = bounds
        self.updates = 0
        """Optimizer steps so far: the version of the weights."""

    def goes_on_after(self, updates: int) -> None:
        """Stand where the schedule is after so many optimizer steps, whose weights and state were loaded."""
        self.scheduler.step(increment=updates - self.updates)
        self.updates = updates

    def learn(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
        on_policy: bool = False,
    ) -> MinibatchResult:
        """One optimizer step on a minibatch, or none: then parameters, optimizer and schedule stay bit-identical.

        `old` are the proximal log-probs, None to use the engine's; with `on_policy` they are the policy's own of now,
        which spares their pass where there is one minibatch a step. `reference` None leaves KL out of the loss. The
        loss is summed over tokens and divided by the minibatch's global `loss_count`, by Megatron, once.
        """
        self.executor.zero_grad()
        self.optimizer.zero_grad()
        on_logits = partial(self._loss, old, reference, on_policy)
        sums, maxima = self._reduce(self.executor.run(batches, on_logits, forward_only=False))
        lr = learning_rate(self.optimizer)
        grad_norm = self._grad_norm()
        totals = MinibatchSums(sums["ratio"], sums["proximal_kl"], sums["loss"], sums["tokens"])
        reason = discard_reason(totals, grad_norm, self.bounds)
        if reason is None:
            self.optimizer.step()
            self.scheduler.step(increment=1)
            self.updates += 1
        self.executor.zero_grad()
        self.optimizer.zero_grad()
        return MinibatchResult(sums, maxima, grad_norm, lr, reason)

    def _loss(
        self,
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
        on_policy: bool,
        index: int,
        batch: MicroBatch,
        logits_TV: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        at = self.executor.device.torch_device
        logprobs_T, entropy_T = self.executor.logprobs_of(batch, logits_TV)
        behaviour_T = batch.behaviour_logprobs_T.to(at)
        recomputed_T = logprobs_T.detach() if old is None else old[index].logprobs_T
        weights_T = batch.loss_weights_T.to(at)
        tokens = TokenInputs(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T if self.settings.entropy_coef else entropy_T.detach(),
            proximal_logprobs_T=behaviour_T if old is None and not on_policy else recomputed_T,
            behaviour_logprobs_T=behaviour_T,
            reference_logprobs_T=None if reference is None else reference[index].logprobs_T,
            advantages_T=batch.advantages_T.to(at),
            weights_T=weights_T,
            segments_T=batch.segments_T.to(at),
            n_segments=batch.n_segments,
        )
        terms = token_loss(tokens, self.settings)
        mismatch_T = torch.where(weights_T > 0, (recomputed_T - behaviour_T).abs(), 0.0)
        # Copies: Megatron divides the loss in place, and metrics must not share its storage.
        metrics = {name: getattr(terms, name).detach().clone() for name in LOSS_SUMS}
        metrics |= {
            "denominator": torch.tensor(float(batch.loss_count), device=at),
            "mismatch": mismatch_T.sum(),
            "mismatch_max": mismatch_T.max(),
        }
        return terms.loss, torch.tensor(batch.loss_count, dtype=torch.int, device=at), metrics

    def _reduce(self, metrics: list[dict[str, Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums over micro-batches and data-parallel ranks; every rank learns them."""
        counted = metrics if self.executor.mesh.speaks_for_loss else []
        at = self.executor.device.torch_device
        # One transfer from the device for each micro-batch, not one for each number.
        rows = [
            torch.stack([m[name].float() for name in (*SUMMED, "mismatch_max")]).tolist() for m in counted
        ]
        *columns, tops = zip(*rows, strict=True) if rows else [(0.0,)] * (len(SUMMED) + 1)
        sums = {name: sum(column) for name, column in zip(SUMMED, columns, strict=True)}
        return sum_over_ranks(sums, at), max_over_ranks({"mismatch_max": max(tops)}, at)

    def _grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())


LOSS_SUMS = tuple(field.name for field in fields(TokenLoss))
SUMMED = (*LOSS_SUMS, "denominator", "mismatch")
"""What `Learner` adds up over a minibatch."""
