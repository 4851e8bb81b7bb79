"""An engine's parameters as matrices that a weight sync writes: experts that vLLM packs on CPU.

vLLM's own packing and its grouped kernel read what is written."""

# Shape legend: E experts, F feed-forward units, K hidden size, N tokens.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.rollout.engine import prepare_environment
from rlmath.rollout.engine_weights import EngineWeights, holds_packed_experts
from tests.rollout.bare_models import model_with

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm import _custom_ops as operations  # noqa: E402

EXPERTS = 3
HIDDEN = 64
PACKED_UNITS = 64
"""Feed-forward units of an expert as the kernel takes them."""
NAMES = ("experts.w13_weight", "experts.w2_weight")


def experts_of(**kernel: Any) -> Any:
    return SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace(**kernel)))


@pytest.mark.parametrize("units", [48, PACKED_UNITS])
def test_written_experts_compute_what_the_formula_says(units: int) -> None:
    """Gate, up and down of every expert; those with fewer units are filled up with zeros."""
    model = model_with(
        {
            NAMES[0]: (EXPERTS, 2 * PACKED_UNITS, HIDDEN),
            NAMES[1]: (EXPERTS, HIDDEN, PACKED_UNITS),
        },
        filled=7.0,
    )
    model.experts.quant_method = experts_of(isa="vec")
    shapes = {
        NAMES[0]: (EXPERTS * 2 * units, HIDDEN),
        NAMES[1]: (EXPERTS * HIDDEN, units),
    }
    weights = EngineWeights(model, shapes)
    torch.manual_seed(0)
    first = torch.randn(EXPERTS, 2, units, HIDDEN) / 8
    second = torch.randn(EXPERTS, HIDDEN, units) / 8
    weights.begin({name: rows for name, (rows, _) in shapes.items()})
    for name, matrix in zip(NAMES, (first, second), strict=True):
        weights.matrix(name).copy_(matrix.view(shapes[name]))
        weights.complete(name)
    assert weights.end() > 0
    assert weights.bytes == 3 * EXPERTS * HIDDEN * PACKED_UNITS * 4

    x_NK = torch.randn(5, HIDDEN)
    chosen_N = torch.tensor([2, 0, 1, 2, 0])
    computed_NK = torch.empty_like(x_NK)
    operations.cpu_fused_moe(
        computed_NK,
        x_NK,
        model.experts.w13_weight.data,
        model.experts.w2_weight.data,
        w13_bias=None,
        w2_bias=None,
        topk_weights=torch.ones(5, 1),
        topk_ids=chosen_N[:, None].int(),
        act="silu",
        isa="vec",
    )
    gate_NF, up_NF = torch.einsum("npfk,nk->pnf", first[chosen_N], x_NK)
    unit_NF = torch.nn.functional.silu(gate_NF) * up_NF
    expected_NK = torch.einsum("nkf,nf->nk", second[chosen_N], unit_NF)
    torch.testing.assert_close(computed_NK, expected_NK, rtol=1e-4, atol=1e-4)


def test_experts_are_packed_on_cpu_alone() -> None:
    triton = SimpleNamespace(name="TRITON")
    assert not holds_packed_experts(torch.nn.Linear(2, 2))
    cases = [
        (experts_of(isa="vec"), True),
        (experts_of(isa="vec", _use_zentorch=True), False),
        (experts_of(), False),
    ]
    for method, packs in cases:
        method.unquantized_backend = triton
        assert holds_packed_experts(SimpleNamespace(quant_method=method)) == packs
    method.unquantized_backend = SimpleNamespace(name="FLASHINFER")
    with pytest.raises(RuntimeError, match=r"lays experts out for .*FLASHINFER.*Triton's"):
        holds_packed_experts(SimpleNamespace(quant_method=method))


def test_a_parameter_that_nothing_is_planned_for_or_of_another_shape_is_refused() -> None:
    model = model_with({"mlp.weight": (4, 3), "norm.weight": (3, 1)})
    with pytest.raises(RuntimeError, match=r"no weight is planned for: \['norm.weight'\]"):
        EngineWeights(model, {"mlp.weight": (4, 3)})
    with pytest.raises(RuntimeError, match=r"mlp.weight has shape \(4, 3\); planned are 3 rows"):
        EngineWeights(model, {"mlp.weight": (3, 3), "norm.weight": (3, 1)})


def test_what_no_copy_fills_is_zero() -> None:
    """Rows behind the planned ones are padding; values of planned rows wait for their copies."""
    shapes = {"head.weight": (4, 3), "norm.weight": (3, 1)}
    model = model_with(shapes, filled=7.0)
    weights = EngineWeights(model, shapes)
    weights.begin({"head.weight": 3})
    assert model.head.weight.tolist() == [[7.0] * 3] * 3 + [[0.0] * 3]
    assert not model.norm.weight.any()
    weights.matrix("head.weight").fill_(2.0)
    assert (model.head.weight == 2.0).all()
