import itertools
import math
import statistics

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlmath.algorithms.advantages import (
    ADVANTAGE_KINDS,
    AdvantageKind,
    KLTotals,
    advantages,
    gdpo_advantages,
    kl_shaped_advantages,
)

OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce++")
OVER_BATCH = ("ppo", "reinforce++")
NO_KL = KLTotals(0.0, 0.0, 0.0)

Rows = list[list[float]]


def one_token_each(rewards: Rows) -> list[list[int]]:
    return [[1] * len(row) for row in rewards]


def approx(rows: Rows, tolerance: float = 1e-12) -> list:
    return [pytest.approx(row, abs=tolerance) for row in rows]


# ---------------------------------------------------------------- hand-computed


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # mean -2.5; squared distances 56.25 and 3 x 6.25 over G - 1 = 3 give a deviation of 5
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [7.5, -2.5, -2.5, -2.5]),
        # 5 - (-5), and -5 - (5 - 5 - 5) / 3
        ("rloo", [10.0, -10 / 3, -10 / 3, -10 / 3]),
        # the same squared distances over 4: deviation 4.330127, 7.5 / 4.330127 = sqrt(3)
        ("ppo", [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("reinforce++", [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("lite_ppo", [1.5, -0.5, -0.5, -0.5]),  # the batch is the group
        ("opo", [7.5, -2.5, -2.5, -2.5]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),  # (1 - 1/4) / (1/4)
        ("pass@k", [20.0, 0.0, 0.0, 0.0]),  # 2 x (5 + 5); only what is best adds to the best of two
    ],
)
def test_one_right_answer_of_four(kind: AdvantageKind, wanted: list[float]):
    assert advantages([[5.0, -5.0, -5.0, -5.0]], [[1, 1, 1, 1]], kind, 0.0) == approx(
        [wanted], 1e-7
    )


def expected_gradient(kind: AdvantageKind, p: float, G: int, k: int = 2) -> float:
    """The gradient by p, over all outcomes of a group whose completions are right with chance p.

    It is a mean over completions."""
    total = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=G):
        (row,) = advantages([list(outcome)], [[1] * G], kind, 0.0, k)
        chance = math.prod(p if right else 1 - p for right in outcome)
        scores = [1 / p if right else -1 / (1 - p) for right in outcome]
        total += chance * sum(a * s for a, s in zip(row, scores, strict=True)) / G
    return total


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_maxrl_and_pass_at_k_have_the_expected_gradients_that_they_claim(p: float):
    for G in (2, 3, 6):
        # pass@j = 1 - (1 - p)^j, whose derivative is j (1 - p)^(j - 1)
        likelihood = sum((1 - p) ** (j - 1) for j in range(1, G))
        assert expected_gradient("maxrl", p, G) == pytest.approx(likelihood, rel=1e-12)
        for k in range(2, G + 1):
            assert expected_gradient("pass@k", p, G, k) == pytest.approx(
                k * (1 - p) ** (k - 1), rel=1e-12
            )
    assert expected_gradient("rloo", p, 4) == pytest.approx(1.0)


# ---------------------------------------------------------------- groups and their sizes


@pytest.mark.parametrize("reward", [5.0, 0.1])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_a_batch_without_contrast_gets_exact_zeros(kind: AdvantageKind, eps: float, reward: float):
    # Three times 0.1 over 3 is not 0.1 in binary: without the rule rounding would be divided by
    # itself.
    assert advantages([[reward] * 3, [reward]], [[1, 5, 2], [3]], kind, eps) == [[0.0] * 3, [0.0]]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_batch_of_groups_that_each_lack_contrast_has_none_once_centred(eps: float):
    assert advantages([[0.1] * 3, [9.0] * 2], [[1, 2, 3], [4, 5]], "reinforce++", eps) == [
        [0.0] * 3,
        [0.0] * 2,
    ]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_nan_makes_its_group_nan_and_no_other(kind: AdvantageKind):
    got = advantages([[math.nan, 1.0], [2.0, 4.0], [math.nan]], [[1, 1], [1, 1], [1]], kind, 1e-6)
    assert all(map(math.isnan, got[0] + got[2]))
    assert got[1] == advantages([[2.0, 4.0]], [[1, 1]], kind, 1e-6)[0]


@pytest.mark.parametrize("kind", OVER_BATCH)
def test_a_nan_makes_the_normalised_batch_nan(kind: AdvantageKind):
    got = advantages([[math.nan, 1.0], [2.0, 4.0]], [[1, 1], [1, 1]], kind, 1e-6)
    assert all(math.isnan(value) for row in got for value in row)


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_no_groups_and_empty_groups(kind: AdvantageKind):
    assert advantages([], [], kind, 1e-6) == []
    assert advantages([[], [1.0, 1.0]], [[], [1, 1]], kind, 1e-6) == [[], [0.0, 0.0]]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_completion_without_tokens_is_no_contrast_of_the_batch(eps: float):
    # The only tokens of the batch all have a return of 1 (or 0.1, where rounding would be divided
    # by itself).
    assert advantages([[1.0, 0.0]], [[3, 0]], "ppo", eps)[0][0] == 0.0
    assert advantages([[0.1, 0.1, 0.0]], [[3, 2, 0]], "ppo", eps)[0][:2] == [0.0, 0.0]


# -------------------------------------------------------- any rewards, against the standard library

groups = st.lists(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 9)), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def by_the_book(rewards: Rows, tokens: list[list[int]], kind: str, eps: float) -> Rows:
    everything = [reward for row in rewards for reward in row]
    lengths = {id(row): ns for row, ns in zip(rewards, tokens, strict=True)}

    def of_group(row: list[float]) -> list[float]:
        mean = statistics.fmean(row)
        if kind == "ppo":
            return row
        if len(row) == 1:
            return [0.0]
        if kind == "opo":
            of_tokens = [r for r, n in zip(row, lengths[id(row)], strict=True) for _ in range(n)]
            return [r - statistics.fmean(of_tokens) for r in row]
        if kind == "maxrl":
            right = [float(r > 0) for r in row]
            rate = statistics.fmean(right)
            return [(s - rate) / rate if rate else 0.0 for s in right]
        if kind == "pass@k":  # of 2
            return [
                2 * statistics.fmean(max(r - o, 0) for o in row[:g] + row[g + 1 :])
                for g, r in enumerate(row)
            ]
        if kind == "rloo":
            return [r - (sum(row) - r) / (len(row) - 1) for r in row]
        scale = {
            "grpo": statistics.stdev(row) + eps,
            "lite_ppo": statistics.stdev(everything) + eps,
        }
        scale = scale.get(kind, 1.0)
        return [(r - mean) / scale if len(set(row)) > 1 else 0.0 for r in row]

    by_group = [of_group(row) for row in rewards]
    if kind not in OVER_BATCH:
        return by_group
    of_tokens = [
        a
        for row, ns in zip(by_group, tokens, strict=True)
        for a, n in zip(row, ns, strict=True)
        for _ in range(n)
    ]
    mean = statistics.fmean(of_tokens)
    scale = statistics.pstdev(of_tokens) + eps
    return [
        [(a - mean) / scale if len(set(of_tokens)) > 1 else 0.0 for a in row] for row in by_group
    ]


@settings(deadline=None, max_examples=60)
@given(groups, st.floats(0.0, 10.0), st.sampled_from(ADVANTAGE_KINDS))
def test_any_batch_agrees_with_the_standard_library(drawn: list, eps: float, kind: AdvantageKind):
    rewards = [[float(reward) for reward, _ in row] for row in drawn]
    tokens = [[n for _, n in row] for row in drawn]
    got = advantages(rewards, tokens, kind, eps)
    assert got == approx(by_the_book(rewards, tokens, kind, eps), 1e-9)


# ---------------------------------------------------------------- KL inside of the reward


def totals_of(kls: list[float]) -> KLTotals:
    to_go = [math.fsum(kls[t:]) for t in range(len(kls))]
    mean = math.fsum(to_go) / max(1, len(to_go))
    return KLTotals(to_go[0] if to_go else 0.0, mean, math.fsum((k - mean) ** 2 for k in to_go))


def approx_row(row: list[float]):
    return pytest.approx(row, abs=1e-12)


def shaped_by_token(
    rewards: Rows, kls: list[list[list[float]]], kl_coef: float, kind: AdvantageKind, eps: float
) -> list[list[list[float]]]:
    """What `kl_shaped_advantages` gives every token."""
    tokens = [[len(token_kls) for token_kls in row] for row in kls]
    totals = [[totals_of(token_kls) for token_kls in row] for row in kls]
    shaped = kl_shaped_advantages(rewards, tokens, totals, kl_coef, kind, eps)
    return [
        [
            [offset - shaped.slope * math.fsum(token_kls[t:]) for t in range(len(token_kls))]
            for offset, token_kls in zip(*rows, strict=True)
        ]
        for rows in zip(shaped.offsets, kls, strict=True)
    ]


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_kinds_of_groups_take_the_kl_of_the_whole_completion_from_its_reward(kind: AdvantageKind):
    # KL 0.25 + 0.25, 0.25 and 0: rewards 1 - 0.4 x 0.5 = 0.8, 0 - 0.4 x 0.25 = -0.1 and 3
    got = shaped_by_token(
        [[1.0, 0.0], [3.0]], [[[0.25, 0.25], [0.25]], [[0.0] * 3]], 0.4, kind, 0.5
    )
    expected = advantages([[0.8, -0.1], [3.0]], [[2, 1], [3]], kind, 0.5)
    assert got == [
        [approx_row([expected[0][0]] * 2), approx_row([expected[0][1]])],
        [approx_row([expected[1][0]] * 3)],
    ]


def test_pass_at_k_with_kl_counts_the_k_that_it_is_given():
    rewards = [[1.0, 0.0, 0.0, 0.0]]
    for k, best in ((2, 2.0), (3, 3.0)):
        shaped = kl_shaped_advantages(
            rewards, [[1] * 4], [[NO_KL] * 4], 0.1, "pass@k", 0.0, pass_k=k
        )
        assert shaped.offsets == [approx_row([best, 0.0, 0.0, 0.0])]


def test_a_slope_goes_with_ppo_alone():
    totals = [[KLTotals(1.0, 1.0, 0.0), NO_KL]]
    for kind in OF_GROUPS:
        assert kl_shaped_advantages([[1.0, 0.0]], [[1, 1]], totals, 0.5, kind, 0.0).slope == 0.0
    # returns 0.5 and 0: deviation 0.25
    assert kl_shaped_advantages([[1.0, 0.0]], [[1, 1]], totals, 0.5, "ppo", 0.0).slope == 2.0


eighths = st.integers(-40, 40).map(lambda n: n / 8)
completions = st.tuples(eighths, st.lists(eighths, min_size=1, max_size=6))
batches = st.lists(st.lists(completions, min_size=1, max_size=4), min_size=1, max_size=4)


def dense_returns(
    rewards: Rows, kls: list[list[list[float]]], kl_coef: float, eps: float
) -> list[list[list[float]]]:
    returns = [
        [
            [r - kl_coef * math.fsum(token_kls[t:]) for t in range(len(token_kls))]
            for r, token_kls in zip(*rows, strict=True)
        ]
        for rows in zip(rewards, kls, strict=True)
    ]
    flat = [value for row in returns for token_returns in row for value in token_returns]
    mean = statistics.fmean(flat)
    scale = statistics.pstdev(flat) + eps
    return [
        [
            [(v - mean) / scale if len(set(flat)) > 1 else 0.0 for v in token_returns]
            for token_returns in row
        ]
        for row in returns
    ]


@settings(deadline=None, max_examples=150)
@given(
    batches,
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from([0.0, 1e-6, 0.5]),
    st.none() | eighths,
)
@example([[(0.0, [3.0]), (0.0, [3.0])], [(0.0, [3.0])]], 0.5, 0.0, None)
@example([[(0.0, [0.0, 0.0, 2.0]), (1.0, [3.0])]], 1.0, 0.0, None)
def test_ppo_equals_the_normalised_returns_of_all_tokens(
    drawn: list, kl_coef: float, eps: float, same_reward: float | None
):
    rewards = [
        [reward if same_reward is None else same_reward for reward, _ in row] for row in drawn
    ]
    kls = [[kl for _, kl in row] for row in drawn]
    got = shaped_by_token(rewards, kls, kl_coef, "ppo", eps)
    for got_row, wanted_row in zip(got, dense_returns(rewards, kls, kl_coef, eps), strict=True):
        for got_token, wanted_token in zip(got_row, wanted_row, strict=True):
            assert got_token == pytest.approx(wanted_token, abs=1e-6, rel=1e-6)


def test_ppo_does_not_lose_a_contrast_far_from_zero():
    # returns 1e6 + 1 and 1e6, without KL
    got = shaped_by_token([[1e6 + 1, 1e6]], [[[0.0], [0.0]]], 0.1, "ppo", 0.0)
    assert got == [[approx_row([1.0]), approx_row([-1.0])]]


def test_ppo_does_not_lose_the_contrast_of_a_large_kl():
    # returns -1000 and -1001: mean -1000.5, deviation 0.5
    got = shaped_by_token([[0.0, 0.0]], [[[1000.0], [1001.0]]], 1.0, "ppo", 0.0)
    assert got == [[pytest.approx([1.0], abs=1e-8), pytest.approx([-1.0], abs=1e-8)]]


@pytest.mark.parametrize("reward", [5.0, 0.1, 1 / 3])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_before_any_kl_equal_rewards_give_exact_zeros(
    kind: AdvantageKind, eps: float, reward: float
):
    totals = [[NO_KL] * 3, [NO_KL] * 2]
    shaped = kl_shaped_advantages(
        [[reward] * 3, [reward] * 2], [[7, 3, 11], [1, 900]], totals, 0.1, kind, eps
    )
    assert shaped.offsets == [[0.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("what", ["reward", "kl"])
def test_a_nan_is_seen_with_kl_in_the_reward_too(kind: AdvantageKind, eps: float, what: str):
    rewards = [[math.nan if what == "reward" else 1.0, 0.0]]
    totals = [[KLTotals(math.nan, math.nan, math.nan) if what == "kl" else NO_KL, NO_KL]]
    shaped = kl_shaped_advantages(rewards, [[1, 1]], totals, 0.1, kind, eps)
    assert all(math.isnan(offset) for offset in shaped.offsets[0])


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_no_groups_with_kl_in_the_reward(kind: AdvantageKind):
    assert kl_shaped_advantages([], [], [], 0.1, kind, 1e-6).offsets == []


# ----------------------------------------------- several rewards, each normalised for itself (GDPO)


def test_gdpo_by_hand():
    # first reward: mean 2, deviation 1; second: of the two that have it mean 1, deviation sqrt(2).
    # Half of the second with it: -1, -0.5 / sqrt(2), 1 + 0.5 / sqrt(2). The group of equal rewards
    # has zeros.
    half = 0.5 / math.sqrt(2)
    scale = math.sqrt((1 + half**2 + (1 + half) ** 2) / (6 - 1))
    parts = [[(1.0, None), (2.0, 0.0), (3.0, 2.0)], [(7.0, 0.1)] * 3]
    got = gdpo_advantages(parts, [1.0, 0.5], eps=0.0)
    assert got[0] == pytest.approx([-1 / scale, -half / scale, (1 + half) / scale], abs=1e-12)
    assert got[1] == [0.0, 0.0, 0.0]
    assert got[0] == pytest.approx([-1.300324, -0.459734, 1.760058], abs=1e-6)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [[(1.0, 2.0)]],
        [[(1.0, None), (1.0, None)]],
        [[(None, None), (None, None)], [(0.1, 0.3), (0.1, 0.3)]],
        [[(1.0, None), (None, 5.0)]],
    ],
)
def test_gdpo_without_contrast_gives_exact_zeros(parts: list):
    for eps in (0.0, 1e-6):
        assert gdpo_advantages(parts, [1.0, 1.0], eps) == [[0.0] * len(rows) for rows in parts]


def test_a_reward_that_failed_everywhere_in_a_group_changes_nothing_of_the_others():
    single_reward = gdpo_advantages([[(1.0,), (0.0,)], [(0.0,), (3.0,)]], [1.0], eps=1e-6)
    parts = [[(1.0, None), (0.0, None)], [(0.0, None), (3.0, None)]]
    assert gdpo_advantages(parts, [1.0, 5.0], eps=1e-6) == single_reward


batches = st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(batches, st.sampled_from([1e-6, 0.1]))
def test_gdpo_with_one_reward_is_grpo_and_then_the_batch(rewards: Rows, eps: float):
    by_group = advantages(rewards, one_token_each(rewards), "grpo", eps)
    flat = torch.tensor([value for row in by_group for value in row], dtype=torch.float64)
    spread = flat.std().item() if len(flat) > 1 else 0.0
    expected = (flat - flat.mean()) / (spread + eps)
    got = gdpo_advantages([[(value,) for value in row] for row in rewards], [1.0], eps)
    assert [value for row in got for value in row] == pytest.approx(expected.tolist(), abs=1e-6)
