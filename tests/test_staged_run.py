"""A run of three stages with validation: interrupted it ends as if it had not been, and its validation is that of the
models it leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmath.distributed.fault_tolerance.exit_codes import SAVED_AND_STOPPED, read_exit_status
from rlmath.telemetry.metrics_writer import without_times
from tests.programs import ENVIRONMENT, REPOSITORY, TRAIN, run, small_run, torchrun_command
from tests.selection import matrix

pytestmark = [pytest.mark.distributed, matrix]

STAGES = ("stages.steps=[2,2,1]", "stages.max_new_tokens=[8,16,24]")
STEPS, LIMITS = 5, [8, 8, 16, 16, 24]
COMMON = (
    "reward.function=shortness:reward",
    "optimizer.decay=constant",
    "optimizer.min_lr=0",
    "optimizer.lr=0.002",
    "algorithm.loss_normalisation=constant",
    "save.ckpt_freq_steps=1",
    f"save.keep_last={STEPS}",
)
FUNCTION = """
def reward(completion, solutions, row):
    return -float(len(completion)), {"correct": len(completion) < 10}
"""
"""The random model is never right, but it can learn to be short."""
MODELS = ("hf_model", "best_model", "models/stage-1", "models/stage-2", "models/stage-3")


def train(place: Path, folder: Path, *overrides: str, expect: int = 0) -> str:
    """What the console said."""
    arguments = [*TRAIN, *small_run(place, folder), *COMMON, *overrides]
    command = torchrun_command(2, *arguments) if expect == 0 else arguments
    return run(*command, path=place / "shortness", timeout=600, expect=expect).stderr


def staged(place: Path) -> tuple[str, ...]:
    """Greedy validation every two steps on 20 problems, and on three of which one is too long."""
    paths = f"validation.paths=[{place}/data/heldout.jsonl,{place}/odd.jsonl]"
    how = ("validation.every_steps=2", "validation.temperature=0", "validation.batch_size=8")
    budgets = "stages.max_tokens_per_microbatch=[256,512,1024]"
    return (*STAGES, budgets, "run.total_steps=null", paths, *how, "validation.keep_best=true")


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [without_times(row) for row in found]


@pytest.fixture(scope="module")
def whole(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The undisturbed run, and what its console said."""
    (arithmetic / "shortness").mkdir()
    (arithmetic / "shortness" / "shortness.py").write_text(FUNCTION)
    odd = [
        {"prompt": prompt, "task": "math", "query_id": f"odd-{number}", "solutions": ["3"]}
        for number, prompt in enumerate(("1+2=", "2+1=", "0+" * 30 + "3="))
    ]
    (arithmetic / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    folder = tmp_path_factory.mktemp("staged") / "whole"
    return folder, train(arithmetic, folder, *staged(arithmetic))


def test_each_stage_has_its_own_lengths_and_leaves_its_model(whole: tuple[Path, str]) -> None:
    folder, console = whole
    found = rows(folder)
    assert [row["stage"] for row in found] == [1, 1, 2, 2, 3]
    assert [row["rollout/max_new_tokens"] for row in found] == LIMITS
    for row, limit in zip(found, LIMITS, strict=True):
        assert row["rollout/response_length"] <= limit
    assert all(0 < found[step]["no_eos_ratio"] < 1 for step in (0, 2)), "some are cut off: the limit is seen"
    assert found[2]["rollout/response_length"] > LIMITS[0]
    assert (
        "Stage 2 of 3: steps 3 to 4, completions of at most 16 tokens, 512 tokens per micro-batch" in console
    )
    last, third = (folder / name / "model.safetensors" for name in ("hf_model", "models/stage-3"))
    assert last.read_bytes() == third.read_bytes()


def test_validations_are_those_of_the_weights_that_were_kept(
    arithmetic: Path, whole: tuple[Path, str]
) -> None:
    folder, console = whole
    found = {row["step"]: row for row in rows(folder, "validation.jsonl")}
    assert list(found) == [0, 2, 4, 5]
    for row in found.values():
        both = [row["validation/heldout/accuracy"], row["validation/odd/accuracy"]]
        assert row["validation/accuracy"] == pytest.approx(sum(both) / 2) and both[1] <= 2 / 3
    assert "Validation odd: 3 problems, 1 of them too long for the context" in console
    account = json.loads((folder / "best_model" / "validation.json").read_text())
    best = max(row["validation/accuracy"] for row in found.values())
    assert best > found[0]["validation/accuracy"]
    first = next(step for step, row in found.items() if row["validation/accuracy"] == best)
    assert (account["step"], account["accuracy"]) == (first, best)
    stage = {2: 1, 4: 2, 5: 3}[first]
    ours, stages = (
        load_file(folder / f / "model.safetensors") for f in ("best_model", f"models/stage-{stage}")
    )
    assert all(torch.equal(ours[name], stages[name]) for name in stages)
    assert greedy(arithmetic, folder / "best_model") == pytest.approx(
        (found[first]["validation/heldout/accuracy"], found[first]["validation/heldout/mean_tokens"])
    )


def greedy(place: Path, model: Path) -> tuple[float, float]:
    """(share of answers that are short, mean tokens) by a fresh vLLM."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (place / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    printed = run("-m", "tests.greedy_answers", str(model), "24", json.dumps(prompts)).stdout
    answers = json.loads(printed.strip().splitlines()[-1])
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return sum(len(text) < 10 for text in texts) / len(texts), sum(map(len, answers)) / len(answers)


@pytest.mark.full
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_interrupted_anywhere_the_run_ends_as_the_undisturbed_one(
    arithmetic: Path, whole: tuple[Path, str], tmp_path: Path, step: int
) -> None:
    folder = tmp_path / "run"
    interrupted_after(step, whole[0], folder)
    console = train(arithmetic, folder, *staged(arithmetic))
    assert f"step-{step:06d}, made on" in console
    same_as(whole[0], folder)


def same_as(whole: Path, folder: Path) -> None:
    assert rows(folder) == rows(whole) and len(rows(folder)) == STEPS
    assert rows(folder, "validation.jsonl") == rows(whole, "validation.jsonl")
    for name in MODELS:
        ours, theirs = (place / name / "model.safetensors" for place in (folder, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name


def interrupted_after(step: int, whole: Path, folder: Path) -> None:
    """What a run leaves that is killed in the validation with which the step after `step` begins: the model of a stage
    that ends with `step` is not there yet."""
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    for number, end in enumerate((2, 4, 5), start=1):
        if end >= step:
            shutil.rmtree(folder / "models" / f"stage-{number}")
    shutil.rmtree(folder / "hf_model")
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    kept = [json.dumps(line) + "\n" for line in lines if line["step"] < step]
    (folder / "validation.jsonl").write_text("".join(kept) + '{"step": 4, "valid')


@pytest.mark.full
def test_a_stop_does_not_wait_for_the_end_of_a_validation(
    arithmetic: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Step 4 is saved only because of the stop, which comes in the validation with which step 5 begins."""
    folder = tmp_path / "run"
    interrupted_after(2, whole[0], folder)
    rare = ("save.ckpt_freq_steps=100", "validation.batch_size=1")
    arguments = [*TRAIN, *small_run(arithmetic, folder), *COMMON, *staged(arithmetic), *rare]
    console = tmp_path / "console.txt"
    with console.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *torchrun_command(2, *arguments)],
            cwd=REPOSITORY,
            env=ENVIRONMENT | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{arithmetic / 'shortness'}"},
            stdout=file,
            stderr=file,
        )
        try:
            while "Stage 3 of 3: steps" not in console.read_text().partition("Resuming from")[2]:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        finally:
            process.kill()
            process.wait()
    assert "The validation after step 4 is broken off by SIGTERM" in console.read_text()
    status = read_exit_status(folder)
    assert (status.status, "after step 4, which is saved" in status.message) == (SAVED_AND_STOPPED, True)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(folder, "validation.jsonl")] == [0, 2]
    again = train(arithmetic, folder, *staged(arithmetic))
    assert "step-000004, made on" in again
    same_as(whole[0], folder)


@pytest.mark.full
def test_the_first_stage_is_a_plain_run_and_validation_changes_nothing(
    arithmetic: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    lengths = ("rollout.max_new_tokens=8", "policy.max_tokens_per_microbatch=256", "run.total_steps=2")
    train(arithmetic, tmp_path / "plain", *lengths)
    own = ("stage", "rollout/max_new_tokens")
    stage = [{key: x for key, x in row.items() if key not in own} for row in rows(whole[0])[:2]]
    assert rows(tmp_path / "plain") == stage
    ours, theirs = whole[0] / "models" / "stage-1", tmp_path / "plain" / "hf_model"
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_a_stage_that_has_begun_is_not_changed(arithmetic: Path, whole: tuple[Path, str]) -> None:
    changed = ("stages.steps=[2,2,1]", "stages.max_new_tokens=[8,17,24]")
    told = train(arithmetic, whole[0], *staged(arithmetic), *changed, "parallel.tensor=1", expect=2)
    assert "stage 2, which has begun, is 2 steps of at most 16 new tokens there" in told


@pytest.mark.full
def test_a_stage_more_goes_on_from_the_last(
    arithmetic: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    more = ("stages.steps=[2,2,1,1]", "stages.max_new_tokens=[8,16,24,32]")
    train(arithmetic, folder, *staged(arithmetic), *more, "stages.max_tokens_per_microbatch=[]")
    assert rows(folder)[:STEPS] == rows(whole[0])
    assert [row["rollout/max_new_tokens"] for row in rows(folder)] == [*LIMITS, 32]
    assert [row["step"] for row in rows(folder, "validation.jsonl")] == [0, 2, 4, 5, 6]
    assert (folder / "models" / "stage-4").is_dir()
