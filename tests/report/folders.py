"""Folders of runs, as a run leaves them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.config.load import load_config, save_config
from rlmath.telemetry.metrics_writer import MetricsWriter

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\">\u202e\0'&amp;"
)


def make_run(folder: Path, steps: int = 12, settings: Sequence[str] = (), **more: float) -> Path:
    """A run with metrics, settings, a log, samples and the files of its end.

    `more` are metrics of every step."""
    writer = MetricsWriter(str(folder), tensorboard=False)
    for step in range(1, steps + 1):
        writer.write(step, metrics_of(step, steps) | more)
    writer.write_validation(0, {"validation/accuracy": 0.25})
    writer.write_validation(steps, {"validation/accuracy": 0.75})
    writer.close()
    overrides = [f"run.output_dir={folder}", "model.path=m", "data.train_path=t.jsonl", *settings]
    save_config(load_config([], overrides), folder / "config.yaml")
    write_json(
        folder / "summary.json",
        {"steps": steps, "layout": "TP1 x PP1 x DP1", "tokens_per_second": 99.5},
    )
    write_json(
        folder / "exit_status.json", {"status": 0, "message": "all is done", "meaning": "finished"}
    )
    write_event(folder, "start", text="Starting")
    write_event(folder, "alert", 2, text="40% of the completions were cut off")
    for step in range(1, min(steps, 5) + 1):
        write_samples(folder, step, [group(f"text of step {step}")])
    return folder


def metrics_of(step: int, steps: int) -> dict[str, float]:
    return {
        "rollout/accuracy": step / steps,
        "task_reward": math.sin(step / 40),
        "no_eos_ratio": 0.0,
        "train/entropy_loss": 1 / step,
        "train/learning_rate": 1e-5,
        "train/early_stopped_minibatches": float(step % 2),
        "seconds/step": 3.0,
        "seconds/rollout": 1.0,
        "seconds/update": 1.5,
        "seconds/wake": 0.125,
        "seconds/sleep": 0.125,
        "seconds/save": 0.25,
        "memory_gib": 2.0,
        "memory/after_update_gib": 3.0,
    }


def group(text: str, correct: Sequence[bool] = (True, False), **more: Any) -> dict[str, Any]:
    completions = [
        {
            "reward": 1.0 if right else -1.0,
            "advantage": 0.5,
            "correct": right,
            "verdict": "string",
            "extracted": "7",
            "boxed": True,
            "length": 10 + number,
            "finish_reason": "stop",
            "text": f"{text} {number}",
        }
        for number, right in enumerate(correct)
    ]
    return {
        "prompt_id": "p-1",
        "prompt": "3+4=",
        "solutions": ["7"],
        "completions": completions,
    } | more


def write_samples(folder: Path, step: int, groups: Sequence[Any], kind: str = "step") -> None:
    (folder / "samples").mkdir(exist_ok=True)
    lines = "".join(json.dumps(group) + "\n" for group in groups)
    (folder / "samples" / f"{kind}-{step:06d}.jsonl").write_text(lines, encoding="utf-8")


def write_event(folder: Path, kind: str, step: int | None = None, **fields: Any) -> None:
    row = {"time": "2026-01-02 10:00:00", "kind": kind, "step": step, "text": "", **fields}
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
