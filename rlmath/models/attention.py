"""Causal attention and rotary positions over packed sequences, for Megatron's local layers.

Megatron's own `DotProductAttention` refuses packed sequences. Ours pads segments of similar length to one bucket, so
that memory stays linear in the packed length and no token attends across a segment's border.
"""

# Shape legend: T packed tokens, S segments, H heads and G key heads of this rank, D head dim, F = D/2 frequencies,
# N segments of one bucket, M longest segment of one bucket.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.config.model_shape import ModelShape, RopeScaling
from rlmath.models.local_layers import rotate

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
    start: int | None
    """Where the segments begin in the pack if they are equally long and lie one after another: both layouts are then
    the same, and nothing is copied."""

    def padded(self, x: Tensor, zero: bool = False) -> Tensor:
        """[T, heads, D] laid out by segment: [N, heads, M, D]. With `zero` slots without a token are 0."""
        N, M = self.gather_NM.shape
        if self.start is not None:
            return x[self.start : self.start + N * M].unflatten(0, (N, M)).transpose(1, 2)
        rows = x.flatten(1)
        if zero:
            tokens = rows.index_select(0, self.positions_K)
            laid_out = rows.new_zeros(N * M, rows.shape[1]).index_copy_(0, self.slots_K, tokens)
        else:
            laid_out = rows.index_select(0, self.gather_NM.flatten())
        return laid_out.view(N, M, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor, out: Tensor) -> None:
        """Write the tokens of [N, heads, M, D] to their places in [T, heads, D]."""
        by_slot = x.transpose(1, 2)
        if self.start is not None:
            out[self.start : self.start + self.gather_NM.numel()].view(by_slot.shape).copy_(by_slot)
        else:
            tokens = by_slot.flatten(2).flatten(0, 1).index_select(0, self.slots_K)
            out.flatten(1).index_copy_(0, self.positions_K, tokens)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the fields that our attention needs."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    """Of every token's rotary angles, [T, 1, F]."""
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
    longest = int(lengths_N.max())
    offsets_M = torch.arange(longest, device=starts_N.device)
    filled_NM = offsets_M[None, :] < lengths_N[:, None]
    gather_NM = starts_N[:, None] + torch.minimum(offsets_M[None, :], lengths_N[:, None] - 1)
    in_place = bool((lengths_N == longest).all()) and bool((starts_N.diff() == longest).all())
    slots_K = filled_NM.flatten().nonzero().squeeze(1)
    return Bucket(gather_NM, slots_K, gather_NM[filled_NM], int(starts_N[0]) if in_place else None)


def pack_sequences(
    cu_seqlens_S1: Tensor, max_seqlen: int, position_ids_T: Tensor, frequencies_F: Tensor | None
) -> PackedSequences:
    """Everything that the layers need to know about the packing of one micro-batch, computed once.

    `frequencies_F` are for Megatron's local layers with our attention; None for Transformer Engine's, which get the
    longest segment rounded up to a power of two.
    """
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_S1,
        "cu_seqlens_kv": cu_seqlens_S1,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if frequencies_F is None:
        # Megatron keeps the rotary tables of 32 lengths; a bound need not be tight.
        common["max_seqlen_q"] = common["max_seqlen_kv"] = 1 << (max_seqlen - 1).bit_length()
        return PackedSequences(**common)
    starts_S = cu_seqlens_S1[:-1].long()
    lengths_S = cu_seqlens_S1.diff().long()
    buckets = tuple(
        _make_bucket(starts_S[members], lengths_S[members]) for members in bucket_segments(lengths_S.tolist())
    )
    angles = torch.outer(position_ids_T.float(), frequencies_F)[:, None]
    return PackedSequences(**common, cos=angles.cos(), sin=angles.sin(), buckets=buckets)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """F frequencies of the rotary embedding (radians per position)."""
    plain_F = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    return plain_F if shape.rope_scaling is None else stretched_frequencies(plain_F, shape.rope_scaling)


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


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal scaled-dot-product attention within every segment of a pack; Megatron's
    `core_attention`."""

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
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        query_THD, key_TGD = rotate(query_THD, cos, sin), rotate(key_TGD, cos, sin)
        return self.attend(query_THD, key_TGD, value_TGD, packed_seq_params.buckets)

    def attend(
        self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, buckets: tuple[Bucket, ...]
    ) -> Tensor:
        """Of queries and keys that are rotated already."""
        attention = _BucketAttention.apply if query_THD.device.type == "cpu" else composed_attention
        return attention(query_THD, key_TGD, value_TGD, buckets).flatten(1)


def composed_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, buckets: tuple[Bucket, ...]
) -> Tensor:
    """The attention of torch's own choice over the buckets, on any device: [T, H, D]."""
    out_THD = query_THD.new_zeros(query_THD.shape)
    repeats = query_THD.shape[1] // key_TGD.shape[1]
    for bucket in buckets:
        key, value = (_repeated(bucket.padded(x), repeats) for x in (key_TGD, value_TGD))
        out = F.scaled_dot_product_attention(bucket.padded(query_THD), key, value, is_causal=True)
        bucket.unpad(out, out_THD)
    return out_THD


class _BucketAttention(torch.autograd.Function):
    """torch's flash attention for CPU over the buckets. Slots behind a segment's end are of no consequence: no query
    before them sees them, and what they return is dropped."""

    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, buckets: tuple[Bucket, ...]
    ) -> Tensor:
        out_THD, saved = torch.empty_like(query_THD, memory_format=torch.contiguous_format), []
        repeats = query_THD.shape[1] // key_TGD.shape[1]
        for bucket in buckets:
            query = bucket.padded(query_THD)
            key, value = (_repeated(bucket.padded(x), repeats) for x in (key_TGD, value_TGD))
            out, logsumexp = _FLASH(query, key, value, is_causal=True)
            bucket.unpad(out, out_THD)
            saved += [query, key, value, out, logsumexp]
        ctx.save_for_backward(*saved)
        ctx.buckets, ctx.key_shape = buckets, key_TGD.shape
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        T, G, D = ctx.key_shape
        repeats = grad_THD.shape[1] // G
        gradients = grad_THD.new_empty(grad_THD.shape), *grad_THD.new_empty(2, T, G, D)
        saved = iter(ctx.saved_tensors)
        for bucket in ctx.buckets:
            query, key, value, out, logsumexp = (next(saved) for _ in range(5))
            upstream = bucket.padded(grad_THD, zero=True)
            found = _FLASH_BACKWARD(upstream, query, key, value, out, logsumexp, 0.0, True)
            for gradient, x, shared in zip(gradients, found, (1, repeats, repeats), strict=True):
                bucket.unpad(_summed(x, shared), gradient)
        return *gradients, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeated(x: Tensor, repeats: int) -> Tensor:
    """[N, G, M, D] with each head as often as queries share it."""
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _summed(x: Tensor, repeats: int) -> Tensor:
    """[N, G * repeats, M, D] summed over the heads that share a key."""
    return x if repeats == 1 else x.unflatten(1, (-1, repeats)).sum(2)
