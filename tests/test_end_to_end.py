"""The program as a user runs it: data and model by the tools, two ranks under torchrun, a model out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.programs import TRAIN, run, small_run, torchrun_command
from tests.selection import matrix

pytestmark = pytest.mark.distributed

STEPS = 3
METRICS = {
    "task_reward",
    "final_reward",
    "kl_reward",
    "importance_weight",
    "actor_clip_ratio",
    "actor_loss",
    "ppo_approx_kl",
    "advantage",
    "avg_seq_len",
    "avg_prompt_len",
    "n_tokens",
    "n_valid_tokens",
    "n_seqs",
    "no_eos_ratio",
    "rollout/rewards",
    "rollout/response_length",
    "rollout/policy_version",
    "rollout/idle_share",
    "rollout/idle_share_max",
    "rollout/idle_share/engine_1",
    "train/entropy_loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/early_stopped_minibatches",
    "train/behaviour_logprob_diff",
    "seconds/rollout",
    "seconds/update",
    "seconds/sync",
    "seconds/step",
    "tokens_per_second/rollout",
}


def command(place: Path, output: Path) -> list[str]:
    kl = ("algorithm.kl_coef=0.01", "algorithm.recompute_logprobs=true")
    saved = ("save.ckpt_freq_steps=1", f"save.keep_last={STEPS}")
    overrides = (*small_run(place, output), f"run.total_steps={STEPS}", *kl, *saved)
    return torchrun_command(2, *TRAIN, *overrides)


@pytest.fixture(scope="module")
def workplace(arithmetic: Path) -> Path:
    """Data, a random model, and a finished run of three steps with a reference."""
    place = arithmetic
    done = run(*command(place, place / "run"))
    (place / "console.txt").write_text(done.stdout + done.stderr)
    return place


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_tells_its_metrics(workplace: Path) -> None:
    found = rows(workplace / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert row.keys() >= METRICS
        assert row["n_seqs"] == 32 and row["train/minibatches"] == 2
        assert row["n_tokens"] == pytest.approx(row["avg_seq_len"] * 32)
        assert row["train/behaviour_logprob_diff_max"] < 1e-5
    assert found[0]["train/reference_kl"] == pytest.approx(0, abs=1e-3)
    assert found[-1]["train/reference_kl"] > found[0]["train/reference_kl"]


def test_the_console_tells_the_steps_and_the_settings(workplace: Path) -> None:
    console = (workplace / "console.txt").read_text()
    assert "Layout: TP2 x PP1 x DP1, 2 engines of TP1" in console
    assert "prompts_per_step: 8" in console
    for step in (1, 2, 3):
        assert f"(global step {step}) finishes." in console
    assert "Traceback" not in console


def test_the_run_leaves_summary_samples_and_events(workplace: Path) -> None:
    folder = workplace / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["tokens_per_second"] > 0
    assert summary["median_seconds"].keys() >= {"sync", "switch", "rollout", "update", "step"}
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    assert any((folder / "tensorboard").iterdir())
    shown = run("tools/show_samples.py", str(folder), "--step", "last").stdout
    assert "reward" in shown


@matrix
def test_the_exported_model_answers_alike_in_transformers_and_vllm(workplace: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = workplace / "run" / "hf_model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(workplace / "base", dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    lines = (workplace / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[:8]]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    printed = run("-m", "tests.greedy_answers", str(exported), "16", json.dumps(prompts)).stdout
    assert json.loads(printed.strip().splitlines()[-1]) == answers


TIMED = ("seconds/", "tokens_per_second/", "memory", "rollout/idle_share")


def test_resumed_after_its_second_step_the_run_is_the_same_bit_for_bit(
    workplace: Path, tmp_path: Path
) -> None:
    """As a run that is killed while it makes its last step: that step's checkpoint, the model and half a line are not
    there or not whole."""
    whole, folder = workplace / "run", tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:06d}")
    shutil.rmtree(folder / "hf_model")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    done = run(*command(workplace, folder))
    assert f"step-{STEPS - 1:06d}, made on TP2 x PP1 x DP1" in done.stderr
    ours, theirs = (
        [{name: x for name, x in row.items() if not name.startswith(TIMED)} for row in rows(one)]
        for one in (folder, whole)
    )
    assert ours == theirs and len(ours) == STEPS
    model, last = Path("hf_model") / "model.safetensors", Path("samples") / f"step-{STEPS:06d}.jsonl"
    assert (folder / model).read_bytes() == (whole / model).read_bytes()
    assert (folder / last).read_text() == (whole / last).read_text()


@pytest.mark.full
def test_the_saved_config_repeats_the_run(workplace: Path) -> None:
    """Bit-equal losses and rewards, and nothing of the first run lost."""
    folder = workplace / "run"
    first = rows(folder)
    again = ("--config", str(folder / "config.yaml"), "run.recover_mode=disabled")
    run(*torchrun_command(2, "launch/train_grpo.py", *again))
    assert rows(folder / "earlier" / "001") == first
    for one, other in zip(first, rows(folder), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(TIMED)} == {
            k: v for k, v in other.items() if not k.startswith(TIMED)
        }


@matrix
def test_a_mistake_is_told_before_anything_starts(workplace: Path) -> None:
    overrides = small_run(workplace, workplace / "other")
    done = run(*torchrun_command(2, *TRAIN, *overrides, "rollout.grop_size=4"), expect=1)
    assert "did you mean" in done.stderr and "rollout.group_size" in done.stderr
    done = run(*torchrun_command(2, *TRAIN, *overrides, "parallel.tensor=3"), expect=1)
    assert "parallel.tensor" in done.stderr
    assert not (workplace / "other").exists()


@matrix
def test_a_reward_function_of_the_users_trains_and_its_failures_are_told(workplace: Path) -> None:
    """Half of its calls fail: the run goes on, warns, and names a file with one of them."""
    mine = workplace / "functions"
    mine.mkdir()
    (mine / "half_broken.py").write_text(
        "def reward(completion, solutions, row):\n"
        "    if len(completion) % 2:\n"
        "        raise ValueError('odd')\n"
        "    return float(len(completion)), {'length': len(completion)}\n"
    )
    overrides = small_run(workplace, workplace / "own")
    own = ("run.total_steps=1", "reward.function=half_broken:reward", "reward.function_failure=-1")
    done = run(*torchrun_command(2, *TRAIN, *overrides, *own), path=mine)
    (row,) = rows(workplace / "own")
    assert 0 < row["reward/failures"] < 1
    assert row["reward/failures"] + row["reward/verdict/function"] == pytest.approx(1.0)
    assert row["reward/own/length"] > 0
    assert row["task_reward"] == pytest.approx(
        row["reward/own/length"] * row["reward/verdict/function"] - row["reward/failures"]
    )
    kept = workplace / "own" / "samples" / "failure-000001.jsonl"
    assert "could not be judged" in done.stderr + done.stdout and str(kept) in done.stderr + done.stdout
    found = json.loads(kept.read_text())
    assert any("ValueError: odd" in one["extracted"] for one in found["completions"])


@pytest.mark.full
def test_a_step_without_contrast_learns_nothing_and_says_so(workplace: Path) -> None:
    """The random model is never right: dynamic sampling drops every group, also those it samples beyond."""
    overrides = small_run(workplace, workplace / "dropped")
    own = ("run.total_steps=1", "selection.dynamic_sampling=accuracy", "selection.max_extra_prompts=12")
    done = run(*torchrun_command(2, *TRAIN, *overrides, *own))
    (row,) = rows(workplace / "dropped")
    assert row["selection/groups_sampled"] == row["selection/dropped/wrong"] == 20
    assert row["selection/extra_prompts"] == 12 and row["n_seqs"] == 80
    assert row["train/minibatches"] == row["selection/groups_learned"] == 0
    assert "0 of 20 sampled groups are learned from, 8 were wanted; groups dropped: 20 wrong" in done.stderr
    base, left = (load_file(workplace / f / "model.safetensors") for f in ("base", "dropped/hf_model"))
    assert all(torch.equal(base[name].to(left[name].dtype), left[name]) for name in left)


@pytest.mark.full
def test_settings_of_the_whole_family_go_together(workplace: Path) -> None:
    """KL in the reward, batch-normalised returns, decoupled loss, two epochs, dynamic sampling, length filter, over an
    interleaved pipeline."""
    mine = workplace / "lengths"
    mine.mkdir()
    (mine / "short_is_good.py").write_text(
        "def reward(completion, solutions, row):\n    return -float(len(completion))\n"
    )
    overrides = [*small_run(workplace, workplace / "family"), "run.total_steps=2"]
    overrides += ["parallel.tensor=1", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    overrides += [
        "reward.function=short_is_good:reward",
        "algorithm.epochs=2",
        "algorithm.entropy_coef=0.001",
    ]
    overrides += ["selection.dynamic_sampling=reward", "selection.max_extra_prompts=4"]
    overrides += ["selection.min_completion_tokens=2", "algorithm.loss_normalisation=sequence"]
    overrides += ["algorithm.kl_coef=0.05", "algorithm.early_stop_kl=10", "algorithm.importance_cap=2"]
    more = ("--config", "configs/algorithms/areal_ppo.yaml", "--config", "configs/algorithms/decoupled.yaml")
    run(*torchrun_command(2, *TRAIN, *more, *overrides), path=mine)
    first, second = rows(workplace / "family")
    for row in (first, second):
        assert row["selection/groups_learned"] == 8
        assert row["train/minibatches"] == 4 and row["train/early_stopped_minibatches"] == 0
        assert row["train/importance_correction"] == pytest.approx(1.0, abs=1e-4)
        assert row["advantage"] == pytest.approx(0.0, abs=1e-5)
        assert row["seconds/reference"] > 0 and row["seconds/logprobs"] > 0
    assert first["kl_reward"] == pytest.approx(0.0, abs=1e-4)
    assert abs(second["kl_reward"]) > abs(first["kl_reward"])
    assert second["final_reward"] < second["task_reward"] or second["train/reference_kl"] < 0
