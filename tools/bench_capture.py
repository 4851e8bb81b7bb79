"""What it costs to keep a step's records, and to write them (telemetry.capture_steps).

    python tools/bench_capture.py [--steps 12] [--quick]

A run of configs/demo.yaml on two ranks (TP2) of a random model; every second step is captured. Prints one JSON object
per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}:

- kept, written: median milliseconds that such a step spends on its records, by the step's own clock (seconds/capture);
  the baseline is the rest of the same steps, and the ratio how many times shorter the records take.

`--quick`: 4 steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli.demo import one_thread, torchrun
from rlmath.telemetry.metrics_writer import read_metrics
from tools.benchmark_runs import REPOSITORY, print_figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="of the run (default 12)")
    parser.add_argument("--quick", action="store_true", help="4 steps")
    given = parser.parse_args()
    steps = 4 if given.quick else given.steps
    with tempfile.TemporaryDirectory() as place:
        rows = read_metrics(str(run(Path(place), steps)))
    # The first step has much to prepare.
    cases = {"kept": rows[2::2], "written": rows[1::2]}
    for case, own in cases.items():
        spent = statistics.median(row["seconds/capture"] for row in own)
        rest = statistics.median(row["seconds/step"] - row["seconds/capture"] for row in own)
        print_figure(
            "capture", case, "records", 1000 * spent, "ms", ("rest of the step", 1000 * rest), less=True
        )


def run(place: Path, steps: int) -> Path:
    """The folder of a run of so many steps, of which every second is captured."""
    for tool, output, more in (
        ("make_arithmetic", "data", ("--train", "200", "--heldout", "20")),
        ("make_tiny_model", "base", ()),
    ):
        start([sys.executable, "-m", f"rlmath.cli.{tool}", "--output", str(place / output), *more])
    captured = ",".join(map(str, range(2, steps + 1, 2)))
    settings = [f"run.output_dir={place}/run", f"model.path={place}/base", f"run.total_steps={steps}"]
    settings += [f"data.train_path={place}/data/train.jsonl", f"telemetry.capture_steps=[{captured}]"]
    settings += ["telemetry.report=false", "telemetry.tensorboard=false"]
    start([*torchrun(2), "launch/train_grpo.py", "--config", "configs/demo.yaml", *settings])
    return place / "run"


def start(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=REPOSITORY, env=one_thread(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
