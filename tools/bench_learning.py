"""What every way to treat the tail of a rollout (`rollout.tail`) learns, on a task with long and short answers.

    python tools/bench_learning.py [--ways wait carry1 carry2 carry4 defer] [--seeds 1 2 3] [--steps 40] [--quick]
                                   [--picture tail_learning.svg]

Additions of numbers of up to two digits, and 15% of numbers of six (tools/make_arithmetic.py), whose worked solutions
are almost three times as long. One base model learns them by supervised training, with slips (tools/demo.py); GRPO
then trains it with every way and seed on two ranks (TP1 x DP2) of configs/demo.yaml, all with the decoupled loss that
"carry" needs (configs/algorithms/decoupled.yaml), so that they differ in the tail alone. carry1, carry2 and carry4 have
that `rollout.max_staleness`.

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; baseline is "wait",
`ratio` above 1 means better than it:

- accuracy: share of held-out problems answered rightly after the last step, one sample each at temperature 1, mean over
  seeds; the case has the difference in standard errors of the seeds' means;
- length: tokens of a completion that is learned from, mean over steps and seeds (ratio: should be 1);
- step_seconds: of a step without validation, median;
- learned_tokens_per_second: tokens learned from by the seconds of all steps, median of the seeds.

What the programs print is in `log.txt` of --output. Results are kept there: the same command resumes, and measures again
what was made with other settings. `--picture` draws held-out accuracy against the seconds of training, mean over seeds.
`--quick`: one seed, a few steps, "wait" and "carry1" alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal
from tools import demo
from tools.bench_demo import BASE_SETTINGS, fingerprint, kept
from tools.plot_run import Curve, canvas_for, draw

WAYS: Mapping[str, tuple[str, ...]] = {
    "wait": (),
    "carry1": ("rollout.tail=carry", "rollout.max_staleness=1"),
    "carry2": ("rollout.tail=carry", "rollout.max_staleness=2"),
    "carry4": ("rollout.tail=carry", "rollout.max_staleness=4"),
    "defer": ("rollout.tail=defer",),
}
RANKS = 2
BASE_SEED = 101
LONG_SHARE = 0.15
MAX_NEW_TOKENS = 96
"""The longest solution without slips has 68."""
VALIDATE_EVERY = 10
SETTINGS = (
    "parallel.tensor=1",
    "optimizer.decay=constant",
    "optimizer.lr=1e-4",
    f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
    f"validation.every_steps={VALIDATE_EVERY}",
    "validation.temperature=1",
    "validation.top_p=1",
)


@dataclass(frozen=True)
class Learned:
    """One run, step by step."""

    accuracy: dict[int, float]
    """Of the held-out problems, by the number of steps done (0 to 1)."""
    seconds: list[float]
    """Of every step, without validation."""
    tokens: list[float]
    """That every step learns from."""
    lengths: list[float]
    """Of its completions, mean."""

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy)]


def make_base(folder: Path, heldout: int) -> None:
    """Data and the base model, in `data` and `base`."""
    python, environment = sys.executable, demo.child_environment()
    sizes = ["--seed", str(BASE_SEED), "--long-share", str(LONG_SHARE), "--heldout", str(heldout)]
    made = [python, "tools/make_arithmetic.py", "--output", str(folder / "data"), *sizes]
    demo.run("Arithmetic problems", made, environment)
    model = [python, "tools/make_tiny_model.py", "--output", str(folder / "random"), "--seed", str(BASE_SEED)]
    demo.run("A tiny random model", model, environment)
    demo.teach(folder, BASE_SEED, ("sft.max_sequence_tokens=96", "run.total_epochs=4"))


def train(base: Path, output: Path, way: str, seed: int, steps: int) -> Path:
    """One run; its folder."""
    command = [*demo.torchrun(RANKS), "launch/train_grpo.py", "--config", "configs/demo.yaml"]
    command += ["--config", str(demo.ALGORITHMS / "decoupled.yaml"), *SETTINGS, *WAYS[way]]
    command += [f"run.output_dir={output / 'run'}", f"run.seed={seed}", f"run.total_steps={steps}"]
    command += [f"model.path={base / 'base'}", f"data.train_path={base / 'data' / 'train.jsonl'}"]
    command += [f"validation.paths=[{base / 'data' / 'heldout.jsonl'}]"]
    demo.run(f"{way}, seed {seed}", command, demo.one_thread())
    return output / "run"


def read_learned(run: Path) -> Learned:
    """What a run's files tell."""
    rows = demo.metrics_of(run)
    lines = (run / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    validated = {int(row["step"]): row["validation/heldout/accuracy"] for row in map(json.loads, lines)}
    return Learned(
        validated,
        [row["seconds/step"] - row.get("seconds/validation", 0.0) for row in rows],
        [row["n_valid_tokens"] for row in rows],
        [row["rollout/response_length"] for row in rows],
    )


# ---------------------------------------------------------------- figures


def line(case: str, metric: str, value: float, unit: str, baseline: float, ratio: float) -> None:
    figure = {"bench": "learning", "case": case, "metric": metric, "value": round(value, 4), "unit": unit}
    print(
        json.dumps(figure | {"baseline": f"wait: {baseline:.4f}", "ratio": round(ratio, 3)}), flush=True
    )


def report(way: str, runs: Sequence[Learned], wait: Sequence[Learned]) -> None:
    """The figures of a way, against those of "wait"."""

    def medians(of: str) -> tuple[float, float]:
        values = [[figures(run)[of] for run in side] for side in (runs, wait)]
        return statistics.median(values[0]), statistics.median(values[1])

    accuracy = [[run.final for run in side] for side in (runs, wait)]
    ours, theirs = map(statistics.mean, accuracy)
    case = f"{way}, {len(runs)} seeds"
    if min(map(len, accuracy)) > 1:
        spread = sum(statistics.variance(side) / len(side) for side in accuracy) ** 0.5
        case += f", difference of {(ours - theirs) / spread if spread else 0.0:+.1f} standard errors"
    line(case, "accuracy", ours, "", theirs, ours / theirs)
    ours, theirs = (statistics.mean(figures(run)["length"] for run in side) for side in (runs, wait))
    line(f"{way}, {len(runs)} seeds", "length", ours, "tokens", theirs, ours / theirs)
    ours, theirs = medians("step_seconds")
    line(f"{way}, {len(runs)} seeds", "step_seconds", ours, "s", theirs, theirs / ours)
    ours, theirs = medians("tokens_per_second")
    line(f"{way}, {len(runs)} seeds", "learned_tokens_per_second", ours, "tokens/s", theirs, ours / theirs)


def figures(run: Learned) -> dict[str, float]:
    return {
        "length": statistics.mean(run.lengths),
        "step_seconds": statistics.median(run.seconds),
        "tokens_per_second": sum(run.tokens) / sum(run.seconds),
    }


def curve_of(way: str, runs: Sequence[Learned]) -> Curve:
    """Held-out accuracy in % against seconds of training, both means over the runs."""
    seconds = [list(itertools.accumulate(run.seconds, initial=0.0)) for run in runs]
    points = [
        (
            round(statistics.mean(of_run[step] for of_run in seconds)),
            100 * statistics.mean(run.accuracy[step] for run in runs),
        )
        for step in sorted(runs[0].accuracy)
    ]
    return Curve(way, tuple(points))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or that of the stage that failed."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=40, help="of a run (default: 40)")
    parser.add_argument("--quick", action="store_true", help="one seed, 6 steps, wait and carry1")
    parser.add_argument("--picture", type=Path, help="file to draw accuracy against seconds in, .svg or .png")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench_learning"), help="default: outputs/bench_learning"
    )
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: needed is at least 1")
    ways, seeds, steps = ["wait", *(way for way in given.ways if way != "wait")], given.seeds, given.steps
    if given.quick:
        ways, seeds, steps = ["wait", "carry1"], given.seeds[:1], 6
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Learned]] = {}
    with (output / "log.txt").open("a", encoding="utf-8") as log:
        for way, seed in itertools.product(ways, seeds):
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                found.setdefault(way, []).append(learn(output, way, seed, steps, 64 if given.quick else 500))
            if len(found[way]) == len(seeds):
                report(way, found[way], found["wait"])
    if given.picture is not None:
        canvas = canvas_for(given.picture)
        curves = [curve_of(way, runs) for way, runs in found.items()]
        draw(canvas, curves, "held-out accuracy (%)", "Accuracy by rollout.tail", "seconds of training")
        canvas.write(given.picture)
    return 0


def learn(output: Path, way: str, seed: int, steps: int, heldout: int) -> Learned:
    """A run's result, made where it is not there."""
    base = output / f"base_{heldout}"
    made_of = fingerprint((*BASE_SETTINGS, "tools/bench_learning.py"), heldout)
    kept(base, made_of, lambda: make_base(base, heldout) or {})
    run = output / f"{way}_{seed}_{steps}_{heldout}"
    settings = ("configs/demo.yaml", demo.ALGORITHMS / "decoupled.yaml", "tools/bench_learning.py")
    kept(run, fingerprint(settings, made_of), lambda: {"run": str(train(base, run, way, seed, steps))})
    return read_learned(run / "run")


if __name__ == "__main__":
    sys.exit(main())
