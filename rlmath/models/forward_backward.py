"""Forward and backward passes of micro-batches through a Megatron model and its pipeline stages.

    micro-batches -> inputs of this rank (packed, split over context ranks) -> Megatron's schedule
    -> on_logits

What is computed from the logits is the caller's: `on_logits(index, batch, logits_TV)` is called on
the last pipeline stage, where a learner makes a loss of it and `logprobs` keeps log-probabilities.
The distribution of a token is that of the engine: logits over temperature, without the tokens of
`min_tokens_mask`.
"""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_patches import p2p_shapes
from rlmath.data.packing import MicroBatch
from rlmath.distributed.device import Device, finish_computation
from rlmath.distributed.mesh import Mesh
from rlmath.models.context_parallel import ContextSplit, gather_and_shift, split_pack
from rlmath.models.logprobs import (
    MinTokensMask,
    TeacherRows,
    is_argmax,
    next_logprobs,
    shift_to_tokens,
)
from rlmath.models.packed_sequences import PackedSequences, pack_sequences
from rlmath.models.routing import RoutingReplay

NO_MASK = MinTokensMask()


@lru_cache(maxsize=8)
def _split_once(
    bounds: tuple[int, ...], context: int, multiple: int, device: torch.device
) -> ContextSplit:
    """A pack's split on the device, computed on the host, which would wait for a GPU's lengths."""
    split = split_pack(torch.tensor(bounds), context, multiple)
    if device.type == "cpu":
        return split
    source_CN, bounds_S1 = (
        tensor.pin_memory().to(device, non_blocking=True)
        for tensor in (split.source_CN, split.cu_seqlens_S1)
    )
    return replace(split, source_CN=source_CN, cu_seqlens_S1=bounds_S1)


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model says of every packed token, under its present weights (nats)."""

    logprobs_T: Tensor
    """Log-probs, with gradient."""
    entropy_T: Tensor
    """Entropies of the distributions that the tokens were drawn from."""
    teacher_kl_T: Tensor | None
    """KL(these distributions || the teacher's), with gradient; None without a teacher."""


class ForwardBackward:
    """Runs micro-batches through one Megatron model, over all pipeline stages.

    `chunks` are this rank's parts of the model in the order of their layers, wrapped for training
    or bare: one, unless a pipeline stage has several (`Mesh.virtual_pipeline`)."""

    def __init__(
        self,
        chunks: Sequence[Any],
        mesh: Mesh,
        device: Device,
        vocab_size: int,
        temperature: float = 1.0,
        min_tokens_mask: MinTokensMask = NO_MASK,
    ) -> None:
        """`temperature` and `min_tokens_mask` are the engine's.

        Without them the distribution is the model's own."""
        self.chunks = list(chunks)
        self.mesh = mesh
        self.device = device
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.min_tokens_mask = min_tokens_mask
        self.routing: RoutingReplay | None = None
        """Replays the routes of micro-batches; None: the model routes by itself."""
        self.on_microbatch: Callable[[], None] = lambda: None
        """Called for every micro-batch: progress for the heartbeat."""
        self._busy_seconds = 0.0
        self._busy_until: float | None = None
        # None where the layers are Transformer Engine's.
        self._rotary = get_attr_wrapped_model(self.chunks[0], "rotary")

    def run(
        self, batches: Sequence[MicroBatch], on_logits: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        """Run the forward (and backward) pass of every micro-batch.

        Returns what `on_logits(index, batch, logits)` returned, on the last stage only. In a
        forward pass alone, `on_logits` may return anything; otherwise (loss sum, token count,
        metrics). All ranks need the same number of micro-batches, a multiple of
        `Mesh.microbatch_multiple`."""
        numbered = list(enumerate(batches))
        if not forward_only:
            get_model_config(self.chunks[0]).finalize_model_grads_func = self._finalize_gradients
        self._busy_until = None
        started = time.perf_counter()
        if self.routing is not None:
            self.routing.begin()
        with self._known_shapes(batches, forward_only):
            results = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, on_logits, forward_only),
                data_iterator=[iter(numbered) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(batches),
                seq_length=max(batch.token_ids_T.numel() for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        if self.routing is not None:
            self.routing.end()
        self._busy_seconds += (self._busy_until or self._now()) - started
        return results

    def _known_shapes(
        self, batches: Sequence[MicroBatch], forward_only: bool
    ) -> AbstractContextManager[None]:
        """Tell Megatron the shapes of all messages between stages; every stage has all packs."""
        mesh = self.mesh
        if mesh.pipeline == 1:
            return nullcontext()
        config = get_model_config(self.chunks[0])
        shared = mesh.tensor if config.sequence_parallel else 1
        shapes = []
        for batch in batches:
            tokens = len(batch.token_ids_T)
            if mesh.context > 1:
                tokens = self._split(batch).source_CN.shape[1]
            shapes.append((tokens // shared, 1, config.hidden_size))
        # Which micro-batches pass through which of this stage's chunks, in their order.
        chunks = mesh.virtual_pipeline
        group = config.microbatch_group_size_per_vp_stage or mesh.pipeline
        passes = get_schedule_table(len(batches), chunks, group)
        begins = 0 if mesh.pipeline_rank == 0 else None
        ends = chunks - 1 if mesh.is_last_stage else None
        hidden_states = [shapes[number] for number, chunk in passes if chunk != begins]
        gradients = [
            shapes[number] for number, chunk in passes if chunk != ends and not forward_only
        ]
        return p2p_shapes.known_shapes(hidden_states, gradients)

    def pop_busy_seconds(self) -> float:
        """Seconds of forward and backward passes since the last call.

        They end with the reduction of gradients: it is the time of this rank and of those of its
        own model replica, without waiting for other replicas."""
        seconds, self._busy_seconds = self._busy_seconds, 0.0
        return seconds

    def _now(self) -> float:
        """The time when the device has finished its queued computation (seconds)."""
        finish_computation(self.device)
        return time.perf_counter()

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients, where the ranks of all replicas wait for each other.

        Megatron calls it after the last backward pass."""
        self._busy_until = self._now()
        finalize_model_grads(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clear the gradient buffers; only of a model wrapped for training."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def _forward_step(
        self,
        on_logits: Callable[..., Any],
        forward_only: bool,
        batches: Iterator[tuple[int, MicroBatch]],
        model: Any,
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Megatron's forward step: a micro-batch through a chunk, and what makes its loss."""
        index, batch = next(batches)
        if self.routing is None:
            batch = replace(batch, experts_TLK=None, is_routed_T=None)
        batch = batch.to(self.device.torch_device)
        self.on_microbatch()
        token_ids, positions, packing = self._inputs(batch)
        if self.routing is not None:
            packing.routing = self.routing.batch_routing(index, batch)
        output = model(token_ids[None], positions[None], None, packed_seq_params=packing)
        if self.routing is not None and model is self.chunks[-1]:
            self.routing.end_forward(index)
        if self.mesh.is_last_stage and model is self.chunks[-1]:
            output = output.squeeze(0)
            if forward_only:
                # Megatron keeps what is returned until the next forward pass is over: not the
                # logits.
                returned = on_logits(index, batch, output)
                return output.new_empty(0), lambda output, non_loss_data=True: returned
        return output, partial(on_logits, index, batch)

    def counted_once(self, count: Tensor) -> Tensor:
        """The denominator that `on_logits` returns.

        Every context rank has the pack's, and the first counts it."""
        return count if self.mesh.context_rank == 0 else torch.zeros_like(count)

    def _inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, PackedSequences]:
        """This rank's token ids and positions of a micro-batch, and how they are packed."""
        token_ids = batch.token_ids_T
        positions = batch.position_ids_T
        if self.mesh.context == 1:
            packing = pack_sequences(
                batch.cu_seqlens_S1, batch.max_seqlen, positions, rotary=self._rotary
            )
            return token_ids, positions, packing
        split = self._split(batch)
        token_ids, positions = (
            split.share(values, self.mesh.context_rank) for values in (token_ids, positions)
        )
        packing = pack_sequences(
            split.cu_seqlens_S1, split.max_seqlen, positions, rotary=self._rotary
        )
        # Padding of a segment counts as tokens: behind its end, it changes nothing for those
        # before.
        packing.cu_seqlens_q_padded = packing.cu_seqlens_kv_padded = split.cu_seqlens_S1
        return token_ids, positions, packing

    def _split(self, batch: MicroBatch) -> ContextSplit:
        # Sequence parallelism splits every chunk again.
        return _split_once(
            batch.bounds, self.mesh.context, self.mesh.tensor, batch.token_ids_T.device
        )

    def logprobs_of(
        self,
        batch: MicroBatch,
        logits_TV: Tensor,
        teacher: TeacherRows | None = None,
        vocab_size: int | None = None,
    ) -> TokenLogprobs:
        """Log-probs and entropies of packed tokens, and with a teacher the KL to it.

        The distribution is over the model's vocabulary, or its first `vocab_size` tokens."""

        def of_next(tokens: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return next_logprobs(
                logits_TV,
                next_ids_T=tokens,
                next_index_T=index,
                temperature=self.temperature,
                vocab_size=self.vocab_size if vocab_size is None else vocab_size,
                min_tokens_mask=self.min_tokens_mask,
                group=parallel_state.get_tensor_model_parallel_group(),
                teacher=teacher,
            )

        columns = self._shift_to_tokens(batch, of_next)
        return TokenLogprobs(
            logprobs_T=columns[0],
            entropy_T=columns[1],
            teacher_kl_T=None if teacher is None else columns[2],
        )

    def values_of(self, batch: MicroBatch, output_T1: Tensor) -> Tensor:
        """Value of what precedes each packed token, by a model with a value head.

        It is float32 and has a gradient."""

        def of_next(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            return output_T1[:, 0].float(), output_T1[:, 0].detach()

        return self._shift_to_tokens(batch, of_next)[0]

    def token_accuracy(self, batch: MicroBatch, logits_TV: Tensor) -> Tensor:
        """1.0 at each packed token that is the most likely one, else 0.0; without gradient."""
        group = parallel_state.get_tensor_model_parallel_group()

        def of_next(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            return is_argmax(logits_TV.detach(), tokens, self.vocab_size, group)

        return self._shift_to_tokens(batch, of_next)[0]

    def _shift_to_tokens(
        self, batch: MicroBatch, of_next: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """`logprobs.shift_to_tokens` of the whole pack, which context-parallel ranks may share."""
        tokens = batch.token_ids_T
        index = batch.completion_index_T
        if self.mesh.context == 1:
            return shift_to_tokens(of_next, tokens, index)
        group = parallel_state.get_context_parallel_group()
        return gather_and_shift(
            of_next, self._split(batch), tokens, completion_index_T=index, group=group
        )

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[MicroBatch], vocab_size: int | None = None
    ) -> list[Tensor]:
        """Log-probabilities of every micro-batch's tokens, [T], under the present weights.

        They have no gradient, and are empty off the last pipeline stage. `vocab_size` is that of
        `logprobs_of`."""
        return [logprobs_T for logprobs_T, _ in self.logprobs_and_entropies(batches, vocab_size)]

    @torch.no_grad()
    def logprobs_and_entropies(
        self, batches: Sequence[MicroBatch], vocab_size: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`logprobs`, each with the entropies of its tokens' distributions, [T] (nats)."""

        def keep(index: int, batch: MicroBatch, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
            policy = self.logprobs_of(batch, logits_TV, vocab_size=vocab_size)
            return policy.logprobs_T, policy.entropy_T

        results = self.run(batches, keep, forward_only=True)
        return (
            results
            if self.mesh.is_last_stage
            else [(torch.empty(0), torch.empty(0))] * len(batches)
        )

    @torch.no_grad()
    def hidden_states(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The output layer's inputs [N, 1, hidden] for every micro-batch, in the host's memory.

        N are this rank's tokens, under sequence parallelism its part. They are empty off the last
        pipeline stage. Only bare chunks have them."""

        def keep(index: int, batch: MicroBatch, hidden: Tensor) -> Tensor:
            return hidden.to("cpu")

        last = self.chunks[-1]
        has_head = last.post_process
        last.post_process = False  # Megatron then returns what comes before the head
        try:
            results = self.run(batches, keep, forward_only=True)
        finally:
            last.post_process = has_head
        return results if self.mesh.is_last_stage else [torch.empty(0)] * len(batches)
