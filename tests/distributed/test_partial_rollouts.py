"""Partial rollouts with real engines: cut or whole, the text is the same.

Nothing is lost, and all is in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.algorithms.types import Completion, ScoredGroup
from rlmath.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    SelectionConfig,
)
from tests.distributed import partial_rollout_cases as cases
from tests.distributed.partial_rollout_cases import CARRY, DEFER, GROUP, LONGEST, PER_STEP, Run
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix

pytestmark = pytest.mark.distributed
STEPS = 10
WAIT = RolloutConfig(
    group_size=GROUP,
    max_new_tokens=LONGEST,
    temperature=1.0,
    max_num_seqs=6,
    cpu_kv_cache_gib=0.1,
    progress_bar=False,
)
LEARNS = OptimizerConfig(kind="sgd", lr=1e-2, distributed=False)
Make = Callable[..., Run]


@pytest.fixture(scope="module")
def model(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.uniform_model(untied_model, tmp_path_factory.mktemp("uniform") / "model")


@pytest.fixture(scope="module")
def make(ranks: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make a run of `STEPS` steps on some ranks and return what its first rank reports.

    The others must report the same."""

    def made(
        world: int = 1, rollout: RolloutConfig = CARRY, steps: int = STEPS, **more: object
    ) -> Run:
        place = tmp_path_factory.mktemp("partial")
        reports = ranks.run(world, cases.run, model, place, steps, rollout, more)
        assert all(report.groups == reports[0].groups for report in reports)
        return reports[0]

    return made


@pytest.fixture(scope="module")
def whole(make: Make) -> Run:
    """Every completion in one piece, `rollout.tail: wait`."""
    return make(1, WAIT)


@pytest.fixture(scope="module")
def carried(make: Make) -> Run:
    return make(1)


@pytest.fixture(scope="module")
def deferred(make: Make) -> Run:
    return make(1, DEFER)


def completions_of(run: Run) -> dict[tuple[str, int], Completion]:
    """Completions by prompt and sample."""
    groups = [group for step in run.groups for group in step]
    completions = {
        (group.prompt.prompt_id, c.sample_index): c for group in groups for c in group.completions
    }
    assert len(completions) == len(groups) * GROUP, "every prompt comes once in these steps"
    return completions


def learned_from(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """Those with a right and a wrong completion."""
    return [group for group in groups if len({score.correct for score in group.scores}) == 2]


def assert_same_completions(run: Run, other: Run) -> None:
    completions = completions_of(run)
    other_completions = completions_of(other)
    assert completions.keys() == other_completions.keys()
    for key, completion in completions.items():
        assert list(completion.token_ids) == list(other_completions[key].token_ids)
        assert (
            completion.finish_reason == other_completions[key].finish_reason
            and completion.text == other_completions[key].text
        )
        assert list(completion.logprobs) == pytest.approx(
            list(other_completions[key].logprobs), abs=1e-5
        )


def test_cut_or_whole_the_completions_are_the_same(whole: Run, carried: Run) -> None:
    assert_same_completions(carried, whole)
    cut = [c for c in completions_of(carried).values() if len(c.segments) > 1]
    assert len(cut) > 10 and {len(c.segments) for c in cut} >= {2, 3}
    assert {c.finish_reason for c in cut} == {"stop", "length"}


@matrix
@pytest.mark.parametrize(
    ("world", "engine", "slice_tokens"),
    [pytest.param(2, 1, 12, marks=pytest.mark.full), (2, 2, 17)],
)
def test_engines_and_cuts_change_nothing(
    make: Make, whole: Run, carried: Run, world: int, engine: int, slice_tokens: int
) -> None:
    rollout = replace(CARRY, tensor_parallel=engine, slice_tokens=slice_tokens)
    run = make(world, rollout, parallel=ParallelConfig(tensor=engine))
    assert_same_completions(run, whole)
    if slice_tokens == CARRY.slice_tokens:
        assert run.groups == carried.groups and run.in_flight == carried.in_flight


BY_GROUP = RewardConfig(function="tests.reward_by_hash:of_group", function_takes="group")


@matrix
def test_a_function_of_whole_groups_pays_what_one_of_single_completions_pays(
    make: Make, carried: Run
) -> None:
    """The function is called once for a group, with all completions, when all are there.

    That holds whoever sampled what of the group, and in which step; also for a group of which a
    checkpoint had a part."""
    repeated = make(2, CARRY, reward=BY_GROUP, stop_after=5)
    assert repeated.groups == carried.groups and repeated.in_flight == carried.in_flight
    assert all(
        "reward/own/row" in metrics and metrics["reward/failures"] == 0
        for metrics in repeated.metrics
    )


@matrix
def test_log_probs_are_those_of_the_weights_that_sampled(make: Make) -> None:
    """Each segment's log-probs are the engine's at its time, while the policy changes.

    Those of earlier segments are kept, not computed again."""
    run = make(1, steps=6, optimizer=LEARNS)
    assert sum(len(sampled) for sampled, _ in run.scored) > 300
    for sampled, scored in run.scored:
        assert sampled == pytest.approx(scored, abs=1e-5)
    versions = [
        [s.policy_version for s in c.segments]
        for step in run.groups
        for g in step
        for c in g.completions
    ]
    assert all(of_one == sorted(set(of_one)) for of_one in versions) and max(map(len, versions)) > 1
    assert all(m["train/behaviour_logprob_diff_max"] > 1e-4 for m in run.metrics[2:])
    assert run.metrics[0]["train/behaviour_logprob_diff_max"] < 1e-5


@matrix
@pytest.mark.parametrize("rollout", [CARRY, DEFER], ids=["carry", "defer"])
def test_dynamic_sampling_replaces_dropped_groups_by_further_draws(
    make: Make, rollout: RolloutConfig
) -> None:
    """Half of the groups have no contrast: a hash rewards, rounded to right and wrong."""
    selection = SelectionConfig(dynamic_sampling="accuracy", max_extra_prompts=4)
    run = make(1, rollout, steps=5, selection=selection)
    for metrics in run.metrics:
        learned = metrics["selection/groups_learned"]
        sampled = metrics["selection/groups_sampled"]
        assert learned == PER_STEP or sampled == PER_STEP + 4
        assert metrics["selection/dropped/surplus"] == 0
    assert any(m["selection/extra_prompts"] > 0 for m in run.metrics) and run.in_flight[-1] == []
    names = [group.prompt.prompt_id for step in run.groups for group in step]
    assert len(names) == len(set(names)), "no prompt comes twice within an epoch"
    for step, metrics in enumerate(run.metrics):
        assert metrics["selection/groups_learned"] == len(learned_from(run.groups[step]))
        assert metrics["selection/groups_sampled"] == len(run.groups[step])
    if rollout is DEFER:
        assert any(metrics["rollout/deferred_groups"] > 0 for metrics in run.metrics)
        versions = [
            {s.step for g in groups for c in g.completions for s in c.segments}
            for groups in run.groups
        ]
        assert versions == [{step} for step in range(5)], (
            "dropped or not, nothing older is in a step"
        )


@pytest.mark.full
def test_groups_that_another_reward_function_has_scored_are_sampled_anew(
    make: Make, whole: Run, carried: Run
) -> None:
    """Those with a finished completion when the run was stopped after its first step."""
    run = make(1, stop_after=1, reward_changed=True)
    assert_same_completions(run, whole)
    drawn = [group.prompt.prompt_id for step in whole.groups for group in step][
        : CARRY.max_groups_in_flight
    ]

    def begun_again(one: Run) -> int:
        redrawn = [
            group for step in one.groups[1:] for group in step if group.prompt.prompt_id in drawn
        ]
        return sum(
            all(s.step >= 1 for c in group.completions for s in c.segments) for group in redrawn
        )

    assert begun_again(run) > begun_again(carried) == 0


# ---------------------------------------------------------------- defer


def test_deferred_or_not_the_completions_are_the_same(whole: Run, deferred: Run) -> None:
    """Each of one version, that of the step that learns from it."""
    assert_same_completions(deferred, whole)
    for step, groups in enumerate(deferred.groups):
        assert len(groups) == PER_STEP
        for completion in (c for group in groups for c in group.completions):
            assert [(s.tokens, s.step) for s in completion.segments] == [
                (len(completion.token_ids), step)
            ]
    lengths = [
        {len(c.token_ids) > DEFER.slice_tokens for g in step for c in g.completions}
        for step in deferred.groups
    ]
    assert {False} in lengths and any(True in kinds for kinds in lengths), (
        "steps of short groups, and others"
    )
    assert deferred.in_flight[-1] == []


@matrix
@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.full), 4])
def test_a_checkpoint_keeps_what_is_deferred(make: Make, deferred: Run, stop_after: int) -> None:
    run = make(1, DEFER, stop_after=stop_after)
    assert run.groups == deferred.groups and run.in_flight == deferred.in_flight
