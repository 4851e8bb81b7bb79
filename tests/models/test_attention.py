import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlmath.config.model_shape import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from rlmath.models import attention, composed_attention, cpu_attention
from rlmath.models.packed_sequences import BUCKET_FILL, PackedSequences, is_short, pack_sequences
from rlmath.models.rotary import Rotary, rotary_frequencies
from tests.rollout.weight_sync.oracle import SMALL

D = 6
RAGGED = [[1], [5], [1, 1, 1], [3, 9, 4, 10, 1, 7], [12, 11, 10], [2, 0, 3], [40, 36, 3, 20]]
"""Lengths of packs; segments of up to 6 to 16 tokens are short with heads of 6 dimensions."""


def packing(lengths: list[int]) -> PackedSequences:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions_T = torch.tensor([p for length in lengths for p in range(length)])
    return pack_sequences(bounds, max(lengths), positions_T, Rotary(torch.tensor([1.0, 0.1, 0.01])))


def inputs(lengths: list[int], heads: int, groups: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), n, D) for n in (heads, groups, groups)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes
    ]


def attend(lengths: list[int], qkv: list[Tensor], window: int | None = None) -> Tensor:
    return attention.attend(*qkv, packing(lengths), window)


def dense_attention(lengths: list[int], qkv: list[Tensor], window: int | None = None) -> Tensor:
    """softmax(Q K' / sqrt(D)) V over the whole pack.

    The mask is block-diagonal and causal, of `window` diagonals."""
    query, key, value = qkv
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen_TT = (segment_T[:, None] == segment_T[None, :]).tril()
    if window is not None:
        seen_TT = seen_TT.triu(1 - window)
    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(D)
    weights = scores.masked_fill(~seen_TT, -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_values_and_gradients_equal_dense_attention(
    lengths: list[int], heads: int, groups: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(composed_attention, "_WINDOW_ROWS", 5)
    qkv = inputs(lengths, heads, groups)
    got = attend(lengths, qkv, window)
    exact = dense_attention(lengths, qkv, window)
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(
        exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    gradients, exact_gradients = (torch.autograd.grad(out, qkv, upstream) for out in (got, exact))
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_the_attention_of_other_devices_is_the_same(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(composed_attention, "_WINDOW_ROWS", 5)
    qkv = inputs(lengths, heads=4, groups=2)
    composed = composed_attention.composed_attention(
        *qkv, packing(lengths).buckets, window
    ).flatten(1)
    ways = [composed, attend(lengths, qkv, window)]
    torch.testing.assert_close(ways[0], ways[1], rtol=1e-12, atol=1e-12)
    composed_gradients, gradients = (torch.autograd.grad(out.square().sum(), qkv) for out in ways)
    for gradient, expected in zip(composed_gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_short_segments_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch):
    lengths = [3, 9, 4, 10, 1, 7]
    qkv = inputs(lengths, heads=4, groups=2)
    runs = []
    for size in (cpu_attention._CHUNK_BYTES, 1):
        monkeypatch.setattr(cpu_attention, "_CHUNK_BYTES", size)
        out = attend(lengths, qkv)
        runs.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    for whole, in_chunks in zip(*runs, strict=True):
        torch.testing.assert_close(in_chunks, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_short_segments_keep_no_more_memory_than_the_flash_kernel(heads: int, groups: int):
    short = [M for M in range(1, 64) if is_short(M, heads, groups, D)]
    assert short == list(range(1, len(short) + 1)) and len(short) >= D
    for M in short:
        qkv = [tensor.detach() for tensor in inputs([M] * 3, heads, groups)]
        packed = packing([M] * 3)
        segments, long_buckets = packed.by_length(heads, groups, D)
        assert segments is not None and not long_buckets
        dense = cpu_attention._dense(segments, None, *qkv)[1]
        flash = cpu_attention._flash(None, *(packed.buckets[0].padded(tensor) for tensor in qkv))[1]
        assert sum(tensor.numel() for tensor in dense) <= sum(tensor.numel() for tensor in flash)


@pytest.mark.parametrize("poison", [math.nan, 1e6])
def test_nothing_leaks_into_another_segment(poison: float):
    lengths = [4, 5, 3, 4]
    clean = inputs(lengths, heads=2, groups=2)
    dirty = [tensor.detach().clone() for tensor in clean]
    for tensor in dirty:
        tensor[4:9] = poison
    outs = [attend(lengths, [tensor.requires_grad_() for tensor in qkv]) for qkv in (clean, dirty)]
    other_rows = [0, 1, 2, 3, *range(9, 16)]
    assert torch.equal(outs[0][other_rows], outs[1][other_rows])
    gradients = [
        torch.autograd.grad(out[other_rows].sum(), qkv)
        for out, qkv in zip(outs, (clean, dirty), strict=True)
    ]
    for clean_gradient, dirty_gradient in zip(*gradients, strict=True):
        assert torch.equal(clean_gradient[other_rows], dirty_gradient[other_rows])


segment_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@settings(deadline=None, max_examples=50)
@given(segment_lengths)
def test_buckets_hold_every_token_once_and_little_padding(lengths: list[int]):
    buckets = packing(lengths).buckets
    positions = torch.cat([bucket.positions_K for bucket in buckets])
    assert sorted(positions.tolist()) == list(range(sum(lengths)))
    for bucket in buckets:
        assert torch.equal(bucket.gather_NM.flatten()[bucket.slots_K], bucket.positions_K)
        longest = bucket.gather_NM.shape[1]
        for row, filled in zip(bucket.gather_NM, _filled(bucket), strict=True):
            assert filled >= BUCKET_FILL * longest
            assert row.diff()[: filled - 1].eq(1).all() and row.diff()[filled - 1 :].eq(0).all()


def _filled(bucket) -> list[int]:
    """Tokens of each segment of a bucket."""
    N, M = bucket.gather_NM.shape
    return torch.bincount(bucket.slots_K // M, minlength=N).tolist()


@settings(deadline=None, max_examples=50)
@given(segment_lengths, st.integers(1, 3))
def test_short_segments_are_laid_out_by_segment_and_head_and_come_back(
    lengths: list[int], heads: int
):
    packed = packing(lengths)
    T = sum(lengths)
    segments, long_buckets = packed.by_length(heads, heads, D)
    assert packed.by_length(heads, heads, D)[0] is segments, "once for all layers"
    shared = packed.by_length(heads, 1, D)[0]
    assert shared is None or (shared.query.heads, shared.key.heads) == (heads, 1)
    short = packed.buckets[len(long_buckets) :]
    assert long_buckets == packed.buckets[: len(long_buckets)]
    assert (segments is None) == (not short)
    if segments is None:
        return
    x_THD = torch.arange(1.0, T * heads * D + 1).view(T, heads, D)
    laid_out, zeroed = (segments.query.padded(x_THD, zero) for zero in (False, True))
    for bucket, (rows,), (blank,) in zip(
        short, segments.by_bucket([laid_out]), segments.by_bucket([zeroed]), strict=True
    ):
        N, M = bucket.gather_NM.shape
        assert torch.equal(rows.view(N, heads, M, D), x_THD[bucket.gather_NM].transpose(1, 2))
        assert torch.equal(blank.view(N, heads, M, D), bucket.padded(x_THD, zero=True))
    short_positions = torch.cat([bucket.positions_K for bucket in short])
    assert torch.equal(segments.query.unpadded(laid_out)[short_positions], x_THD[short_positions])


def test_rotary_angles_by_hand():
    # frequencies of base 10,000 and D = 4: 1 and 10,000 ** -0.5 = 0.01
    frequencies_F = rotary_frequencies(replace(SMALL, head_dim=4, rope_theta=10000.0))
    torch.testing.assert_close(frequencies_F, torch.tensor([1.0, 0.01]))
    packed = pack_sequences(
        torch.tensor([0, 2, 3]).int(), 2, torch.tensor([0, 3, 0]), Rotary(frequencies_F, 2.0)
    )
    angles = torch.tensor([[0.0, 0.0], [3.0, 0.03], [0.0, 0.0]])
    torch.testing.assert_close(packed.cos[:, 0], 2 * angles.cos())
    torch.testing.assert_close(packed.sin[:, 0], 2 * angles.sin())


def test_transformer_engine_gets_the_bounds_and_no_buckets():
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = pack_sequences(bounds, 3, torch.tensor([0, 1, 0, 1, 2]), rotary=None)
    assert packed.qkv_format == "thd" and "buckets" not in vars(packed)
    assert packed.cu_seqlens_q is bounds and packed.cu_seqlens_kv is bounds
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 4, "a power of two"
    assert packed.cu_seqlens_q_padded is None and packed.cos is None


ROPES: dict[str, tuple[RopeScaling, dict[str, Any]]] = {
    "llama3.1": (Llama3Scaling(8.0, 1.0, 4.0, 8192), {}),
    "llama3.2": (Llama3Scaling(32.0, 1.0, 4.0, 8192), {}),
    "llama3 tiny": (Llama3Scaling(8.0, 1.0, 4.0, 32), {"rope_theta": 10000.0}),
    "llama3 odd": (Llama3Scaling(2.5, 0.5, 7.0, 100), {"rope_theta": 10000.0}),
    "linear": (LinearScaling(4.0), {}),
    "yarn": (YarnScaling(4.0, 32.0, 1.0, 32768, 0.1 * math.log(4.0) + 1.0, True), {}),
    "yarn odd": (YarnScaling(3.0, 7.0, 2.5, 100, 1.5, False), {"rope_theta": 10000.0}),
    "yarn sharp": (YarnScaling(2.0, 1.0, 1.0, 1024, 1.0, False), {"rope_theta": 10000.0}),
    "longrope": (
        LongRopeScaling(tuple(1.0 + x / 8 for x in range(32)), math.sqrt(1 + 5 / 12), 131072),
        {},
    ),
}


@pytest.mark.parametrize(("scaling", "changes"), ROPES.values(), ids=ROPES)
def test_stretched_frequencies_are_those_of_transformers(
    scaling: RopeScaling, changes: dict[str, Any]
):
    kind = type(scaling).__name__.removesuffix("Scaling").lower()
    parameters = {
        name.replace("max_positions", "max_position_embeddings"): setting
        for name, setting in vars(scaling).items()
    }
    if isinstance(scaling, LongRopeScaling):
        parameters = {"short_factor": [*scaling.short_factors], "long_factor": [9.0] * 32}
    rope = {"rope_type": kind, "rope_theta": 500000.0, **parameters, **changes}
    settings: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
    }
    config = (Phi3Config if kind == "longrope" else LlamaConfig)(**settings, rope_parameters=rope)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config)
    shape = replace(SMALL, head_dim=64, rope_theta=rope["rope_theta"], rope_scaling=scaling)
    torch.testing.assert_close(rotary_frequencies(shape), expected, rtol=5e-7, atol=0)
    assert shape.rotary_magnitude == pytest.approx(attention_factor)
    plain = rotary_frequencies(replace(shape, rope_scaling=None))
    assert (rotary_frequencies(shape) <= plain).all() and not torch.equal(expected, plain)
