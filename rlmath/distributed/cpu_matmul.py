"""Matrix products of a linear layer on CPU, by oneDNN on AMD's processors with AVX-512.

torch gives float32 products to MKL, which has no kernels with AVX-512 for AMD's processors; oneDNN
has, and was measured to be 2.2 times as fast there (docs/benchmarks.md). Without AVX-512 MKL's are
as fast forward, and faster for the gradients of weights. On one thread both give the same bits from
run to run. Small products stay with MKL: oneDNN prepares every new shape for half a millisecond.
"""

# Shape legend: T tokens (any number of dimensions), K inputs, N outputs.

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

LEAST_MULTIPLICATIONS = 2**24
"""T x K x N from which oneDNN pays."""


def mkl_lacks_avx512(processor: str) -> bool:
    """Whether a processor has AVX-512 that MKL does not use.

    `processor` is the text of /proc/cpuinfo.

    >>> mkl_lacks_avx512("vendor_id : AuthenticAMD\\nflags : fma avx2 avx512f")
    True
    >>> mkl_lacks_avx512("vendor_id : AuthenticAMD\\nflags : fma avx2")
    False
    >>> mkl_lacks_avx512("vendor_id : GenuineIntel\\nflags : fma avx2 avx512f")
    False
    """
    return "AuthenticAMD" in processor and "avx512f" in processor


def _onednn_is_faster() -> bool:
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    with suppress(OSError):
        return mkl_lacks_avx512(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return False


ONEDNN_IS_FASTER = _onednn_is_faster()


def uses_onednn(x: Tensor, N: int) -> bool:
    """Whether a product of x [T, K] with N outputs is oneDNN's."""
    return ONEDNN_IS_FASTER and x.dtype == torch.float32 and x.numel() * N >= LEAST_MULTIPLICATIONS


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x weight^T + bias, [T, N], without gradient."""
    if uses_onednn(x_TK, len(weight_NK)):
        return torch.ops.mkldnn._linear_pointwise(
            x_TK, weight_NK, bias_N, attr="none", scalars=[], algorithm=""
        )
    if x_TK.dtype == torch.float32:
        return torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    # In two dimensions: with more, one of which has size 1 and an odd stride (a gradient of
    # logits), torch takes its slowest bfloat16 kernel: 27 s instead of 0.07 for an output layer.
    rows_TK = x_TK.reshape(-1, x_TK.shape[-1])
    product_TN = torch.nn.functional.linear(rows_TK, weight_NK, bias_N)
    return product_TN.view(*x_TK.shape[:-1], len(weight_NK))


def weight_gradient(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """grad^T x, [N, K], of two dimensions."""
    if not uses_onednn(x_TK, grad_TN.shape[1]):
        return grad_TN.t() @ x_TK
    # The side that has fewer rows is cheaper to transpose as the input than as the weight.
    if grad_TN.shape[1] < x_TK.shape[1]:
        return linear(grad_TN.t(), x_TK.t())
    return linear(x_TK.t(), grad_TN.t()).t()
