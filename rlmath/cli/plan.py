"""Plan a run before a GPU is spent: memory, FLOPs and seconds of a step, hours of an epoch, and the fastest layout.

rlmath plan --config configs/areal/7b_n16.yaml --mean-response-tokens 8600
rlmath plan --config configs/my.yaml --gpu H100-80GB --nodes 4
rlmath plan --config configs/my.yaml --calibrate outputs/short/metrics.jsonl --write-coefficients mine.json

It is a prediction; its formulas and errors are in docs/planning.md. Of the model only config.json is read, and for
published models not even that is needed (configs/models). It exits with 2 where the run cannot start or does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmath.cli.plan_memory import MISTAKE, NOT_NEEDED
from rlmath.config.gpu_specs import GPUS
from rlmath.config.load import load_config, make_parser
from rlmath.config.terminal import escape_terminal
from rlmath.planning.planner.calibration import Measured, as_file, fit, read_coefficients, read_run
from rlmath.planning.planner.report import calibration_lines, coefficient_lines, run_data, run_lines
from rlmath.planning.planner.run import Asked, place_run, predict_run
from rlmath.planning.planner.step import compare_layouts
from rlmath.planning.planner.work import CPU, DEFAULTS, RANKS_PER_NODE, Coefficients


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 where the run fits, MISTAKE where not, or where there is no plan."""
    escape_terminal()
    given = parser().parse_intermixed_args(argv)
    try:
        return plan(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE


def parser() -> argparse.ArgumentParser:
    made = make_parser("Plan a run: memory, seconds of a step, hours of an epoch, the fastest layout.")
    cluster = made.add_argument_group("the cluster")
    cluster.add_argument("--gpu", choices=[*GPUS, CPU], help="without it that of memory.gpu, or the CPU")
    cluster.add_argument("--nodes", type=int, help="without it as many as the layout's ranks take")
    cluster.add_argument("--gpus-per-node", type=int, help="default: 8, or all ranks where they are fewer")
    cluster.add_argument("--network-gbps", type=float, help="Gbit/s between nodes for each GPU")
    work = made.add_argument_group("the work")
    work.add_argument("--mean-response-tokens", type=float, help="default: 0.3 x rollout.max_new_tokens")
    work.add_argument("--mean-prompt-tokens", type=float, help="default: 128, or data.max_prompt_tokens")
    prompts_help = "training prompts, where data.train_path is not there, or is parquet without pyarrow"
    work.add_argument("--prompts", type=int, help=prompts_help)
    measured = made.add_argument_group("measured figures")
    runs_help = "metrics.jsonl of a run, with config.yaml beside it; may be given several times"
    measured.add_argument(
        "--calibrate", type=Path, metavar="RUN", action="append", default=[], help=runs_help
    )
    measured.add_argument("--coefficients", type=Path, metavar="FILE", help="calibrated before")
    measured.add_argument("--write-coefficients", type=Path, metavar="FILE", help="write the calibrated ones")
    made.add_argument("--layouts", type=int, default=5, help="fastest layouts to show; 0: none (default: 5)")
    made.add_argument("--json", action="store_true", help="print plain data")
    return made


def plan(given: argparse.Namespace) -> int:
    """The plan of one run; MISTAKE where it does not fit."""
    if given.write_coefficients and not given.calibrate:
        raise ValueError("--write-coefficients writes what --calibrate finds; give --calibrate, too")
    asked = Asked(
        given.gpu,
        given.nodes,
        ranks_per_node=given.gpus_per_node,
        network_gbps=given.network_gbps,
        mean_response=given.mean_response_tokens,
        mean_prompt=given.mean_prompt_tokens,
        prompts=given.prompts,
    )
    place = place_run(load_config(given.config, given.overrides, stand_ins=NOT_NEEDED), asked)
    coefficients, runs = coefficients_of(given, place.target.kind)
    prediction = predict_run(place, asked, coefficients, runs)
    layouts = compare_layouts(prediction.last_step, coefficients) if given.layouts > 0 else None
    if given.json:
        print(json.dumps(run_data(prediction, layouts, coefficients, given.layouts), indent=2))
    else:
        lines = run_lines(prediction, layouts, given.layouts)
        lines += coefficient_lines(coefficients, DEFAULTS[place.target.kind])
        print("\n".join([*calibration_lines(runs, coefficients), *lines]))
    for problem in prediction.memory_problems:
        print(f"  - {problem}", file=sys.stderr)
    return MISTAKE if prediction.memory_problems else 0


def coefficients_of(given: argparse.Namespace, kind: str) -> tuple[Coefficients, list[Measured]]:
    """The coefficients of the `kind` of device, of a file, or fitted to runs, starting from either."""
    start = DEFAULTS[kind] if given.coefficients is None else read_coefficients(given.coefficients, kind)
    per_node = given.gpus_per_node or RANKS_PER_NODE
    runs = [read_run(path, given.gpu, per_node) for path in given.calibrate]
    for run in runs:
        if run.target.kind != kind:
            raise ValueError(
                f'{run.source} was planned for "{run.target.kind}", this run for "{kind}"; name the devices by --gpu, '
                "or by memory.gpu in its config.yaml"
            )
    if not runs:
        return start, runs
    found = fit(runs, start)
    if given.write_coefficients is not None:
        write(given.write_coefficients, json.dumps(as_file(found, kind, runs), indent=2) + "\n")
    return found, runs


def write(file: Path, text: str) -> None:
    """ValueError where it cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--write-coefficients: {file} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
