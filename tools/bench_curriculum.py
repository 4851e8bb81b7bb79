"""What a curriculum by pass rate (`data.curriculum`) saves, on a task with easy and hard problems.

    python tools/bench_curriculum.py [--seeds 1 2 3] [--steps 48] [--target 0.9] [--quick]

Additions of numbers of up to two digits, and 10% of numbers of four (rlmath.cli.make_arithmetic). One base model learns
them by supervised training (rlmath demo): the short ones nearly without a slip, the long ones with so many that 40%
come out right. GRPO then trains it on 128 of the problems, 32 a step, with every seed: "none" draws all problems,
"band" those whose pass rate lies in the default band (with the default floor), "skip_solved" those that are
not always right. Two ranks of configs/demo.yaml (TP1 x DP2); nothing else differs.

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; baseline is
"none", and `ratio` above 1 means better than it:

- tokens_to_target: completion tokens that were sampled until held-out accuracy reached --target, between two
  validations on the straight line between them; of each seed, and the mean where every seed reaches it;
- share_saved: of these tokens, against "none" (0 to 1, below 0 where it needs more);
- accuracy: share of held-out problems answered rightly after the last step, one sample each at temperature 1, mean of
  the short ones' and the long ones';
- sampled_tokens: of the whole run;
- groups_with_contrast: share of the groups whose rewards differ, mean over steps: those that GRPO learns from.

What the programs print is in `log.txt` of --output. Results are kept there: the same command resumes, and measures
again what was made with other settings. `--quick`: the first seed and 4 steps, from a base model that learned little:
it shows that all of this runs, and its accuracies say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.run_files import VALIDATION_FILE
from rlmath.config.terminal import escape_terminal
from rlmath.telemetry.metrics_writer import read_metrics
from tools.benchmark_runs import TwoKindTask, open_output, print_figure, run_interleaved

WAYS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "band": ("data.curriculum=band",),
    "skip_solved": ("data.curriculum=skip_solved", "data.solved_samples=8"),
}
MAX_NEW_TOKENS = 64
"""Worked solutions have 46 tokens at most."""
QUICK_STEPS = 4
SETTINGS = (
    "parallel.tensor=1",
    "data.prompts_per_step=32",
    "optimizer.decay=constant",
    "optimizer.lr=5e-5",
    f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
    "validation.every_steps=4",
    "validation.temperature=1",
    "validation.top_p=1",
    "save.ckpt_freq_secs=null",
    "telemetry.tensorboard=false",
)


FULL = TwoKindTask(
    "curriculum_base",
    long_digits=4,
    long_share=0.1,
    right_short=0.99,
    right_long=0.4,
    problems=128,
    heldout=200,
    worked=12000,
    epochs=3,
)
QUICK = replace(FULL, name="curriculum_base_quick", heldout=32, worked=8000, epochs=1)


@dataclass(frozen=True)
class Learned:
    """One run."""

    accuracy: dict[int, float]
    """Of the held-out problems, by the number of steps done, the first 0 (0 to 1)."""
    tokens: list[float]
    """Completion tokens that every step sampled."""
    contrast: float
    """Share of the groups whose rewards differ, mean over steps (0 to 1)."""

    @property
    def last_accuracy(self) -> float:
        return self.accuracy[max(self.accuracy)]

    def tokens_to(self, target: float) -> float | None:
        """Completion tokens until the accuracy first reached `target`; None where it never did.

        >>> Learned({0: 0.5, 2: 0.75, 4: 1.0}, [10.0, 10.0, 20.0, 20.0], 1.0).tokens_to(0.875)
        40.0
        """
        done = list(itertools.accumulate(self.tokens, initial=0.0))
        points = [(done[step], accuracy) for step, accuracy in sorted(self.accuracy.items())]
        for (t0, a0), (t1, a1) in itertools.pairwise(points):
            if a1 >= target:
                return t1 if a1 == a0 else t0 + (t1 - t0) * max(0.0, target - a0) / (a1 - a0)
        return None


def read_learned(run: Path) -> Learned:
    """What the files of a run's folder tell."""
    rows, validated = read_metrics(str(run)), read_metrics(str(run), VALIDATION_FILE)
    return Learned(
        {int(row["step"]): row["validation/accuracy"] for row in validated},
        [row["n_valid_tokens"] for row in rows],
        statistics.mean(row["rollout/groups_with_contrast"] for row in rows),
    )


# ---------------------------------------------------------------- figures


def line(
    case: str, metric: str, value: float | None, unit: str, baseline: float | None, less: bool = False
) -> None:
    """Print one figure; `less`: less is better."""
    print_figure("curriculum", case, metric, value, unit, ("none", baseline), less)


def report(
    way: str, runs: Sequence[Learned], none: Sequence[Learned], seeds: Sequence[int], target: float
) -> None:
    """The figures of a way, against those of "none"."""
    ours, theirs = [one.tokens_to(target) for one in runs], [one.tokens_to(target) for one in none]
    for seed, own, other in zip(seeds, ours, theirs, strict=True):
        case = f"{way}, seed {seed}, to {target:g}"
        line(case, "tokens_to_target", own, "tokens", other, less=True)
        if own is not None and other is not None and way != "none":
            line(case, "share_saved", 1 - own / other, "", 0.0)
    case = f"{way}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
    reached = [one for one in ours if one is not None], [one for one in theirs if one is not None]
    if all(len(side) == len(runs) for side in reached):
        own, other = map(statistics.mean, reached)
        line(f"{case}, to {target:g}", "tokens_to_target", own, "tokens", other, less=True)
        if way != "none":
            line(f"{case}, to {target:g}", "share_saved", 1 - own / other, "", 0.0)
    accuracies = [statistics.mean(one.last_accuracy for one in side) for side in (runs, none)]
    line(case, "accuracy", accuracies[0], "", accuracies[1])
    sampled = [statistics.mean(sum(one.tokens) for one in side) for side in (runs, none)]
    line(case, "sampled_tokens", sampled[0], "tokens", sampled[1], less=True)
    contrast = [statistics.mean(one.contrast for one in side) for side in (runs, none)]
    line(case, "groups_with_contrast", contrast[0], "", contrast[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; that of a stage that failed, which ends it; `demo.INTERRUPTED` after Ctrl-C."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=["none", "band"], help="default: none band"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=48, help="of a run (default: 48)")
    parser.add_argument("--target", type=float, default=0.9, help="held-out accuracy (default: 0.9)")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/bench_curriculum"),
        help="default: outputs/bench_curriculum",
    )
    given = parser.parse_args(arguments)
    if given.steps < 1 or min(given.seeds) < 0 or not 0 < given.target <= 1:
        parser.error(
            "needed: --steps of at least 1, --seeds of at least 0, and --target above 0 and at most 1"
        )
    ways, seeds = list(dict.fromkeys(["none", *given.ways])), list(dict.fromkeys(given.seeds))
    task, steps = FULL, given.steps
    if given.quick:
        seeds, task, steps = seeds[:1], QUICK, QUICK_STEPS
    output = open_output(parser, given.output)
    status, _ = run_interleaved(
        "bench_curriculum",
        output,
        ways,
        seeds,
        lambda way, seed: read_learned(task.train(output, way, (*SETTINGS, *WAYS[way]), seed, steps)),
        lambda way, found: report(way, found[way], found["none"], seeds, given.target),
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
