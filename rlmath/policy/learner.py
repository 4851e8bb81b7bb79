"""How the policy learns from a minibatch, or discards it."""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlmath.algo.early_stop import EarlyStop, MinibatchSums, discard_reason
from rlmath.algo.losses import LossSettings, TokenInputs, TokenLoss, token_loss
from rlmath.policy.executor import Executor, TokenLogprobs
from rlmath.policy.optimizing import MinibatchResult, OptimizingLearner
from rlmath.types import MicroBatch

LOSS_SUMS = tuple(field.name for field in fields(TokenLoss))
SUMMED = (*LOSS_SUMS, "denominator", "mismatch")
TOPPED = ("mismatch_max",)
"""What `Learner` tells of a minibatch: sums, and the largest of any token."""


class Learner(OptimizingLearner):
    """The actor of GRPO and its kin."""

    def __init__(
        self, executor: Executor, optimizer: Any, scheduler: Any, settings: LossSettings, bounds: EarlyStop
    ) -> None:
        super().__init__(executor, optimizer, scheduler)
        self.settings = settings
        self.bounds = bounds

    def learn(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[TokenLogprobs] | None,
        reference: Sequence[TokenLogprobs] | None,
        on_policy: bool = False,
    ) -> MinibatchResult:
        """One optimizer step on a minibatch, or none: then parameters, optimizer and schedule stay bit-identical.

        `old` are the proximal log-probs, None to use the engine's; with `on_policy` they are the policy's own of now,
        which spares their pass where there is one minibatch a step. `reference` None leaves KL out of the loss.
        """
        on_logits = partial(self._loss, old, reference, on_policy)
        return self._optimize(batches, on_logits, self._discard_reason, SUMMED, TOPPED)

    def _discard_reason(self, sums: Mapping[str, float], grad_norm: float) -> str | None:
        totals = MinibatchSums(sums["ratio"], sums["proximal_kl"], sums["loss"], sums["tokens"])
        return discard_reason(totals, grad_norm, self.bounds)

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
