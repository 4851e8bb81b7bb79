import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from rlmath.algo.advantages import (
    ADVANTAGE_KINDS,
    AdvantageKind,
    KLTotals,
    advantages,
    batch_normalised,
    centred,
    group_normalised,
    kl_shaped_advantages,
    leave_one_out,
)

OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce++")
NO_KL = KLTotals(0.0, 0.0, 0.0)


def ones(rewards: list[list[float]]) -> list[list[int]]:
    return [[1] * len(row) for row in rewards]


def approx(rows: list[list[float]], tolerance: float = 1e-12) -> list:
    return [pytest.approx(row, abs=tolerance) for row in rows]


# ---------------------------------------------------------------- one group


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # mean -2.5; squared distances 56.25 and 3 x 6.25 over G - 1 = 3 give a deviation of 5
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [7.5, -2.5, -2.5, -2.5]),
        # 5 - (-5), and -5 - (5 - 5 - 5) / 3
        ("rloo", [10.0, -10 / 3, -10 / 3, -10 / 3]),
        # 75 / 4 gives a deviation of the batch of 4.330127
        ("ppo", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("reinforce++", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
    ],
)
def test_one_right_answer_of_four(kind: AdvantageKind, wanted: list[float]):
    assert advantages([[5.0, -5.0, -5.0, -5.0]], [[1, 1, 1, 1]], kind, 0.0) == approx([wanted])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("grpo", [-0.5, 0.0, 0.5]),  # mean 2, deviation (4 + 4) / 2 = 2^2, plus 2
        ("dr_grpo", [-2.0, 0.0, 2.0]),
        ("rloo", [-3.0, 0.0, 3.0]),
        ("ppo", [-2 / (8 / 3 + 1), 0.0, 2 / (8 / 3 + 1)]),  # 10 tokens: deviation 8 / 3, plus 1
        ("reinforce++", [-2 / (8 / 3 + 1), 0.0, 2 / (8 / 3 + 1)]),
    ],
)
def test_epsilon_is_added_to_the_deviation(kind: AdvantageKind, wanted: list[float]):
    # tokens 8, 2 and 8 of 18: variance 16 * 4 / 18 = 3.5556; with 8, 1, 0 ... see below for the batch's
    eps = 2.0 if kind not in ("ppo", "reinforce++") else 1.0
    tokens = [[8, 2, 8]]
    if kind in ("ppo", "reinforce++"):
        # 16 tokens at distance 2 of 18 tokens: deviation sqrt(64 / 18) = 1.885618
        wanted = [-2 / (1.8856180831641267 + 1), 0.0, 2 / (1.8856180831641267 + 1)]
    assert advantages([[0.0, 2.0, 4.0]], tokens, kind, eps) == approx([wanted])


