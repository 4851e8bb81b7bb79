"""The two things a policy does: tell the log-probabilities of samples, and learn from a minibatch."""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlmath.algo.early_stop import discard_reason
from rlmath.algo.losses import TokenInputs, grpo_loss
from rlmath.parallel.collectives import max_over_ranks, sum_over_ranks
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.attention import pack_sequences
from rlmath.policy.layer_spec import uses_local_layers
from rlmath.policy.logprobs import HeldBack, packed_logprobs
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
class TokenLogprobs:
    """Log-probabilities of one micro-batch's tokens under a frozen policy; empty off the last pipeline stage."""

    logprobs_T: Tensor


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


class Executor:
    """Runs micro-batches through one Megatron model, over all pipeline stages."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        device: Device,
        temperature: float,
        vocab_size: int,
        held_back: HeldBack,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.device = device
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.held_back = held_back
        self._local_layers = uses_local_layers(device.kind)

    def run(
        self, batches: Sequence[MicroBatch], on_logits: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        """Forward (and backward) of every micro-batch; what `on_logits(index, batch, logits)` gave, on the last
        stage only.

        Forward only, `on_logits` may give anything; otherwise (loss sum, token count, metrics).
        """
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, on_logits),
            data_iterator=iter(list(enumerate(batches))),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=max(batch.token_ids_T.numel() for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(
        self, on_logits: Callable[..., Any], batches: Iterator[tuple[int, MicroBatch]], model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        index, batch = next(batches)
        at = self.device.torch_device
        positions = batch.position_ids_T.to(at)
        output = model(
            batch.token_ids_T.to(at)[None],
            positions[None],
            None,
            packed_seq_params=pack_sequences(
                batch.cu_seqlens_S1.to(at), batch.max_seqlen, positions, self._local_layers
            ),
        )

        def loss_function(output: Tensor, non_loss_data: bool = False) -> Any:
            return on_logits(index, batch, output[0])

        return output, loss_function

    def logprobs_of(self, batch: MicroBatch, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each packed token, with gradient, and entropy of its distribution (nats)."""
        at = self.device.torch_device
        return packed_logprobs(
            logits_TV,
            batch.token_ids_T.to(at),
            batch.completion_index_T.to(at),
            self.temperature,
            self.vocab_size,
            self.held_back,
            parallel_state.get_tensor_model_parallel_group(),
        )

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[TokenLogprobs]:
        """Log-probabilities of every micro-batch's tokens under the weights as they are."""

        def keep(index: int, batch: MicroBatch, logits_TV: Tensor) -> TokenLogprobs:
            return TokenLogprobs(self.logprobs_of(batch, logits_TV)[0])

        results = self.run(batches, keep, forward_only=True)
        return results if self.mesh.is_last_stage else [TokenLogprobs(torch.empty(0))] * len(batches)


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
