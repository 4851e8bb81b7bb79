"""Runs over several hosts, which are network namespaces.

They meet, differ, go missing, are cut off, and go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, read_exit_status
from tests.hosts.cluster import Node, cluster, why_not
from tests.hosts.launching import Launch, launch
from tests.programs import rows, small_run, wait_for
from tests.selection import matrix

WHY_NOT = why_not()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
full = pytest.mark.full

START_SECONDS = 150.0
"""What a start may take on a busy machine."""
HEARTBEAT_SECONDS = 6.0
STEPS = 30
SFT = ("launch/train_sft.py", "--config", "configs/demo_sft.yaml")
GRPO = ("launch/train_grpo.py", "--config", "configs/demo.yaml")
SMALL = "tests/hosts/node_program.py"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Two hosts."""
    with cluster(2) as hosts:
        yield hosts


def sft_settings(place: Path, output: Path, *more: str) -> list[str]:
    return [
        f"run.output_dir={output}",
        f"run.total_steps={STEPS}",
        f"run.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}",
        f"model.path={place}/base",
        f"data.train_path={place}/data/worked.jsonl",
        "data.prompts_per_step=16",
        "parallel.tensor=2",
        "sft.held_out_share=0",
        "optimizer.warmup_steps=1",
        "save.ckpt_freq_steps=2",
        "telemetry.tensorboard=false",
        *more,
    ]


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def run_to_the_end(nodes: list[Node], console: Path, *program: str) -> Launch:
    started = launch(nodes, console, *program)
    assert started.end_within(2 * START_SECONDS) == [0] * len(nodes), started.consoles[-8000:]
    return started


@pytest.fixture(scope="module")
def undisturbed(
    nodes: list[Node], arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A supervised run on two hosts of two ranks, TP2 in each; its console beside it."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    program = (*SFT, *sft_settings(arithmetic, output))
    done = run_to_the_end(nodes, output.with_name("console"), *program)
    output.with_suffix(".console.txt").write_text(done.consoles)
    return output


@matrix
def test_two_hosts_train_together_and_say_who_they_are(undisturbed: Path) -> None:
    metric_rows = rows(undisturbed)
    assert [row["step"] for row in metric_rows] == list(range(1, STEPS + 1))
    assert all(row["train/grad_norm"] > 0 for row in metric_rows)
    console = undisturbed.with_suffix(".console.txt").read_text()
    assert "2 nodes, 4 ranks:" in console
    assert "node0: ranks 0-1, 10.77.0.1 (eth0)" in console
    assert "node1: ranks 2-3, 10.77.0.2 (ens1)" in console
    assert "Layout: TP2 x PP1 x DP2\n" in console
    assert (undisturbed / "hf_model" / "model.safetensors").is_file()


@full
def test_a_link_that_is_cut_is_found_and_the_run_goes_on_after_it_is_mended(
    nodes: list[Node], arithmetic: Path, undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    program = (*SFT, *sft_settings(arithmetic, output))
    run = launch(nodes, tmp_path / "cut", *program)
    run.wait_for(lambda: steps_done(output) >= 5, START_SECONDS)
    nodes[1].cut()
    try:
        assert steps_done(output) < STEPS
        first, second = run.programs
        assert first.ends_within(START_SECONDS) != 0
        assert (
            "on node1"
            in first.console.partition("has given no sign of life for")[2].partition("\n")[0]
        )
        # The other side knows only that the first node is lost.
        wait_for(lambda: "key-value store of the run at node0:" in second.console)
        assert read_exit_status(output).status == FAILURE
        assert "node1" in read_exit_status(output).message
    finally:
        nodes[1].mend()
    second.kill()
    resumed = run_to_the_end(nodes, tmp_path / "mended", *program)
    assert "Resuming from" in resumed.consoles
    assert rows(output) == rows(undisturbed)
    model = Path("hf_model") / "model.safetensors"
    assert (output / model).read_bytes() == (undisturbed / model).read_bytes()


def test_nodes_that_differ_are_told_by_host_on_both_before_anything_starts(
    nodes: list[Node], tmp_path: Path
) -> None:
    run = launch(nodes, tmp_path / "differ", SMALL, str(tmp_path / "run"), "differ")
    assert 0 not in run.end_within(START_SECONDS)
    for program in run.programs:
        assert "The nodes differ" in program.console, program.console[-4000:]
        assert "torch: " in program.console and "2.12.0 on node1" in program.console
        assert "run.seed: 1 on node0; 2 on node1" in program.console
    assert not (tmp_path / "run" / "step").exists()


@full
def test_a_rank_that_never_comes_is_named_with_its_host(nodes: list[Node], tmp_path: Path) -> None:
    run = launch(
        nodes, tmp_path / "hang", SMALL, str(tmp_path / "run"), "hang", "start_timeout_seconds=6"
    )
    assert 0 not in run.end_within(START_SECONDS)
    message = (
        "3 of 4 ranks are at the start after 6 s (run.start_timeout_seconds). Missing: rank 3 "
        "on node1"
    )
    assert all(message in program.console for program in run.programs), run.consoles[-6000:]


@full
def test_torchrun_starts_a_run_again_that_lost_a_rank_and_it_goes_on(
    nodes: list[Node], arithmetic: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """--max-restarts: the launchers, and their key-value store, stay; all ranks start again."""
    output = tmp_path / "run"
    program = (*SFT, *sft_settings(arithmetic, output))
    run = launch(nodes, tmp_path / "restart", *program, options=("--max-restarts=2",))
    run.wait_for(lambda: steps_done(output) >= 5, START_SECONDS)
    os.kill(run.programs[1].ranks()[3].pid, signal.SIGKILL)
    assert run.end_within(2 * START_SECONDS) == [0, 0], run.consoles[-8000:]
    assert "rank 3 on node1" in run.consoles and "has died" in run.consoles
    assert "Resuming from" in run.consoles
    assert rows(output) == rows(undisturbed)


@full
@pytest.mark.timeout(900)
def test_engines_have_a_host_of_their_own(
    nodes: list[Node], arithmetic: Path, tmp_path: Path
) -> None:
    """The first host trains, the second samples.

    Weights, prompts, scores and log-probs cross the network."""
    output = tmp_path / "run"
    settings = (
        "parallel.tensor=1",
        "rollout.ranks=2",
        "rollout.max_staleness=1",
        "algorithm.recompute_logprobs=true",
        "algorithm.importance_correction=token",
        "algorithm.importance_mask_high=5",
        "sync.probe_every=1",
        "run.total_steps=5",
    )
    program = (*GRPO, *small_run(arithmetic, output), *settings)
    run_to_the_end(nodes, tmp_path / "console", *program)
    metric_rows = rows(output)
    assert [row["step"] for row in metric_rows] == [1, 2, 3, 4, 5]
    assert all(row["sync/probe_difference_max"] <= 1e-5 for row in metric_rows)
    assert all(row["sync/sent_gib"] > 0 for row in metric_rows)
