"""What a critic learns to predict, and what training with it reaches, against GRPO.

    python tools/bench_critic.py [--seeds 1 2 3] [--steps 30] [--quick]

Half of the problems are additions of numbers of up to two digits, which the base model gets right nearly always, half
of numbers of six, which it hardly ever does (tools/make_arithmetic.py, supervised training by tools/demo.py). GRPO and
configs/algorithms/critic.yaml then train it, on the same problems, with the same number of samples. Two ranks of
configs/demo.yaml (TP1 x DP2).

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}:

- explained_variance of the critic: of a step's returns by its values, over all tokens; largest mean of three
  consecutive steps, and the last step, mean over seeds. The baseline is what the kind of the problem explains alone: a
  value that knew nothing but each kind's share of right samples in the first step;
- accuracy: share of held-out problems answered rightly after the last step, one sample each at temperature 1, mean of
  both kinds, mean over seeds; the baseline is GRPO's;
- step_seconds: median of all steps but the first, without validation; the baseline is GRPO's.

What the programs print is in `log.txt` of --output. Results are kept there: the same command resumes, and measures
again what was made with other settings. `--quick`: the first seed and 4 steps, from a base model that learned little:
it shows that all of this runs, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal
from rlmath.trainer.telemetry.metrics_writer import VALIDATION_FILE, read_metrics
from tools import demo
from tools.bench_runs import TwoKinds, figure, fingerprint, in_turns, kept

RECIPE = "configs/algorithms/critic.yaml"
WAYS: Mapping[str, tuple[str, ...]] = {"grpo": (), "critic": ("--config", RECIPE)}
RANKS = 2
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
FULL = TwoKinds("base", 6, 0.5, 0.99, 0.05, problems=4000, heldout=200, worked=12000, epochs=3)
QUICK = TwoKinds("base_quick", 6, 0.5, 0.99, 0.05, problems=256, heldout=32, worked=4000, epochs=1)


@dataclass(frozen=True)
class Learned:
    """One run."""

    accuracy: float
    """Of the held-out problems after the last step (0 to 1)."""
    seconds: float
    """Of a step, median."""
    explained: tuple[float, ...]
    """Explained variance of every step with a critic."""

    @property
    def best_explained(self) -> float:
        """Largest mean of three consecutive steps."""
        size = min(3, len(self.explained))
        return max(
            statistics.mean(self.explained[first : first + size])
            for first in range(len(self.explained) - size + 1)
        )


def train(base: Path, output: Path, way: str, seed: int, steps: int) -> dict:
    """One run of the base model in the folder `base`, in `output`/run."""
    command = [*demo.torchrun(RANKS), "launch/train_grpo.py", "--config", "configs/demo.yaml", *WAYS[way]]
    command += [*SETTINGS, f"run.output_dir={output / 'run'}", f"run.seed={seed}", f"run.total_steps={steps}"]
    command += [f"model.path={base / 'base'}", f"data.train_path={base / 'data' / 'train.jsonl'}"]
    command += [f"validation.paths=[{base / 'data' / 'short.jsonl'},{base / 'data' / 'long.jsonl'}]"]
    demo.run(f"{way}, seed {seed}", command, demo.one_thread())
    return {}


def read_learned(run: Path) -> Learned:
    """What the files of a run's folder tell."""
    rows, validated = read_metrics(str(run)), read_metrics(str(run), VALIDATION_FILE)
    seconds = [row["seconds/step"] - row.get("seconds/validation", 0.0) for row in rows]
    key = "critic/explained_variance"
    return Learned(
        accuracy=validated[-1]["validation/accuracy"],
        seconds=statistics.median(seconds[1:]),
        explained=tuple(row[key] for row in rows if key in row),
    )


def explained_by_kind(run: Path) -> float:
    """What the kind of the problem explains of the rewards of the first step's samples.

    With 4 of 4 short and 0 of 4 long answers right everything, with 2 of 4 of both nothing.
    """
    (first, *_) = sorted((run / "samples").glob("*.jsonl"))
    by_kind: dict[bool, list[float]] = {False: [], True: []}
    for line in first.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        is_long = len(row["prompt"]) > len("99+99=")
        by_kind[is_long] += [float(one["correct"]) for one in row["completions"]]
    right = [value for values in by_kind.values() for value in values]
    inside = sum(len(values) * statistics.pvariance(values) for values in by_kind.values() if values)
    return 1 - inside / (len(right) * statistics.pvariance(right))


def report(way: str, runs: Sequence[Learned], grpo: Sequence[Learned], by_kind: Sequence[float]) -> None:
    """The figures of a way, against GRPO's."""
    case = f"{way}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"

    def mean(values: Sequence[float]) -> float:
        return statistics.mean(values)

    if all(run.explained for run in runs):
        known = ("known by its kind", mean(by_kind))
        best, last = mean([run.best_explained for run in runs]), mean([run.explained[-1] for run in runs])
        figure("critic", f"{case}, best of 3 steps", "explained_variance", best, "", known)
        figure("critic", f"{case}, last step", "explained_variance", last, "", known)
    theirs = mean([run.accuracy for run in grpo])
    figure("critic", case, "accuracy", mean([run.accuracy for run in runs]), "", ("grpo", theirs))
    theirs = statistics.median(run.seconds for run in grpo)
    ours = statistics.median(run.seconds for run in runs)
    figure("critic", case, "step_seconds", ours, "s", ("grpo", theirs), less=True)


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
    if given.steps < 2 or min(given.seeds) < 0:
        parser.error("needed: --steps of at least 2, and --seeds of at least 0")
    seeds, two_kinds, steps = list(dict.fromkeys(given.seeds)), FULL, given.steps
    if given.quick:
        seeds, two_kinds, steps = seeds[:1], QUICK, QUICK_STEPS
    output = given.output.resolve()
    if output.exists() and not output.is_dir():
        parser.error(f"--output {given.output}: it is a file; name a folder")
    output.mkdir(parents=True, exist_ok=True)

    def folder_of(way: str, seed: int) -> Path:
        return output / f"{way}_seed_{seed}_steps_{steps}_{two_kinds.name}"

    def learn(way: str, seed: int) -> Learned:
        base, base_of = two_kinds.base(output)
        folder = folder_of(way, seed)
        made_of = fingerprint(("configs/demo.yaml", RECIPE), base_of, SETTINGS, WAYS[way], RANKS)
        kept(folder, made_of, lambda: train(base, folder, way, seed, steps))
        return read_learned(folder / "run")

    def report_way(way: str, found: dict[str, list[Learned]]) -> None:
        by_kind = [explained_by_kind(folder_of(way, seed) / "run") for seed in seeds]
        report(way, found[way], found["grpo"], by_kind)

    return in_turns("bench_critic", output, list(WAYS), seeds, learn, report_way)


if __name__ == "__main__":
    sys.exit(main())
