"""Attention bucket by bucket, by the kernel that torch chooses, on any device.

With a window it is computed for some queries at a time, and the keys that these see.
"""

# Shape legend: T packed tokens, H heads and G key heads of this rank, D head dim, N segments of one
# bucket, M longest segment of one bucket.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmath.models.packed_sequences import SegmentBucket


@dataclass(frozen=True)
class Block:
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


def blocks_of(query_NHMD: Tensor, window: int | None) -> list[Block]:
    """The blocks of queries in which attention is computed, one without a window."""
    M = query_NHMD.shape[2]
    if window is None or window >= M:
        return [Block(slice(None), slice(None), None)]
    max_rows = min(M, _WINDOW_ROWS)
    before = window - 1
    hidden = hidden_mask(max_rows, before, window, like=query_NHMD)
    blocks = []
    for start in range(0, M, max_rows):
        first, stop = max(0, start - before), min(M, start + max_rows)
        part = hidden[: stop - start, before - (start - first) : before + stop - start]
        blocks.append(Block(slice(start, stop), slice(first, stop), part))
    return blocks


def hidden_mask(rows: int, before: int, window: int | None, like: Tensor) -> Tensor:
    """Mask [rows, before + rows]: -inf where a query does not attend to a key, 0 elsewhere.

    The rows are queries one after another, the columns `before` keys before the first one, and
    their own."""
    nothing = like.new_full((rows, before + rows), -math.inf)
    future = nothing.triu(before + 1)
    return future if window is None else future + nothing.tril(before - window)


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
        key, value = (
            repeated_heads(bucket.padded(tensor), repeats) for tensor in (key_TGD, value_TGD)
        )
        query = bucket.padded(query_THD)
        outs = [
            F.scaled_dot_product_attention(
                *block.queries(query),
                *block.keys(key, value),
                attn_mask=block.hidden,
                is_causal=block.hidden is None,
            )
            for block in blocks_of(query, window)
        ]
        bucket.unpad(outs[0] if len(outs) == 1 else torch.cat(outs, 2), out_THD)
    return out_THD


def repeated_heads(x: Tensor, repeats: int) -> Tensor:
    """[N, G, M, D] with each head as often as queries share it."""
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)
