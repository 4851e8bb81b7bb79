"""Causal attention and rotary positions over packed sequences, where Transformer Engine is not installed.

Megatron's own `DotProductAttention` refuses packed sequences. Ours pads segments of similar length to one bucket, so
that memory stays linear in the packed length and no token attends across a segment's border.
"""

# Shape legend: T packed tokens, S segments, H heads of this rank, D head dim, N segments of one bucket,
# M longest segment of one bucket.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlmath.config.model_shape import RopeScaling

BUCKET_FILL = 0.75
"""A segment joins a bucket only if it fills at least this share of the bucket's longest segment."""


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length, as index tensors between the packed and the padded layout."""

    gather_NM: Tensor
    """Packed position of each padded slot; slots behind a segment's end repeat its last token."""
    slots_K: Tensor
    """The K slots of the flattened padded layout that hold a token."""
    positions_K: Tensor
    """Packed position of each of them."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the fields that our attention and rotary embedding need."""

    position_ids_T: Tensor | None = None
    buckets: tuple[Bucket, ...] = ()


def bucket_segments(lengths: list[int]) -> list[list[int]]:
    """Indices of segments grouped by similar length, longest first; segments of length 0 are left out.

    >>> bucket_segments([10, 2, 9, 0])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] == 0:
            continue
        if groups and lengths[index] >= BUCKET_FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _make_bucket(starts_N: Tensor, lengths_N: Tensor) -> Bucket:
    offsets_M = torch.arange(int(lengths_N.max()), device=starts_N.device)
    filled_NM = offsets_M[None, :] < lengths_N[:, None]
    gather_NM = starts_N[:, None] + torch.minimum(offsets_M[None, :], lengths_N[:, None] - 1)
    return Bucket(gather_NM, filled_NM.flatten().nonzero().squeeze(1), gather_NM[filled_NM])


def pack_sequences(
    cu_seqlens_S1: Tensor, max_seqlen: int, position_ids_T: Tensor, local_layers: bool
) -> PackedSequences:
    """Everything that the layers need to know about the packing of one micro-batch, computed once.

    `local_layers` is true for Megatron's local layers with our attention, false for Transformer Engine's.
    """
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_S1,
        "cu_seqlens_kv": cu_seqlens_S1,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if not local_layers:
        return PackedSequences(**common, position_ids_T=position_ids_T)
    starts_S = cu_seqlens_S1[:-1].long()
    lengths_S = cu_seqlens_S1.diff().long()
    buckets = tuple(
        _make_bucket(starts_S[members], lengths_S[members]) for members in bucket_segments(lengths_S.tolist())
    )
    # For Megatron's rotary code the pack is one segment, since our embedding already follows the positions.
    whole = torch.tensor([0, position_ids_T.numel()], dtype=torch.int32, device=cu_seqlens_S1.device)
    return PackedSequences(
        **common,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        position_ids_T=position_ids_T,
        buckets=buckets,
    )


def stretched_frequencies(frequencies_F: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's frequencies for longer sequences, of plain ones (F of them, radians per position).

    A frequency that turns `high_freq_factor` times or more within the original length is kept; one that turns
    `low_freq_factor` times or less is divided by `factor`; between, the two are blended. Source: Llama 3's
    `rope_type: llama3`, as transformers' `_compute_llama3_parameters` has it.
    """
    turns_F = scaling.original_max_positions * frequencies_F / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_F = ((turns_F - scaling.low_freq_factor) / span).clamp(0, 1)
    return kept_F * frequencies_F + (1 - kept_F) * frequencies_F / scaling.factor


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles of each packed token's own position, instead of a table that is cut up segment by segment."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """The position ids; Megatron passes what this returns to `forward`."""
        return args[-1].position_ids_T

    def forward(self, position_ids_T: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Angles of shape [T, 1, 1, D]."""
        angles = torch.outer(position_ids_T.float(), self.inv_freq.to(position_ids_T.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedAttention(torch.nn.Module):
    """Causal scaled-dot-product attention within every segment of a pack; Megatron's `core_attention`."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> Tensor:
        """Attention of query [T, H, D] over key and value [T, groups, D]; returns [T, H * D]."""
        T, H, D = query_THD.shape
        out = query_THD.new_zeros(T, H * D)
        for bucket in packed_seq_params.buckets:
            q, k, v = (x[bucket.gather_NM].transpose(1, 2) for x in (query_THD, key_TGD, value_TGD))
            repeats = H // k.shape[1]
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            flat = context.reshape(-1, H * D)[bucket.slots_K]
            out = out.index_copy(0, bucket.positions_K, flat)
        return out
