"""The GPU check tells what ran, what did not and why.

A stage that fails or hangs does not end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rlmath.workers import process_tree
from tests.programs import run, wait_for
from tests.selection import matrix
from tools import gpu_check, gpu_runs
from tools.gpu_check import STAGES, Found, Stage

BY_NAME = {stage.name: stage for stage in STAGES}
EVERYTHING = Found(dict.fromkeys(gpu_check.PACKAGES, "1.0"), {}, (), None)


def stage_of(
    stage: Stage, found: Found, folder: Path, seconds_left: float = 600.0
) -> gpu_check.Outcome:
    return gpu_check.check(stage, found, True, seconds_left, folder, os.environ)


def test_without_a_gpu_it_says_so_and_names_what_is_missing(tmp_path: Path) -> None:
    chosen = ("--stages", "transformer_engine", "machine")
    process = run("tools/gpu_check.py", "--quick", "--output", str(tmp_path), *chosen)
    assert "GPUs: none; what the CPU can run is run" in process.stdout
    assert all(len(line) < 80 for line in process.stdout.splitlines()[:10])
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    transformer_engine, machine = report["stages"]  # in the order that was asked for
    assert machine["status"] == "ran" and machine["figures"][0]["value"] > 1
    assert (transformer_engine["status"], transformer_engine["reason"]) == (
        "not run",
        "needs a GPU",
    )
    assert transformer_engine["figures"] == []
    assert {"vllm", "trl"}.isdisjoint(report["packages"]), "none of these stages uses them"
    table = (tmp_path / "gpu_check.md").read_text()
    description = "Transformer Engine's layers against float32 on CPU (not run: needs a GPU"
    assert f"| transformer_engine | {description}; without apex) |  |  |  |" in table


@pytest.mark.parametrize(
    ("stages", "figures"),
    [
        pytest.param(("policy", "step", "engine"), 8, marks=matrix),
        pytest.param(
            ("ranks",),
            11,
            marks=[pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(1300)],
        ),
    ],
)
def test_what_the_cpu_can_run_is_as_expected(
    tmp_path: Path, stages: tuple[str, ...], figures: int
) -> None:
    run("tools/gpu_check.py", "--output", str(tmp_path), "--stages", *stages, timeout=1250)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    for stage in report["stages"]:
        assert stage["status"] == "ran", stage["reason"]
    checked = [
        figure for stage in report["stages"] for figure in stage["figures"] if figure["expected"]
    ]
    assert len(checked) == figures and all(figure["holds"] for figure in checked)


@pytest.mark.parametrize(
    ("metric", "end", "expected"),
    [
        ({}, [3.0, 4.0], "as one rank"),
        ({"train/grad_norm": 2.01}, [3.0, 4.0], "gradient norm 2"),
        ({"train/behaviour_logprob_diff": 0.01}, [3.0, 4.0], "mismatch at most 0.0001"),
        ({"task_reward": float("nan")}, [3.0, 4.0], "reward 0.5"),
        ({}, [3.0, 0.0], "cosine at least 0.99"),
    ],
)
def test_a_layout_that_is_not_as_one_rank_is_told(
    capsys: pytest.CaptureFixture[str], metric: dict[str, float], end: list[float], expected: str
) -> None:
    names = [name for name, *_ in gpu_runs.COMPARED.values()] + ["train/behaviour_logprob_diff"]
    row = dict(zip(names, (0.5, 0.0, 2.0, 4.6, 0.0), strict=True))
    base_run, changed_run = (
        gpu_runs.Found([row | changes], {"w": torch.tensor(weights)})
        for changes, weights in (({}, [3.0, 4.0]), (metric, end))
    )
    gpu_runs.tell_found(
        "TP2", gpu_runs.LAYOUTS["TP2"], changed_run, base_run, {"w": torch.zeros(2)}, "cpu"
    )
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["expected"], outcome["holds"]) == (expected, expected == "as one rank")


def test_a_rank_that_fails_ends_the_others_of_its_layout() -> None:
    """Which would wait for it until the stage has no time left."""
    codes = ("import time; time.sleep(600)", "raise SystemExit(3)")
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    assert gpu_runs.wait_for_all(ranks) == 3
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM, 3]


def test_a_stage_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    outcome = stage_of(replace(BY_NAME["policy"], quick_seconds=2.0), EVERYTHING, tmp_path)
    assert (outcome.status, outcome.reason) == ("stopped", "after its limit of 2 s")
    assert not outcome.is_good
    wait_for(lambda: not any("gpu_stages" in words for words in processes_with(str(tmp_path))))


def processes_with(text: str) -> list[str]:
    """Command lines that contain it."""
    commands = (
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
    return [words for words in commands if text in words]


def test_a_stage_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    """Here one that lacks its --case."""
    outcome = stage_of(replace(BY_NAME["policy"], name="measure_policy"), EVERYTHING, tmp_path)
    assert outcome.status == "failed" and not outcome.is_good
    assert "exit status 1: TypeError: the JSON object must be str" in outcome.reason


def test_a_stage_that_cannot_run_says_why(tmp_path: Path) -> None:
    machine = replace(EVERYTHING, packages=EVERYTHING.packages | {"vllm": None}, gpus=("a GPU",))
    outcome = stage_of(BY_NAME["peer"], machine, tmp_path)
    assert (outcome.status, outcome.reason) == (
        "not run",
        "needs vllm, the variable MODEL, the variable DATA",
    )
    assert outcome.is_good


def test_a_stage_that_finds_no_time_is_no_success(tmp_path: Path) -> None:
    outcome = stage_of(BY_NAME["engine"], EVERYTHING, tmp_path, seconds_left=100.0)
    assert (outcome.status, outcome.reason) == ("no time", "100 s are left")
    assert not outcome.is_good


def test_ranks_in_sessions_of_their_own_are_killed_with_their_stage(tmp_path: Path) -> None:
    """torchrun gives them some; neither is a child of the caller's killed."""
    other = subprocess.Popen(["sleep", "60"])
    program = "import subprocess, sys, time; "
    program += "subprocess.Popen(['sleep', sys.argv[1]], start_new_session=True); time.sleep(60)"
    mark = f"6{os.getpid()}"
    process_tree.adopt_orphans()
    started = subprocess.Popen([sys.executable, "-c", program, mark], start_new_session=True)
    try:
        wait_for(lambda: bool(processes_with(f"sleep {mark}")))
        gpu_check.kill_all_but({pid for pid in gpu_check.children() if pid != started.pid})
        assert not processes_with(f"sleep {mark}") and other.poll() is None
    finally:
        for process in (other, started):
            process.kill()
            process.wait()


@matrix
def test_a_package_that_breaks_at_its_import_hides_no_other(tmp_path: Path) -> None:
    """It is no missing one: the check fails.

    One that needs torch's libraries, as apex's kernel does, finds them."""
    for name, text in {
        "fused_weight_gradient_mlp_cuda": "import sys; assert 'torch' in sys.modules",
        "vllm": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "pytest": "raise OSError('libcuda.so.1: cannot open')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    machine = gpu_check.look(os.environ | {"PYTHONPATH": str(tmp_path)})
    assert machine.packages["vllm"] is None and machine.packages["torch"] is not None
    assert machine.packages["apex"] == "installed"
    assert machine.broken == ["vllm", "pytest"]
    assert machine.reasons["vllm"] == "ended by SIGSEGV"
    assert machine.reasons["pytest"] == "OSError: libcuda.so.1: cannot open"


def test_a_figure_that_is_not_as_expected_is_a_failure_of_its_stage(tmp_path: Path) -> None:
    figure = {"what": "x", "value": 2, "unit": "s", "expected": "1 at most", "holds": False}
    outcome = gpu_check.Outcome("step", "a step", "ran", figures=[figure])
    assert not outcome.is_good
    lines = gpu_check.table(EVERYTHING, [outcome])
    assert lines[-2:] == [
        "| step | a step (ran, 0 s) |  |  | **no** |",
        "|  | x | 2 s | 1 at most | **no** |",
    ]


def test_it_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    """A new environment, as before the first installation."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "new")], check=True
    )
    command = [
        str(tmp_path / "new" / "bin" / "python"),
        "tools/gpu_check.py",
        "--output",
        str(tmp_path),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=gpu_check.REPOSITORY
    )
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["packages"]["torch"] is None
    assert {stage["status"] for stage in report["stages"]} == {"not run"}
