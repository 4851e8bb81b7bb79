"""Causal self-attention over packed sequences, for Megatron's local layers.

Megatron's own `DotProductAttention` refuses packed sequences. `attend` chooses:

| where | attention | of |
|---|---|---|
| CPU, short segments | products of whole matrices | `cpu_attention` |
| CPU, other segments | torch's flash kernel for CPUs, bucket by bucket | `cpu_attention` |
| GPU, heads that flash takes (`flash_takes`) | torch's flash kernel, the pack as it is | `flash_over_segments` |
| GPU, other heads, float32 | what torch chooses, bucket by bucket | `composed_attention` |

Transformer Engine's layers have an attention of their own.
"""

# Shape legend: T packed tokens, H heads and G key heads of this rank, D head dim.

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlmath.models.composed_attention import composed_attention
from rlmath.models.cpu_attention import CPUAttention
from rlmath.models.local_layers import split_heads
from rlmath.models.packed_sequences import PackedSequences
from rlmath.models.scratch_sizes import flash_takes


class SelfAttention(megatron_attention.SelfAttention):
    """Megatron's, with `split_heads` and `attend` between its two products."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # On a GPU the bias is added where heads are split, on CPU by the product.
        self.linear_qkv.skip_bias_add = not config.use_cpu_initialization
        number = self.layer_number
        self.rotates = not (config.no_rope_freq and config.no_rope_freq[number - 1])
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, number
        )
        self.window = config.window_size[0] + 1 if has_window else None

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSequences, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the tokens, [T, 1, H], and a bias that is still to be added to them."""
        projected, bias = self.linear_qkv(hidden_states)
        between = partial(self._between, bias, packed_seq_params)
        recomputes = self.checkpoint_core_attention and self.training
        attended = (
            tensor_parallel.checkpoint(between, False, projected)
            if recomputes
            else between(projected)
        )
        return self.linear_proj(attended)

    def _between(self, bias: Tensor | None, packing: PackedSequences, projected: Tensor) -> Tensor:
        """Heads, norms, rotation and attention: what "selective" recomputes."""
        angles = [table if self.rotates else table[..., :0] for table in (packing.cos, packing.sin)]
        norms = self.q_layernorm, self.k_layernorm
        projected_TGSD = projected.view(
            len(projected),
            self.num_query_groups_per_partition,
            -1,
            self.hidden_size_per_attention_head,
        )
        query_THD, key_TGD, value_TGD = split_heads(projected_TGSD, bias, norms, angles)
        return attend(query_THD, key_TGD, value_TGD, packing=packing, window=self.window)[:, None]


def attend(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    packing: PackedSequences,
    window: int | None,
) -> Tensor:
    """Causal scaled-dot-product attention within every segment of a pack, [T, H * D].

    Queries and keys are rotated already. A query attends to `window` tokens, itself and the last
    ones before it; None: to all."""
    if query_THD.device.type == "cpu":
        return CPUAttention.apply(query_THD, key_TGD, value_TGD, packing, window).flatten(1)
    if flash_takes(query_THD.shape[2], query_THD.dtype.itemsize):
        return flash_over_segments(
            query_THD, key_TGD, value_TGD, packing=packing, window=window
        ).flatten(1)
    return composed_attention(
        query_THD, key_TGD, value_TGD, buckets=packing.buckets, window=window
    ).flatten(1)


def flash_over_segments(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    packing: PackedSequences,
    window: int | None,
) -> Tensor:
    """The attention [T, H, D] of torch's flash kernel for GPUs.

    One call is over all segments, wherever they lie, and the heads that share a key."""
    bounds = packing.cu_seqlens_q
    longest = packing.max_seqlen_q
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out_THD, *_ = torch.ops.aten._flash_attention_forward(
        query_THD,
        key_TGD,
        value_TGD,
        cum_seq_q=bounds,
        cum_seq_k=bounds,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=window is None,
        return_debug_mask=False,
        **sides,
    )
    return out_THD
