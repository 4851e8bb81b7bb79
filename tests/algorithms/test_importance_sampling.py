"""Weights at their bounds.

`test_losses_textbook` compares any rule and its gradients with the papers' formulas."""

import math

import pytest
import torch

from rlmath.algorithms.importance_sampling import (
    Corrected,
    Correction,
    binary_kl,
    corrected,
    interpolated_proximal,
    proximal_logprobs,
)

MOST = math.exp(20)


def weights(ratios: list[float], rule: Correction, segments: list[int] | None = None) -> Corrected:
    """Every token counts; by default all in one segment."""
    segments_T = torch.tensor(segments if segments is not None else [0] * len(ratios))
    log_T = torch.tensor(ratios, dtype=torch.float64).log()
    counted_T = torch.ones(len(ratios), dtype=torch.bool)
    return corrected(
        log_T, torch.zeros_like(log_T), counted_T, segments_T, int(segments_T.max()) + 1, rule
    )


def test_interpolated_proximal_log_probs_are_near_those_of_the_step_between():
    """The interpolation of a policy's first and last log-probs is near those of the third step.

    The policy learns for 2 + 6 steps. The interpolation is much nearer than either end, and exact
    where nothing was learned since."""
    logits = torch.zeros(50, dtype=torch.float64)
    draw = torch.Generator().manual_seed(2)
    direction = torch.randn(50, dtype=torch.float64, generator=draw)
    path = [logits.log_softmax(0)]
    for _ in range(8):  # plain gradient ascent of the mean of `direction`
        p = logits.softmax(0)
        logits = logits + 2.0 * p * (direction - (p * direction).sum())
        path.append(logits.log_softmax(0))
    interpolated = interpolated_proximal(path[8], path[0], torch.full((50,), 2), updates=6)
    error = (interpolated - path[2]).abs().mean()
    assert 0 < error < 0.2 * (path[0] - path[2]).abs().mean() < (path[8] - path[2]).abs().mean()
    assert (
        interpolated_proximal(path[2], path[0], torch.zeros(50).long(), updates=0) - path[2]
    ).abs().max() == 0
    assert (
        interpolated_proximal(path[8], path[2], torch.zeros(50).long(), 6) - path[2]
    ).abs().max() == 0


@pytest.mark.parametrize("interpolated", [None, -1.25])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("recomputed", [None, -3.0])
def test_which_log_probs_are_those_of_the_proximal_policy(
    recomputed: float | None, interpolated: float | None, on_policy: bool
):
    """Recomputed ones come first, then interpolated ones, the policy's own, and the engine's."""
    now_T = torch.tensor([-1.0], requires_grad=True)
    proximal_T = proximal_logprobs(
        now_T,
        torch.tensor([-2.0]),
        None if recomputed is None else torch.tensor([recomputed]),
        interpolated_T=None if interpolated is None else torch.tensor([interpolated]),
        on_policy=on_policy,
    )
    candidates = [recomputed, interpolated, -1.0 if on_policy else None, -2.0]
    assert proximal_T.tolist() == [next(logprob for logprob in candidates if logprob is not None)]
    assert not proximal_T.requires_grad


def test_masks_look_at_the_weight_before_the_cap():
    got = weights([0.5, 1.0, 2.25, 3.0], Correction("token", cap=2.0, mask_high=2.5))
    assert got.weights_T.tolist() == [0.5, 1.0, 2.0, 0.0]
    assert got.cut_T.tolist() == [False, False, True, True]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_on_its_bound_is_not_cut(level):
    got = weights([1.0, 1.0], Correction(level, cap=1.0, mask_low=1.0, mask_high=1.0))
    assert got.weights_T.tolist() == [1.0, 1.0] and not got.cut_T.any()


@pytest.mark.parametrize(
    ("log_weights", "level", "wanted"),
    [
        ([1000.0, -1000.0], "token", [MOST, 1 / MOST]),
        ([15.0, 15.0], "sequence", [MOST, MOST]),
        ([-15.0, -15.0], "sequence", [1 / MOST, 1 / MOST]),
        # only the product is cut: e^30 x e^-29 = e
        ([30.0, -29.0], "sequence", [math.e, math.e]),
        ([19.0, -19.0], "token", [math.exp(19), math.exp(-19)]),
    ],
)
def test_no_weight_overflows(log_weights: list[float], level, wanted: list[float]):
    sampled_T = torch.tensor([True, True])
    segments_T = torch.tensor([0, 0])
    got = corrected(
        torch.tensor(log_weights), torch.zeros(2), sampled_T, segments_T, 1, Correction(level)
    )
    assert got.weights_T.tolist() == pytest.approx(wanted, rel=1e-5)
    assert got.cut_T.tolist() == [weight in (MOST, 1 / MOST) for weight in wanted]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_have_no_gradient(level):
    log_T = torch.zeros(2, requires_grad=True)
    sampled_T = torch.tensor([True, True])
    segments_T = torch.tensor([0, 0])
    got = corrected(log_T, torch.zeros(2), sampled_T, segments_T, 1, Correction(level, cap=2.0))
    assert not got.weights_T.requires_grad


def test_the_binary_kl_of_probabilities_at_their_ends_is_finite_and_bounded_by_what_float32_tells():
    log_T = torch.tensor([0.0, -1e-7, -0.5, -200.0, -math.inf])
    log_p_T, log_b_T = (grid.flatten() for grid in torch.meshgrid(log_T, log_T, indexing="ij"))
    for dtype in (torch.float32, torch.float64):
        kl_TT = binary_kl(log_p_T.to(dtype), log_b_T.to(dtype)).reshape(5, 5)
        assert kl_TT.isfinite().all() and (kl_TT >= -1e-15).all()
        assert kl_TT.diagonal().tolist() == [0.0] * 5
        # an engine that rounds 1 - 1e-7 to 1 does not differ from a trainer that does not
        assert kl_TT[0, 1] == kl_TT[1, 0] == 0.0
        assert kl_TT[2, 0] > 3 and kl_TT[2, 4] > 29 and kl_TT[0, 4] > 49
    assert binary_kl(torch.tensor([math.nan]), torch.tensor([-1.0])).isnan().all()
