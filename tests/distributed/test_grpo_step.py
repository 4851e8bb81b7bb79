"""The GRPO step on one rank: what was sampled is what is learned from, step by step."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from tests.distributed import grpo_step_cases
from tests.distributed.grpo_step_cases import (
    EPOCHS,
    GROUP,
    LR,
    MIN_LR,
    MINIBATCHES,
    PER_STEP,
    STEPS,
    WARMUP,
    Step,
)
from tests.distributed.rank_pool import RankPool
from tests.reward_by_hash import hash_of

pytestmark = pytest.mark.distributed
UPDATES = MINIBATCHES * EPOCHS
SAMPLES = PER_STEP * GROUP


@pytest.fixture(scope="module")
def made(ranks: RankPool, untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return ranks.run(1, grpo_step_cases.steps, untied_model, tmp_path_factory.mktemp("grpo_step"))[0]


def test_the_learner_is_given_what_was_sampled(made: list[Step]) -> None:
    """Every sample has its own tokens, the engine's log-probs of them, its advantage, and the policy's log-probs of
    before the step, which are the engine's."""
    for step in made:
        sampled = [(group, one) for group in step.groups for one in group.completions]
        advantages = [advantage for row in step.advantages for advantage in row]
        assert len(set(advantages)) == len(sampled) == SAMPLES
        for call in step.learned:
            assert not call.on_policy
            for index in call.samples:
                group, completion = sampled[index]
                assert call.tokens[index] == [*group.prompt.token_ids, *completion.token_ids]
                n = len(completion.token_ids)
                assert call.advantages[index] == pytest.approx([advantages[index]] * n, abs=1e-6)
                assert call.behaviour[index] == pytest.approx(list(completion.logprobs))
                assert call.old[index] == pytest.approx(list(completion.logprobs), abs=1e-4)
                assert len(call.reference[index]) == n


def test_the_reference_stays_as_it_was(made: list[Step]) -> None:
    """In the first step it is the policy itself; later it differs from it, and in both epochs it is the same."""
    distances = []
    for step in made:
        first = {i: row for call in step.learned[:MINIBATCHES] for i, row in call.reference.items()}
        again = {i: row for call in step.learned[MINIBATCHES:] for i, row in call.reference.items()}
        assert first == again
        old = {i: row for call in step.learned for i, row in call.old.items()}
        distances.append(max(abs(a - b) for i in first for a, b in zip(first[i], old[i], strict=True)))
    assert distances[0] < 1e-5 and distances[1] > 1e-4 and distances[2] > 1e-4


def test_every_epoch_has_every_sample_once_and_every_step_other_minibatches(made: list[Step]) -> None:
    dealt, orders = [], []
    for step in made:
        calls = [call.samples for call in step.learned]
        assert len(calls) == UPDATES
        for epoch in range(EPOCHS):
            own = calls[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES]
            assert sorted(index for samples in own for index in samples) == list(range(SAMPLES))
            assert {frozenset(samples) for samples in own} == {
                frozenset(samples) for samples in calls[:MINIBATCHES]
            }
        dealt.append(tuple(frozenset(samples) for samples in calls[:MINIBATCHES]))
        orders.append(calls)
    assert len(set(dealt)) == STEPS


def test_the_rate_of_every_update_is_that_of_the_schedule(made: list[Step]) -> None:
    """Warm-up from one part above 0, then a cosine that ends with the run's last update."""

    def wanted(update: int) -> float:
        if update < WARMUP:
            return LR * (update + 1) / (WARMUP + 1)
        share = (update - WARMUP) / (STEPS * UPDATES - WARMUP)
        return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * share)) / 2

    rates = [call.learning_rate for step in made for call in step.learned]
    assert rates == pytest.approx([wanted(update) for update in range(STEPS * UPDATES)])
    assert [step.metrics["train/learning_rate"] for step in made] == rates[UPDATES - 1 :: UPDATES]


def test_a_step_samples_anew_with_the_newest_weights(made: list[Step]) -> None:
    texts: list[dict[str, list[str]]] = []
    for number, step in enumerate(made):
        completions = [one for group in step.groups for one in group.completions]
        assert {one.policy_version for one in completions} == {number * UPDATES}
        assert step.metrics["rollout/policy_version"] == number * UPDATES
        assert step.epoch == number
        texts.append({g.prompt.prompt_id: [one.text[:5] for one in g.completions] for g in step.groups})
    for one, other in itertools.pairwise(texts):
        both = one.keys() & other.keys()
        assert len(both) >= 3
        assert sum(set(one[name]).isdisjoint(other[name]) for name in both) >= len(both) - 1


def test_rewards_and_advantages_are_of_their_groups(made: list[Step]) -> None:
    for step in made:
        assert len(step.groups) == PER_STEP
        for group, row in zip(step.groups, step.advantages, strict=True):
            assert group.prompt.solutions == (str(2 * int(group.prompt.prompt_id[1:])),)
            rewards = [hash_of(one.text, group.prompt.solutions) for one in group.completions]
            assert [score.reward for score in group.scores] == rewards
            mean = sum(rewards) / GROUP
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (GROUP - 1))
            assert row == pytest.approx([(reward - mean) / (deviation + 1e-6) for reward in rewards])


def test_only_what_is_selected_is_learned_from(ranks: RankPool, untied_model: Path, tmp_path: Path) -> None:
    """With selection.drop_truncated the completions that were cut off are sampled, but not learned from."""
    (made,) = ranks.run(1, grpo_step_cases.steps, untied_model, tmp_path, True)
    completions = [one for step in made for group in step.groups for one in group.completions]
    ended = [one for one in completions if one.finish_reason == "stop"]
    assert 0 < len(ended) < len(completions)
    for step in made:
        whole = sorted(
            [*group.prompt.token_ids, *one.token_ids]
            for group in step.groups
            for one in group.completions
            if one.finish_reason == "stop"
        )
        learned = [
            row for call in step.learned[: len(step.learned) // EPOCHS] for row in call.tokens.values()
        ]
        assert sorted(learned) == whole
