"""Runs over two nodes of a real Slurm.

They train, are disturbed, and go on as if nothing had been.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.programs import small_run
from tests.slurm.cluster import KILL_WAIT_SECONDS, Cluster
from tests.slurm.submitted import ENDED, START_SECONDS, TWO_NODES, Submitted, Submitter, config

STEPS = {"grpo": 10, "sft": 60}
EARLY = {"grpo": 2, "sft": 6}
"""Steps of a start after which it is disturbed."""

pytestmark = [pytest.mark.slurm, pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(arithmetic: Path) -> Path:
    """Inputs with a reward that takes its time, so that a short run can be disturbed in mid-run."""
    functions = arithmetic / "functions"
    functions.mkdir()
    (functions / "slow.py").write_text(
        "import time\n\ndef reward(completion, solutions, row):\n    time.sleep(0.03)\n"
        "    return -float(len(completion))\n"
    )
    return arithmetic


def arguments(program: str, inputs: Path, output: Path) -> list[str]:
    """A run of either program on two nodes."""
    steps = f"run.total_steps={STEPS[program]}"
    if program == "grpo":
        settings = ("reward.function=slow:reward", "save.ckpt_freq_steps=1", steps)
        return [config("demo.yaml"), *TWO_NODES, *small_run(inputs, output), *settings]
    return [
        "--program=sft",
        config("demo_sft.yaml"),
        *TWO_NODES,
        f"run.output_dir={output}",
        f"model.path={inputs}/base",
        f"data.train_path={inputs}/data/worked.jsonl",
        "optimizer.decay=constant",
        "save.ckpt_freq_steps=5",
        "parallel.tensor=2",
        steps,
    ]


def submit(submitter: Submitter, program: str, inputs: Path, output: Path, *more: str) -> Submitted:
    with_functions = replace(submitter, functions=inputs / "functions")
    return with_functions.submit(output, *arguments(program, inputs, output), *more)


def test_a_run_trains_across_both_nodes_and_the_later_links_of_its_chain_end_at_once(
    submitter: Submitter, inputs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    settings = (*small_run(inputs, output), "run.total_steps=2", "parallel.tensor=2")
    run = submitter.submit(output, config("demo.yaml"), *TWO_NODES, *settings, "--chain=2")
    assert run.wait_for_state(*ENDED) == "COMPLETED", run.said()
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert "2 nodes (n[1-2]) x 1 ranks" in run.said() and "status 0 (finished)" in run.said()
    logs = sorted((run.logs / run.jobs[0]).iterdir())
    assert [path.name.partition("-")[0] for path in logs] == ["0", "1"]

    assert run.wait_for_state(*ENDED, link=1) == "COMPLETED"
    log = run.said(link=1)
    assert (
        "link 2 of 2" in log
        and "the start before: status 0" in log
        and "nothing is left to do" in log
    )
    assert list((run.logs / run.jobs[1]).iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("program", ["sft", "grpo"])
def test_requeued_and_after_the_loss_of_a_node_the_run_is_the_same(
    slurm: Cluster, submitter: Submitter, inputs: Path, tmp_path: Path, program: str
) -> None:
    steps = STEPS[program]
    whole = submit(submitter, program, inputs, tmp_path / "whole")
    assert whole.wait_for_state(*ENDED) == "COMPLETED", whole.said()
    run = submit(submitter, program, inputs, tmp_path / "run", "--requeue")
    run.wait_for_step(EARLY[program])
    slurm.ask("scontrol", "requeue", run.jobs[0])
    run.wait_for_requeue(1)
    run.wait_for_step(run.last_step() + EARLY[program])
    assert run.last_step() < steps
    slurm.set_down("n2")
    run.wait_for_requeue(2)
    slurm.bring_back("n2")
    assert run.wait_for_state(*ENDED) == "COMPLETED", run.said()
    log = run.said()
    assert "NODE FAILURE" in log and "node n2 is down: power lost" in log
    assert "start 2" in log and "start 3" in log and "the start before: status " in log
    assert whole.last_step() == steps and run.rows() == whole.rows()
    models = [
        finished_run.output / "hf_model" / "model.safetensors" for finished_run in (run, whole)
    ]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_before_its_limit_a_run_saves_and_is_queued_again_and_cancelled_it_is_gone(
    slurm: Cluster, submitter: Submitter, inputs: Path, tmp_path: Path
) -> None:
    """Slurm's limits are whole minutes; so the limit is brought near instead of waited for."""
    endless = ("run.total_steps=100000", "run.total_epochs=1000", "run.stop_grace_seconds=120")
    run = submit(submitter, "sft", inputs, tmp_path / "run", "--requeue", *endless)
    run.wait_for_step(3)
    slurm.ask("scontrol", "update", f"JobId={run.jobs[0]}", "TimeLimit=3")
    run.wait_for_requeue(1)
    slurm.ask("scontrol", "update", f"JobId={run.jobs[0]}", "TimeLimit=30")
    assert "status 75 (stopped on request): stopped by SIGUSR1" in run.said(), run.said()
    saved = run.last_step()
    run.wait_for_step(saved + 3)
    assert [row["step"] for row in run.rows()][: saved + 4] == list(range(saved + 4))

    processes = slurm.processes_of(run.jobs[0])
    assert len(processes) >= 4, "two launchers, two ranks"
    slurm.ask("scancel", run.jobs[0])
    assert run.wait_for_state(*ENDED) == "CANCELLED"
    _, alive = psutil.wait_procs(processes, KILL_WAIT_SECONDS + 10)
    assert not alive and not slurm.processes_of(run.jobs[0])
    slurm.wait_for(lambda: submitter.queue() == [], 30)
    assert "does not queue itself again: Slurm has ended it" in run.said()


def test_a_run_that_cannot_start_is_not_queued_again(
    slurm: Cluster, submitter: Submitter, inputs: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "worked.jsonl"
    prompts.write_text((inputs / "data" / "worked.jsonl").read_text())
    options = ("--requeue", "--sbatch=--hold", f"data.train_path={prompts}")
    run = submit(submitter, "sft", inputs, tmp_path / "run", *options)
    prompts.write_text("no row\n")
    slurm.ask("scontrol", "release", run.jobs[0])
    assert run.wait_for_state(*ENDED) == "FAILED", run.said()
    assert slurm.job(run.jobs[0], "ExitCode") == "2:0" and slurm.job(run.jobs[0], "Restarts") == "0"
    assert "status 2 (mistake in the settings)" in run.said()


@pytest.mark.full
def test_an_evaluation_that_is_stopped_goes_on(
    slurm: Cluster, submitter: Submitter, inputs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "eval"
    path_options = (
        "--model",
        f"{inputs}/base",
        "--data-dir",
        f"{inputs}/data",
        "--output",
        str(output),
    )
    sampling_options = (
        "--benchmarks",
        "heldout",
        "--samples",
        "300",
        "--max-new-tokens",
        "32",
        "--max-num-seqs",
        "16",
    )
    options = ("--program=evaluate", *TWO_NODES, "--requeue")
    run = submitter.submit(
        output, *options, "--", *path_options, *sampling_options, "--cpu-kv-cache-gib", "0.1"
    )
    slurm.wait_for(lambda: len(completions(output)) > 0, START_SECONDS, run.log)
    slurm.ask("scancel", "--signal=USR1", run.jobs[0])
    run.wait_for_requeue(1)
    assert "status 75 (stopped on request): stopped by SIGUSR1" in run.said(), run.said()
    before = completions(output)
    assert 0 < len(before) < 20 * 301
    assert run.wait_for_state(*ENDED) == "COMPLETED", run.said()
    after = completions(output)
    assert set(before) <= set(after) and len(after) == 20 * 301
    assert len({path.stem for path in output.glob("generations/heldout/*.jsonl")}) == 2


def completions(output: Path) -> list[str]:
    """Whole lines only: one may be cut off by the end of its process."""
    texts = [path.read_text() for path in output.glob("generations/heldout/*.jsonl")]
    return [
        line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]
