"""Logits in float32 from factors of 16 bits."""

from __future__ import annotations

import pytest
import torch

from rlmath.models import output_layer

# Shape legend: T packed tokens, H hidden size, V vocabulary.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_exact_to_float32_and_their_gradient_is_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient overwrites its own memory, here some three rows of 37 at a time."""
    monkeypatch.setitem(output_layer.CHUNK_BYTES, "cpu", 3 * 501 * 4)
    torch.manual_seed(3)
    hidden_TH, weight_VH = (torch.randn(rows, 64).to(dtype).requires_grad_() for rows in (37, 501))
    logits_TV = output_layer._Float32Logits.apply(hidden_TH, weight_VH)
    exact_TV, rounded_TV = (
        x @ y.t() for x, y in ((hidden_TH.double(), weight_VH.double()), (hidden_TH, weight_VH))
    )
    off, off_rounded = ((x.double() - exact_TV).abs().mean() for x in (logits_TV, rounded_TV))
    assert logits_TV.dtype == torch.float32 and 500 * off < off_rounded
    grad_TV = torch.randn(37, 501)
    rounded_TV = grad_TV.to(dtype)
    logits_TV.backward(grad_TV)
    assert torch.equal(hidden_TH.grad, rounded_TV @ weight_VH)
    assert torch.equal(weight_VH.grad, rounded_TV.t() @ hidden_TH)
