"""Every alert on rows made by hand.

It is logged once, not below its limit, and not again when a run goes on."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.config.help import is_among, setting_values
from rlmath.config.schema import Config, TelemetryConfig
from rlmath.run.recovery.resume import MAY_CHANGE
from rlmath.telemetry.alerts import Alerts, dropped_alert

LIMITS = TelemetryConfig()
GOOD = {
    "no_eos_ratio": 0.01,
    "importance_weight": 1.0,
    "actor_clip_ratio": 0.01,
    "task_reward": 0.0,
    "rollout/accuracy": 0.5,
    "rollout/groups_with_contrast": 0.8,
    "train/entropy_loss": 0.5,
    "train/early_stopped_minibatches": 0.0,
}


def told(rows, limits=LIMITS, **more):
    """(step, text) of every sign, steps counted from 1."""
    alerts = Alerts(limits, **more)
    signs = [(step, text) for step, row in enumerate(rows, start=1) for text in alerts.check(row)]
    for step, text in signs:
        assert all(
            len(line) <= 80 for line in f"12:00:00 WARNING: step {step}: {text}".split("\n")
        ), text
        assert text.count("\n") == 1
        assert "ew run" in text or not settings_that_a_resume_refuses(text), text
    return signs


def settings_that_a_resume_refuses(text):
    named_settings = set(re.findall(r"[a-z]+\.[a-z_]+", text)) & {*setting_values(Config())}
    may_change = (*MAY_CHANGE, "stages.", "reward.function")  # the code of that function may
    return {key for key in named_settings if not is_among(key, may_change)}


def rows(name, values):
    return [{**GOOD, name: value} for value in values]


def test_truncated_completions_are_told_of_once_with_share_and_key():
    ((step, text),) = told(rows("no_eos_ratio", [0.23, 0.2, 0.28, 0.25]))
    assert step == 1
    assert text == (
        "23% of completions were cut off (last step).\n"
        "  Resume with longer `stages` (--help stages); new runs: rollout.max_new_tokens."
    )


def test_the_key_of_the_length_is_that_of_the_stages_where_there_are_any():
    ((_, text),) = told(rows("no_eos_ratio", [0.23]), length_key="stages.max_new_tokens")
    assert (
        "Resume with a larger stages.max_new_tokens" in text
        and "rollout.max_new_tokens" not in text
    )


def test_truncated_share_is_the_mean_of_five_steps():
    # (0 + 0 + 0 + 0.12 + 0.12) / 5 = 0.048; with the next 0.12 in place of a 0 it is 0.072
    ((step, text),) = told(rows("no_eos_ratio", [0, 0, 0, 0.12, 0.12, 0.12, 0.12]))
    assert (step, text.partition(" ")[0]) == (6, "7.2%")
    assert "last 5 steps" in text
    assert told(rows("no_eos_ratio", [0.05] * 20)) == []


@pytest.mark.parametrize(
    ("share", "is_told"), [(0.05, False), (0.051, True), (0.83, True), (0.0, False)]
)
def test_dropped_prompts(share, is_told):
    text = dropped_alert(share, LIMITS)
    assert (text is not None) == is_told
    if text is not None:
        assert (
            text.startswith(f"{100 * share:.3g}% of the prompts")
            and "data.max_prompt_tokens" in text
        )
        assert "unusable_rows.jsonl" in text and "rows" not in str(
            dropped_alert(share, LIMITS, is_written=False)
        )


def test_every_sign_has_a_limit_of_its_own():
    limits = TelemetryConfig(warn_truncated=0.3, warn_dropped=0.6, warn_importance_weight=0.9)
    assert dropped_alert(0.5, limits) is None and dropped_alert(0.7, limits) is not None
    for name, below, above in (("no_eos_ratio", 0.2, 0.4), ("importance_weight", 1.8, 2.0)):
        assert (
            told(rows(name, [below]), limits) == [] and len(told(rows(name, [above]), limits)) == 1
        )


@pytest.mark.parametrize("values", [[1.11], [0.89], [0.8, 1.2], [math.nan]])
def test_importance_weights_far_from_one(values):
    """Above and below do not make up for each other; a NaN is far."""
    ((step, text),) = told(rows("importance_weight", values))
    assert step == 1
    assert f"is {values[0]:.3g} (last step)" in text
    assert all(key in text for key in ("optimizer.lr", "n_minibatches"))


def test_clipped_tokens_are_a_sign_except_in_gspo():
    ((step, text),) = told(rows("actor_clip_ratio", [0.05, 0.16]))  # mean 0.105
    assert step == 2
    assert "10.5% of tokens are clipped" in text and "10%" in text
    assert told(rows("actor_clip_ratio", [0.1] * 9)) == []
    assert told(rows("actor_clip_ratio", [0.5] * 9), clips_whole_completions=True) == []


def flat_limits(steps):
    return replace(LIMITS, warn_flat_steps=steps)


def test_flat_rewards_are_told_of_when_the_window_is_full():
    ((step, text),) = told(rows("task_reward", [1.0, 3.0] * 6), flat_limits(8))
    assert step == 8
    assert "2, then 2 (last 8 steps)" in text and "selection.dynamic_sampling" in text


def test_a_rise_is_measured_against_the_scatter_of_both_halves():
    # Halves (0, 2, 0, 2) and the same plus d: variances 4/3 each, standard error sqrt(2 * 4/3 / 4)
    # = 0.8165.
    base = [0.0, 2.0, 0.0, 2.0]
    assert len(told(rows("task_reward", base + [v + 0.81 for v in base]), flat_limits(8))) == 1
    assert told(rows("task_reward", base + [v + 0.82 for v in base]), flat_limits(8)) == []
    falls = base + [v - 3 for v in base]
    assert len(told(rows("task_reward", falls), flat_limits(8))) == 1


def test_a_reward_that_can_hardly_rise_is_not_flat():
    best = [{**row, "rollout/accuracy": 0.97} for row in rows("task_reward", [4.7] * 60)]
    assert told(best, flat_limits(20)) == []


def test_entropy_that_falls_without_the_errors_is_told_of():
    # first steps 0.5; mean of five at step 9: (0.5 + 4 * 0.01) / 5 = 0.108 = 21.6%; at step 10:
    # 0.01 = 2%
    ((step, text),) = told(rows("train/entropy_loss", [0.5] * 5 + [0.01] * 9))
    assert step == 10
    assert "fell to 2% of its start" in text
    assert all(key in text for key in ("entropy_coef", "clip_ratio_high", "optimizer.lr"))
    assert told(rows("train/entropy_loss", [0.5] * 5 + [0.101] * 20)) == []


def learning(entropy, accuracy):
    return [
        {**GOOD, "train/entropy_loss": e, "rollout/accuracy": a}
        for e, a in zip(entropy, accuracy, strict=True)
    ]


def test_entropy_that_falls_as_the_errors_do_is_learning():
    """The course of the laptop demo: errors from 53% to 2%, entropy from 0.19 to 0.014."""
    errors = [0.53] * 5 + [0.53 * 0.9**step for step in range(40)]
    assert told(learning([0.36 * error for error in errors], [1 - error for error in errors])) == []
    # Half as far as the errors is the edge: 10% of the first entropy, 21% and 19% of the first
    # errors.
    entropy = [0.4] * 5 + [0.04] * 5
    assert len(told(learning(entropy, [0.5] * 5 + [1 - 0.5 * 0.21] * 5))) == 1
    assert told(learning(entropy, [0.5] * 5 + [1 - 0.5 * 0.19] * 5)) == []


def test_minibatches_discarded_in_most_of_ten_steps():
    ((step, text),) = told(rows("train/early_stopped_minibatches", [2, 0] * 2 + [2] * 10))
    # Steps 1, 3 and then from 5 on: at step 10 eight of ten.
    assert step == 10
    assert text.startswith("8 of the last 10 steps discarded minibatches")
    assert told(rows("train/early_stopped_minibatches", [1, 0] * 20)) == []


@pytest.mark.parametrize(
    "bad",
    [
        rows("no_eos_ratio", [0.5] * 30),
        rows("task_reward", [0.0] * 30),
        rows("train/entropy_loss", [0.5] * 5 + [0.01] * 25),
        rows("train/early_stopped_minibatches", [1] * 30),
    ],
    ids=lambda bad: None,
)
@pytest.mark.parametrize("stopped_after", [1, 9, 19, 29])
def test_a_run_that_goes_on_tells_what_an_unbroken_one_tells_from_there(bad, stopped_after):
    limits = flat_limits(20)
    whole = told(bad, limits)
    assert whole != []
    alerts = Alerts(limits)
    for row in bad[:stopped_after]:
        alerts.check(row)
    later_signs = [
        (n, text) for n, row in enumerate(bad, 1) if n > stopped_after for text in alerts.check(row)
    ]
    assert later_signs == [(step, text) for step, text in whole if step > stopped_after]


def test_a_new_stage_is_measured_by_its_own_first_steps():
    alerts = Alerts(flat_limits(12))
    for row in rows("train/entropy_loss", [0.5] * 10):
        assert alerts.check(row) == []
    alerts.reset()
    changed = [{**GOOD, "train/entropy_loss": 0.05, "task_reward": -1.0}] * 11
    assert [alerts.check(row) for row in changed] == [[]] * 11
    assert len(alerts.check(changed[0])) == 1  # twelve flat steps


def test_steps_without_minibatches_are_no_sign():
    assert told([{"no_eos_ratio": 0.0, "train/early_stopped_minibatches": 0.0}] * 100) == []


@settings(max_examples=20, deadline=None)
@given(
    truncated=st.floats(0, 0.05),
    weight=st.floats(0.91, 1.09),
    clipped=st.floats(0, 0.1),
    entropy=st.floats(1e-6, 10),
    accuracy=st.floats(0, 1),
    slope=st.floats(1e-3, 10),
)
def test_steady_good_runs_tell_nothing(truncated, weight, clipped, entropy, accuracy, slope):
    steady = {
        "no_eos_ratio": 0.999 * truncated,
        "importance_weight": weight,
        "actor_clip_ratio": 0.999 * clipped,
        "rollout/accuracy": accuracy,
        "train/entropy_loss": entropy,
        "train/early_stopped_minibatches": 0.0,
    }
    assert told([{**steady, "task_reward": slope * step} for step in range(60)]) == []


def test_long_waits_for_reward_workers_name_the_setting():
    slow = {**GOOD, "reward/queue_wait_s_max": 12.5, "seconds/step": 40.0}
    ((step, text),) = told([slow] * 3)
    assert step == 2  # workers start in the first
    assert "waited 12.5 s" in text and "Raise reward.workers" in text
    assert told([{**slow, "reward/queue_wait_s_max": 3.9}] * 3) == []
    assert told([{**slow, "reward/queue_wait_s_max": 0.9, "seconds/step": 2.0}] * 3) == []


def test_rewards_that_are_all_alike_within_groups_are_told_of_after_two_steps():
    rows_alike = [
        {**GOOD, "rollout/groups_with_contrast": 0.0, "task_reward": 1.0, "train/minibatches": 0.0}
    ] * 6
    ((step, text),) = told([rows_alike[0], GOOD, *rows_alike])
    assert step == 4
    assert text.startswith("No group had different rewards") and "last 2 steps" in text
    assert "reward.function" in text
    learned_rows = [row | {"train/minibatches": 1.0} for row in rows_alike]
    assert told(learned_rows, group_relative=False) == []
    assert told(rows("rollout/groups_with_contrast", [0.01] * 20)) == []


def test_steps_whose_groups_were_all_dropped_are_told_of_after_two_steps():
    dropped_row = {**GOOD, "train/minibatches": 0.0, "train/early_stopped_minibatches": 0.0}
    ((step, text),) = told([dropped_row, GOOD, *[dropped_row] * 3])
    assert step == 4 and text.startswith("No group was learned from (last 2 steps)")
    ((_, text),) = told([dropped_row, {**GOOD, "rollout/groups_with_contrast": 0.0}])
    assert text.startswith("No group had different rewards")


def dropped(
    sampled: int, right: int, wrong: int, uniform: int = 0, contrast: float = 0.1
) -> dict[str, float]:
    counts = {"right": right, "wrong": wrong, "uniform": uniform, "empty": 0, "surplus": 0}
    return {
        **GOOD,
        "rollout/groups_with_contrast": contrast,
        "selection/groups_sampled": float(sampled),
        **{f"selection/dropped/{name}": float(count) for name, count in counts.items()},
    }


def test_dynamic_sampling_that_discards_almost_all_groups_is_told_of_with_its_reasons():
    partial = [dropped(96, 91, 0, contrast=0.9), dropped(96, 90, 4, contrast=0.9)]
    ((step, text),) = told(partial)
    assert step == 1
    assert text.startswith("94.8% of groups dropped as all right (last step)")
    assert "Rewards do differ. In a new run: selection.dynamic_sampling=reward" in text
    ((_, text),) = told([dropped(96, 2, 92, contrast=0.02)])
    assert (
        "dropped as all wrong" in text and "In a new run take problems it sometimes solves" in text
    )
    ((_, text),) = told([dropped(96, 0, 0, uniform=95, contrast=0.01)])
    assert "dropped as all alike" in text and "dynamic_sampling=reward" not in text


def test_few_groups_and_usual_shares_are_not_told_of():
    assert told([dropped(96, 40, 46)] * 20) == []  # 10% are left
    assert told([dropped(8, 8, 0), dropped(6, 6, 0)]) == []
    ((step, _),) = told([dropped(8, 8, 0)] * 4)
    assert step == 2
    assert told([GOOD] * 20) == []


def test_merged_weights_that_lose_the_update_are_told_of_where_there_are_any():
    ((step, text),) = told(rows("sync/lora_kept", [1.0, 0.95, 0.174, 0.1]))
    assert step == 3
    assert "keep 17.4% of LoRA's update" in text and "lora.engine=adapters" in text
    assert told(rows("sync/lora_kept", [1.0, 0.99, 0.95])) == told([GOOD] * 9) == []
