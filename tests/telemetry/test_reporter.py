"""What rank 0 counts over all starts of a run: time, tokens and the steps that alerts look at."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import Config, RunConfig, StagesConfig, TelemetryConfig
from rlmath.data.order import PromptOrder
from rlmath.telemetry.reporter import Reporter

STAGES = [2, 4]


def resumed(folder: Path, rows: list[dict[str, float]]) -> Reporter:
    """The reporter of a run that goes on after these rows, in its second length stage."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        run=RunConfig(output_dir=str(folder)),
        stages=StagesConfig(steps=STAGES, max_new_tokens=[8, 9]),
        telemetry=TelemetryConfig(tensorboard=False, report=False),
    )
    order = PromptOrder(20, 5, seed=1, shuffle=False)
    inputs: Any = SimpleNamespace(order=order, total_steps=sum(STAGES), dropped_share=0.0)
    return Reporter(
        config,
        inputs,
        "grpo",
        length_stages(config, inputs.total_steps),
        layout="TP1",
        steps_done=len(rows),
    )


def test_a_resumed_run_counts_what_earlier_starts_did(tmp_path: Path) -> None:
    seconds_rows = [
        {"step": step, "seconds/step": 1000.0 * step, "seconds/save": 100.0} for step in range(1, 5)
    ]
    counts_rows = (
        {"n_valid_tokens": 7.0 * step, "no_eos_ratio": 0.01 * step} for step in range(1, 5)
    )
    rows = [seconds | counts for seconds, counts in zip(seconds_rows, counts_rows, strict=True)]
    reporter = resumed(tmp_path, rows)
    assert reporter._alerts is not None
    ratios = [row["no_eos_ratio"] for row in reporter._alerts.last]
    assert ratios == [0.03, 0.04], "those of the stage that it is in"
    reporter.write_summary(50.0, {"history": {"prompts": 3}})
    reporter.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seconds_total"] == 10_000 + 400 + 50
    assert summary["seconds_training"] >= 10_400
    assert summary["completion_tokens"] == 70 and summary["went_on_after_step"] == 4
    assert summary["median_seconds"] == {"step": 2500.0, "save": 100.0}
    assert summary["history"] == {"prompts": 3} and summary["last_step"]["no_eos_ratio"] == 0.04
