"""The segments of a pack, as attention needs them.

Segments of similar length are padded to one bucket, so that memory stays linear in the packed
length and no token attends across a segment's border.
"""

# Shape legend: T packed tokens, S segments, H heads and G key heads of this rank, D head dim, F =
# D/2 frequencies, N segments of one bucket, M longest segment of one bucket, P slots of all short
# segments' buckets.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlmath.models.rotary import Rotary
from rlmath.models.routing import BatchRouting

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

    def by_bucket(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
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
    routing: BatchRouting | None = None
    """Experts that the layers replay or record; None: they route by themselves."""
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
                bucket for bucket in self.buckets if is_short(bucket.gather_NM.shape[1], H, G, D)
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


def is_short(M: int, H: int, G: int, D: int) -> bool:
    """Whether the probabilities take no more memory than the copies that the flash kernel needs.

    There are M probabilities of a query; the copies are the kernel's result, and keys and values
    repeated for every query head."""
    return H * M <= D * (3 * H - 2 * G)


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
