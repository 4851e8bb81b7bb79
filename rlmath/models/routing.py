"""Routing replay: the policy's layers send tokens to the experts that were recorded for them.

    MicroBatch.experts_TLK -> RoutingReplay -> BatchRouting -> PackedSequences.routing
    -> LayerRouting -> Megatron's router

Megatron's own class for it keeps one list for the whole process and a queue that passes without a
gradient fill. Here every micro-batch has its own object, which goes to the layers with its packing:
a layer that is computed again for the backward pass is given the same one, whatever micro-batch
came between. Models of which nothing is replayed, as reference, critic and teacher, have no such
object in their packing, or no `LayerRouting`.

What is replayed is the choice: the probabilities are of the policy's own logits for the recorded
experts, and have their gradient.
"""

# Shape legend: T packed tokens of one micro-batch, N tokens of this rank (T, or its part under
# sequence parallelism), L layers of this rank, K experts of a token in a layer, E experts.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlmath.data.packing import MicroBatch
from rlmath.data.routes import expert_dtype
from rlmath.distributed.mesh import Mesh

COUNTS = ("pairs", "differing_pairs", "tokens", "differing_tokens")
"""Numbers of `RoutingReplay.pop_counts`: (token, layer) pairs with a recorded route, those for which
the policy would have chosen other experts, and the same of tokens, which differ in any layer."""


class BatchRouting:
    """The experts of one micro-batch's tokens in one pass of the policy.

    It lives as long as a layer may be computed again."""

    def __init__(
        self, batch: MicroBatch, mesh: Mesh, recorded_as: torch.dtype | None, counts: bool
    ) -> None:
        """Replay those of the batch, if it has any.

        `recorded_as` keeps the policy's own choice as such numbers, and `counts` how it differs."""
        self._experts_TLK = batch.experts_TLK
        self._is_routed_T = batch.is_routed_T
        self._mesh = mesh
        self._recorded_as = recorded_as
        self._counts = counts
        self.own_LNK: list[Tensor] = []
        """The policy's own choice in each layer, where it is recorded."""
        self.differs_LN: list[Tensor] = []
        """Whether it is another than the replayed one, where that is counted.

        Of tokens without a route False."""

    def choose(self, layer: int, scores_NE: Tensor, own_NK: Tensor) -> Tensor:
        """Experts of this rank's tokens in a layer, [N, K], those with the highest scores first.

        Equal choices have then the same order, and probabilities the same rounding."""
        if self._recorded_as is not None:
            self.own_LNK.append(own_NK.to(self._recorded_as))
        if self._experts_TLK is None or self._is_routed_T is None:
            return own_NK
        tokens = len(scores_NE)
        is_routed_N = self._part(self._is_routed_T, tokens)
        recorded_NK = self._part(self._experts_TLK, tokens)[:, layer].to(own_NK.dtype)
        experts_NK = torch.where(is_routed_N[:, None], recorded_NK, own_NK)
        recorded_scores_NK = scores_NE.detach().gather(1, experts_NK)
        order_NK = recorded_scores_NK.sort(dim=1, descending=True, stable=True).indices
        if self._counts:
            self.differs_LN.append((experts_NK.sort(1)[0] != own_NK.sort(1)[0]).any(1))
        return experts_NK.gather(1, order_NK)

    def _part(self, rows_T: Tensor, tokens: int) -> Tensor:
        """This rank's N rows; it has all of them but under sequence parallelism."""
        if len(rows_T) == tokens:
            return rows_T
        return rows_T[self._mesh.tensor_rank * tokens :][:tokens]

    def routed_tokens(self, tokens: int) -> Tensor:
        """How many of this rank's tokens have a route, []."""
        assert self._is_routed_T is not None
        return self._part(self._is_routed_T, tokens).sum()

    def end_forward(self) -> None:
        """Neither record nor count from here on: layers are computed again."""
        self._recorded_as = None
        self._counts = False


class LayerRouting:
    """Stands in a router for Megatron's `RouterReplay`, of which it has the one method in use."""

    def __init__(self, layer: int) -> None:
        """`layer` counts from 0 over the layers of this rank."""
        self._layer = layer
        self._batch: BatchRouting | None = None

    def enter(self, module: torch.nn.Module, inputs: tuple[Any, ...], keywords: Any) -> None:
        """A layer's pre-hook: the micro-batch that it is about to compute, for whichever time."""
        self._batch = keywords["packed_seq_params"].routing

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of each token's experts, both [N, K], by the scores [N, E]."""
        assert default_compute_topk is not None
        own_scores_NK, own_NK = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self._batch is None:
            return own_scores_NK, own_NK
        experts_NK = self._batch.choose(self._layer, scores, own_NK)
        return scores.gather(1, experts_NK), experts_NK


class RoutingReplay:
    """What the passes of one model replay and record on this rank.

    With the model's packing of each micro-batch goes what `batch_routing` gives."""

    def __init__(self, chunks: Sequence[Any], mesh: Mesh, num_experts: int) -> None:
        """Put a `LayerRouting` into every router of these bare chunks."""
        self._mesh = mesh
        self._dtype = expert_dtype(num_experts)
        self._records = False
        self.is_counting = False
        """Whether passes count what differs; until the counts are popped."""
        self._batches: dict[int, BatchRouting] = {}
        """Those of micro-batches that not all chunks of this rank have computed."""
        self._own_NLK: list[Tensor] = []
        """What the present pass has recorded, by micro-batch, in host memory."""
        self._differs_N: list[Tensor] = []
        """Tokens that differ in any layer of this rank, by micro-batch of the present pass."""
        self._counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        self.layers: list[int] = []
        """The layers of this rank, in the order of its chunks; they count from 0 in the model."""
        for layer in _layers(chunks):
            routing = LayerRouting(len(self.layers))
            layer.mlp.router.router_replay = routing
            layer.register_forward_pre_hook(routing.enter, with_kwargs=True)
            self.layers.append(layer.layer_number - 1)

    def begin(self) -> None:
        """Begin a pass, whatever one that has failed has left."""
        self._batches.clear()
        self._own_NLK.clear()
        self._differs_N.clear()

    def batch_routing(self, index: int, batch: MicroBatch) -> BatchRouting:
        """The routing of micro-batch `index` of the present pass, the same for all chunks.

        The batch is on the device."""
        if index not in self._batches:
            self._batches[index] = BatchRouting(
                batch,
                self._mesh,
                recorded_as=self._dtype if self._records else None,
                counts=self.is_counting,
            )
        return self._batches[index]

    def end_forward(self, index: int) -> None:
        """End a micro-batch's forward pass through all chunks of this rank.

        What it replays stays no longer than layers may be computed again."""
        routing = self._batches.pop(index)
        routing.end_forward()
        if routing.own_LNK:
            self._own_NLK.append(torch.stack(routing.own_LNK, dim=1).cpu())
        if routing.differs_LN:
            differs_LN = torch.stack(routing.differs_LN)
            tokens = routing.routed_tokens(differs_LN.shape[1])
            self._counts["pairs"] += tokens * len(differs_LN)
            self._counts["differing_pairs"] += differs_LN.sum()
            self._counts["tokens"] += tokens * (self._mesh.pipeline_rank == 0)
            self._differs_N.append(differs_LN.any(0))

    def end(self) -> None:
        """End a pass.

        A collective of the pipeline stages, on the first of which tokens count."""
        if not self._differs_N:
            return
        differs_N = torch.cat(self._differs_N).int()
        if self._mesh.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(differs_N, dist.ReduceOp.MAX, group=group)
        self._counts["differing_tokens"] += differs_N.sum() * (self._mesh.pipeline_rank == 0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the policy's own choices of the passes inside, for `recorded`."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def recorded(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of the recorded pass, which replay its choices from here on.

        As they are where there was no such pass."""
        if not self._own_NLK:
            return list(batches)
        replayed = []
        for batch, own_NLK in zip(batches, self._own_NLK, strict=True):
            is_routed_T = torch.arange(len(batch.token_ids_T)) < batch.sample_tokens
            replayed.append(replace(batch, experts_TLK=own_NLK, is_routed_T=is_routed_T))
        self._own_NLK.clear()
        return replayed

    def pop_counts(self) -> dict[str, float]:
        """The numbers of COUNTS on this rank, of passes while `is_counting`, which ends."""
        self.is_counting = False
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(COUNTS, 0)
        return counts


def _layers(chunks: Sequence[Any]) -> Iterator[Any]:
    """The layers of bare chunks, in order; all of them have experts."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield module
