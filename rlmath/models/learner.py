"""One optimizer step on one minibatch: the losses of GRPO and of supervised training.

Both have one `Learner`; the critic's is in `critic`.

    micro-batches -> forward, loss, backward -> sums over all ranks -> discard or optimizer step ->
    MinibatchResult

A minibatch is discarded where its loss or gradient is not finite or, in GRPO, where it leaves the
bounds of `early_stop`: parameters, optimizer and learning-rate schedule are then bit-identical to
before.
"""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlmath.algorithms.early_stop import EarlyStop, discard_reason
from rlmath.algorithms.importance_sampling import interpolated_proximal, proximal_logprobs
from rlmath.algorithms.losses import LossSettings, TokenInputs, TokenLoss, policy_loss
from rlmath.data.packing import MicroBatch
from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.distributed.device import release_cached
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.optimizer import LossScale, learning_rate
from rlmath.models.teacher import TeacherStates

DiscardRule = Callable[[Mapping[str, float], float], str | None]
"""Gives the reason to discard a minibatch, or None, from its sums and its gradient norm."""


@dataclass(frozen=True)
class MinibatchResult:
    """Metrics of one minibatch, equal on all ranks.

    Sums are over all sampled tokens of the minibatch; "loss" is weighted and of the learned ones,
    and is divided by "denominator", the others by "tokens"."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Norm of the gradient before clipping (L2)."""
    learning_rate: float
    discarded: str | None
    """Why it was discarded; None when it was learned from."""
    loss_scale: float | None = None
    """Factor of the loss for its gradient (`optimizer.LossScale`); None: it was not scaled."""
    overflowed: bool = False
    """Whether it was discarded since the loss scale was too large: a smaller one follows."""


@dataclass(eq=False)
class Learner:
    """A model with its optimizer and learning-rate schedule.

    A subclass has the loss."""

    forward_backward: ForwardBackward
    optimizer: Any
    scheduler: Any
    updates: int = field(default=0, init=False)
    """Optimizer steps so far: the version of the weights."""
    lr_scale: float = field(default=1.0, init=False)
    """Factor of the schedule's learning rate."""
    loss_scale: LossScale | None = field(default=None, kw_only=True)
    """Loss scale of float16; None: the loss is not scaled."""

    def _loss_of(
        self, loss: Tensor, batch: MicroBatch, metrics: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What a forward pass of Megatron returns: loss, denominator and metrics.

        Metrics are copied, since Megatron divides the loss in place and they must not share its
        storage."""
        count = loss.new_full((), batch.loss_count, dtype=torch.int)
        copies = {name: value.detach().clone() for name, value in metrics.items()}
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        return loss, self.forward_backward.counted_once(count), copies | {"denominator": count}

    def restore_schedule(self, updates: int, loss_scale: Sequence[float] = ()) -> None:
        """Set the schedule to where it is after so many optimizer steps.

        Their weights and state were loaded. The loss scale becomes what `loss_scale_state` was
        then."""
        self._step_schedule(updates - self.updates)
        self.updates = updates
        if self.loss_scale is not None and loss_scale:
            self.loss_scale.scale, self.loss_scale.clean_updates = loss_scale[0], int(loss_scale[1])

    @property
    def loss_scale_state(self) -> tuple[float, ...]:
        """The loss scale's state for a checkpoint; () where losses are not scaled."""
        scale = self.loss_scale
        return () if scale is None else (scale.scale, scale.clean_updates)

    def _step_schedule(self, increment: int) -> None:
        self.scheduler.step(increment=increment)
        if self.lr_scale != 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= self.lr_scale

    def _optimizer_step(
        self,
        metrics: Sequence[dict[str, Tensor]],
        discard_rule: DiscardRule,
        sum_names: Sequence[str],
        max_names: Sequence[str] = (),
    ) -> MinibatchResult:
        """Make an optimizer step with a minibatch's gradients, unless `discard_rule` has a reason.

        `metrics` are those of the minibatch's passes. Megatron divides the summed loss by the
        minibatch's global count, once. The names are the arguments of `_reduce`. Gradients are zero
        before the pass, and again afterwards."""
        sums, maxima = self._reduce(metrics, sum_names, max_names)
        lr = learning_rate(self.optimizer)
        scale = None
        overflowed = False
        if self.loss_scale is not None:
            scale = self.loss_scale.scale
            for chunk in self.forward_backward.chunks:
                chunk.scale_gradients(1 / scale)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        reason = discard_rule(sums, grad_norm)
        if self.loss_scale is not None and math.isfinite(sums["loss"]):
            overflowed = self.loss_scale.update(not math.isfinite(grad_norm))
            if overflowed:
                reason = (
                    f"gradients overflow at loss scale {scale:g}; the next is "
                    f"{self.loss_scale.scale:g}"
                )
        if reason is None:
            if self.updates == 0:
                # The optimizer makes its state now, for good. Within what the passes have left it
                # would keep pieces of memory as large as the logits from ever being given back, and
                # gradients in them from being freed.
                release_cached(self.forward_backward.device)
            self.optimizer.step()
            self._step_schedule(1)
            self.updates += 1
        self.forward_backward.zero_grad()
        self.optimizer.zero_grad()
        return MinibatchResult(
            sums,
            maxima,
            grad_norm,
            learning_rate=lr,
            discarded=reason,
            loss_scale=scale,
            overflowed=overflowed,
        )

    def _reduce(
        self,
        metrics: Sequence[dict[str, Tensor]],
        sum_names: Sequence[str],
        max_names: Sequence[str] = (),
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over micro-batches and data-parallel ranks, returned on every rank.

        A collective."""
        counted = metrics if self.forward_backward.mesh.counts_loss else []
        names = (*sum_names, *max_names)
        # One transfer from the device for all micro-batches.
        rows = [
            torch.stack([batch_metrics[name].float() for name in names])
            for batch_metrics in counted
        ]
        columns = dict(zip(names, torch.stack(rows, 1).tolist(), strict=True)) if rows else {}
        sums = {name: sum(columns.get(name, (0.0,))) for name in sum_names}
        maxima = {name: max(columns.get(name, (0.0,))) for name in max_names}
        return reduce_over_ranks(sums, maxima)


L = TypeVar("L", bound=Learner)


@dataclass(frozen=True)
class Actor(Generic[L]):
    """The learner, and the bare model chunks of this rank.

    The weights of the chunks are synced, saved and exported."""

    learner: L
    chunks: list[GPTModel]

    @property
    def forward_backward(self) -> ForwardBackward:
        return self.learner.forward_backward


LOSS_SUMS = tuple(loss_field.name for loss_field in fields(TokenLoss))
GRPO_SUMS = (*LOSS_SUMS, "denominator", "mismatch", "proximal_error")
GRPO_MAXIMA = ("mismatch_max",)
"""Metrics of a minibatch of `GrpoLearner`: sums over tokens, and the largest value of a token."""


@dataclass(eq=False)
class GrpoLearner(Learner):
    """The learner of the GRPO family: policy gradient with the samples' advantages.

    The losses are in `algorithms.losses`."""

    settings: LossSettings
    bounds: EarlyStop
    step_version: int = field(default=0, init=False)
    """Version of the weights that the step begins with."""

    def learn(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None,
        on_policy: bool = False,
        teacher: TeacherStates | None = None,
    ) -> MinibatchResult:
        """Make an optimizer step on a minibatch, or none where it is discarded.

        `old` are the proximal log-probs, None to use the engine's; with `on_policy` they are those
        of the same forward pass, which saves a pass where there is one minibatch a step.
        `reference` None leaves KL out of the loss. With the states of a `teacher` the KL to its
        whole distributions is part of the loss."""
        on_logits = partial(
            self._loss, old=old, reference=reference, on_policy=on_policy, teacher=teacher
        )
        metrics = self.forward_backward.run(batches, on_logits, forward_only=False)
        rule = partial(discard_reason, bounds=self.bounds)
        return self._optimizer_step(metrics, rule, GRPO_SUMS, max_names=GRPO_MAXIMA)

    def _loss(
        self,
        index: int,
        batch: MicroBatch,
        logits_TV: Tensor,
        old: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None,
        on_policy: bool,
        teacher: TeacherStates | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, and the metrics of GRPO_SUMS and GRPO_MAXIMA."""
        rows = None if teacher is None else teacher.rows(index)
        token_logprobs = self.forward_backward.logprobs_of(batch, logits_TV, rows)
        entropy_T = token_logprobs.entropy_T
        behaviour_T = batch.behaviour_logprobs_T
        sampled_T = batch.sampled_T
        old_T = None if old is None else old[index]
        interpolated_T = None
        if batch.lag_T is not None:
            since = self.updates - self.step_version
            interpolated_T = interpolated_proximal(
                token_logprobs.logprobs_T, behaviour_T, batch.lag_T, updates=since
            )
        proximal_T = proximal_logprobs(
            token_logprobs.logprobs_T,
            behaviour_T,
            old_T,
            interpolated_T=interpolated_T,
            on_policy=on_policy,
        )
        tokens = TokenInputs(
            logprobs_T=token_logprobs.logprobs_T,
            entropy_T=entropy_T if self.settings.entropy_coef else entropy_T.detach(),
            proximal_logprobs_T=proximal_T,
            behaviour_logprobs_T=behaviour_T,
            reference_logprobs_T=None if reference is None else reference[index],
            advantages_T=batch.advantages_T,
            weights_T=batch.loss_weights_T,
            sampled_T=sampled_T,
            learned_T=batch.learned_T,
            segments_T=batch.segments_T,
            n_segments=batch.n_segments,
            teacher_kl_T=token_logprobs.teacher_kl_T,
            penalty_T=batch.penalty_T,
        )
        terms = policy_loss(tokens, self.settings)
        recomputed_T = token_logprobs.logprobs_T.detach() if old_T is None else old_T
        mismatch_T = torch.where(sampled_T, (recomputed_T - behaviour_T).abs(), 0.0)
        metrics = {name: getattr(terms, name) for name in LOSS_SUMS}
        approximate_T = proximal_T if interpolated_T is None else interpolated_T
        error_T = torch.where(sampled_T, (approximate_T - proximal_T).abs(), 0.0)
        metrics |= {"mismatch": mismatch_T.sum(), "mismatch_max": mismatch_T.max()}
        metrics["proximal_error"] = error_T.sum()
        return self._loss_of(terms.loss, batch, metrics)


class SftLearner(Learner):
    """The learner of supervised fine-tuning: cross-entropy of completion tokens.

    It is the mean over all ranks and micro-batches. Tokens of prompts and of others' turns are not
    sampled."""

    def learn(self, batches: Sequence[MicroBatch]) -> MinibatchResult:
        """One optimizer step, or none where the loss or the gradient is not finite."""
        metrics = self.forward_backward.run(batches, self._loss, forward_only=False)
        return self._optimizer_step(metrics, not_finite, ("loss", "tokens"))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Sums over the micro-batches of all data-parallel ranks.

        "loss" (sum of nats), "tokens" and "hits" (tokens that are the most likely ones). A
        collective."""

        def token_sums(index: int, batch: MicroBatch, logits_TV: Tensor) -> dict[str, Tensor]:
            hits_T = self.forward_backward.token_accuracy(batch, logits_TV)
            logprobs_T = self.forward_backward.logprobs_of(batch, logits_TV).logprobs_T
            hits = torch.where(batch.sampled_T, hits_T, 0.0).sum()
            return self._sums(logprobs_T, batch) | {"hits": hits}

        metrics = self.forward_backward.run(batches, token_sums, forward_only=True)
        return self._reduce(metrics, ("loss", "tokens", "hits"))[0]

    def _loss(
        self, index: int, batch: MicroBatch, logits_TV: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs_T = self.forward_backward.logprobs_of(batch, logits_TV).logprobs_T
        sums = self._sums(logprobs_T, batch)
        return self._loss_of(sums["loss"], batch, sums)

    def _sums(self, logprobs_T: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Sums over tokens; log-probs of tokens that are not learned may be anything."""
        loss = -torch.where(batch.learned_T, logprobs_T, 0.0).sum()
        return {"loss": loss, "tokens": batch.sampled_T.sum()}


def not_finite(sums: Mapping[str, float], grad_norm: float) -> str | None:
    """A `DiscardRule`: the loss or the gradient is not finite."""
    if not math.isfinite(sums["loss"]):
        return f"the loss is not finite ({sums['loss']})"
    if not math.isfinite(grad_norm):
        return f"the gradient norm is not finite ({grad_norm})"
    return None
