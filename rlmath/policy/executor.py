"""Runs micro-batches through one Megatron model over all its pipeline stages, and tells their log-probabilities."""

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

from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.attention import pack_sequences
from rlmath.policy.layer_spec import uses_local_layers
from rlmath.policy.logprobs import HeldBack, packed_logprobs
from rlmath.types import MicroBatch


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one micro-batch's tokens under a frozen policy; empty off the last pipeline stage."""

    logprobs_T: Tensor


class Executor:
    """Runs micro-batches through one Megatron model, over all pipeline stages.

    `chunks` are this rank's parts of the model in the order of their layers, wrapped for training or bare: one, unless
    a pipeline stage has several (`Mesh.virtual_pipeline`).
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        mesh: Mesh,
        device: Device,
        temperature: float,
        vocab_size: int,
        held_back: HeldBack,
    ) -> None:
        self.chunks = list(chunks)
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

        Forward only, `on_logits` may give anything; otherwise (loss sum, token count, metrics). All ranks need the same
        number of micro-batches, a multiple of `Mesh.microbatch_multiple`.
        """
        numbered = list(enumerate(batches))
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, on_logits),
            data_iterator=[iter(numbered) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=max(batch.token_ids_T.numel() for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def zero_grad(self) -> None:
        """Clear the gradient buffers; only of a model wrapped for training."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

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
            return on_logits(index, batch, output.squeeze(0))

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
