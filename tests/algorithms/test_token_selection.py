"""Tokens chosen by entropy and covariance, over ranks that share only sums."""

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.algorithms.token_selection import TokenRules, among_largest, chosen_tokens, covariances


def on_ranks(
    parts: list[Tensor], work: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
) -> Tensor:
    """What ranks with these tokens find, each in its thread, laid end to end."""
    barrier = threading.Barrier(len(parts))
    shared = {}
    outputs = {}

    def rank(number: int) -> None:
        def summed(values: Tensor) -> Tensor:
            shared[number] = values
            barrier.wait(timeout=60)
            total = sum(shared[rank_number] for rank_number in range(len(parts)))
            barrier.wait(timeout=60)
            return total

        outputs[number] = work(parts[number], summed)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[number] for number in range(len(parts))])


few = st.sampled_from([0.0, -0.0, 0.5, 0.50000006, 0.5000001, -0.5, 1e-40, 3e38])
values_of_ranks = st.lists(
    st.lists(few | st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=6),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=100)
@given(values_of_ranks, st.floats(0.01, 1.0))
@example([[9.0, 1.0], [1.0000001, 1.0000002]], 0.5)
def test_the_largest_of_all_ranks_are_those_of_a_sort(rows: list[list[float]], share: float):
    every = sorted((number for row in rows for number in row), reverse=True)
    parts = [torch.tensor(row, dtype=torch.float32) for row in rows]
    got = on_ranks(parts, lambda part, summed: among_largest(part, share, summed))
    least = every[max(1, int(share * len(every))) - 1] if every else 0.0
    assert got.tolist() == [number >= least for row in rows for number in row]


def test_covariances_are_to_the_means_of_all_ranks():
    # log-probs -1, -3 | -5: mean -3; advantages 1, 1 | -2: mean 0
    parts = [torch.tensor([[-1.0, -3.0], [1.0, 1.0]]), torch.tensor([[-5.0], [-2.0]])]
    got = on_ranks(parts, lambda part, summed: covariances(part[0], part[1], summed))
    assert got.tolist() == [2.0, 0.0, 4.0]


NUMBERS = {
    "entropy_N": torch.tensor([0.1, 2.0, 0.3, 0.2]),
    "logprobs_N": torch.tensor([-1.0, -2.0, -3.0, -6.0]),  # mean -3
    "advantages_N": torch.tensor([1.0, 3.0, -1.0, -3.0]),  # mean 0; covariances 2, 3, 0, 9
    "uniform_N": torch.tensor([0.9, 0.8, 0.7, 0.99]),
}


@pytest.mark.parametrize(
    ("rules", "learned", "penalty"),
    [
        (TokenRules(), "xxxx", [0.0] * 4),
        (TokenRules(entropy_share=0.5), ".xx.", [0.0] * 4),
        (TokenRules(entropy_share=0.01), ".x..", [0.0] * 4),
        (
            TokenRules(clip_cov=0.25),
            ".xxx",
            [0.0] * 4,
        ),  # 2 and 3 lie from 1 to 5; 0.9 is drawn, not 0.99
        (TokenRules(clip_cov=0.75), "..xx", [0.0] * 4),
        (TokenRules(clip_cov=0.25, clip_high=9.0), "xxx.", [0.0] * 4),
        (TokenRules(kl_cov=0.5, kl_coef=0.25), "xxxx", [0.0, 0.25, 0.0, 0.25]),
        (TokenRules(entropy_share=0.5, kl_cov=0.25), ".xx.", [0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_choices_by_hand(rules: TokenRules, learned: str, penalty: list[float]):
    got = chosen_tokens(rules, **NUMBERS, summed=lambda tensor: tensor)
    assert got.learned_N.tolist() == [mark == "x" for mark in learned]
    assert got.penalty_N.tolist() == penalty
