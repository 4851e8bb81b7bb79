"""Asynchronous runs as a user starts them.

What dies is named, what is stopped is saved, and no prompt is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.config.run_files import LOG_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FINISHED,
    SAVED_AND_STOPPED,
    read_exit_status,
)
from tests.forked_ranks import run_ranks
from tests.programs import (
    ENVIRONMENT,
    REPOSITORY,
    TRAIN,
    end_family,
    family,
    rows,
    small_run,
    torchrun_command,
    wait_for,
)
from tests.selection import matrix
from tests.test_failures import END_SECONDS, assert_all_gone, ranks_of, rows_of

STEPS = 24
"""Enough that some are left when the trainers hear of a request to stop that an engine gets.

They hear of it up to two beats (2 s) later."""
PER_STEP = 8
SETTINGS = (
    f"run.total_steps={STEPS}",
    "run.total_epochs=1",
    f"data.prompts_per_step={PER_STEP}",
    f"telemetry.sample_groups_per_step={PER_STEP}",
    "save.ckpt_freq_steps=1",
    "parallel.tensor=1",
    "rollout.max_staleness=3",
    "rollout.max_new_tokens=96",
    "rollout.max_num_seqs=12",
    "policy.max_tokens_per_microbatch=2048",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
)


@contextmanager
def running(
    place: Path, output: Path, engines: int, until: int, *more: str
) -> Iterator[subprocess.Popen[str]]:
    """The run, with one rank that trains, once it has made `until` steps; `more` are settings."""
    settings = [*small_run(place, output), *SETTINGS, f"rollout.ranks={engines}", *more]
    console_path = output.with_suffix(f".{engines}.{until}.txt")
    with console_path.open("w") as console:
        process = subprocess.Popen(
            [sys.executable, *torchrun_command(1 + engines, *TRAIN, *settings)],
            cwd=REPOSITORY,
            env=ENVIRONMENT | {"TMPDIR": str(output.parent)},
            stdout=console,
            stderr=console,
            text=True,
        )
        try:
            metrics = output / "metrics.jsonl"
            wait_for(
                lambda: (
                    (metrics.is_file() and metrics.read_text().count("\n") >= until)
                    or process.poll() is not None
                )
            )
            assert process.poll() is None or until == STEPS, console_path.read_text()
            yield process
        finally:
            end_family(process)


def told(output: Path, engines: int, until: int) -> str:
    return output.with_suffix(f".{engines}.{until}.txt").read_text()


def assert_learned_once(output: Path, steps: int = STEPS) -> None:
    """No step of the whole run is missing, and no prompt came twice."""
    assert [row["step"] for row in rows_of(output)] == list(range(1, steps + 1))
    lines = [
        line for file in (output / "samples").iterdir() for line in file.read_text().splitlines()
    ]
    prompt_ids = [json.loads(line)["prompt_id"] for line in lines]
    assert len(prompt_ids) == len(set(prompt_ids)) == steps * PER_STEP


def test_engines_of_their_own_sample_what_is_learned_also_where_a_run_goes_on(
    arithmetic: Path, tmp_path: Path
) -> None:
    """No token is older than it may be, and what was in flight is learned.

    Validation asks the engines in between."""
    output = tmp_path / "run"
    settings = [
        *small_run(arithmetic, output),
        *SETTINGS,
        "run.total_steps=5",
        "rollout.ranks=1",
        "rollout.max_staleness=2",
        "rollout.max_new_tokens=24",
        "save.keep_last=5",
        f"validation.paths=[{arithmetic}/data/heldout.jsonl]",
        "validation.every_steps=2",
        "validation.samples=1",
    ]
    run_ranks(2, [*TRAIN, *settings])
    assert_learned_fresh(output)
    before = rows(output)
    for step in (3, 4, 5):
        shutil.rmtree(output / "checkpoints" / f"step-{step:06d}")
    checkpoint = output / "checkpoints" / "step-000002"
    unfinished = read_unfinished((checkpoint / UNFINISHED).read_bytes(), 4, 1000, lambda *_: "")
    assert unfinished.groups
    console = run_ranks(2, [*TRAIN, *settings]).stderr
    assert f"Resuming from {checkpoint}" in console
    assert rows(output)[:2] == before[:2]
    assert_learned_fresh(output)
    assert [row["step"] for row in rows(output, "validation.jsonl")] == [0, 2, 4, 5]
    assert read_exit_status(output).status == FINISHED


def assert_learned_fresh(output: Path) -> None:
    """Each of five steps has its prompts, of at most two steps ago, and no prompt came twice."""
    assert_learned_once(output, 5)
    for step, row in enumerate(rows(output), start=1):
        path = output / "samples" / f"step-{step:06d}.jsonl"
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        completions = [completion for group in groups for completion in group["completions"]]
        assert len(completions) == row["n_seqs"] == PER_STEP * 4
        versions = [completion["policy_version"] for completion in completions]
        updates = 2 * (step - 1)
        assert max(0, updates - 2 * 2) <= min(versions) and max(versions) <= updates
        assert row["rollout/staleness_max"] <= 2


@pytest.mark.distributed
@matrix
def test_a_killed_engine_is_named_and_every_prompt_is_learned_once_by_whichever_engines(
    arithmetic: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with running(arithmetic, output, 1, 3) as process:
        everyone = family(process.pid)
        ranks_of(process.pid)["1"].kill()
        assert process.wait(END_SECONDS) != 0
        assert_all_gone(everyone)
    assert "rank 1" in told(output, 1, 3) and read_exit_status(output).status != 0
    with running(arithmetic, output, 2, 5) as process:
        ranks_of(process.pid)["2"].terminate()  # as where only the engines' node is taken away
        assert process.wait(END_SECONDS) != 0
    assert read_exit_status(output).status == SAVED_AND_STOPPED, told(output, 2, 5)
    assert "SIGTERM: the run saves after this step and stops" in told(output, 2, 5)
    checkpoint = max((output / "checkpoints").iterdir())
    assert (checkpoint / UNFINISHED).stat().st_size > 4000, "nothing was in flight"
    with running(arithmetic, output, 1, STEPS) as process:
        assert process.wait(END_SECONDS) == 0, told(output, 1, STEPS)
    assert f"Resuming from {checkpoint}" in told(output, 1, STEPS)
    assert_learned_once(output)
    assert max(row["rollout/staleness_max"] for row in rows_of(output)) <= 3
    assert sum(row.get("rollout/interrupted_sequences", 0) for row in rows_of(output)) > 0


@pytest.mark.distributed
@pytest.mark.full
def test_what_is_saved_while_validation_runs_is_resumed(arithmetic: Path, tmp_path: Path) -> None:
    """The engines have sampled with the weights that the run would go on with."""
    output = tmp_path / "run"
    validated = (
        "save.ckpt_freq_steps=100",
        f"validation.paths=[{arithmetic}/data/train.jsonl]",
        "validation.every_steps=4",
        "validation.before_training=false",
        "validation.batch_size=1",
        "validation.max_new_tokens=96",
    )
    with running(arithmetic, output, 1, 4, *validated) as process:
        wait_for(lambda: "The validation after step 4 begins" in (output / LOG_FILE).read_text())
        ranks_of(process.pid)["1"].terminate()
        assert process.wait(END_SECONDS) != 0
    assert read_exit_status(output).status == SAVED_AND_STOPPED, told(output, 1, 4)
    assert "The validation after step 4 is broken off by SIGTERM" in told(output, 1, 4)
    assert max((output / "checkpoints").iterdir()).name.endswith("4")
    with running(arithmetic, output, 1, STEPS) as process:
        assert process.wait(END_SECONDS) == 0, told(output, 1, STEPS)
    assert_learned_once(output)
