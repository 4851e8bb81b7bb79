"""One run with everything on.

Its records on the disk say what each part was given.

One rank or two that train and sample, a critic, two length stages, partial rollouts, two updates a
step and three epochs of the critic, two rewards of weights 1 and 3, functions of a plugin's,
validation with a template, lengths and a scorer of its own, pass rates of an earlier run, a captured
step; its third step breaks the policy, and it goes back. No two settings are alike that one part
could take for another.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlmath.algorithms.partial_rollouts import UnfinishedGroups
from rlmath.checkpoint.capture import read_capture
from rlmath.checkpoint.directory import read_progress
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.distributed.fault_tolerance.exit_codes import FINISHED, read_exit_status
from tests.forked_ranks import replay, run_ranks
from tests.programs import TRAIN, metric_rows, rows, run, small_run, torchrun_command
from tests.spoiled_run import SPOILED_STEP
from tests.test_end_to_end import replay_by_command

STAGES = (2, 3)
LIMITS = (12, 12, 20, 20, 20)
STEPS = sum(STAGES)
PER_STEP = 5
GROUP = 3
PROMPTS = 80
MINIBATCHES = 2
CRITIC_EPOCHS = 3
PRETRAIN = 1
LR = 2e-3
MIN_LR = 2e-4
WARMUP = 3
CRITIC_LR = 5e-3
CRITIC_WARMUP = 7
FACTOR = 0.25
"""Factor of the learning rates after the rollback."""
SAVED = 4
"""The step after which the run is killed."""
PLUGIN = """
from pathlib import Path
from rlmath import hooks

def note(name, text):
    with Path(__file__).with_name(name).open("a") as file:
        file.write(text + "\\n")

@hooks.template("asked")
def asked(problem, row):
    return "Q" + problem

@hooks.template("held_out")
def held_out(problem, row):
    note("templates", row["query_id"])
    return "HH" + problem

@hooks.reward("digits")
def digits(completion, solutions, row):
    return sum(one.isdigit() for one in completion) / 10, {"correct": 0}

@hooks.scorer("by_row")
def by_row(completion, solutions, row):
    note("scored", row["query_id"])
    return row["query_id"] == "held-0"

@hooks.metric("texts")
def texts(groups):
    return {"groups": len(groups), "rewards": sum(sum(one.rewards) for one in groups)}
"""
SETTINGS = f"""
run.plugins=[{{place}}/own.py] run.seed=3 run.total_steps=null data.train_path={{place}}/few.jsonl data.template=asked
data.prompts_per_step={PER_STEP} data.max_prompt_tokens=13 data.history_path={{place}}/rates.jsonl
data.curriculum=skip_solved data.solved_samples=8 data.curriculum_floor=0.01 stages.steps=[{STAGES[0]},{STAGES[1]}]
stages.max_new_tokens=[12,20] stages.max_tokens_per_microbatch=[128,192] parallel.tensor=1 rollout.max_new_tokens=27
rollout.group_size={GROUP} rollout.tail=carry rollout.slice_tokens=4 rollout.max_staleness=2
rollout.max_groups_in_flight=11 optimizer.lr={LR} optimizer.min_lr={MIN_LR} optimizer.warmup_steps={WARMUP}
sync.probe_every=3 memory.offload_critic=true memory.offload_reference=true reward.rewards=[length,digits]
reward.weights=[1,3] reward.workers=1 algorithm.advantage=gae algorithm.n_minibatches={MINIBATCHES}
algorithm.kl_coef=0.05 algorithm.kl_in=reward algorithm.loss_normalisation=constant
algorithm.recompute_logprobs=true algorithm.importance_correction=token algorithm.importance_mask_high=5
algorithm.early_stop_ratio=null algorithm.rollback=2
algorithm.rollback_lr_factor={FACTOR} algorithm.rollback_reward_drop=50 critic.path={{place}}/critic
critic.lr={CRITIC_LR} critic.warmup_steps={CRITIC_WARMUP} critic.epochs={CRITIC_EPOCHS}
critic.pretrain_steps={PRETRAIN} validation.every_steps=3 validation.paths=[{{place}}/held.jsonl]
validation.template=held_out validation.scorer=by_row validation.before_training=false validation.batch_size=2
validation.samples=4 validation.temperature=0.8 validation.max_new_tokens=9 validation.keep_best=true
telemetry.sample_groups_per_step=100 telemetry.metrics=[texts] telemetry.capture_steps=[5] save.ckpt_freq_steps=1
save.ckpt_freq_secs=null save.keep_last={STEPS + 1}
""".split()
KINDS = {
    "full": ("algorithm.reference_every_steps=4",),
    "one_rank": ("algorithm.reference_every_steps=4",),
    "lora": ("lora.rank=4",),
}
RANKS = 2
"""Ranks of the kinds that torchrun starts: all but "one_rank"."""
SPOILED = (
    "tests/spoiled_run.py",
    "--config",
    TRAIN[2],
    *["--program", "grpo", "--spoil", "nan", "--times", "1"],
)
HELD = 3


def train(place: Path, folder: Path, kind: str, *program: str) -> str:
    """What the console said."""
    for name in ("templates", "scored"):
        (place / name).unlink(missing_ok=True)
    everything = [
        *small_run(place, folder),
        *(setting.format(place=place) for setting in (*SETTINGS, *KINDS[kind])),
    ]
    if kind == "one_rank":
        return run_ranks(1, [*program, *everything]).stderr
    return run(*torchrun_command(RANKS, *program, *everything), timeout=1800).stderr


@pytest.fixture(scope="module")
def place(arithmetic: Path) -> Path:
    """Data, models and a plugin.

    Every second prompt was always right in an earlier run."""
    rows = [
        json.loads(line) for line in (arithmetic / "data" / "train.jsonl").read_text().splitlines()
    ]
    held_out = [
        row | {"query_id": f"held-{n}"} for n, row in enumerate(rows[PROMPTS : PROMPTS + HELD])
    ]
    rates = [{"query_id": row["query_id"], "correct": 8, "sampled": 8} for row in rows[:PROMPTS:2]]
    for name, content in {"few": rows[:PROMPTS], "held": held_out, "rates": rates}.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (arithmetic / f"{name}.jsonl").write_text(text)
    (arithmetic / "own.py").write_text(PLUGIN)
    run("-m", "rlmath.cli.make_tiny_model", "--output", str(arithmetic / "critic"), "--seed", "8")
    return arithmetic


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("full", marks=pytest.mark.distributed),
        pytest.param("lora", marks=[pytest.mark.distributed, pytest.mark.full]),
        "one_rank",
    ],
)
def whole(place: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of a run that was never killed.

    Its name says whether all weights learn or only adapters, and on how many ranks."""
    folder = place / request.param
    (folder.with_suffix(".txt")).write_text(train(place, folder, folder.name, *SPOILED))
    return folder


def layout_of(whole: Path) -> str:
    return f"TP1 x PP1 x DP{1 if whole.name == 'one_rank' else RANKS}"


def groups_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """The groups of a step, counted from 1, as they are kept."""
    file = folder / "samples" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def unfinished_of(folder: Path, step: int) -> UnfinishedGroups:
    """What was in flight when so many steps were done."""
    content = (folder / "checkpoints" / f"step-{step:06d}" / UNFINISHED).read_bytes()
    return read_unfinished(content, GROUP, 1000, lambda *_: "")


def updates_before(step: int) -> int:
    """Optimizer steps of the policy before a step, counted from 1.

    The critic learns alone at first."""
    return MINIBATCHES * max(0, step - 1 - PRETRAIN)


def test_it_goes_back_once_and_ends(whole: Path) -> None:
    assert read_exit_status(whole).status == FINISHED
    metrics = rows(whole)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert whole.with_suffix(".txt").read_text().count("Rollback 1 of at most 2") == 1
    assert layout_of(whole) in (whole / "report.html").read_text()
    assert json.loads((whole / "summary.json").read_text())["steps"] == STEPS
    (record,) = json.loads((whole / "rollbacks.json").read_text())["rollbacks"]
    assert (record["step"], record["diverged_step"]) == (SPOILED_STEP - 1, SPOILED_STEP)
    (event,) = [row for row in metric_rows(whole, "events.jsonl") if row["kind"] == "rollback"]
    assert (event["step"], event["diverged_step"]) == (SPOILED_STEP - 1, SPOILED_STEP)


def test_every_step_has_the_lengths_of_its_stage_which_leaves_its_model(whole: Path) -> None:
    for step, (row, limit) in enumerate(zip(rows(whole), LIMITS, strict=True), start=1):
        assert (row["stage"], row["rollout/max_new_tokens"]) == (1 if limit == 12 else 2, limit)
        completions = [
            completion for group in groups_of(whole, step) for completion in group["completions"]
        ]
        assert (
            len(completions) == PER_STEP * GROUP
            and max(completion["length"] for completion in completions) == limit
        )
        assert any(completion["finish_reason"] == "length" for completion in completions)
        assert all(
            completion["length"] == limit
            for completion in completions
            if completion["finish_reason"] == "length"
        )
    last, second = (whole / name / "model.safetensors" for name in ("hf_model", "models/stage-2"))
    assert last.read_bytes() == second.read_bytes() and (whole / "models" / "stage-1").is_dir()
    assert "12 tokens, 128 tokens per micro-batch" in whole.with_suffix(".txt").read_text()


def test_what_is_in_flight_knows_the_step_and_the_weights_that_sampled_it(whole: Path) -> None:
    """Every token of a step was sampled with the version of all updates before it.

    No checkpoint lacks a group."""
    draws: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        unfinished = unfinished_of(whole, step)
        row = rows(whole)[step - 1]
        assert len(unfinished.groups) == row["rollout/groups_in_flight"]
        assert (len(unfinished.groups) > 0) == (step not in (STAGES[0], STEPS)), (
            "none is in flight at a stage's end"
        )
        for segment in (
            segment
            for group in unfinished.groups
            for part in group.parts
            for segment in part.segments
        ):
            assert segment.policy_version == updates_before(segment.step + 1)
        draws.update(group["prompt_id"] for group in groups_of(whole, step))
        assert row["rollout/staleness_max"] <= 2
        versions = {
            completion["policy_version"]
            for group in groups_of(whole, step)
            for completion in group["completions"]
        }
        assert versions <= {updates_before(earlier_step) for earlier_step in range(1, step + 1)}
    assert set(draws.values()) == {1}


def test_prompts_have_the_template_of_training_and_none_was_solved_before(
    place: Path, whole: Path
) -> None:
    solved = {
        json.loads(line)["query_id"] for line in (place / "rates.jsonl").read_text().splitlines()
    }
    for step in range(1, STEPS + 1):
        for group in groups_of(whole, step):
            assert group["prompt"][0] == "Q" and group["prompt_id"] not in solved
    history_rows = [
        json.loads(line) for line in (whole / "prompt_history.jsonl").read_text().splitlines()
    ]
    assert (
        solved <= {row.get("query_id") for row in history_rows}
        and rows(whole)[0]["history/skipped_share"] > 0
    )


def test_rewards_are_weighed_as_they_are_listed(whole: Path) -> None:
    for step, row in enumerate(rows(whole), start=1):
        groups = groups_of(whole, step)
        rewards = []
        for completion in (completion for group in groups for completion in group["completions"]):
            short = 1 - completion["length"] / LIMITS[step - 1]
            digits = sum(map(str.isdigit, completion["text"])) / 10
            assert completion["reward"] == pytest.approx(1 * short + 3 * digits, abs=1e-5)
            rewards.append(completion["reward"])
        assert row["task_reward"] == pytest.approx(fmean(rewards), abs=1e-5)
        assert row["own/texts/groups"] == len(groups) == PER_STEP
        assert row["own/texts/rewards"] == pytest.approx(sum(rewards), abs=1e-3)


def rate(update: int, most: float, least: float, warmup: int, updates: int) -> float:
    """The learning rate of update `update`, counted from 0, of `updates`."""
    if update < warmup:
        return most * (update + 1) / (warmup + 1)
    return most - (most - least) * (update - warmup) / (updates - warmup)


def test_policy_and_critic_have_rates_and_epochs_of_their_own_and_both_are_lowered(
    whole: Path,
) -> None:
    metrics = rows(whole)
    least = MIN_LR / LR * CRITIC_LR
    of_critic = MINIBATCHES * CRITIC_EPOCHS
    for step, row in enumerate(metrics, start=1):
        factor = FACTOR if step >= SPOILED_STEP else 1.0
        expected_rate = rate(
            step * of_critic - 1, CRITIC_LR, least, CRITIC_WARMUP, STEPS * of_critic
        )
        assert row["critic/learning_rate"] == pytest.approx(factor * expected_rate)
        if step > PRETRAIN:
            updates = MINIBATCHES * (STEPS - PRETRAIN)
            expected_rate = rate(updates_before(step + 1) - 1, LR, MIN_LR, WARMUP, updates)
            assert row["train/learning_rate"] == pytest.approx(factor * expected_rate)
        progress = read_progress(whole / "checkpoints" / f"step-{step:06d}")
        assert progress.updates == updates_before(step + 1)
        assert (progress.critic_updates, progress.syncs) == (step * of_critic, step)
        assert progress.learned_step == step, "the first one, in which the critic learns alone, too"
        assert progress.has_model("reference") == (step >= 4 and whole.name != "lora")
        assert list(progress.rewards) == [row["task_reward"] for row in metrics[:step]]
    assert abs(metrics[1]["critic/value"]) > 0, (
        "the model of critic.path has a head of its own, or has learned"
    )


def test_validation_is_asked_with_settings_of_its_own(place: Path, whole: Path) -> None:
    validations = rows(whole, "validation.jsonl")
    assert [row["step"] for row in validations] == [3, 5]
    for row in validations:
        assert row["validation/held/accuracy"] == pytest.approx(1 / HELD)
        assert row["validation/held/mean_tokens"] <= 9 and 0 < row["validation/held/truncated"] <= 1
    names = [f"held-{n}" for n in range(HELD)]
    assert set((place / "templates").read_text().split()) == set(names), (
        "training prompts have another"
    )
    scored = Counter((place / "scored").read_text().split())
    assert {name: scored[name] for name in names} == dict.fromkeys(names, 2 * 4)
    account = json.loads((whole / "best_model" / "validation.json").read_text())
    assert (account["step"], account["measured_with"]["template"]) == (3, "held_out")
    assert account["measured_with"]["max_new_tokens"] == 9


def test_weights_are_probed_as_often_as_asked(whole: Path) -> None:
    probed = ["sync/probe_difference" in row for row in rows(whole)]
    assert probed == [True, False, False, True, False]
    assert all(row["sync/probe_difference_max"] < 1e-5 for row in rows(whole)[::3])


def test_tensorboard_has_the_validations_at_their_steps(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("validation/accuracy")] == [3, 5]


def test_a_captured_step_has_its_place_in_the_run(whole: Path) -> None:
    diverged = read_capture(whole / "captures" / f"step-{SPOILED_STEP:06d}")
    assert diverged.reason.startswith("diverged: ") and diverged.rollbacks == 0
    captured = read_capture(whole / "captures" / "step-000005")
    assert (captured.step, captured.length_stage, captured.rollbacks) == (4, 1, 1)
    assert (captured.total_steps, len(captured.groups)) == (STEPS, PER_STEP)
    assert captured.sampling_seed not in (1, 3), "the rollback changed it"
    assert captured.update is not None
    counts = len(captured.update.minibatches), len(captured.update.critic_minibatches)
    assert counts == (MINIBATCHES, MINIBATCHES * CRITIC_EPOCHS)


def test_a_captured_step_is_made_again_to_the_bit_without_the_data(
    place: Path, whole: Path, tmp_path: Path
) -> None:
    """A colleague has the capture and the checkpoint before it, and no data set.

    The step is one of the second stage, with a critic, and at the rate of after the rollback."""
    capture = tmp_path / "step-000005"
    state = tmp_path / "step-000004"
    shutil.copytree(whole / "captures" / capture.name, capture)
    shutil.copytree(whole / "checkpoints" / state.name, state)
    settings = (
        (capture / "config.yaml")
        .read_text()
        .replace(str(place / "few.jsonl"), "/nowhere/few.jsonl")
    )
    (capture / "config.yaml").write_text(settings)
    again = partial(replay, 1) if whole.name == "one_rank" else replay_by_command
    comparison, console = again(capture, "--state", str(state))
    assert comparison["start"] == comparison["weights"] == "equal" and comparison["bit_equal"]
    of_critic = [f"critic {n + 1}" for n in range(MINIBATCHES * CRITIC_EPOCHS)]
    assert {difference["minibatch"] for difference in comparison["differences"]} == {
        "all",
        *(str(n + 1) for n in range(MINIBATCHES)),
        *of_critic,
    }
    assert all(
        difference["captured"] == difference["replayed"] for difference in comparison["differences"]
    )
    assert "The same to the bit" in console


def test_killed_later_it_goes_on_with_all_of_it(place: Path, whole: Path, tmp_path: Path) -> None:
    """What a run leaves that is killed in its last step; what follows is the same bit for bit."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for gone in ("checkpoints/step-000005", "hf_model", "models/stage-2", "captures"):
        shutil.rmtree(folder / gone)
    for name in ("metrics.jsonl", "validation.jsonl"):
        lines = [
            line
            for line in (folder / name).read_text().splitlines()
            if f'"step": {STEPS}' not in line
        ]
        (folder / name).write_text("".join(f"{line}\n" for line in lines) + '{"step": 5, "lo')
    console = train(place, folder, whole.name, *TRAIN)
    assert f"step-{SAVED:06d}, made on {layout_of(whole)}" in console
    after_resume = rows(folder)
    expected = rows(whole)
    if whole.name == "lora":  # the first sync of a start sends the base, too
        sent_first = after_resume[-1].pop("sync/copied_gib")
        assert sent_first > 2 * expected[-1].pop("sync/copied_gib")
    assert after_resume == expected and len(after_resume) == STEPS
    assert rows(folder, "validation.jsonl") == rows(whole, "validation.jsonl")
    for name in ("hf_model", "models/stage-2"):
        resumed, uninterrupted = (root / name / "model.safetensors" for root in (folder, whole))
        assert resumed.read_bytes() == uninterrupted.read_bytes()
    assert groups_of(folder, STEPS) == groups_of(whole, STEPS)
    assert (folder / "prompt_history.jsonl").read_bytes() == (
        whole / "prompt_history.jsonl"
    ).read_bytes()
    assert not list((folder / "checkpoints").glob("*.partial"))
    resumed, uninterrupted = (
        read_progress(root / "checkpoints" / f"step-{STEPS:06d}") for root in (folder, whole)
    )
    assert resumed == uninterrupted
