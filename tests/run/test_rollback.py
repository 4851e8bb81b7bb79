"""Rollbacks.

The list on the disk, which checkpoints it rules out, other orders and seeds, and collapsed
rewards."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.directory import (
    Progress,
    complete_checkpoints,
    read_progress,
    write_progress,
)
from rlmath.checkpoint.retention import Retention, set_superseded_aside
from rlmath.config.run_files import ROLLBACKS_FILE
from rlmath.config.schema import AlgorithmConfig, Config, RolloutConfig, SaveConfig
from rlmath.data.order import PromptOrder, Rollback, seed_after, shares_of
from rlmath.models.learner import MinibatchResult
from rlmath.planning.checks import run_problems
from rlmath.run.divergence import NO_STEP, DivergedError, DivergenceCheck, RewardRule, best_rewards
from rlmath.run.loop import reward_rule
from rlmath.run.recovery.rollbacks_file import (
    read_rollbacks,
    rollbacks_of,
    superseded_by,
    write_rollbacks,
)
from tests.checkpoint.test_directory import make as make_checkpoint

RECORDS = [Rollback(1, 20, 20, 23, "values"), Rollback(2, 10, 12, 31, "rewards")]


def progress(step: int, *rollbacks: Rollback) -> Progress:
    steps = tuple(rollback.step for rollback in rollbacks)
    draws = tuple(rollback.draw_step for rollback in rollbacks)
    return Progress(
        step,
        0,
        0,
        step,
        step,
        "",
        1,
        (),
        (),
        "",
        "",
        {},
        rollback_steps=steps,
        rollback_draw_steps=draws,
    )


# ---------------------------------------------------------------- the list


def test_the_list_of_rollbacks_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_rollbacks(tmp_path) == read_rollbacks(tmp_path / "absent") == []
    write_rollbacks(tmp_path, RECORDS[:1])
    write_rollbacks(tmp_path, RECORDS)
    assert read_rollbacks(tmp_path) == RECORDS
    assert [path.name for path in tmp_path.iterdir()] == [ROLLBACKS_FILE]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2, "rollbacks": []}',
        '{"version": 1, "rollbacks": [{"step": 1}]}',
        '{"version": 1, "rollbacks": [{"step": -1, "draw_step": 1, "diverged_step": 1, "reason": '
        '""}]}',
        '{"version": 1, "rollbacks": [{"step": 1e99, "draw_step": 1, "diverged_step": 1, '
        '"reason": ""}]}',
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / ROLLBACKS_FILE).write_text(content)
    with pytest.raises(ValueError, match="list of the run's rollbacks, cannot be read"):
        read_rollbacks(tmp_path)


def test_the_longer_of_the_folder_s_and_the_checkpoint_s_list_counts(tmp_path: Path) -> None:
    bare = [Rollback(record.number, record.step, record.draw_step) for record in RECORDS]
    assert rollbacks_of(tmp_path, progress(12, *RECORDS)) == bare  # the file is lost
    write_rollbacks(tmp_path, RECORDS)
    for record_count in (0, 1, 2):
        assert rollbacks_of(tmp_path, progress(10, *RECORDS[:record_count])) == RECORDS
    assert rollbacks_of(tmp_path, None) == RECORDS
    with pytest.raises(ValueError, match="that of another run"):
        rollbacks_of(tmp_path, progress(10, Rollback(1, 5, 5)))


@pytest.mark.parametrize(
    ("step", "known", "number"), [(10, 0, None), (20, 0, 2), (21, 0, 1), (15, 1, 2), (15, 2, None)]
)
def test_a_checkpoint_from_before_a_rollback_is_superseded_where_it_is_newer(
    step: int, known: int, number: int | None
) -> None:
    later = superseded_by(RECORDS, progress(step, *RECORDS[:known]))
    assert (later and later.number) == number


def test_progress_has_rollbacks_and_rewards_and_older_files_have_none(tmp_path: Path) -> None:
    written_progress = replace(
        progress(7, *RECORDS), rewards=(0.5, -1.0), good_step=4, learned_step=6
    )
    write_progress(tmp_path, written_progress)
    assert read_progress(tmp_path) == written_progress and written_progress.sound_before == 5
    path = tmp_path / "progress.json"
    values = json.loads(path.read_text())
    for name in ("rewards", "good_step", "rollback_steps", "rollback_draw_steps"):
        del values[name]
    path.write_text(json.dumps(values))
    older_progress = read_progress(tmp_path)
    assert (older_progress.rewards, older_progress.rollback_steps, older_progress.sound_before) == (
        (),
        (),
        6,
    )


# ---------------------------------------------------------------- order and seeds


@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_prompts_of_discarded_steps_are_drawn_again_in_what_is_left_of_their_epoch(
    weights: tuple[float, ...],
) -> None:
    """Steps 0 to 7 are an epoch of 33 or 42 places; the run goes back from step 5 to step 3."""
    counts = [20, 13]
    planned, order = (PromptOrder(33, 4, 1, True, shares_of(counts, weights)) for _ in range(2))
    per_epoch = order.steps_per_epoch
    order.roll_back([Rollback(1, step=3, draw_step=3)])
    assert [order.batch(step) for step in range(3)] == [planned.batch(step) for step in range(3)]
    remaining_prompts = [
        sorted(index for step in range(3, per_epoch) for index in prompt_order.batch(step)[1])
        for prompt_order in (planned, order)
    ]
    # Those of the discarded steps 3 and 4 are among them.
    assert remaining_prompts[0] == remaining_prompts[1]
    assert [order.batch(step) for step in (3, 4, per_epoch)] != [
        planned.batch(step) for step in (3, 4, per_epoch)
    ]
    assert order.batch(per_epoch)[0] == 1
    for step, is_same in ((2, True), (3, False)):
        assert (
            list(order.extra(step, step_prompts=())) == list(planned.extra(step, step_prompts=()))
        ) is is_same


def test_seeds_and_orders_follow_from_the_rollbacks_that_still_count() -> None:
    order = PromptOrder(40, 4, 7, True)
    order.roll_back([Rollback(1, 12, 12), Rollback(2, 5, 6)])
    assert order.rollbacks == (Rollback(2, 5, 6),)
    assert [order.seed_at(step) for step in (5, 6, 30)] == [7, seed_after(7, 2), seed_after(7, 2)]
    order.roll_back([Rollback(1, 5, 5), Rollback(2, 12, 12)])
    assert [order.seed_at(step) for step in (4, 5, 11, 12)] == [
        7,
        *[seed_after(7, 1)] * 2,
        seed_after(7, 2),
    ]
    assert len({seed_after(7, number) for number in range(100)}) == 100
    first_only = PromptOrder(40, 4, 7, True)
    first_only.roll_back([Rollback(1, 5, 5)])
    assert [order.batch(step) for step in range(12)] == [
        first_only.batch(step) for step in range(12)
    ]
    assert order.batch(12) != first_only.batch(12)
    as_in_the_file = PromptOrder(40, 4, 7, shuffle=False)
    as_in_the_file.roll_back([Rollback(1, 1, 1)])
    assert as_in_the_file.batch(1) == (0, [4, 5, 6, 7]) and as_in_the_file.seed_at(1) != 7


# ---------------------------------------------------------------- collapsed rewards


RULE = RewardRule(drop=0.5, steps=2)


def test_rewards_have_collapsed_where_they_lost_the_share_of_their_gain_and_three_deviations() -> (
    None
):
    assert best_rewards([0.0, 0.0, 1.0], RULE) is None
    best = best_rewards([0.0, 0.0, 1.0, 1.0, 0.6, 0.6], RULE)  # lost 0.4 of a gain of 1
    assert best is not None and (best.mean, best.end, best.collapsed) == (1.0, 4, None)
    best = best_rewards([0.0, 0.0, 1.0, 1.0, 0.4, 0.4], RULE)  # 0.6
    assert best is not None and best.collapsed is not None and best.end == 4
    noisy = best_rewards([0.0, 0.0, 0.5, 1.5, 0.1, 0.7], RULE)  # 0.6 is 1.5 deviations of 0.41
    assert noisy is not None and noisy.collapsed is None
    below = best_rewards(
        [-5.0, -5.0, -5.1, -5.1], RULE
    )  # without any gain: a fall of any size, beyond the noise
    assert below is not None and below.collapsed is not None


def test_the_steps_of_a_run_are_counted_from_its_beginning_where_rewards_are_looked_at_later() -> (
    None
):
    """Seven steps were done before the first of these rewards."""
    rewards = [0.0, 0.0, 1.0, 1.0, 0.9, 0.9]
    best = best_rewards(rewards, RULE, first_step=7)
    assert best is not None and (best.end, best.collapsed) == (11, None)
    best = best_rewards([*rewards, 0.1, 0.1], RULE, first_step=7)
    assert best is not None and best.end == 11
    assert best.collapsed == "the mean reward of the last 2 steps is 0.1; up to step 11 it was 1"


def test_a_check_raises_at_the_collapse_and_names_what_is_good_from_before() -> None:
    check = DivergenceCheck(None, 3, None, RULE)  # pyright: ignore: no minibatch is discarded, no value looked at
    assert check.sound_before == 0
    for step, reward in enumerate([0.0, 0.0, 1.0, 1.0, 0.9], start=1):
        check.after_step(step, [], reward)
    check.learned_step = 5
    assert (check.good_step, check.sound_before) == (3, 4)  # of the windows up to step 3
    check.after_step(6, [], 0.8)
    check.after_step(7, [], 0.0)  # 0.4 on average, but 0 and 0.8 deviate by as much
    with pytest.raises(DivergedError, match=r"last 2 steps is 0; .*rollback_reward_drop is 0\.5"):
        check.after_step(8, [], 0.0)
    assert check.sound_before == 5
    check.begin_at(replace(progress(4), rewards=(0.0, 0.0, 1.0, 1.0), good_step=2, learned_step=4))
    assert check.rewards == [0.0, 0.0, 1.0, 1.0] and check.sound_before == 3
    without = DivergenceCheck(None, 1, None)  # pyright: ignore
    without.after_step(1, [], 1.0)
    assert without.rewards == [] and without.good_step == NO_STEP
    overflow = MinibatchResult(
        {}, {}, math.inf, 0.1, "too large a loss scale", 8.0, overflowed=True
    )
    without.after_step(2, [overflow, overflow])
    assert without.discarded_steps == 0 and without.learned_step == 0, "the policy is as it was"


@pytest.mark.parametrize("value", [0.1, 0.3, -0.7, 1.1, 2.2, 0.35])
def test_a_reward_that_is_always_the_same_has_not_collapsed(value: float) -> None:
    rule = RewardRule(drop=0.5, steps=10)
    for count in range(20, 60):
        best = best_rewards([value] * count, rule)
        assert best is not None and best.collapsed is None


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 8, 10])
def test_a_checkpoint_from_before_a_collapse_is_there(tmp_path: Path, every: int) -> None:
    """Rewards rise until step 60, and fall.

    However many steps are between two checkpoints, a good one stays, and few stay."""
    rule = RewardRule(drop=0.5, steps=10)
    keep_last = 2
    rewards = []
    for step in range(1, 100):
        rewards.append(step / 60 if step <= 60 else 0.0)
        best = best_rewards(rewards, rule)
        if best is not None and best.collapsed is not None:
            break
        if step % every == 0:
            make_checkpoint(tmp_path, step)
            good_step = step if best is None else best.end
            retention = Retention(keep_last, None, judged_after=rule.steps)
            set_superseded_aside(tmp_path, retention, learned_step=min(step, good_step + 1))
    assert best is not None and best.collapsed is not None
    steps = [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)[0]]
    assert any(best.end - 2 * rule.steps <= step <= best.end for step in steps), (best.end, steps)
    assert len(steps) <= keep_last + 6


# ---------------------------------------------------------------- settings


def with_algorithm(**values: object) -> Config:
    return replace(Config(), algorithm=AlgorithmConfig(**values))  # pyright: ignore


def test_rewards_are_looked_at_only_where_the_run_may_go_back() -> None:
    algorithm = AlgorithmConfig(rollback=2, rollback_reward_drop=0.5, rollback_reward_steps=7)
    assert reward_rule(algorithm) == RewardRule(0.5, 7)
    assert reward_rule(replace(algorithm, rollback=0)) is None
    assert reward_rule(replace(algorithm, rollback_reward_drop=None)) is None


def problems(config: Config) -> list[str]:
    return [
        problem
        for problem in run_problems(config, 2, None)
        if problem.startswith("algorithm.rollback")
    ]


def test_rollbacks_need_checkpoints_and_engines_that_can_go_back() -> None:
    config = with_algorithm(rollback=1)
    assert problems(config) == []
    (problem,) = problems(replace(config, save=SaveConfig(ckpt_freq_secs=None)))
    assert "no checkpoint to go back to" in problem
    assert problems(replace(config, save=SaveConfig(ckpt_freq_secs=None, save_freq_steps=5))) == []
    (problem,) = problems(replace(config, rollout=RolloutConfig(ranks=1)))
    assert "rollout.ranks 1" in problem and "cannot go back" in problem
