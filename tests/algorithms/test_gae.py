"""GAE, VAPO's lambda, the value loss and explained variance.

The oracles are numbers worked out by hand, and a loop."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlmath.algorithms.gae import BLOCK, explained_variance, gae, length_adaptive_lambda, value_loss


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_of_two_completions_by_hand() -> None:
    """gamma 0.5, lambda 0.5, so that what follows counts a quarter.

    First: rewards 0, 0, 8 and values 2, 4, 6: d = (0 + 2 - 2, 0 + 3 - 4, 8 - 6) = (0, -1, 2), from
    the end A = 2, -1 + 0.5 = -0.5, 0 - 0.125. Second, cut off with a value of 4 behind it: d = 1 +
    2 - 3 = 0.
    """
    advantages = gae(
        f64(0, 0, 8, 1),
        f64(2, 4, 6, 3),
        f64(0, 4),
        torch.tensor([3, 1]),
        gamma=0.5,
        lambda_S=f64(0.5, 0.5),
    )
    assert advantages.tolist() == [-0.125, -0.5, 2.0, 0.0]


def test_every_completion_has_its_own_lambda_over_any_number_of_blocks() -> None:
    draw = random.Random(0)
    tokens = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]
    lambdas = [0.0, 0.5, 0.95, 1.0, 0.999]
    rewards, values = ([[draw.uniform(-1, 1) for _ in range(n)] for n in tokens] for _ in range(2))
    ends = [draw.uniform(-1, 1) for _ in tokens]
    gamma = 0.98
    expected: list[float] = []
    for reward, value, end, lam in zip(rewards, values, ends, lambdas, strict=True):
        row = [0.0] * len(reward)
        behind = 0.0
        after = end
        for t in reversed(range(len(reward))):
            behind = reward[t] + gamma * after - value[t] + gamma * lam * behind
            row[t], after = behind, value[t]
        expected += row
    flat = [f64(*(number for row in rows for number in row)) for rows in (rewards, values)]
    advantages = gae(*flat, f64(*ends), torch.tensor(tokens), gamma, f64(*lambdas))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_lambda_of_a_completion_grows_with_its_length() -> None:
    lambdas = length_adaptive_lambda(torch.tensor([1, 20, 40, 2000]), alpha=0.05)
    assert lambdas.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.99])


def test_the_value_loss_takes_the_worse_of_value_and_clipped_value() -> None:
    """Old values 0, returns 1, clip 0.2.

    Value 0.5 counts as 0.2: half of 0.64, and no gradient. Value -0.5 counts as itself: half of
    2.25. The third token is not sampled and is NaN; the fourth is clipped, and not learned."""
    values = torch.tensor([0.5, -0.5, math.nan, 0.5], requires_grad=True)
    returns = torch.tensor([1.0, 1.0, math.nan, 1.0])
    terms = value_loss(
        values,
        torch.zeros(4),
        returns,
        weights_T=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        sampled_T=torch.tensor([True, True, False, True]),
        learned_T=torch.tensor([True, True, False, False]),
        clip=0.2,
    )
    assert terms.loss.item() == pytest.approx(0.32 + 2 * 1.125)
    assert (terms.tokens.item(), terms.clipped.item()) == (3.0, 2.0)
    terms.loss.backward()
    assert values.grad.tolist() == [0.0, -3.0, 0.0, 0.0]


def test_without_a_clip_the_value_loss_is_half_the_squared_distance() -> None:
    values = torch.tensor([0.5, 3.0])
    every_T = torch.ones(2, dtype=torch.bool)
    terms = value_loss(
        values,
        torch.zeros(2),
        torch.ones(2),
        weights_T=torch.ones(2),
        sampled_T=every_T,
        learned_T=every_T,
        clip=None,
    )
    assert (terms.loss.item(), terms.clipped.item()) == (0.125 + 2.0, 0.0)


def test_explained_variance_by_hand() -> None:
    """Errors 0 and 1 have 1/4 of the variance of returns 1 and 3; the values are 1 and 2.

    A constant error costs nothing; returns that are all the same explain nothing."""
    assert explained_variance(2.0, 4.0, 10.0, 1.0, 1.0) == 0.75
    assert explained_variance(2.0, 4.0, 10.0, 10.0, 50.0) == 1.0
    assert explained_variance(2.0, 4.0, 8.0, 2.0, 2.0) == 0.0
    assert explained_variance(0.0, 0.0, 0.0, 0.0, 0.0) == 0.0
