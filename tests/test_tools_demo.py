"""The demo whose tiny model learns to call Python: `rlmath demo --algorithm tools`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.run_files import VALIDATION_FILE
from rlmath.telemetry.metrics_writer import read_metrics
from tests.programs import run

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(3600)]


def test_a_tiny_model_that_cannot_multiply_learns_to_call_python(tmp_path: Path) -> None:
    output_option = f"--output={tmp_path / 'demo'}"
    output = run("-m", "rlmath.cli.demo", "--algorithm=tools", output_option, timeout=3500).stdout
    before, after = (
        row["validation/accuracy"]
        for row in read_metrics(str(tmp_path / "demo" / "run"), VALIDATION_FILE)
    )
    assert before < 0.3 and after > 0.9
    steps = read_metrics(str(tmp_path / "demo" / "run"))
    first_calls, last_calls = (step["tools/calls_per_completion"] for step in (steps[0], steps[-1]))
    assert first_calls < 0.4 and last_calls > 0.95
    assert steps[0]["tools/accuracy_without_calls"] < 0.05
    assert f"Calls of Python a completion: {first_calls:.2f} in the first step" in output
