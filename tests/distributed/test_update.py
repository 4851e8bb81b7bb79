"""A whole step's updates: KL inside of the reward, epochs, early stop's two ways, layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.types import Sample, ScoredGroup, Segment
from rlmath.config.schema import AlgorithmConfig
from rlmath.trainer.policy_update import make_samples
from tests.distributed import oracle, update_cases
from tests.distributed.policy_cases import LEARNING_RATE, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.distributed.update_cases import REFERENCE_FACTOR, StepOutcome, make_groups
from tests.selection import keeping, matrix

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

GROUPS = make_groups((4, 4, 3, 1, 4))
PPO = AlgorithmConfig(
    advantage="ppo",
    advantage_eps=1e-5,
    kl_in="reward",
    kl_estimator="k1",
    kl_coef=0.5,
    early_stop_ratio=None,
)
LAYOUTS = [
    Case(max_tokens=128),
    Case(tensor=2, pipeline=2, max_tokens=64),
    Case(data=2, max_tokens=64),
]


def step(ranks: RankPool, folder: Path, case: Case, algorithm: AlgorithmConfig) -> StepOutcome:
    return ranks.run(case.ranks, update_cases.step, folder, case, GROUPS, algorithm)[0]


def returns(groups: list[ScoredGroup], kls: list[Tensor], coef: float) -> list[Tensor]:
    """Reward minus all KL from each token on, by completion."""
    rewards = [reward for group in groups for reward in group.rewards]
    return [
        torch.stack([reward - coef * kl[t:].sum() for t in range(len(kl))])
        for reward, kl in zip(rewards, kls, strict=True)
    ]


def normalised(values: list[Tensor], eps: float) -> list[Tensor]:
    every = torch.cat(values)
    return [(tensor - every.mean()) / (every.std(correction=0) + eps) for tensor in values]


def dense_ppo(
    folder: Path, samples: list[Sample], algorithm: AlgorithmConfig
) -> tuple[list[Tensor], Tensor]:
    """Advantages per token and the update by AReaL's PPO without a critic, in plain torch.

    The loss is on-policy."""
    model = oracle.load(folder)
    reference = oracle.load(folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_FACTOR)
        log_refs = [oracle.completion_logprobs(reference, sample).double() for sample in samples]
    logprobs = [oracle.completion_logprobs(model, sample) for sample in samples]
    kls = [
        kl_estimate("k1", p.detach().double(), r) for p, r in zip(logprobs, log_refs, strict=True)
    ]
    advantages = normalised(returns(GROUPS, kls, algorithm.kl_coef), algorithm.advantage_eps)
    total = sum(
        -(a.float() * (p - p.detach()).exp()).sum()
        for a, p in zip(advantages, logprobs, strict=True)
    )
    loss = total / sum(len(p) for p in logprobs)
    loss.backward()
    update = {n: -LEARNING_RATE["sgd"] * g for n, g in oracle.gradients(model).items()}
    return advantages, update


@pytest.mark.parametrize("case", keeping(LAYOUTS, LAYOUTS[2], others=0), ids=str)
def test_ppo_with_kl_in_the_reward_is_that_of_plain_torch(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    torch.set_num_threads(1)
    samples = make_samples(GROUPS, [[0.0] * len(group.completions) for group in GROUPS])
    advantages, update = dense_ppo(untied_model, samples, PPO)
    outcome = step(ranks, untied_model, case, PPO)
    mean_advantages = [advantage for row in outcome.record.advantages for advantage in row]
    assert mean_advantages == pytest.approx([float(a.mean()) for a in advantages], abs=1e-4)
    assert_close(outcome.update, update, 1e-5)
    assert outcome.record.reward_kl.per_token != 0


@matrix
@pytest.mark.parametrize(
    ("algorithm", "moved"),
    [
        (AlgorithmConfig(clip_ratio=1e-4, early_stop_ratio=None), [False]),
        (AlgorithmConfig(clip_ratio=1e-4, early_stop_ratio=None, epochs=3), [False, True, True]),
        (AlgorithmConfig(clip_ratio=1e-4, early_stop_ratio=None, n_minibatches=2), [False, True]),
        (AlgorithmConfig(clip_ratio=1e3, early_stop_ratio=None, epochs=2), [False, None]),
    ],
    ids=["once", "epochs", "minibatches", "wide"],
)
def test_the_ratio_is_to_the_policy_before_the_steps_first_update(
    ranks: RankPool, untied_model: Path, algorithm: AlgorithmConfig, moved: list[bool | None]
) -> None:
    """Only the first update has ratio 1, also where one minibatch is learned from again.

    Narrow bounds cut the others. None: it has moved, but wide bounds do not cut."""
    results = step(ranks, untied_model, LAYOUTS[0], algorithm).record.results
    assert len(results) == len(moved)
    for result, has_moved in zip(results, moved, strict=True):
        ratio, clipped = (
            result.sums[name] / result.sums["tokens"] for name in ("ratio", "clipped")
        )
        assert (abs(ratio - 1) > 1e-4) == (has_moved is not False)
        assert (clipped > 0.1) == (has_moved is True)
        assert result.discarded is None


@matrix
@pytest.mark.parametrize(("action", "made"), [("skip", 4), ("end", 2)])
def test_after_a_discard_the_step_goes_on_or_ends(
    ranks: RankPool, untied_model: Path, action: str, made: int
) -> None:
    """The first minibatch has KL 0, and its update takes all others out of the bound."""
    algorithm = AlgorithmConfig(
        n_minibatches=2, epochs=2, early_stop_kl=1e-5, early_stop_action=action
    )
    record = step(ranks, untied_model, LAYOUTS[2], algorithm).record
    first, *later_results = record.results
    assert record.passes == made / 2
    assert first.discarded is None and len(later_results) == made - 1
    assert all("approximate KL" in result.discarded for result in later_results)


@pytest.mark.parametrize(("entropy_coef", "skipped"), [(0.0, True), (0.1, False)])
def test_a_step_without_any_contrast_is_not_learned_from(
    ranks: RankPool, untied_model: Path, entropy_coef: float, skipped: bool
) -> None:
    """Adam's momentum would move the weights, too.

    The entropy bonus has a gradient of its own."""
    alike = [
        replace(group, scores=tuple(replace(score, reward=5.0) for score in group.scores))
        for group in GROUPS
    ]
    algorithm = AlgorithmConfig(entropy_coef=entropy_coef)
    case = Case(optimizer="adam")
    _, outcome = ranks.run(1, update_cases.steps, untied_model, case, [GROUPS, alike], algorithm)[0]
    assert (outcome.record.results == []) == skipped
    assert any(bool(change.any()) for change in outcome.update.values()) != skipped


@pytest.mark.parametrize("recompute", keeping([True, False], True))
def test_a_rule_that_chooses_no_token_learns_by_the_same_log_probs_as_without_it(
    ranks: RankPool, untied_model: Path, recompute: bool
) -> None:
    """They are the policy's of the step's beginning, or the engine's, which are others here."""
    plain = AlgorithmConfig(n_minibatches=2, recompute_logprobs=recompute, early_stop_ratio=None)
    none_inside = replace(plain, clip_cov_ratio=0.1, clip_cov_low=1e6, clip_cov_high=1e7)
    by_ratio = [
        [result.sums["ratio"] / result.sums["tokens"] for result in outcome.record.results]
        for outcome in (
            step(ranks, untied_model, LAYOUTS[0], algorithm) for algorithm in (plain, none_inside)
        )
    ]
    assert by_ratio[0] == pytest.approx(by_ratio[1], rel=1e-5)
    assert (abs(by_ratio[0][0] - 1) < 1e-5) == recompute


@matrix
def test_chosen_tokens_do_not_depend_on_ranks_and_micro_batches(
    ranks: RankPool, untied_model: Path
) -> None:
    """The same tokens lose their advantage or pay.

    One rank has large micro-batches, two have small ones."""
    algorithm = AlgorithmConfig(
        top_entropy_share=0.3,
        clip_cov_ratio=0.1,
        clip_cov_low=-9.0,
        clip_cov_high=9.0,
        n_minibatches=2,
    )
    for chosen in (algorithm, replace(algorithm, clip_cov_ratio=None, kl_cov_ratio=0.1, epochs=2)):
        single, split = (
            step(ranks, untied_model, case, chosen) for case in (LAYOUTS[0], LAYOUTS[2])
        )
        assert_close(single.update, split.update, 1e-4)
        for result, split_result in zip(single.record.results, split.record.results, strict=True):
            assert result.sums == pytest.approx(split_result.sums, rel=1e-3, abs=1e-3)
    plain = step(
        ranks,
        untied_model,
        LAYOUTS[0],
        replace(algorithm, clip_cov_ratio=None, top_entropy_share=1.0),
    )
    differ = [(single.update[name] - plain.update[name]).abs().max() for name in plain.update]
    assert max(differ) > 1e-2 * max(update.abs().max() for update in plain.update.values())


@matrix
def test_interpolated_log_probs_are_the_recomputed_ones_until_the_first_update(
    ranks: RankPool, untied_model: Path
) -> None:
    """The tokens' weights are two optimizer steps older than those of the step's start."""
    old = [
        replace(
            group,
            completions=tuple(
                replace(completion, segments=(Segment(len(completion.token_ids), -2, 0),))
                for completion in group.completions
            ),
        )
        for group in GROUPS
    ]
    sums_by_setting = {}
    for word in ("recompute", "interpolate", "compare"):
        algorithm = AlgorithmConfig(
            n_minibatches=2,
            importance_correction="token",
            early_stop_ratio=None,
            proximal_logprobs=word,
        )
        outcome = ranks.run(1, update_cases.step, untied_model, LAYOUTS[0], old, algorithm)[0]
        sums_by_setting[word] = [result.sums for result in outcome.record.results]
    assert sums_by_setting["interpolate"][0] == pytest.approx(
        sums_by_setting["recompute"][0], rel=1e-4, abs=1e-3
    )
    errors = [sums["proximal_error"] / sums["tokens"] for sums in sums_by_setting["compare"]]
    assert errors[0] < 1e-5 < 1e-3 < errors[1]
    assert sums_by_setting["compare"][1]["ratio"] == pytest.approx(
        sums_by_setting["recompute"][1]["ratio"], rel=1e-3
    )
    assert sums_by_setting["interpolate"][1]["ratio"] != pytest.approx(
        sums_by_setting["recompute"][1]["ratio"], rel=1e-3
    )
