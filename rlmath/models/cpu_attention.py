"""Attention on CPU, short segments by products of whole matrices, others by torch's flash kernel.

The flash kernel takes a fixed time for each segment and head, in which a product of whole matrices
computes all scores of some 50 tokens.
"""

# Shape legend: T packed tokens, H heads and G key heads of this rank, D head dim, N segments of one
# bucket, M longest segment of one bucket, B = N * G, L = R * M rows of the R query heads that share
# a key.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmath.models.composed_attention import blocks_of, hidden_mask, repeated_heads
from rlmath.models.packed_sequences import PackedSequences, ShortSegments

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_KEEPS = 5
"""Tensors of a bucket that `_flash` keeps for `_flash_backward`."""


class CPUAttention(torch.autograd.Function):
    """Attention on CPU within the segments.

    Slots behind a segment's end are of no consequence: no query before them sees
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
        saved = iter(ctx.saved_tensors)
        if ctx.short is None:
            gradients = (
                grad_THD.new_empty(grad_THD.shape),
                grad_THD.new_empty(ctx.key_shape),
                grad_THD.new_empty(ctx.key_shape),
            )
        else:
            short_tensors = list(itertools.islice(saved, ctx.short_keeps))
            gradients = _dense_backward(ctx.short, grad_THD, short_tensors)
        for bucket in ctx.long:
            bucket_tensors = list(itertools.islice(saved, _FLASH_KEEPS))
            bucket_gradients = _flash_backward(
                ctx.window,
                bucket.padded(grad_THD, zero=True),
                bucket_tensors,
                repeats=grad_THD.shape[1] // ctx.key_shape[1],
            )
            for gradient, bucket_gradient in zip(gradients, bucket_gradients, strict=True):
                bucket.unpad(bucket_gradient, gradient)
        return *gradients, None, None


# ---------------------------------------------------------------- other segments


def _summed(x: Tensor, repeats: int) -> Tensor:
    """[N, G * repeats, M, D] summed over the heads that share a key."""
    return x if repeats == 1 else x.unflatten(1, (-1, repeats)).sum(2)


def _flash(
    window: int | None, query_NHMD: Tensor, key_NGMD: Tensor, value_NGMD: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The attention [N, H, M, D], and what `_flash_backward` needs."""
    repeats = query_NHMD.shape[1] // key_NGMD.shape[1]
    key, value = (repeated_heads(tensor, repeats) for tensor in (key_NGMD, value_NGMD))
    blocks = blocks_of(query_NHMD, window)
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
    window: int | None, upstream_NHMD: Tensor, saved: Sequence[Tensor], repeats: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [N, H, M, D], key and value [N, G, M, D], of what `_flash` has saved."""
    query, key, value, out, logsumexp = saved
    blocks = blocks_of(query, window)
    if len(blocks) == 1 and blocks[0].hidden is None:
        grads = _FLASH_BACKWARD(
            upstream_NHMD,
            query,
            key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            dropout_p=0.0,
            is_causal=True,
        )
        return grads[0], _summed(grads[1], repeats), _summed(grads[2], repeats)
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for block in blocks:
        block_upstream, block_query, block_out, block_logsumexp = block.queries(
            upstream_NHMD, query, out, logsumexp
        )
        block_key, block_value = block.keys(key, value)
        parts = _FLASH_BACKWARD(
            block_upstream,
            block_query,
            block_key,
            value=block_value,
            out=block_out,
            logsumexp=block_logsumexp,
            dropout_p=0.0,
            is_causal=False,
            attn_mask=block.hidden,
        )
        sums = [*block.queries(grads[0]), *block.keys(grads[1], grads[2])]
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
    return grads[0], _summed(grads[1], repeats), _summed(grads[2], repeats)


# ---------------------------------------------------------------- short segments

_CHUNK_BYTES = 2**20
"""Scores that are computed at a time: they should stay in a core's cache."""


def _dense(
    short: ShortSegments, window: int | None, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The attention [T, H, D] of tokens of short segments, and what `_dense_backward` needs."""
    laid_out = short.query.padded(query_THD), short.key.padded(key_TGD), short.key.padded(value_TGD)
    out = torch.empty_like(laid_out[0])
    probs = []
    for query_BLD, key_BMD, value_BMD, out_BLD in short.by_bucket([*laid_out, out]):
        B, L, D = query_BLD.shape
        M = key_BMD.shape[1]
        hidden_LM = hidden_mask(M, 0, window, like=query_BLD).repeat(L // M, 1)
        probs_BLM = query_BLD.new_empty(B, L, M)
        for probs_, query, key, value, out_ in _chunks(
            [probs_BLM, query_BLD, key_BMD, value_BMD, out_BLD]
        ):
            scores = torch.baddbmm(hidden_LM, query, key.mT, alpha=D**-0.5)
            torch.softmax(scores, -1, out=probs_)
            torch.bmm(probs_, value, out=out_)
        probs.append(probs_BLM)
    return short.query.unpadded(out), [*laid_out, *probs]


def _dense_backward(
    short: ShortSegments, upstream_THD: Tensor, saved: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [T, H, D], key and value [T, G, D] at tokens of short segments."""
    query, key, value, *probs = saved
    upstream = short.query.padded(upstream_THD, zero=True)
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    by_bucket = short.by_bucket([upstream, query, key, value, *grads])
    for probs_BLM, in_bucket in zip(probs, by_bucket, strict=True):
        for p, up, q, k, v, grad_q, grad_k, grad_v in _chunks([probs_BLM, *in_bucket]):
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


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """All tensors in chunks of their first dimension.

    The first of them, the probabilities, takes about _CHUNK_BYTES in each."""
    rows = max(1, _CHUNK_BYTES // tensors[0][0].nbytes)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
