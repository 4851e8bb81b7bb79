"""Profiles of chosen steps: a trace with the phases' names, and a table of what took longest."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.telemetry.profile import StepProfiler


def work(timers: PhaseTimers) -> None:
    with timers.phase("update"):
        matrix = torch.randn(600, 600)
        for _ in range(7):
            matrix = matrix @ matrix / 600
    with timers.phase("pack"):
        torch.ones(3).cumsum(0)


def test_a_profiled_step_leaves_a_trace_with_its_phases_and_a_table(tmp_path: Path) -> None:
    profiler = StepProfiler([2], tmp_path, 1, on_gpu=False)
    timers = PhaseTimers()
    for number in (1, 2, 3):
        with profiler.step(number):
            work(timers)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["step-000002-rank-1.json.gz", "step-000002-rank-1.md"]
    with gzip.open(tmp_path / "profile" / names[0], "rt") as trace:
        events = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"phase: update", "phase: pack", "aten::mm"} <= events
    table = (tmp_path / "profile" / names[1]).read_text()
    assert "# Step 2, rank 1" in table
    phases, operations = table.split("## Operations")
    assert phases.index("phase: update") < phases.index("phase: pack"), (
        "the longest phase comes first"
    )
    assert re.search(r"^ +phase: update .* 1 *$", phases, re.MULTILINE)
    assert re.search(r"^ +aten::mm .* 7 *$", operations, re.MULTILINE)


def test_what_the_disk_refuses_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file")
    with StepProfiler([1], tmp_path, 0, on_gpu=False).step(1):
        work(PhaseTimers())
    assert "The profile of step 1 of rank 0 could not be written" in caplog.text


def test_an_error_of_the_step_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfiler([1], tmp_path, 0, on_gpu=False).step(1):
        _ = 1 / 0
    assert not (tmp_path / "profile").exists()
