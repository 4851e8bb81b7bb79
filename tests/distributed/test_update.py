"""A whole step's updates: KL inside of the reward, epochs, early stop's two ways, layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.config.schema import AlgorithmConfig
from rlmath.trainer.grpo import make_samples
from tests.distributed import oracle, update_cases
from tests.distributed.policy_cases import LEARNING_RATE, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.distributed.update_cases import REFERENCE_FACTOR, StepOutcome, make_groups
from tests.selection import keeping

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

GROUPS = make_groups((4, 4, 3, 1, 4))
PPO = AlgorithmConfig(
    advantage="ppo", advantage_eps=1e-5, kl_in="reward", kl_estimator="k1", kl_coef=0.5, early_stop_ratio=None
)
LAYOUTS = [Case(max_tokens=128), Case(tensor=2, pipeline=2, max_tokens=64), Case(data=2, max_tokens=64)]


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
    return [(value - every.mean()) / (every.std(correction=0) + eps) for value in values]


def dense_ppo(folder: Path, samples: list[Sample], algorithm: AlgorithmConfig) -> tuple[list[Tensor], Tensor]:
    """Advantages per token and loss of AReaL's PPO without a critic, in plain torch; the loss is on-policy."""
    model, reference = oracle.load(folder), oracle.load(folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_FACTOR)
        log_refs = [oracle.completion_logprobs(reference, sample).double() for sample in samples]
    logprobs = [oracle.completion_logprobs(model, sample) for sample in samples]
    kls = [kl_estimate("k1", p.detach().double(), r) for p, r in zip(logprobs, log_refs, strict=True)]
    advantages = normalised(returns(GROUPS, kls, algorithm.kl_coef), algorithm.advantage_eps)
    total = sum(
        -(a.float() * (p - p.detach()).exp()).sum() for a, p in zip(advantages, logprobs, strict=True)
    )
    loss = total / sum(len(p) for p in logprobs)
    loss.backward()
    update = {n: -LEARNING_RATE["sgd"] * g for n, g in oracle.gradients(model).items()}
    return advantages, update


@pytest.mark.parametrize("case", keeping(LAYOUTS, LAYOUTS[2]), ids=str)
def test_ppo_with_kl_in_the_reward_is_that_of_plain_torch(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    torch.set_num_threads(1)
    samples = make_samples(GROUPS, [[0.0] * len(group.completions) for group in GROUPS])
    advantages, update = dense_ppo(untied_model, samples, PPO)
    ours = step(ranks, untied_model, case, PPO)
    found = [advantage for row in ours.record.advantages for advantage in row]
    assert found == pytest.approx([float(a.mean()) for a in advantages], abs=1e-4)
    assert_close(ours.update, update, 1e-5)
    assert ours.record.reward_kl.per_token != 0


def test_kl_in_the_reward_shifts_whole_completions_where_groups_are_compared(
    ranks: RankPool, untied_model: Path
) -> None:
    algorithm = AlgorithmConfig(advantage="dr_grpo", kl_in="reward", kl_coef=0.5, early_stop_ratio=None)
    one = step(ranks, untied_model, LAYOUTS[0], algorithm)
    other = step(ranks, untied_model, LAYOUTS[2], algorithm)
    for row, same, group in zip(one.record.advantages, other.record.advantages, GROUPS, strict=True):
        assert row == pytest.approx(same, abs=1e-4)
        assert sum(row) == pytest.approx(0.0, abs=1e-9)
        plain = [reward - sum(group.rewards) / len(group.rewards) for reward in group.rewards]
        assert len(row) == 1 or row != pytest.approx(plain, abs=1e-3)
    assert_close(one.update, other.update, 1e-5)


@pytest.mark.parametrize("loss", keeping(["clip", "gspo"], "gspo"))
def test_epochs_over_minibatches_agree_between_layouts(
    ranks: RankPool, untied_model: Path, loss: str
) -> None:
    algorithm = AlgorithmConfig(loss=loss, n_minibatches=2, epochs=2, early_stop_ratio=None)
    one = step(ranks, untied_model, LAYOUTS[0], algorithm)
    other = step(ranks, untied_model, LAYOUTS[1], algorithm)
    assert len(one.record.results) == 4 and one.record.passes == 2
    for ours, theirs in zip(one.record.results, other.record.results, strict=True):
        assert ours.sums == pytest.approx(theirs.sums, rel=1e-3, abs=1e-3)
    first, *later = one.record.results
    assert first.sums["approx_kl"] == pytest.approx(0.0, abs=1e-3)
    assert all(abs(result.sums["approx_kl"]) > 1e-2 for result in later)


def test_later_epochs_take_the_minibatches_in_another_order(ranks: RankPool, untied_model: Path) -> None:
    algorithm = AlgorithmConfig(n_minibatches=8, epochs=2, early_stop_ratio=None)
    results = step(ranks, untied_model, LAYOUTS[0], algorithm).record.results
    first, second = ([r.sums["tokens"] for r in results[start : start + 8]] for start in (0, 8))
    assert sorted(first) == sorted(second) and first != second
    fixed = dataclasses.replace(algorithm, shuffle=False)
    results = step(ranks, untied_model, LAYOUTS[0], fixed).record.results
    first, second = ([r.sums["tokens"] for r in results[start : start + 8]] for start in (0, 8))
    assert first == second


def test_more_minibatches_than_samples_are_one_sample_each(ranks: RankPool, untied_model: Path) -> None:
    algorithm = AlgorithmConfig(n_minibatches=40, early_stop_ratio=None)
    outcome = step(ranks, untied_model, LAYOUTS[2], algorithm)
    assert len(outcome.record.results) == sum(len(group.completions) for group in GROUPS) == 16


@pytest.mark.parametrize(("action", "made"), [("skip", 4), ("end", 2)])
def test_after_a_discard_the_step_goes_on_or_ends(
    ranks: RankPool, untied_model: Path, action: str, made: int
) -> None:
    """The first minibatch has KL 0, and its update takes all others out of the bound."""
    algorithm = AlgorithmConfig(n_minibatches=2, epochs=2, early_stop_kl=1e-5, early_stop_action=action)
    record = step(ranks, untied_model, LAYOUTS[2], algorithm).record
    first, *others = record.results
    assert record.passes == made / 2
    assert first.discarded is None and len(others) == made - 1
    assert all("approximate KL" in result.discarded for result in others)


def test_the_only_minibatch_needs_no_pass_for_its_log_probs(ranks: RankPool, untied_model: Path) -> None:
    case = Case(tensor=2, max_tokens=64)
    recomputed, _ = ranks.run(2, update_cases.only_minibatch, untied_model, case, False)[0]
    spared, ratio = ranks.run(2, update_cases.only_minibatch, untied_model, case, True)[0]
    assert ratio == 1.0
    assert_close(spared, recomputed, 1e-6)
