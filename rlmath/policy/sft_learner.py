"""How the policy learns from sequences that somebody wrote: cross-entropy on their completions."""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlmath.policy.optimizing import MinibatchResult, OptimizingLearner
from rlmath.types import MicroBatch


class SftLearner(OptimizingLearner):
    """Minimises minus the log-probability of completion tokens, their mean over all ranks and micro-batches. Prompt
    tokens weigh nothing."""

    def learn(self, batches: Sequence[MicroBatch]) -> MinibatchResult:
        """One optimizer step, or none where the loss or the gradient is not finite."""
        return self._optimize(batches, self._loss, _not_finite, ("loss", "tokens"))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """ "loss" (sum of nats), "tokens" and "hits" (tokens that are the likeliest of all) of the micro-batches of all
        data-parallel ranks. A collective."""

        def told(index: int, batch: MicroBatch, logits_TV: Tensor) -> dict[str, Tensor]:
            weights_T = batch.loss_weights_T.to(logits_TV.device)
            hits_T = self.executor.hits_of(batch, logits_TV)
            logprobs_T, _ = self.executor.logprobs_of(batch, logits_TV)
            return self._sums(logprobs_T, weights_T) | {"hits": torch.where(weights_T > 0, hits_T, 0.0).sum()}

        metrics = self.executor.run(batches, told, forward_only=True)
        return self._reduce(metrics, ("loss", "tokens", "hits"))[0]

    def _loss(
        self, index: int, batch: MicroBatch, logits_TV: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs_T, _ = self.executor.logprobs_of(batch, logits_TV)
        sums = self._sums(logprobs_T, batch.loss_weights_T.to(logits_TV.device))
        # Copies: Megatron divides the loss in place.
        metrics = {name: value.detach().clone() for name, value in sums.items()}
        count = torch.tensor(batch.loss_count, dtype=torch.int, device=logits_TV.device)
        return sums["loss"], count, metrics

    def _sums(self, logprobs_T: Tensor, weights_T: Tensor) -> dict[str, Tensor]:
        """What stands at tokens of weight 0 may be anything, and gets no gradient."""
        loss = -torch.where(weights_T > 0, logprobs_T, 0.0).sum()
        return {"loss": loss, "tokens": weights_T.sum()}


def _not_finite(sums: Mapping[str, float], grad_norm: float) -> str | None:
    if not math.isfinite(sums["loss"]):
        return f"the loss is not finite ({sums['loss']})"
    if not math.isfinite(grad_norm):
        return f"the gradient norm is not finite ({grad_norm})"
    return None
