"""Patches `MoEAlltoAllTokenDispatcher`, which sends tokens to the ranks that have their experts.

Upstream: megatron-core 0.16.1 to 0.19.2 makes a CUDA stream and copies the counts of tokens from
the GPU on it, where they become the lists that the all-to-all needs. It keeps the router's
probabilities until the layer's next pass. Why: on CPU there are no streams, and counts that are
there already stay tensors, which the all-to-all refuses. On every device the probabilities hold the
graph that they come from: where layers are recomputed, every layer's input and its gradient,
between steps, too (5.6 GiB for 48 layers of Qwen3-30B-A3B and 15,360 tokens). Can go: when
Megatron-Core turns counts into lists wherever they are, and drops the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch

_COUNTS = ("input_splits", "output_splits", "output_splits_tp")


def _as_lists(
    self: Any, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    for name in _COUNTS:
        counts = getattr(self, name)
        if isinstance(counts, torch.Tensor):
            setattr(self, name, counts.tolist())
    return tokens_per_expert


def drop_graphs() -> None:
    """Let the graph of a pass end with it, on every device."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    combine = MoEAlltoAllTokenDispatcher.combine_postprocess

    def combine_postprocess(self: Any, *given: Any, **named: Any) -> Any:
        combined = combine(self, *given, **named)
        self.probs = None
        return combined

    MoEAlltoAllTokenDispatcher.combine_postprocess = combine_postprocess


def patch() -> None:
    """Let tokens be dispatched from and to CPUs."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on the CPU"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _as_lists
