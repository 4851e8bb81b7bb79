"""What a critic learns to predict, and what training with it reaches, against GRPO.

    python tools/bench_critic.py [--seeds 1 2 3] [--steps 30] [--quick]

Half of the problems are additions of numbers of up to two digits, which the base model gets right nearly always, half
of numbers of six, which it hardly ever does (rlmath.cli.make_arithmetic, supervised training by rlmath demo). GRPO and
configs/algorithms/critic.yaml then train it on the same problems, with as many samples. In the first three steps that
recipe trains the critic alone, with "pretrained" in nine. Two ranks of configs/demo.yaml (TP1 x DP2).

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}:

- explained_variance of the critic: of a step's returns by its values, over all tokens (1: all of it); mean over the
  steps of the case, and over seeds. The baseline, of the same steps: what a value explains that knows no more of a
  problem than its kind, and each kind's share of right samples in the step;
- accuracy: share of held-out problems answered rightly after the last step, one sample each at temperature 1, mean of
  both kinds and over seeds; the baseline is GRPO's;
- step_seconds: median of all steps but the first, without validation, median over seeds; the baseline is GRPO's.

What the programs print is in `log.txt` of --output. Results are kept there: the same command resumes, and measures
again what was made with other settings. `--quick`: the first seed and 4 steps, without "pretrained", from a base model
that learned little: it shows that all of this runs, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.run_files import SAMPLES_FOLDER, VALIDATION_FILE
from rlmath.config.terminal import escape_terminal
from rlmath.telemetry.metrics_writer import read_metrics
from tools.benchmark_runs import TwoKindTask, open_output, print_figure, run_interleaved

PRETRAIN_STEPS = 9
RECIPE = "configs/algorithms/critic.yaml"
WAYS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "critic": ("--config", RECIPE),
    "pretrained": ("--config", RECIPE, f"critic.pretrain_steps={PRETRAIN_STEPS}"),
}
MAX_NEW_TOKENS = 96
"""Worked solutions have 62 tokens at most."""
QUICK_STEPS = 4
SETTINGS = (
    "parallel.tensor=1",
    "data.prompts_per_step=32",
    "optimizer.decay=constant",
    "optimizer.lr=1e-4",
    "optimizer.warmup_steps=2",
    f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
    "validation.every_steps=10",
    "validation.temperature=1",
    "validation.top_p=1",
    "save.ckpt_freq_secs=null",
    "telemetry.tensorboard=false",
    "telemetry.sample_groups_per_step=32",
)
FULL = TwoKindTask(
    "critic_base",
    long_digits=6,
    long_share=0.5,
    right_short=0.99,
    right_long=0.05,
    problems=4000,
    heldout=200,
    worked=12000,
    epochs=3,
)
QUICK = replace(FULL, name="critic_base_quick", problems=256, heldout=32, worked=4000, epochs=1)
GROUP = 3
"""Steps that a figure of explained variance is the mean of; the last one of fewer."""


@dataclass(frozen=True)
class Learned:
    """One run."""

    accuracy: float
    """Of the held-out problems after the last step (0 to 1)."""
    seconds: float
    """Of a step, median."""
    explained: dict[int, float]
    """Explained variance by the critic, by step from 1."""
    by_kind: dict[int, float]
    """The same by the kind of the problem alone."""


def read_learned(run: Path) -> Learned:
    """What the files of a run's folder tell."""
    rows, validated = read_metrics(str(run)), read_metrics(str(run), VALIDATION_FILE)
    seconds = [row["seconds/step"] - row.get("seconds/validation", 0.0) for row in rows]
    key = "critic/explained_variance"
    explained = {int(row["step"]): row[key] for row in rows if key in row}
    samples = {step: run / SAMPLES_FOLDER / f"step-{step:06d}.jsonl" for step in explained}
    return Learned(
        accuracy=validated[-1]["validation/accuracy"],
        seconds=statistics.median(seconds[1:]),
        explained=explained,
        by_kind={step: explained_by_kind(read_samples(path)) for step, path in samples.items()},
    )


def read_samples(path: Path) -> list[tuple[bool, float, int]]:
    """Whether the problem is long, whether the answer is right (1 or 0), and its length (tokens), of every sample."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (len(row["prompt"]) > len("99+99="), float(one["correct"]), one["length"])
        for row in rows
        for one in row["completions"]
    ]


def explained_by_kind(samples: Sequence[tuple[bool, float, int]]) -> float:
    """What the kind of the problem explains of the tokens' returns; 0 where all are alike.

    >>> explained_by_kind([(False, 1.0, 2), (False, 1.0, 2), (True, 0.0, 4)])
    1.0
    >>> explained_by_kind([(False, 1.0, 2), (False, 0.0, 2), (True, 0.0, 4), (True, 1.0, 4)])
    0.0
    """
    every = _deviation(samples)
    inside = sum(_deviation([one for one in samples if one[0] == is_long]) for is_long in (False, True))
    return 1 - inside / every if every else 0.0


def _deviation(samples: Sequence[tuple[bool, float, int]]) -> float:
    """Squared differences to their mean, summed over tokens."""
    tokens = sum(length for _, _, length in samples)
    mean = sum(right * length for _, right, length in samples) / tokens if tokens else 0.0
    return sum(length * (right - mean) ** 2 for _, right, length in samples)


def report(way: str, runs: Sequence[Learned], grpo: Sequence[Learned]) -> None:
    """The figures of a way, against GRPO's."""
    case = f"{way}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
    steps = sorted(runs[0].explained)
    for first in range(0, len(steps), GROUP):
        part = steps[first : first + GROUP]
        ours, theirs = (
            statistics.mean(explained[step] for explained in side for step in part)
            for side in ([run.explained for run in runs], [run.by_kind for run in runs])
        )
        title = f"{case}, steps {part[0]} to {part[-1]}"
        print_figure("critic", title, "explained_variance", ours, "", ("known by its kind", theirs))
    ours, theirs = (statistics.mean(run.accuracy for run in side) for side in (runs, grpo))
    print_figure("critic", case, "accuracy", ours, "", ("grpo", theirs))
    ours, theirs = (statistics.median(run.seconds for run in side) for side in (runs, grpo))
    print_figure("critic", case, "step_seconds", ours, "s", ("grpo", theirs), less=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; that of a stage that failed, which ends it; `demo.INTERRUPTED` after Ctrl-C."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=30, help="of a run (default: 30)")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench_critic"), help="default: outputs/bench_critic"
    )
    given = parser.parse_args(arguments)
    if given.steps <= PRETRAIN_STEPS or min(given.seeds) < 0:
        parser.error(f"needed: --steps above {PRETRAIN_STEPS}, and --seeds of at least 0")
    ways, seeds, task, steps = list(WAYS), list(dict.fromkeys(given.seeds)), FULL, given.steps
    if given.quick:
        ways, seeds, task, steps = ["grpo", "critic"], seeds[:1], QUICK, QUICK_STEPS
    output = open_output(parser, given.output)

    status, _ = run_interleaved(
        "bench_critic",
        output,
        ways,
        seeds,
        lambda way, seed: read_learned(task.train(output, way, (*WAYS[way], *SETTINGS), seed, steps)),
        lambda way, found: report(way, found[way], found["grpo"]),
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
