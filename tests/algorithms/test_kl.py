import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.algorithms.kl import KL_KINDS, KLKind, kl_estimate, to_go


@pytest.mark.parametrize(
    ("policy", "other", "k1", "k2", "k3"),
    [
        (0.5, 0.25, 0.693147, 0.240227, 0.193147),  # d = ln 2: ln(2)^2 / 2, 1/2 - 1 + ln 2
        (0.25, 0.5, -0.693147, 0.240227, 0.306853),  # d = -ln 2: 2 - 1 - ln 2
        (0.3, 0.3, 0.0, 0.0, 0.0),
        (0.1, 0.9, -2.197225, 2.413898, 5.802775),  # d = -ln 9: 4.827796 / 2, 9 - 1 - ln 9
    ],
)
def test_estimates_of_one_token(policy: float, other: float, k1: float, k2: float, k3: float):
    wanted = {"k1": k1, "k2": k2, "k3": k3, "abs": abs(k1)}
    for kind in KL_KINDS:
        got = kl_estimate(kind, torch.tensor([policy]).log(), torch.tensor([other]).log())
        assert float(got) == pytest.approx(wanted[kind], abs=2e-6), kind


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
@settings(deadline=None, max_examples=50)
@given(d=st.floats(-30.0, 30.0, width=32))
def test_all_but_k1_are_never_negative(kind: KLKind, d: float):
    assert float(kl_estimate(kind, torch.tensor([d]), torch.zeros(1))) >= 0.0


def test_k3_keeps_its_digits_near_equality():
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998333e-7, which exp(-d) - 1 + d in float32 would miss by a tenth
    got = kl_estimate("k3", torch.tensor([1e-3]), torch.zeros(1))
    assert float(got) == pytest.approx(4.998333e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "gradient"),
    # d = ln 2: 1, d, 1 - exp(-d), sign of d
    [("k1", 1.0), ("k2", 0.693147), ("k3", 0.5), ("abs", 1.0)],
)
def test_the_gradient_by_the_policys_log_prob_of_one_token(kind: KLKind, gradient: float):
    leaf = torch.tensor([math.log(0.5)], requires_grad=True)
    kl_estimate(kind, leaf, torch.tensor([math.log(0.25)])).sum().backward()
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_a_nan_is_seen(kind: KLKind):
    got = kl_estimate(kind, torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, math.nan]))
    assert got.isnan().all()


def test_to_go_by_hand():
    values_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    bounds = torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    assert to_go(values_T, bounds).tolist() == [7.0, 6.0, 4.0, 8.0, 16.0]
