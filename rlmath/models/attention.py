"""Causal attention and rotary positions over packed sequences, for Megatron's local layers.

Megatron's own `DotProductAttention` refuses packed sequences. Ours pads segments of similar length
to one bucket, so that memory stays linear in the packed length and no token attends across a
segment's border. A GPU's flash kernel takes packs as they are.
"""

# Shape legend: T packed tokens, S segments, H heads and G key heads of this rank, D head dim, F =
# D/2 frequencies, N segments of one bucket, M longest segment of one bucket, P slots of all short
# segments' buckets.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.config.model_shape import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelShape,
    RopeScaling,
    YarnScaling,
)
from rlmath.models.local_layers import split_heads
from rlmath.models.scratch_sizes import flash_takes

BUCKET_FILL = 0.75
"""A segment joins a bucket only if it fills at least this share of the bucket's longest segment."""


@dataclass(frozen=True)
class SegmentBucket:
    """Segments of similar length, as index tensors between the packed and the padded layout."""

    gather_NM: Tensor
    """Packed position of each padded slot; slots behind a segment's end repeat its last token."""
    slots_K: Tensor
    """The K slots of the flattened padded layout that hold a token."""
    positions_K: Tensor
    """Packed position of each of them."""
    start: int | None
    """Start of the segments in the pack if they are equally long and lie one after another.

    Both layouts are then the same, and nothing is copied."""

    def padded(self, x: Tensor, zero: bool = False) -> Tensor:
        """[T, heads, D] laid out by segment: [N, heads, M, D].

        With `zero` slots without a token are 0."""
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


@dataclass(frozen=True)
class HeadRows:
    """Maps rows of D numbers between [T, heads, D] and all buckets, [N, heads, M, D].

    The buckets lie one after another. Both directions are one selection of rows, whatever the
    number of buckets."""

    from_packed: Tensor
    """Row in the pack of every row of the buckets; int32 [P * heads]."""
    to_packed: Tensor
    """Row in the buckets of every row of the pack; int32 [T * heads].

    It is 0 for tokens that are in no bucket."""
    empty: Tensor
    """Rows of the buckets without a token, int64: they hold the segment's last one."""
    heads: int

    def padded(self, x: Tensor, zero: bool = False) -> Tensor:
        """[T, heads, D] laid out by bucket: [P * heads, D].

        With `zero` rows without a token are 0."""
        laid_out = x.flatten(0, 1).index_select(0, self.from_packed)
        return laid_out.index_fill_(0, self.empty, 0.0) if zero else laid_out

    def unpadded(self, x: Tensor) -> Tensor:
        """The tokens of [P * heads, D] at their places in [T, heads, D].

        Other tokens may hold anything."""
        return x.index_select(0, self.to_packed).view(-1, self.heads, x.shape[1])


def _head_rows(buckets: Sequence[SegmentBucket], T: int, heads: int) -> HeadRows:
    """The rows of all buckets' heads and of a pack of T tokens, for both directions."""
    head_H = torch.arange(heads, device=buckets[0].gather_NM.device)
    from_packed = []
    first = 0
    to_packed_TH = head_H.new_zeros(T, heads)
    is_empty = head_H.new_ones(
        sum(bucket.gather_NM.numel() for bucket in buckets) * heads, dtype=torch.bool
    )
    for bucket in buckets:
        from_packed.append((bucket.gather_NM[:, None] * heads + head_H[:, None]).flatten())
        M = bucket.gather_NM.shape[1]
        segment_K, offset_K = bucket.slots_K // M, bucket.slots_K % M
        rows_KH = first + (segment_K[:, None] * heads + head_H) * M + offset_K[:, None]
        to_packed_TH[bucket.positions_K] = rows_KH
        is_empty[rows_KH.flatten()] = False
        first += bucket.gather_NM.numel() * heads
    return HeadRows(
        torch.cat(from_packed).int(), to_packed_TH.flatten().int(), is_empty.nonzero()[:, 0], heads
    )


@dataclass(frozen=True)
class ShortSegments:
    """The buckets of a pack's short segments, laid out one after another."""

    shapes: tuple[tuple[int, int], ...]
    """(N, M) of every bucket."""
    query: HeadRows
    key: HeadRows

    def by_bucket(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Tensors of [P * H, D] or [P * G, D] as views of every bucket.

        A view is [N * G, R * M, D], with R query heads for each key head, or [N * G, M, D]."""
        slots = sum(N * M for N, M in self.shapes)
        first = 0
        for N, M in self.shapes:
            heads = [len(tensor) // slots for tensor in tensors]
            rows = [
                tensor[first * head_count : (first + N * M) * head_count]
                for tensor, head_count in zip(tensors, heads, strict=True)
            ]
            yield tuple(tensor.view(N * self.key.heads, -1, tensor.shape[1]) for tensor in rows)
            first += N * M


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the fields that our attention needs."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    """Cosine and sine of every token's rotary angles, [T, 1, F]."""
    _by_length: dict[
        tuple[int, int, int], tuple[ShortSegments | None, tuple[SegmentBucket, ...]]
    ] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def buckets(self) -> tuple[SegmentBucket, ...]:
        """Buckets of the segments, the longest first.

        The host waits for a GPU to give their lengths."""
        starts_S = self.cu_seqlens_q[:-1].long()
        lengths_S = self.cu_seqlens_q.diff().long()
        groups = bucket_segments(lengths_S.tolist())
        return tuple(_make_bucket(starts_S[members], lengths_S[members]) for members in groups)

    def by_length(
        self, H: int, G: int, D: int
    ) -> tuple[ShortSegments | None, tuple[SegmentBucket, ...]]:
        """The short segments for such heads, None without any, and the buckets of the others.

        They are computed once for all layers."""
        key = H, G, D
        if key not in self._by_length:
            short = [
                bucket for bucket in self.buckets if _is_short(bucket.gather_NM.shape[1], H, G, D)
            ]
            segments = None
            if short:
                T = int(self.cu_seqlens_q[-1])
                shapes = tuple(
                    (len(bucket.gather_NM), bucket.gather_NM.shape[1]) for bucket in short
                )
                segments = ShortSegments(shapes, _head_rows(short, T, H), _head_rows(short, T, G))
            self._by_length[key] = segments, self.buckets[: len(self.buckets) - len(short)]
        return self._by_length[key]


def bucket_segments(lengths: list[int]) -> list[list[int]]:
    """Indices of segments grouped by similar length, longest first.

    Segments of length 0 are left out.

    >>> bucket_segments([10, 2, 9, 0])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda segment: (-lengths[segment], segment)):
        if lengths[index] == 0:
            continue
        if groups and lengths[index] >= BUCKET_FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _make_bucket(starts_N: Tensor, lengths_N: Tensor) -> SegmentBucket:
    """The bucket of segments with these starts and lengths in the pack."""
    longest = int(lengths_N.max())
    offsets_M = torch.arange(longest, device=starts_N.device)
    filled_NM = offsets_M[None, :] < lengths_N[:, None]
    gather_NM = starts_N[:, None] + torch.minimum(offsets_M[None, :], lengths_N[:, None] - 1)
    in_place = bool((lengths_N == longest).all()) and bool((starts_N.diff() == longest).all())
    slots_K = filled_NM.flatten().nonzero().squeeze(1)
    return SegmentBucket(
        gather_NM, slots_K, gather_NM[filled_NM], start=int(starts_N[0]) if in_place else None
    )


@dataclass(frozen=True)
class Rotary:
    frequencies_F: Tensor
    """Radians per position."""
    magnitude: float = 1.0
    """Factor of cosines and sines."""


def pack_sequences(
    cu_seqlens_S1: Tensor, max_seqlen: int, position_ids_T: Tensor, rotary: Rotary | None
) -> PackedSequences:
    """What the layers need to know about the packing of one micro-batch, computed once.

    `rotary` is for Megatron's local layers; None for Transformer Engine's, which get the longest
    segment rounded up to a power of two."""
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_S1,
        "cu_seqlens_kv": cu_seqlens_S1,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if rotary is None:
        # Megatron keeps the rotary tables of 32 lengths; a bound need not be tight.
        common["max_seqlen_q"] = common["max_seqlen_kv"] = 1 << (max_seqlen - 1).bit_length()
        return PackedSequences(**common)
    angles = torch.outer(position_ids_T.float(), rotary.frequencies_F)[:, None]
    cos, sin = (table.mul_(rotary.magnitude) for table in (angles.cos(), angles.sin()))
    return PackedSequences(**common, cos=cos, sin=sin)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """F frequencies of the rotary embedding (radians per position)."""
    dim = shape.rotary_dim or shape.head_dim
    plain_F = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    if shape.rope_scaling is None:
        return plain_F
    return stretched_frequencies(plain_F, shape.rope_theta, shape.rope_scaling)


def stretched_frequencies(frequencies_F: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies for longer sequences, from F plain ones of base `theta` (radians per position).

    They are those of transformers' `modeling_rope_utils`."""
    match scaling:
        case LinearScaling(factor):
            return frequencies_F / factor
        case LongRopeScaling(short_factors):
            return frequencies_F / torch.tensor(short_factors)
        case Llama3Scaling():
            turns_F = scaling.original_max_positions * frequencies_F / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept_share_F = ((turns_F - scaling.low_freq_factor) / span).clamp(0, 1)
        case YarnScaling():
            kept_share_F = 1 - _yarn_ramp(len(frequencies_F), theta, scaling)
    return kept_share_F * frequencies_F + (1 - kept_share_F) * frequencies_F / scaling.factor


def _yarn_ramp(F: int, theta: float, scaling: YarnScaling) -> Tensor:
    """0 for the frequencies that YaRN keeps to 1 for those that it divides, linear between."""

    def index_of(turns: float) -> float:
        """Index (with fraction) of the frequency that turns so often within the original length."""
        return (
            F * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)
        )

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * F - 1)
    return ((torch.arange(F).float() - low) / ((high - low) or 0.001)).clamp(0, 1)


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
        heads = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        angles = [table if self.rotates else table[..., :0] for table in (packing.cos, packing.sin)]
        norms = self.q_layernorm, self.k_layernorm
        query_THD, key_TGD, value_TGD = split_heads(
            projected.view(len(projected), *heads), bias, norms, angles
        )
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
        return _CPUAttention.apply(query_THD, key_TGD, value_TGD, packing, window).flatten(1)
    if flash_takes(query_THD.shape[2], query_THD.dtype.itemsize):
        return flash_over_segments(
            query_THD, key_TGD, value_TGD, packing=packing, window=window
        ).flatten(1)
    return composed_attention(
        query_THD, key_TGD, value_TGD, buckets=packing.buckets, window=window
    ).flatten(1)


@dataclass(frozen=True)
class _Block:
    """Queries of a segment and the keys that they attend to; without a window all of both."""

    rows: slice
    columns: slice
    hidden: Tensor | None
    """Mask [queries, keys], -inf where a query does not attend to a key.

    None: a query attends to all keys but later ones."""

    def queries(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The block's part of tensors [N, heads, M, ...] of queries."""
        return tuple(tensor[:, :, self.rows] for tensor in tensors)

    def keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor[:, :, self.columns] for tensor in tensors)


_WINDOW_ROWS = 512
"""Queries of a block where there is a window."""


def _blocks(query_NHMD: Tensor, window: int | None) -> list[_Block]:
    """The blocks of queries in which attention is computed, one without a window."""
    M = query_NHMD.shape[2]
    if window is None or window >= M:
        return [_Block(slice(None), slice(None), None)]
    most = min(M, _WINDOW_ROWS)
    before = window - 1
    hidden = _hidden(most, before, window, like=query_NHMD)
    blocks = []
    for start in range(0, M, most):
        first, stop = max(0, start - before), min(M, start + most)
        part = hidden[: stop - start, before - (start - first) : before + stop - start]
        blocks.append(_Block(slice(start, stop), slice(first, stop), part))
    return blocks


def _hidden(rows: int, before: int, window: int | None, like: Tensor) -> Tensor:
    """Mask [rows, before + rows]: -inf where a query does not attend to a key, 0 elsewhere.

    The rows are queries one after another, the columns `before` keys before the first one, and
    their own."""
    nothing = like.new_full((rows, before + rows), -math.inf)
    future = nothing.triu(before + 1)
    return future if window is None else future + nothing.tril(before - window)


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
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        window is None,
        False,
        **sides,
    )
    return out_THD


def composed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    buckets: tuple[SegmentBucket, ...],
    window: int | None = None,
) -> Tensor:
    """The attention of torch's own choice over the buckets, on any device: [T, H, D]."""
    out_THD = query_THD.new_zeros(query_THD.shape)
    repeats = query_THD.shape[1] // key_TGD.shape[1]
    for bucket in buckets:
        key, value = (_repeated(bucket.padded(tensor), repeats) for tensor in (key_TGD, value_TGD))
        query = bucket.padded(query_THD)
        outs = [
            F.scaled_dot_product_attention(
                *block.queries(query),
                *block.keys(key, value),
                attn_mask=block.hidden,
                is_causal=block.hidden is None,
            )
            for block in _blocks(query, window)
        ]
        bucket.unpad(outs[0] if len(outs) == 1 else torch.cat(outs, 2), out_THD)
    return out_THD


class _CPUAttention(torch.autograd.Function):
    """Attention on CPU within the segments.

    Short ones are computed by products of whole matrices, the others, bucket by bucket, by torch's
    flash kernel. Slots behind a segment's end are of no consequence: no query before them sees
    them, and what they return is dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        packing: PackedSequences,
        window: int | None,
    ) -> Tensor:
        ctx.window = window
        ctx.short, ctx.long = packing.by_length(query_THD.shape[1], *key_TGD.shape[1:])
        if ctx.short is None:
            out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
            saved = []
        else:
            out_THD, saved = _dense(
                ctx.short, window, query_THD, key_TGD=key_TGD, value_TGD=value_TGD
            )
        ctx.short_keeps = len(saved)
        for bucket in ctx.long:
            out, bucket_tensors = _flash(
                window, *(bucket.padded(tensor) for tensor in (query_THD, key_TGD, value_TGD))
            )
            bucket.unpad(out, out_THD)
            saved += bucket_tensors
        ctx.save_for_backward(*saved)
        ctx.key_shape = key_TGD.shape
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        T, G, D = ctx.key_shape
        saved = iter(ctx.saved_tensors)
        if ctx.short is None:
            gradients = grad_THD.new_empty(grad_THD.shape), *grad_THD.new_empty(2, T, G, D)
        else:
            gradients = _dense_backward(
                ctx.short, grad_THD, *itertools.islice(saved, ctx.short_keeps)
            )
        for bucket in ctx.long:
            bucket_tensors = itertools.islice(saved, _FLASH_KEEPS)
            bucket_gradients = _flash_backward(
                ctx.window, bucket.padded(grad_THD, zero=True), G, *bucket_tensors
            )
            for gradient, bucket_gradient in zip(gradients, bucket_gradients, strict=True):
                bucket.unpad(bucket_gradient, gradient)
        return *gradients, None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_KEEPS = 5
"""Tensors of a bucket that `_flash` keeps for `_flash_backward`."""


def _repeated(x: Tensor, repeats: int) -> Tensor:
    """[N, G, M, D] with each head as often as queries share it."""
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _summed(x: Tensor, repeats: int) -> Tensor:
    """[N, G * repeats, M, D] summed over the heads that share a key."""
    return x if repeats == 1 else x.unflatten(1, (-1, repeats)).sum(2)


def _flash(
    window: int | None, query_NHMD: Tensor, key_NGMD: Tensor, value_NGMD: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The attention [N, H, M, D], and what `_flash_backward` needs."""
    repeats = query_NHMD.shape[1] // key_NGMD.shape[1]
    key, value = (_repeated(tensor, repeats) for tensor in (key_NGMD, value_NGMD))
    blocks = _blocks(query_NHMD, window)
    outputs = [
        _FLASH(
            *block.queries(query_NHMD),
            *block.keys(key, value),
            is_causal=block.hidden is None,
            attn_mask=block.hidden,
        )
        for block in blocks
    ]
    out, logsumexp = (
        outputs[0]
        if len(outputs) == 1
        else (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
    )
    return out, [query_NHMD, key, value, out, logsumexp]


def _flash_backward(
    window: int | None, upstream_NHMD: Tensor, G: int, *kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [N, H, M, D], key and value [N, G, M, D]."""
    repeats = upstream_NHMD.shape[1] // G
    query, key, value, out, logsumexp = kept
    blocks = _blocks(query, window)
    if len(blocks) == 1 and blocks[0].hidden is None:
        grads = _FLASH_BACKWARD(upstream_NHMD, query, key, value, out, logsumexp, 0.0, True)
        return grads[0], _summed(grads[1], repeats), _summed(grads[2], repeats)
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for block in blocks:
        row_tensors = block.queries(upstream_NHMD, query, out, logsumexp)
        parts = _FLASH_BACKWARD(
            *row_tensors[:2],
            *block.keys(key, value),
            *row_tensors[2:],
            0.0,
            False,
            attn_mask=block.hidden,
        )
        sums = *block.queries(grads[0]), *block.keys(*grads[1:])
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
    return grads[0], _summed(grads[1], repeats), _summed(grads[2], repeats)


# Short segments: the flash kernel takes a fixed time for each segment and head, in which a product
# of whole matrices computes all scores of some 50 tokens. L = R * M rows of the R query heads that
# share a key, B = N * G.

_CHUNK_BYTES = 2**20
"""Scores that are computed at a time: they should stay in a core's cache."""


def _is_short(M: int, H: int, G: int, D: int) -> bool:
    """Whether the probabilities take no more memory than the copies that the flash kernel needs.

    There are M probabilities of a query; the copies are the kernel's result, and keys and values
    repeated for every query head."""
    return H * M <= D * (3 * H - 2 * G)


def _dense(
    short: ShortSegments, window: int | None, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The attention [T, H, D] of tokens of short segments, and what `_dense_backward` needs."""
    laid_out = short.query.padded(query_THD), short.key.padded(key_TGD), short.key.padded(value_TGD)
    out = torch.empty_like(laid_out[0])
    probs = []
    for query_BLD, key_BMD, value_BMD, out_BLD in short.by_bucket(*laid_out, out):
        B, L, D = query_BLD.shape
        M = key_BMD.shape[1]
        hidden_LM = _hidden(M, 0, window, like=query_BLD).repeat(L // M, 1)
        probs_BLM = query_BLD.new_empty(B, L, M)
        for probs_, query, key, value, out_ in _chunks(
            probs_BLM, query_BLD, key_BMD, value_BMD, out_BLD
        ):
            scores = torch.baddbmm(hidden_LM, query, key.mT, alpha=D**-0.5)
            torch.softmax(scores, -1, out=probs_)
            torch.bmm(probs_, value, out=out_)
        probs.append(probs_BLM)
    return short.query.unpadded(out), [*laid_out, *probs]


def _dense_backward(
    short: ShortSegments,
    upstream_THD: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *probs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [T, H, D], key and value [T, G, D] at tokens of short segments."""
    upstream = short.query.padded(upstream_THD, zero=True)
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    by_bucket = short.by_bucket(upstream, query, key, value, *grads)
    for probs_BLM, in_bucket in zip(probs, by_bucket, strict=True):
        for p, up, q, k, v, grad_q, grad_k, grad_v in _chunks(probs_BLM, *in_bucket):
            torch.bmm(p.mT, up, out=grad_v)
            grad_p = torch.bmm(up, v.mT)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(
                q.shape[-1] ** -0.5
            )
            torch.bmm(grad_scores, k, out=grad_q)
            torch.bmm(grad_scores.mT, q, out=grad_k)
    return (
        short.query.unpadded(grads[0]),
        short.key.unpadded(grads[1]),
        short.key.unpadded(grads[2]),
    )


def _chunks(probs_BLM: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """All tensors in chunks of their first dimension; the probabilities take about _CHUNK_BYTES."""
    rows = max(1, _CHUNK_BYTES // probs_BLM[0].nbytes)
    return zip(*(tensor.split(rows) for tensor in (probs_BLM, *tensors)), strict=True)
