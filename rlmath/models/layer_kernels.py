"""What Megatron's local layers do between their products on a GPU: Triton kernels, one each way.

`local_layers` has the same made of torch's operations. The kernels compute in float32 and round
what they write.

A weight's gradient is a sum over tokens. Each program writes the sum over its own as one of P
parts, and a product adds them to Megatron's buffer, in an order that is always the same.
"""

# Shape legend: T packed tokens, U feed-forward units of this rank, H hidden size, P programs, N
# numbers of a weight; of attention G key heads, S heads of a group (R queries that share a key, the
# key, the value), D head dim, F frequencies.

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from triton.language import constexpr

BLOCK = 1024
"""Units of one program of SwiGLU."""
PROGRAMS = 1024
"""Programs that share the tokens where weights have gradients."""


def _blocks(**sizes: int) -> dict[str, int]:
    """Powers of two that hold so many, and the warps for 8 numbers a thread."""
    blocks = {name: triton.next_power_of_2(size) for name, size in sizes.items()}
    return blocks | {"num_warps": min(16, max(1, math.prod(blocks.values()) // 256))}


def _add_to_buffer(parts_PN: Tensor | None, weight_N: Tensor | None) -> Tensor | None:
    """Add the gradient to Megatron's buffer; returns what autograd gets in its place.

    Megatron's products do the same, so that its hooks run."""
    if parts_PN is None:
        return None
    weight_N.main_grad.addmv_(parts_PN.t(), _ones(len(parts_PN), parts_PN.device))
    weight_N.grad_added_to_main_grad = True
    return torch.empty_like(weight_N)


@cache
def _ones(number: int, device: torch.device) -> Tensor:
    return torch.ones(number, device=device)


class AddNorm(Function):
    """The kernels of `local_layers.RMSNorm.behind`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, w_H: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        H = len(w_H)
        total = x
        normed = torch.empty_like(x)
        if added is not None:
            total = torch.empty_like(x)
            added = added.contiguous()
        ctx.sizes = {"eps": eps, "H": H, **_blocks(BLOCK=H)}
        _add_norm[(x.numel() // H,)](x, added, weight=w_H, total=total, normed=normed, **ctx.sizes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, w_H)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_H = ctx.saved_tensors
        _, adds, learns, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x)
        rows = x.numel() // len(w_H)
        programs = min(rows, PROGRAMS)
        parts = x.new_empty(programs, len(w_H), dtype=torch.float32) if learns else None
        grad_total = None if grad_total is None else grad_total.contiguous()
        _add_norm_gradient[(programs,)](
            grad.contiguous(),
            grad_total,
            x,
            weight=w_H,
            grad_x=grad_x,
            parts=parts,
            rows=rows,
            **ctx.sizes,
        )
        return grad_x, grad_x if adds else None, _add_to_buffer(parts, w_H), None


@triton.jit
def _add_norm(x, added, weight, total, normed, eps, H, BLOCK: constexpr):
    """One program for a token: x with what is added to it, and the norm of that."""
    at = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    is_inside = column < H
    value = tl.load(x + at + column, is_inside, 0.0).to(tl.float32)
    if added is not None:
        value += tl.load(added + at + column, is_inside, 0.0).to(tl.float32)
        tl.store(total + at + column, value, is_inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(
        normed + at + column,
        value * r * tl.load(weight + column, is_inside, 0.0).to(tl.float32),
        is_inside,
    )


@triton.jit
def _add_norm_gradient(grad, grad_total, x, weight, grad_x, parts, rows, eps, H, BLOCK: constexpr):
    """One program for every so many tokens: gradients of x, and a part of the weight's."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < H
    scale = tl.load(weight + column, is_inside, 0.0).to(tl.float32)
    weight_gradient = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * H + column
        value = tl.load(x + at, is_inside, 0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
        normed = value * r
        upstream = tl.load(grad + at, is_inside, 0.0).to(tl.float32)
        weight_gradient += upstream * normed
        upstream *= scale
        gradient = r * (upstream - normed * (tl.sum(upstream * normed, 0) / H))
        if grad_total is not None:
            gradient += tl.load(grad_total + at, is_inside, 0.0).to(tl.float32)
        tl.store(grad_x + at, gradient, is_inside)
    if parts is not None:
        tl.store(parts + program * H + column, weight_gradient, is_inside)


class SplitHeads(Function):
    """The kernels of `local_layers.split_heads`; the weights are those of both norms.

    Without norms no projection is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TGSD: Tensor,
        eps: float,
        bias: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_TGSD = x_TGSD.contiguous()
        T, G, S, D = x_TGSD.shape
        query = x_TGSD.new_empty(T, G * (S - 2), D)
        key = x_TGSD.new_empty(T, G, D)
        value = x_TGSD.new_empty(T, G, D)
        ctx.sizes = {
            "eps": eps,
            "R": S - 2,
            "D": D,
            "F": sin.shape[-1],
            **_blocks(HEADS=S, BLOCK=D),
        }
        _split_heads[(T, G)](
            x_TGSD,
            query,
            key,
            v=value,
            b=bias,
            wq=query_weight,
            wk=key_weight,
            cos=cos,
            sin=sin,
            **ctx.sizes,
        )
        normed_TGSD = x_TGSD if query_weight is not None else None
        ctx.save_for_backward(normed_TGSD, bias, query_weight, key_weight, cos, sin)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TGSD, bias, query_weight, key_weight, cos, sin = ctx.saved_tensors
        T, G, D = grad_key.shape
        S = ctx.sizes["R"] + 2
        programs = min(T, PROGRAMS)
        grad_x = grad_key.new_empty(T, G, S, D)

        def parts(learns: bool, rows: int, columns: int) -> Tensor | None:
            if not learns:
                return None
            return grad_x.new_empty(rows, columns, dtype=torch.float32)

        _, _, learns_bias, learns_query_weight, learns_key_weight, _, _ = ctx.needs_input_grad
        bias_parts = parts(learns_bias, programs, G * S * D)
        query_weight_parts = parts(learns_query_weight, programs * G, D)
        key_weight_parts = parts(learns_key_weight, programs * G, D)
        _split_heads_gradient[(programs, G)](
            x_TGSD,
            grad_query.contiguous(),
            grad_key.contiguous(),
            v=grad_value.contiguous(),
            b=bias,
            wq=query_weight,
            wk=key_weight,
            cos=cos,
            sin=sin,
            dx=grad_x,
            db=bias_parts,
            dwq=query_weight_parts,
            dwk=key_weight_parts,
            T=T,
            **ctx.sizes,
        )
        return (
            grad_x,
            None,
            _add_to_buffer(bias_parts, bias),
            _add_to_buffer(query_weight_parts, query_weight),
            _add_to_buffer(key_weight_parts, key_weight),
            None,
            None,
        )


@triton.jit
def _split_heads(x, q, k, v, b, wq, wk, cos, sin, eps, R, D, F, HEADS: constexpr, BLOCK: constexpr):
    """One program for a group of one token.

    A dim that turns needs another one, its partner, which is read once more."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    partner, cosine, sine = _angles(cos, sin, token, head=head, dim=dim, R=R, F=F)
    at = token * tl.num_programs(1) + group
    value = _biased(x, b, at, group, head, dim, R, D)
    partner_value = _biased(x, b, at, group, head, partner, R, D)
    if wq is not None:
        r = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= _scale(wq, wk, r, head, dim, R, D)
        partner_value *= _scale(wq, wk, r, head, partner, R, D)
    turned = value * cosine + partner_value * sine
    tl.store(q + (at * R + head) * D + dim, turned, (dim < D) & (head < R))
    tl.store(k + (at + head - R) * D + dim, turned, (dim < D) & (head == R))
    tl.store(v + (at + head - R - 1) * D + dim, turned, (dim < D) & (head == R + 1))


@triton.jit
def _split_heads_gradient(
    x,
    q,
    k,
    v,
    b,
    wq,
    wk,
    cos,
    sin,
    dx,
    db,
    dwq,
    dwk,
    T,
    eps,
    R,
    D,
    F,
    HEADS: constexpr,
    BLOCK: constexpr,
):
    """One program for a group of every so many tokens; q, k and v are their gradients."""
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    is_inside = (head < R + 2) & (dim < D)
    bias_gradient = tl.zeros((HEADS, BLOCK), tl.float32)
    weight_gradient = tl.zeros((HEADS, BLOCK), tl.float32)
    for token in range(program, T, tl.num_programs(0)):
        partner, cosine, sine = _angles(cos, sin, token, head=head, dim=dim, R=R, F=F)
        at = token * groups + group
        gradient = _joined(q, k, v, at, head, dim, R, D) * cosine
        gradient -= _joined(q, k, v, at, head, partner, R, D) * sine
        if wq is not None:
            value = _biased(x, b, at, group, head, dim, R, D)
            r = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
            weight_gradient += gradient * value * r
            scaled = gradient * _scale(wq, wk, r, head, dim, R, D)
            through_r = r * r * value * (tl.sum(scaled * value, 1) / D)[:, None]
            gradient = tl.where(head <= R, scaled - through_r, gradient)
        tl.store(dx + (at * (R + 2) + head) * D + dim, gradient, is_inside)
        bias_gradient += gradient
    at = program * groups + group
    if db is not None:
        tl.store(db + (at * (R + 2) + head) * D + dim, bias_gradient, is_inside)
    if dwq is not None:
        tl.store(
            dwq + at * D + dim,
            tl.sum(tl.where(head < R, weight_gradient, 0.0), 0)[None, :],
            dim < D,
        )
        tl.store(
            dwk + at * D + dim,
            tl.sum(tl.where(head == R, weight_gradient, 0.0), 0)[None, :],
            dim < D,
        )


@triton.jit
def _angles(cos, sin, token, head, dim, R, F):
    """The partner of a dim, and its cosine and sine, which has the partner's sign."""
    at = token * F + tl.where(dim < F, dim, dim - F)
    turns = (head <= R) & (dim < 2 * F)
    sine = tl.load(sin + at, turns, 0.0)
    partner = tl.where(dim < F, dim + F, tl.where(dim < 2 * F, dim - F, dim))
    return partner, tl.load(cos + at, turns, 1.0), tl.where(dim < F, -sine, sine)


@triton.jit
def _biased(x, b, at, group, head, dim, R, D):
    is_inside = (head < R + 2) & (dim < D)
    values = tl.load(x + (at * (R + 2) + head) * D + dim, is_inside, 0.0).to(tl.float32)
    if b is not None:
        values += tl.load(b + (group * (R + 2) + head) * D + dim, is_inside, 0.0).to(tl.float32)
    return values


@triton.jit
def _scale(wq, wk, r, head, dim, R, D):
    """The factor of query and key; the value is not normed."""
    weight = tl.where(head < R, tl.load(wq + dim, dim < D, 0.0), tl.load(wk + dim, dim < D, 0.0))
    return tl.where(head <= R, r * weight.to(tl.float32), 1.0)


@triton.jit
def _joined(q, k, v, at, head, dim, R, D):
    values = tl.load(q + (at * R + head) * D + dim, (dim < D) & (head < R), 0.0).to(tl.float32)
    values += tl.load(k + (at + head - R) * D + dim, (dim < D) & (head == R), 0.0).to(tl.float32)
    return values + tl.load(v + (at + head - R - 1) * D + dim, (dim < D) & (head == R + 1), 0.0).to(
        tl.float32
    )


class SwiGLU(Function):
    """The kernels of `local_layers._SwiGLU`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, U = x.contiguous(), x.shape[-1] // 2
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], U)
        _swiglu[(out.numel() // U, triton.cdiv(U, BLOCK))](x, out, U, BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        U = grad.shape[-1]
        grad_x = torch.empty_like(x)
        _swiglu_gradient[(grad.numel() // U, triton.cdiv(U, BLOCK))](
            grad.contiguous(), x, grad_x, U=U, BLOCK=BLOCK
        )
        return grad_x


@triton.jit
def _swiglu(x, out, U, BLOCK: constexpr):
    """One program for a block of a token's units."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < U
    gate = tl.load(x + row * 2 * U + column, is_inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * U + U + column, is_inside, 0.0).to(tl.float32)
    tl.store(out + row * U + column, gate * tl.sigmoid(gate) * up, is_inside)


@triton.jit
def _swiglu_gradient(grad, x, grad_x, U, BLOCK: constexpr):
    """One program for a block of a token's units."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < U
    gate_at = row * 2 * U + column
    gate = tl.load(x + gate_at, is_inside, 0.0).to(tl.float32)
    up = tl.load(x + gate_at + U, is_inside, 0.0).to(tl.float32)
    upstream = tl.load(grad + row * U + column, is_inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(grad_x + gate_at, upstream * up * sigmoid * (1 + gate * (1 - sigmoid)), is_inside)
    tl.store(grad_x + gate_at + U, upstream * gate * sigmoid, is_inside)
