"""The life cycle of a run: what it saves and when, how it ends, and what the next start makes of it.

Supervised runs of a tiny model on one rank, in which something happens at a step
(`tests/disturbed_run.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmath.checkpoint.directory import complete_checkpoints, read_progress
from rlmath.config.run_files import EVENTS_FILE, VALIDATION_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    MISTAKE,
    SAVED_AND_STOPPED,
    read_exit_status,
)
from rlmath.telemetry.events import read_events
from tests.disturbed_run import ACCURACY
from tests.forked_ranks import run_ranks
from tests.programs import metric_rows, rows

PROGRAM = ("tests/disturbed_run.py", "--config", "configs/demo_sft.yaml")
STEPS = 6
STEPS_PER_EPOCH = 3
SEQUENCES_PER_STEP = 8
NEVER_SAVED = ["save.ckpt_freq_secs=null"]
EVERY_STEP = ["save.ckpt_freq_steps=1", "save.keep_last=9", "save.background=false"]


@pytest.fixture(scope="module")
def inputs(arithmetic: Path) -> list[str]:
    """Settings of a run of six steps, two epochs of 24 worked solutions."""
    lines = (arithmetic / "data" / "worked.jsonl").read_text().splitlines(keepends=True)
    file = arithmetic / "few.jsonl"
    file.write_text("".join(lines[: STEPS_PER_EPOCH * SEQUENCES_PER_STEP]))
    return [
        f"model.path={arithmetic}/base",
        f"data.train_path={file}",
        f"data.prompts_per_step={SEQUENCES_PER_STEP}",
        f"run.total_steps={STEPS}",
        "sft.held_out_share=0",
        "optimizer.warmup_steps=1",
    ]


def train(
    settings: list[str],
    folder: Path,
    events: tuple[str, ...] = (),
    at: int = 0,
    expect: int = FINISHED,
) -> str:
    """The console of a run in which the events happen in step `at`."""
    event_words = [word for event in events for word in ("--event", event)]
    words = [*PROGRAM, *event_words, "--at", str(at), f"run.output_dir={folder}", *settings]
    return run_ranks(1, words, expect=expect).stderr


def kept_by_step(folder: Path) -> dict[int, bool]:
    """The steps of a run's checkpoints, newest first, and whether each is one to keep."""
    checkpoints, problems = complete_checkpoints(folder / "checkpoints")
    assert problems == []
    return {checkpoint.step: checkpoint.kept for checkpoint in checkpoints}


def ending(folder: Path) -> str:
    return read_exit_status(folder).message


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf_model" / "model.safetensors")


def assert_same_run(folder: Path, other: Path) -> None:
    """Equal metrics without times, and equal models."""
    assert rows(folder) == rows(other)
    tensors = weights(folder)
    other_tensors = weights(other)
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


@pytest.fixture(scope="module")
def undisturbed(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves nothing but its model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(inputs + NEVER_SAVED, folder)
    return folder


# ---------------------------------------------------------------- what is saved, and when


def test_a_run_without_recovery_points_leaves_its_model_alone(undisturbed: Path) -> None:
    assert not (undisturbed / "checkpoints").exists()
    assert not (undisturbed / "models").exists()
    assert (undisturbed / "hf_model" / "model.safetensors").is_file()
    assert [row["step"] for row in metric_rows(undisturbed)] == [1, 2, 3, 4, 5, 6]
    assert ending(undisturbed) == "all 6 steps are done"
    assert f"{STEPS} of {STEPS} steps." in (undisturbed / "hf_model" / "README.md").read_text()


def test_recovery_points_come_after_the_second_step_when_due_and_after_the_last(
    inputs: list[str], tmp_path: Path
) -> None:
    """One that is to be kept takes the place of a point of the same step."""
    folder = tmp_path / "run"
    saves = [
        "run.total_steps=5",
        "save.ckpt_freq_secs=null",
        "save.ckpt_freq_steps=3",
        "save.save_freq_steps=3",
        "save.keep_last=9",
    ]
    console = train(inputs + saves, folder)
    assert kept_by_step(folder) == {5: False, 3: True, 2: False}
    assert not (folder / "models").exists(), "save.export_hf is false"
    progress = read_progress(folder / "checkpoints" / "step-000005")
    assert (progress.step, progress.epoch, progress.position) == (5, 1, 2 * SEQUENCES_PER_STEP)
    assert (progress.updates, progress.syncs, progress.learned_step) == (5, 0, 5)
    assert (progress.layout, progress.world_size) == ("TP1 x PP1 x DP1", 1)
    saved_events = [
        row["step"] for row in read_events(folder / EVENTS_FILE) if row["kind"] == "checkpoint"
    ]
    assert saved_events == [2, 3, 5]
    assert console.index("Checkpoint of step 5: ") < console.index("The trained model is in ")


def test_the_newest_checkpoints_and_the_newest_kept_ones_stay_each_by_their_own_number(
    inputs: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    saves = [
        "run.total_steps=5",
        "save.ckpt_freq_secs=null",
        "save.ckpt_freq_steps=1",
        "save.save_freq_steps=1",
        "save.keep_last=1",
        "save.keep_models=3",
        "save.export_hf=true",
        "save.background=false",
    ]
    console = train(inputs + saves, folder)
    assert list(kept_by_step(folder)) == [5, 4, 3]
    models = sorted((folder / "models").iterdir())
    assert [model.name for model in models] == ["step-000003", "step-000004", "step-000005"]
    for step, model in zip((3, 4, 5), models, strict=True):
        assert f"{step} of 5 steps." in (model / "README.md").read_text()
    last_model = load_file(models[-1] / "model.safetensors")
    assert all(torch.equal(last_model[name], weights(folder)[name]) for name in last_model)
    for step in range(1, 5):
        saved = console.index(f"Checkpoint of step {step}: ")
        assert saved < console.index(f"step {step + 1}/5 loss"), "not in the background"


def test_training_goes_on_without_what_the_disk_refuses(inputs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saves = ["save.save_freq_steps=1", "save.export_hf=true"]
    console = train(inputs + EVERY_STEP + saves, folder, events=("disk",), at=3)
    for step in range(3, 7):
        assert f"The checkpoint of step {step} was not saved: " in console
        assert f"The model of step {step} was not exported: " in console
    assert console.count("The run continues; the newest is that of step 2") == 4
    assert ending(folder) == "all 6 steps are done"
    assert (folder / "hf_model" / "model.safetensors").is_file()
    first_folder = tmp_path / "first"
    console = train(
        inputs + EVERY_STEP, first_folder, events=("disk", "stop"), at=1, expect=FAILURE
    )
    assert "was not saved: " in console and "there is none yet" in console
    assert ending(first_folder) == (
        "stopped by SIGTERM after step 1, which could not be saved: the same command starts "
        "from the beginning"
    )


# ---------------------------------------------------------------- stopped, and gone on with


def test_a_stopped_run_saves_its_step_and_goes_on_as_if_it_had_not_been_stopped(
    inputs: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """It does so though its settings ask for no recovery point."""
    folder = tmp_path / "run"
    stopped = (
        "stopped by SIGTERM after step 3, which is saved: the same command resumes after step 3"
    )
    console = train(inputs + NEVER_SAVED, folder, events=("stop",), at=3, expect=SAVED_AND_STOPPED)
    saving = f"Saving step 3 in {folder}/checkpoints, then the run stops ..."
    assert console.index("step 3/6 loss") < console.index(saving)
    assert console.index(saving) < console.index("Checkpoint of step 3: ")
    assert kept_by_step(folder) == {3: False}
    assert not (folder / "hf_model").exists() and not (folder / "report.html").exists()
    assert ending(folder) == stopped and f"The run was {stopped}" in console

    console = train(
        inputs + NEVER_SAVED, folder, events=("stopped start",), expect=SAVED_AND_STOPPED
    )
    assert "Resuming from" in console and "step 4/6" not in console
    assert "Saving step" not in console, "it is saved already"
    assert ending(folder) == stopped

    console = train(inputs + NEVER_SAVED, folder)
    assert "3 steps and 3 updates are done" in console
    assert_same_run(folder, undisturbed)
    assert kept_by_step(folder) == {3: False}


def test_a_run_that_is_stopped_in_its_last_step_finishes(
    inputs: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(inputs + NEVER_SAVED, folder, events=("stop",), at=STEPS)
    assert ending(folder) == "all 6 steps are done"
    assert_same_run(folder, undisturbed)
    assert kept_by_step(folder) == {6: False}
    console = train(inputs + NEVER_SAVED, folder, events=("stopped start",))
    assert "6 steps and 6 updates are done, which are all; the model is exported again" in console
    assert ending(folder) == "all 6 steps are done", "no step is left that a stop could spare"


def test_a_run_that_is_stopped_before_its_first_step_ends_saves_nothing(
    inputs: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(inputs + EVERY_STEP, folder, events=("interrupt",), at=1, expect=SAVED_AND_STOPPED)
    assert ending(folder) == (
        "stopped by SIGUSR1 before the end of its first step: nothing was saved, and the same "
        "command starts from the beginning"
    )
    assert not (folder / "checkpoints").exists()


def test_a_step_that_is_not_made_as_the_run_stops_leaves_the_one_before_saved(
    inputs: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(inputs + NEVER_SAVED, folder, events=("interrupt",), at=5, expect=SAVED_AND_STOPPED)
    assert ending(folder).startswith("stopped by SIGUSR1 after step 4, which is saved")
    assert [row["step"] for row in metric_rows(folder)] == [1, 2, 3, 4]
    train(inputs + NEVER_SAVED, folder)
    assert_same_run(folder, undisturbed)


# ---------------------------------------------------------------- failed, and gone on with


def test_a_function_that_fails_costs_no_step_before_and_may_be_corrected(
    inputs: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    console = train(inputs + NEVER_SAVED, folder, events=("function",), at=5, expect=MISTAKE)
    assert ending(folder) == (
        "ended in step 5, of which nothing was learned: the reward function is broken"
    )
    assert "Correct the function: the same command resumes after step 4" in console
    assert (
        "The last step is kept: the step after it failed: the reward function is broken" in console
    )
    assert kept_by_step(folder) == {4: False}
    assert (folder / "report.html").is_file() and not (folder / "hf_model").exists()

    console = train(inputs + NEVER_SAVED, folder, events=("resume",), expect=MISTAKE)
    assert ending(folder) == (
        "cannot go on from its checkpoint: the advantage function refuses the checkpoint"
    )
    assert "Correct the function: the same command then resumes" in console
    assert len(metric_rows(folder)) == 4

    train(inputs + NEVER_SAVED, folder)
    assert_same_run(folder, undisturbed)


def test_a_run_that_broke_repeats_the_steps_after_its_newest_checkpoint(
    inputs: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    saves = ["save.ckpt_freq_secs=null", "save.save_freq_steps=2", "save.background=false"]
    console = train(inputs + saves, folder, events=("error",), at=4, expect=FAILURE)
    assert "The last step is kept: failed on rank 0: RuntimeError: something is broken" in console
    assert [row["step"] for row in metric_rows(folder)] == [1, 2, 3]
    assert kept_by_step(folder) == {2: True}
    console = train(inputs + saves, folder)
    assert "2 steps and 2 updates are done" in console and "step 3/6 loss" in console
    assert_same_run(folder, undisturbed)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["went_on_after_step"]) == (6, 2)


# ---------------------------------------------------------------- after the last step


def test_the_card_has_the_last_validation_and_the_summary_what_the_program_adds(
    inputs: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    lora = [
        "lora.rank=2",
        "save.export_dtype=bfloat16",
        "policy.dtype=bfloat16",
        "optimizer.lr=1e-5",
    ]
    console = train(inputs + NEVER_SAVED + lora, folder, events=("validation",))
    assert rows(folder, VALIDATION_FILE) == [{"step": STEPS, "validation/accuracy": ACCURACY}]
    share_text = "rounded, the model keeps "
    measured = f"| `validation/accuracy` | {STEPS} | {ACCURACY} | {STEPS} | {ACCURACY} |"
    model_card, adapter_card = (
        (folder / "hf_model" / name).read_text() for name in ("README.md", "adapter/README.md")
    )
    assert measured in model_card and measured in adapter_card
    assert share_text.capitalize() in model_card and share_text.capitalize() not in adapter_card
    assert share_text in console
    assert json.loads((folder / "summary.json").read_text())["added"] == "by the program"


def test_adapters_are_exported_without_the_model_where_it_is_not_wanted(
    inputs: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    lora = ["lora.rank=2", "save.merged=false", "run.total_steps=2"]
    console = train(inputs + NEVER_SAVED + lora, folder)
    assert f"The trained adapters are in {folder}/hf_model/adapter\n" in console
    files = {path.relative_to(folder / "hf_model").as_posix() for path in folder.rglob("adapter/*")}
    assert {"adapter/adapter_model.safetensors", "adapter/tokenizer.json"} <= files
    assert "adapter/config.json" not in files
    assert not list((folder / "hf_model").glob("*.safetensors"))
    assert "# LoRA adapters of " in (folder / "hf_model" / "adapter" / "README.md").read_text()
