"""Activation and rotation of Megatron's local layers on a GPU, each one Triton kernel each way (`local_layers` has the
same of torch's operations). They compute in float32 and round what they write."""

# Shape legend: T packed tokens, U feed-forward units of this rank, H heads and G key heads, D head dim, F frequencies.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Units of one program."""


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) up of [..., 2U], the gate being the first half; [..., U]."""
    x, U = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], U)
    if out.numel():
        _swiglu[(out.numel() // U, triton.cdiv(U, BLOCK))](x, out, U, BLOCK)
    return out


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Of `swiglu`, [..., 2U]."""
    grad, x, U = grad.contiguous(), x.contiguous(), grad.shape[-1]
    grad_x = torch.empty_like(x)
    if grad.numel():
        _swiglu_gradient[(grad.numel() // U, triton.cdiv(U, BLOCK))](grad, x, grad_x, U, BLOCK)
    return grad_x


@triton.jit
def _swiglu(x, out, U, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < U
    gate = tl.load(x + row * 2 * U + column, there, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * U + U + column, there, 0.0).to(tl.float32)
    tl.store(out + row * U + column, gate * tl.sigmoid(gate) * up, there)


@triton.jit
def _swiglu_gradient(grad, x, grad_x, U, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < U
    gate_at = row * 2 * U + column
    gate = tl.load(x + gate_at, there, 0.0).to(tl.float32)
    up = tl.load(x + gate_at + U, there, 0.0).to(tl.float32)
    upstream = tl.load(grad + row * U + column, there, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(grad_x + gate_at, upstream * up * sigmoid * (1 + gate * (1 - sigmoid)), there)
    tl.store(grad_x + gate_at + U, upstream * gate * sigmoid, there)


def rotated(query_THD: Tensor, key_TGD: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Both by the angle, or with `sign` -1 by minus the angle; cosines and sines are [T, 1, F]. Heads may lie anywhere,
    the dims of a head one after another."""
    pair = tuple(x if x.stride(2) == 1 else x.contiguous() for x in (query_THD, key_TGD))
    turned = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in pair)
    (T, H, D), G, F = query_THD.shape, key_TGD.shape[1], cos.shape[-1]
    if T:
        _rotate[(T,)](
            *pair,
            *turned,
            cos,
            sin,
            *pair[0].stride()[:2],
            *pair[1].stride()[:2],
            H,
            G,
            D,
            F,
            sign,
            triton.next_power_of_2(H),
            triton.next_power_of_2(G),
            triton.next_power_of_2(F),
            triton.next_power_of_2(D - 2 * F) if D > 2 * F else 0,
        )
    return turned


@triton.jit
def _rotate(
    query,
    key,
    query_out,
    key_out,
    cos,
    sin,
    query_token,
    query_head,
    key_token,
    key_head,
    H,
    G,
    D,
    F,
    sign,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    frequency = tl.arange(0, FREQUENCIES)
    there = frequency < F
    cosine = tl.load(cos + token * F + frequency, there, 0.0)[None, :]
    sine = tl.load(sin + token * F + frequency, there, 0.0)[None, :] * sign
    query += token * query_token
    key += token * key_token
    _rotate_heads(
        query, query_out + token * H * D, query_head, H, cosine, sine, D, F, HEADS, FREQUENCIES, REST
    )
    _rotate_heads(key, key_out + token * G * D, key_head, G, cosine, sine, D, F, KEY_HEADS, FREQUENCIES, REST)


@triton.jit
def _rotate_heads(
    x,
    out,
    stride,
    heads,
    cosine,
    sine,
    D,
    F,
    HEADS: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    REST: tl.constexpr,
):
    head = tl.arange(0, HEADS)[:, None]
    frequency = tl.arange(0, FREQUENCIES)[None, :]
    there = (head < heads) & (frequency < F)
    a = tl.load(x + head * stride + frequency, there, 0.0).to(tl.float32)
    b = tl.load(x + head * stride + F + frequency, there, 0.0).to(tl.float32)
    tl.store(out + head * D + frequency, a * cosine - b * sine, there)
    tl.store(out + head * D + F + frequency, b * cosine + a * sine, there)
    if REST:
        dim = 2 * F + tl.arange(0, REST)[None, :]
        there = (head < heads) & (dim < D)
        tl.store(out + head * D + dim, tl.load(x + head * stride + dim, there, 0.0), there)
