"""The demo whose tiny model learns from feedback: `rlmath demo --algorithm feedback`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.telemetry.metrics_writer import read_metrics
from tests.programs import run

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(3600)]


def test_a_tiny_model_that_can_only_guess_learns_to_give_the_other_answer(tmp_path: Path) -> None:
    output_option = f"--output={tmp_path / 'demo'}"
    output = run("-m", "rlmath.cli.demo", "--algorithm=feedback", output_option, timeout=3500)
    steps = read_metrics(str(tmp_path / "demo" / "run"))
    last_accuracy = steps[-1]["turns/accuracy"]
    assert max(step["turns/accuracy_first"] for step in steps) < 0.7
    assert last_accuracy > steps[-1]["turns/accuracy_first"] + 0.2
    assert last_accuracy > steps[0]["turns/accuracy"] + 0.2
    assert f"{last_accuracy:.1%} of last answers." in output.stdout
