import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from rlmath.algorithms.kl import KL_KINDS, KLKind, kl_estimate, to_go

POLICY = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
OTHER = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)
# 0.2 ln(1/3) + 0.5 ln 5 + 0.3 ln 1 = -0.219722 + 0.804719
KL = 0.584996


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


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: KLKind):
    expected = (POLICY * kl_estimate(kind, POLICY.log(), OTHER.log())).sum()
    assert float(expected) == pytest.approx(KL, abs=1e-6)
    assert float(expected) == pytest.approx(0.2 * math.log(1 / 3) + 0.5 * math.log(5), rel=1e-12)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
@settings(deadline=None, max_examples=50)
@given(d=st.floats(-30.0, 30.0, width=32))
def test_all_but_k1_are_never_negative(kind: KLKind, d: float):
    assert float(kl_estimate(kind, torch.tensor([d]), torch.zeros(1))) >= 0.0


def test_k3_keeps_its_digits_near_equality():
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998333e-7, which exp(-d) - 1 + d in float32 would miss by a tenth
    got = kl_estimate("k3", torch.tensor([1e-3]), torch.zeros(1))
    assert float(got) == pytest.approx(4.998333e-7, rel=1e-3)


def expected_gradient(kind: KLKind) -> Tensor:
    """Over samples of the policy, by its logits; the sampling itself has no gradient."""
    logits = POLICY.log().requires_grad_()
    estimates = kl_estimate(kind, logits.log_softmax(0), OTHER.log())
    (gradient,) = torch.autograd.grad((POLICY * estimates).sum(), logits)
    return gradient


def exact_gradient(divergence) -> Tensor:
    logits = POLICY.log().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(logits.softmax(0)), logits)
    return gradient


def test_on_policy_the_gradient_of_k2_is_that_of_the_divergence():
    wanted = exact_gradient(lambda p: (p * (p / OTHER).log()).sum())
    torch.testing.assert_close(expected_gradient("k2"), wanted, rtol=1e-12, atol=1e-14)


def test_on_policy_the_gradient_of_k1_is_nothing():
    torch.testing.assert_close(
        expected_gradient("k1"), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14
    )


def test_on_policy_the_gradient_of_k3_is_that_of_the_divergence_the_other_way_round():
    wanted = exact_gradient(lambda p: (OTHER * (OTHER / p).log()).sum())
    torch.testing.assert_close(expected_gradient("k3"), wanted, rtol=1e-12, atol=1e-14)


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


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(-99, 99), min_size=1, max_size=6), min_size=1, max_size=5))
def test_to_go_sums_up_each_segment_from_its_end(segments: list[list[int]]):
    bounds = [0]
    for segment in segments:
        bounds.append(bounds[-1] + len(segment))
    values = [value for segment in segments for value in segment]
    got = to_go(torch.tensor(values, dtype=torch.float64), torch.tensor(bounds)).tolist()
    assert got == [sum(values[t:end]) for start, end in pairwise(bounds) for t in range(start, end)]


def test_shapes_and_words_are_checked():
    row = torch.zeros(3)
    with pytest.raises(TypeCheckError):
        kl_estimate("k3", row, torch.zeros(2))
    with pytest.raises(TypeCheckError):
        kl_estimate("k3", row, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeCheckError):
        kl_estimate("k3", row[None], row[None])
    with pytest.raises(TypeCheckError):
        kl_estimate("k4", row, row)  # pyright: ignore
    with pytest.raises(TypeCheckError):
        to_go(row, torch.tensor([0.0, 3.0]))
