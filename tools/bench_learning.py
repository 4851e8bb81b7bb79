"""What every way to treat the tail of a rollout (`rollout.tail`), and asynchronous training, learn, on a task with long
and short answers.

    python tools/bench_learning.py [--ways carry1 carry2 carry4 defer] [--seeds 1 2 3] [--steps 40] [--quick]
                                   [--picture tail_learning.svg]
    python tools/bench_learning.py --ways async0 async1 async4 async8 async1_clip async4_clip async8_clip

Additions of numbers of up to two digits, and 15% of numbers of six (rlmath.cli.make_arithmetic), whose worked solutions
are almost three times as long. One base model learns them by supervised training, with slips (rlmath demo); GRPO
then trains it with every way and seed on two ranks of configs/demo.yaml (TP1 x DP2; "async": one trains, one has the
engine), all with the decoupled loss (configs/algorithms/decoupled.yaml), so that they differ in the way alone. carry1,
carry2, carry4 and async0 to async8 have that `rollout.max_staleness`; "_clip": without the decoupled loss, the ratio is
to the log-probs of the version that sampled (AReaL's ablation, arXiv:2505.24298).

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; baseline is
"wait", which is always measured, and `ratio` above 1 means better than it. The ways take turns, seed by seed, so that a
machine that gets busier slows all of them; figures are printed when a way's last seed is done:

- accuracy: share of held-out problems answered rightly, one sample each at temperature 1, mean over seeds, after every
  10 steps and the last: near 1 all ways are alike, and what one learns later shows before. The case has the difference
  to "wait" in standard errors, from the variance between seeds: of three seeds a rough guess, where they happen to
  agree far too small;
- length: tokens of a completion that is learned from, mean over steps and seeds (ratio: should be 1);
- step_seconds: seconds of a step without validation, mean of the steps (with "carry", steps that make no round take a
  fraction of the others, and a median would be one or the other), median of the seeds;
- learned_tokens_per_second: tokens learned from by the seconds of all steps, median of the seeds;
- train/mfu: model FLOP utilisation of the update as the trainer logs it, median of the steps, median of the seeds.

What the programs print is in `log.txt` of --output. Results are kept there: the same command resumes, and measures
again what was made with other settings. `--picture` draws held-out accuracy against the seconds of training, mean over
seeds. `--quick`: the first seed, 6 steps, "wait" and "carry1" alone, from a base model that learned little: it shows
that all of this runs, and its accuracies say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.cli.plot_run import Curve, canvas_for, draw
from rlmath.config.run_files import VALIDATION_FILE
from rlmath.config.terminal import escape_terminal
from rlmath.telemetry.metrics_writer import read_metrics
from tools.benchmark_runs import (
    BASE_SETTINGS,
    fingerprint,
    load_or_measure,
    open_output,
    print_figure,
    run_interleaved,
)

CLIP = (
    "algorithm.recompute_logprobs=false",
    "algorithm.importance_correction=null",
    "algorithm.importance_mask_high=null",
)


def asynchronous(staleness: int) -> tuple[str, ...]:
    """Settings of a run with an engine on a rank of its own."""
    return "rollout.ranks=1", f"rollout.max_staleness={staleness}"


WAYS: Mapping[str, tuple[str, ...]] = {
    "wait": (),
    "carry1": ("rollout.tail=carry", "rollout.max_staleness=1"),
    "carry2": ("rollout.tail=carry", "rollout.max_staleness=2"),
    "carry4": ("rollout.tail=carry", "rollout.max_staleness=4"),
    "defer": ("rollout.tail=defer",),
    "async0": asynchronous(0),
    "async1": asynchronous(1),
    "async4": asynchronous(4),
    "async8": asynchronous(8),
    "async1_clip": (*asynchronous(1), *CLIP),
    "async4_clip": (*asynchronous(4), *CLIP),
    "async8_clip": (*asynchronous(8), *CLIP),
}
TAILS = ("wait", "carry1", "carry2", "carry4", "defer")
"""The ways that are measured unless others are named."""
RANKS = 2
BASE_SEED = 101
LONG_SHARE = 0.15
MAX_NEW_TOKENS = 96
"""Worked solutions have 24 tokens on average, and 62 at most."""
VALIDATE_EVERY = 10
"""Steps."""
QUICK_STEPS = 6
SFT_SETTINGS = ("sft.max_sequence_tokens=96",)
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
class Base:
    """What the base model is made of."""

    name: str
    """Of its folder."""
    train: int
    """Problems that GRPO draws from."""
    heldout: int
    """Problems of the validation."""
    worked: int
    """Worked solutions of the supervised training."""
    epochs: int
    """Passes over them."""


FULL = Base("base", train=8000, heldout=500, worked=20000, epochs=4)
QUICK = Base("base_quick", train=1000, heldout=64, worked=8000, epochs=1)


@dataclass(frozen=True)
class Learned:
    """One run, step by step."""

    accuracy: dict[int, float]
    """Of the held-out problems, by the number of steps done, the first 0 (0 to 1)."""
    seconds: list[float]
    """Of every step, without validation."""
    tokens: list[float]
    """That every step learns from."""
    lengths: list[float]
    """Of its completions, mean (tokens)."""
    mfu: list[float]
    """Of the updates, by step; a step without one has none."""


def make_base(folder: Path, base: Base) -> dict:
    """Data and the base model, in `data` and `base`; returns nothing that is to be kept."""
    python, environment = sys.executable, demo.child_environment()
    made = [
        python,
        "-m",
        "rlmath.cli.make_arithmetic",
        "--output",
        str(folder / "data"),
        "--seed",
        str(BASE_SEED),
    ]
    made += ["--long-share", str(LONG_SHARE), "--train", str(base.train)]
    made += ["--heldout", str(base.heldout), "--worked", str(base.worked)]
    demo.run("Arithmetic problems", made, environment)
    model = [
        python,
        "-m",
        "rlmath.cli.make_tiny_model",
        "--output",
        str(folder / "random"),
        "--seed",
        str(BASE_SEED),
    ]
    demo.run("A tiny random model", model, environment)
    demo.teach(folder, BASE_SEED, (*SFT_SETTINGS, f"run.total_epochs={base.epochs}"))
    return {}


def train(base: Path, output: Path, way: str, seed: int, steps: int) -> None:
    """One run of the base model in the folder `base`, in `output`/run."""
    command = [*demo.torchrun(RANKS), "-m", "rlmath.trainer", "--config", "configs/demo.yaml"]
    command += ["--config", str(demo.ALGORITHMS / "decoupled.yaml"), *SETTINGS, *WAYS[way]]
    command += [f"run.output_dir={output / 'run'}", f"run.seed={seed}", f"run.total_steps={steps}"]
    command += [f"model.path={base / 'base'}", f"data.train_path={base / 'data' / 'train.jsonl'}"]
    command += [f"validation.paths=[{base / 'data' / 'heldout.jsonl'}]"]
    demo.run(f"{way}, seed {seed}", command, demo.one_thread())


def read_learned(run: Path) -> Learned:
    """What the files of a run's folder tell."""
    rows, validated = read_metrics(str(run)), read_metrics(str(run), VALIDATION_FILE)
    return Learned(
        {int(row["step"]): row["validation/heldout/accuracy"] for row in validated},
        [row["seconds/step"] - row.get("seconds/validation", 0.0) for row in rows],
        [row["n_valid_tokens"] for row in rows],
        [row["rollout/response_length"] for row in rows],
        [row["train/mfu"] for row in rows if "train/mfu" in row],
    )


# ---------------------------------------------------------------- figures


def line(case: str, metric: str, value: float, unit: str, baseline: float, faster: bool = False) -> None:
    """Print one figure; `faster`: less is better."""
    print_figure("learning", case, metric, value, unit, ("wait", baseline), less=faster)


def report(way: str, runs: Sequence[Learned], wait: Sequence[Learned]) -> None:
    """The figures of a way, against those of "wait" with as many steps."""
    case = f"{way}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
    for step in sorted(runs[0].accuracy)[1:]:
        accuracies = [[run.accuracy[step] for run in side] for side in (runs, wait)]
        ours, theirs = map(statistics.mean, accuracies)
        apart = difference(*accuracies) if way != "wait" else ""
        line(f"{case}, after {step} steps{apart}", "accuracy", ours, "", theirs)
    of_runs, of_wait = [figures(run) for run in runs], [figures(run) for run in wait]

    def pair(name: str, average: Callable[[Iterable[float]], float]) -> tuple[float, float]:
        ours, theirs = (average(one[name] for one in side) for side in (of_runs, of_wait))
        return ours, theirs

    ours, theirs = pair("length", statistics.mean)
    line(case, "length", ours, "tokens", theirs)
    ours, theirs = pair("step_seconds", statistics.median)
    line(case, "step_seconds", ours, "s", theirs, faster=True)
    ours, theirs = pair("tokens_per_second", statistics.median)
    line(case, "learned_tokens_per_second", ours, "tokens/s", theirs)
    if all(run.mfu for run in (*runs, *wait)):
        ours, theirs = pair("mfu", statistics.median)
        line(case, "train/mfu", ours, "of the ceiling", theirs)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of two means, in standard errors of it, for the case's text; nothing where a side has one value, or none vary."""
    if min(len(ours), len(theirs)) < 2:
        return ""
    spread = sum(statistics.variance(side) / len(side) for side in (ours, theirs)) ** 0.5
    distance = statistics.mean(ours) - statistics.mean(theirs)
    return f", difference of {distance / spread:+.1f} standard errors" if spread else ""


def figures(run: Learned) -> dict[str, float]:
    """Of a run: tokens of a completion, seconds of a step, tokens learned from by second; without validation. And MFU,
    where it has one."""
    mfu = {"mfu": statistics.median(run.mfu)} if run.mfu else {}
    return mfu | {
        "length": statistics.mean(run.lengths),
        "step_seconds": statistics.mean(run.seconds),
        "tokens_per_second": sum(run.tokens) / sum(run.seconds),
    }


def curve_of(way: str, runs: Sequence[Learned]) -> Curve:
    """Held-out accuracy in % against seconds of training (whole ones), both means over the runs."""
    seconds = [list(itertools.accumulate(run.seconds, initial=0.0)) for run in runs]
    points = [
        (
            round(statistics.mean(of_run[step] for of_run in seconds)),
            100 * statistics.mean(run.accuracy[step] for run in runs),
        )
        for step in sorted(runs[0].accuracy)
    ]
    return Curve(way, tuple(points))


def draw_picture(path: Path, found: Mapping[str, Sequence[Learned]]) -> None:
    """A curve for every way."""
    canvas = canvas_for(path)
    curves = [curve_of(way, runs) for way, runs in found.items()]
    draw(canvas, curves, "held-out accuracy (%)", "Accuracy by way", "seconds of training")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.write(path)


def learn(output: Path, base: Base, way: str, seed: int, steps: int) -> Learned:
    """A run's result, made where it is not there."""
    base_dir = output / base.name
    base_of = fingerprint(BASE_SETTINGS, base, BASE_SEED, LONG_SHARE, SFT_SETTINGS)
    load_or_measure(base_dir, base_of, lambda: make_base(base_dir, base))
    folder = output / f"{way}_seed_{seed}_steps_{steps}_{base.name}"
    files = ("configs/demo.yaml", demo.ALGORITHMS / "decoupled.yaml")
    made_of = fingerprint(files, base_of, SETTINGS, WAYS[way], RANKS)
    load_or_measure(folder, made_of, lambda: train(base_dir, folder, way, seed, steps) or {})
    return read_learned(folder / "run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; that of a stage that failed, which ends it; `demo.INTERRUPTED` after Ctrl-C."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(TAILS), help="default: those of rollout.tail"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=40, help="of a run (default: 40)")
    parser.add_argument(
        "--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps, wait and carry1"
    )
    parser.add_argument("--picture", type=Path, help="file to draw accuracy against seconds in, .svg or .png")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench_learning"), help="default: outputs/bench_learning"
    )
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: needed is at least 1")
    if min(given.seeds) < 0:
        parser.error(f"--seeds {min(given.seeds)}: needed is at least 0")
    if given.picture is not None and given.picture.suffix.lower() not in (".svg", ".png"):
        parser.error(f"--picture {given.picture}: needed is a name that ends in .svg or .png")
    ways, seeds = list(dict.fromkeys(["wait", *given.ways])), list(dict.fromkeys(given.seeds))
    base, steps = FULL, given.steps
    if given.quick:
        ways, seeds, base, steps = ["wait", "carry1"], seeds[:1], QUICK, QUICK_STEPS
    output = open_output(parser, given.output)
    status, found = run_interleaved(
        "bench_learning",
        output,
        ways,
        seeds,
        lambda way, seed: learn(output, base, way, seed, steps),
        lambda way, found: report(way, found[way], found["wait"]),
    )
    if status:
        return status
    if given.picture is not None:
        draw_picture(given.picture, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
