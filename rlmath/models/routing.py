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
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlmath.data.packing import MicroBatch
from rlmath.data.routes import expert_dtype
from rlmath.distributed.mesh import Mesh

COUNTS = ("pairs", "differing_pairs", "tokens", "differing_tokens")
"""Numbers of `RoutingReplay.pop_counts`: (token, layer) pairs with a recorded route, those for which
the policy would have chosen other experts, and the same of tokens, which differ in any layer."""


class BatchRouting:
    """The experts of one micro-batch's tokens in one pass of the policy."""

    def __init__(self, batch: MicroBatch, layers: int, mesh: Mesh, records: bool) -> None:
        """Replay those of the batch, if it has any; `records` keeps the policy's own choice."""
        self._experts_TLK = batch.experts_TLK
        self._is_routed_T = batch.is_routed_T
        self._layers = layers
        self._mesh = mesh
        self._records = records
        self.own_LNK: list[Tensor | None] = [None] * layers
        """The policy's own choice in each layer, where it is recorded."""
        self.differs_LN: list[Tensor | None] = [None] * layers
        """Whether it is another than the replayed one; of tokens without a route False."""

    def choose(self, layer: int, scores_NE: Tensor, own_NK: Tensor) -> Tensor:
        """Experts of this rank's tokens in a layer, [N, K], those with the highest scores first.

        Equal choices have then the same order, and probabilities the same rounding."""
        if self._records:
            self.own_LNK[layer] = own_NK
        if self._experts_TLK is None or self._is_routed_T is None:
            return own_NK
        tokens = len(scores_NE)
        is_routed_N = self._part(self._is_routed_T, tokens)
        recorded_NK = self._part(self._experts_TLK, tokens)[:, layer].to(own_NK.dtype)
        experts_NK = torch.where(is_routed_N[:, None], recorded_NK, own_NK)
        recorded_scores_NK = scores_NE.detach().gather(1, experts_NK)
        order_NK = recorded_scores_NK.sort(dim=1, descending=True, stable=True).indices
        self.differs_LN[layer] = (experts_NK.sort(1)[0] != own_NK.sort(1)[0]).any(1)
        return experts_NK.gather(1, order_NK)

    def _part(self, rows_T: Tensor, tokens: int) -> Tensor:
        """This rank's N rows; it has all of them but under sequence parallelism."""
        if len(rows_T) == tokens:
            return rows_T
        return rows_T[self._mesh.tensor_rank * tokens :][:tokens]

    def counts(self) -> Tensor:
        """The numbers of COUNTS for this micro-batch, [4].

        A collective of the pipeline stages, on the first of which tokens count."""
        differs_LN = torch.stack([rows for rows in self.differs_LN if rows is not None])
        assert self._is_routed_T is not None and len(differs_LN) == self._layers
        tokens = self._part(self._is_routed_T, differs_LN.shape[1]).sum()
        differs_N = differs_LN.any(0).int()
        if self._mesh.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(differs_N, dist.ReduceOp.MAX, group=group)
        is_counted = int(self._mesh.pipeline_rank == 0)
        numbers = (
            tokens * self._layers,
            differs_LN.sum(),
            tokens * is_counted,
            differs_N.sum() * is_counted,
        )
        return torch.stack(numbers).double()


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
        self._batches: dict[int, BatchRouting] = {}
        self._counts: Tensor | None = None
        self.layers: list[int] = []
        """The layers of this rank, in the order of its chunks; they count from 0 in the model."""
        for layer in _layers_with_experts(chunks):
            routing = LayerRouting(len(self.layers))
            layer.mlp.router.router_replay = routing
            layer.register_forward_pre_hook(routing.enter, with_kwargs=True)
            self.layers.append(layer.layer_number - 1)

    def batch_routing(self, index: int, batch: MicroBatch) -> BatchRouting:
        """The routing of micro-batch `index` of the present pass, the same for all chunks.

        The batch is on the device."""
        if index not in self._batches:
            self._batches[index] = BatchRouting(
                batch, len(self.layers), self._mesh, records=self._records
            )
        return self._batches[index]

    def end(self, batches: Sequence[MicroBatch]) -> None:
        """End a pass of these micro-batches: count what differed.

        A collective of the pipeline stages."""
        for index, batch in enumerate(batches):
            if batch.experts_TLK is not None:
                counts = self._batches[index].counts()
                self._counts = counts if self._counts is None else self._counts + counts
        if not self._records:
            self._batches.clear()

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
        if not self._batches:
            return list(batches)
        replayed = []
        for index, batch in enumerate(batches):
            layers = [rows for rows in self._batches[index].own_LNK if rows is not None]
            experts_NLK = torch.stack(layers, dim=1).to("cpu", self._dtype)
            is_routed_N = torch.ones(len(experts_NLK), dtype=torch.bool)
            replayed.append(replace(batch, experts_TLK=experts_NLK, is_routed_T=is_routed_N))
        self._batches.clear()
        return replayed

    def pop_counts(self) -> dict[str, float]:
        """The numbers of COUNTS on this rank, of all passes since the last call."""
        counts = [0.0] * len(COUNTS) if self._counts is None else self._counts.tolist()
        self._counts = None
        return dict(zip(COUNTS, counts, strict=True))


def _layers_with_experts(chunks: Sequence[Any]) -> Iterator[Any]:
    """The layers of bare chunks that route tokens, in order."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer) and isinstance(
                getattr(module.mlp, "router", None), TopKRouter
            ):
                yield module
