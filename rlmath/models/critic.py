"""The critic, a model whose last stage gives one number for each token, and its learner.

It is otherwise a model like the policy.

    micro-batches -> values (old) -> returns (trainer) -> minibatches: clipped value loss, optimizer
    step

The value of a token is that of what precedes it: the model's output at the position before. The
head is float32, also where the model is bfloat16, and begins at zero unless the model's folder has
one.
"""

# Shape legend: N tokens of this rank (a share of T with sequence parallelism), T packed tokens of
# one micro-batch, S segments of it, H hidden size.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from rlmath.algorithms.gae import ValueLoss, value_loss
from rlmath.checkpoint.sharded_state import ALWAYS_FLOAT32
from rlmath.data.packing import MicroBatch
from rlmath.models.learner import Actor, Learner, MinibatchResult, not_finite


class ValueHead(torch.nn.Module):
    """Maps [N, 1, H] hidden states to [T, 1, 1] values, in place of Megatron's output layer.

    It is called like that layer. Every tensor-parallel rank has all of it and, with sequence
    parallelism, reads its share of the tokens."""

    def __init__(self, hidden_size: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
        self.sequence_parallel = sequence_parallel
        for parameter in (self.weight, self.bias):
            # Megatron adds up the gradients of such parameters over the tensor-parallel ranks.
            parameter.sequence_parallel = sequence_parallel
            setattr(parameter, ALWAYS_FLOAT32, True)

    def forward(
        self, hidden_N1H: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        values = torch.nn.functional.linear(hidden_N1H.float(), self.weight, self.bias)
        if self.sequence_parallel:
            # Every rank computes the same loss of all values: its own share of the gradient is
            # whole.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


@dataclass(frozen=True)
class TokenValues:
    """Values of one micro-batch under the critic of the step's start, without gradient.

    They are empty off the last stage."""

    values_T: Tensor
    """Value of what precedes each token, float32."""
    ends_S: Tensor
    """Value after the last token of each segment, float32."""


@dataclass(frozen=True)
class ValueTargets:
    """What the critic learns one micro-batch by; empty off the last stage."""

    old_values_T: Tensor
    returns_T: Tensor
    """Return of each token; both fields are float32."""


VALUE_SUMS = (*(loss_field.name for loss_field in fields(ValueLoss)), "denominator")
"""Metrics of a minibatch of `CriticLearner`: sums over its tokens."""


@dataclass(eq=False)
class CriticLearner(Learner):
    """The critic's learner: squared distance from the returns, clipped.

    The loss is `algorithms.gae.value_loss`, with the weights, the masks and the denominator of the
    policy's loss."""

    clip: float | None

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch]) -> list[TokenValues]:
        """The values of every micro-batch's tokens under the present weights."""

        def keep(index: int, batch: MicroBatch, output_T1: Tensor) -> TokenValues:
            ends_S = output_T1[
                (batch.cu_seqlens_S1[1:] - 1).long().clamp(max=len(output_T1) - 1), 0
            ]
            return TokenValues(self.forward_backward.values_of(batch, output_T1), ends_S.float())

        results = self.forward_backward.run(batches, keep, forward_only=True)
        empty = torch.empty(0)
        return (
            results
            if self.forward_backward.mesh.is_last_stage
            else [TokenValues(empty, empty)] * len(batches)
        )

    def learn(
        self, batches: Sequence[MicroBatch], targets: Sequence[ValueTargets]
    ) -> MinibatchResult:
        """One optimizer step, or none where the loss or the gradient is not finite."""
        metrics = self.forward_backward.run(
            batches, partial(self._loss, targets), forward_only=False
        )
        return self._optimizer_step(metrics, not_finite, VALUE_SUMS)

    def _loss(
        self, targets: Sequence[ValueTargets], index: int, batch: MicroBatch, output_T1: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        values_T = self.forward_backward.values_of(batch, output_T1)
        target = targets[index]
        old_T, returns_T = (
            tensor.to(values_T.device) for tensor in (target.old_values_T, target.returns_T)
        )
        terms = value_loss(
            values_T,
            old_T,
            returns_T,
            weights_T=batch.loss_weights_T,
            sampled_T=batch.sampled_T,
            learned_T=batch.learned_T,
            clip=self.clip,
        )
        return self._loss_of(
            terms.loss,
            batch,
            {loss_field.name: getattr(terms, loss_field.name) for loss_field in fields(ValueLoss)},
        )


class Critic(Actor[CriticLearner]):
    """The critic's learner, and its bare model chunks of this rank."""
