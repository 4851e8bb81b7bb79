"""What the recipes of configs/algorithms make of the demo's model, on seeds that nobody chose.

    python tools/bench_demo.py [--algorithms grpo gspo] [--seeds 101 102 103 104 105] [--quick]

Every seed has data and a base model of its own (rlmath/cli/demo.py), from which every recipe is trained and evaluated.
Prints one JSON object per recipe and seed, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}, and at
the end each recipe's worst and median seed: `value` is the share of right answers after training in %, `baseline` that
before, `ratio` how many times more are right. What the programs print is in `log.txt`. Results are kept: the same
command resumes, and measures again what was made with other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.terminal import escape_terminal
from tools.benchmark_runs import BASE_SETTINGS, fingerprint, load_or_measure

SEEDS = (101, 102, 103, 104, 105)


def base_of_seed(folder: Path, seed: int) -> dict:
    """`accuracy_before` of a seed's base model, which is made if it is not there."""
    return load_or_measure(
        folder / "base",
        fingerprint(BASE_SETTINGS),
        lambda: {"accuracy_before": demo.make_base(folder / "base", seed)},
    )


def after_recipe(folder: Path, seed: int, algorithm: str, layout: demo.Layout) -> dict:
    """A recipe's result on a seed, with `accuracy_before` and `accuracy_after`."""
    base, output = base_of_seed(folder, seed), folder / algorithm

    def measure() -> dict:
        return base | demo.train_and_evaluate(folder / "base", output, seed, layout, algorithm)

    recipe = demo.ALGORITHMS / f"{algorithm}.yaml"
    return load_or_measure(
        output, fingerprint((recipe, "configs/demo.yaml"), base["made_of"], layout), measure
    )


def line(case: str, metric: str, after: float, before: float) -> None:
    """Print one figure: shares of right answers as percentages."""
    figure = {"bench": "demo", "case": case, "metric": metric, "value": round(100 * after, 1), "unit": "%"}
    ratio = round(after / before, 3) if before else None
    print(json.dumps(figure | {"baseline": f"before: {100 * before:.1f}", "ratio": ratio}), flush=True)


def report(results: Sequence[dict]) -> None:
    """Each recipe's worst and median seed, the recipe with the worst seed first."""
    recipes: dict[str, list[dict]] = {}
    for result in sorted(results, key=lambda result: result["accuracy_after"]):
        recipes.setdefault(result["algorithm"], []).append(result)
    for algorithm, of_recipe in recipes.items():
        worst, seeds = of_recipe[0], len(of_recipe)
        line(f"{algorithm}, worst of {seeds} seeds: {worst['seed']}", "accuracy_worst", *shares(worst))
        after, before = (statistics.median(values) for values in zip(*map(shares, of_recipe), strict=True))
        line(f"{algorithm}, median of {seeds} seeds", "accuracy_median", after, before)
        reached = [result["train_mfu"] for result in of_recipe if result.get("train_mfu") is not None]
        if reached:
            figure = {"bench": "demo", "case": algorithm, "metric": "train/mfu"}
            figure["value"], figure["unit"] = round(statistics.median(reached), 3), "of the ceiling"
            print(json.dumps(figure | {"baseline": None, "ratio": None}), flush=True)


def shares(result: dict) -> tuple[float, float]:
    """Accuracy after and before."""
    return result["accuracy_after"], result["accuracy_before"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if a recipe failed on a seed: the others are measured still; `demo.INTERRUPTED` after Ctrl-C."""
    escape_terminal()
    names = sorted(path.stem for path in demo.ALGORITHMS.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="default: 101 to 105")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="of the training layout (default: 2)")
    parser.add_argument("--quick", action="store_true", help="only the first recipe on the first seed")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench_demo"), help="default: outputs/bench_demo"
    )
    given = parser.parse_args(arguments)
    layout = demo.Layout(given.ranks, given.tensor_parallel, pipeline=1)
    try:
        layout.check()
    except ValueError as error:
        parser.error(str(error))
    cases = [(seed, algorithm) for seed in given.seeds for algorithm in given.algorithms]
    output, results, failed = given.output.resolve(), [], 0
    output.mkdir(parents=True, exist_ok=True)
    for seed, algorithm in cases[:1] if given.quick else cases:
        try:
            with (
                (output / "log.txt").open("a", encoding="utf-8") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                results.append(after_recipe(output / f"seed_{seed}", seed, algorithm, layout))
            line(f"{algorithm}, seed {seed}", "accuracy_after", *shares(results[-1]))
        except SystemExit as stage:
            if stage.code == demo.INTERRUPTED:
                print("bench_demo: interrupted; the same command resumes", file=sys.stderr)
                return demo.INTERRUPTED
            print(
                f"bench_demo: {algorithm}, seed {seed}: a stage ended with status {stage.code}; see "
                f"{output / 'log.txt'}",
                file=sys.stderr,
            )
            failed += 1
    report(results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
