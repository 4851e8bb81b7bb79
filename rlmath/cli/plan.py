"""Plan a run before a GPU is spent: memory, FLOPs and seconds of a step, hours of an epoch, and the fastest layout.

rlmath plan --config configs/areal/7b_n16.yaml --mean-response-tokens 8600
rlmath plan --config configs/my.yaml --gpu H100-80GB --nodes 4
rlmath plan --config configs/my.yaml --calibrate outputs/short/metrics.jsonl --write-coefficients mine.json
rlmath plan --config configs/my.yaml --search-tails
rlmath plan --config configs/my.yaml --asynchronous rollout.max_staleness=4
rlmath plan --published

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
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.config.terminal import escape_terminal
from rlmath.models.hf_config import required_shape
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.planner.calibration import Measured, Where, as_file, fit, read_coefficients, read_run
from rlmath.planning.planner.machines import CPU, Machine, machine_of
from rlmath.planning.planner.published import (
    ASYNCHRONOUS,
    COLOCATED,
    LOG,
    SYNCHRONOUS,
    TABLE,
    Calibrated,
    Predicted,
    Row,
    one_factor,
    predict,
    predict_splits,
    predict_tails,
    recipe_file,
)
from rlmath.planning.planner.report import (
    calibration_lines,
    coefficient_lines,
    published_lines,
    run_data,
    run_lines,
)
from rlmath.planning.planner.run import (
    Asked,
    ClusterPlacement,
    compare_layouts,
    compare_rank_splits,
    compare_rollout_tails,
    place_run,
    predict_run,
    with_ranks_of_their_own,
)
from rlmath.planning.planner.tails import Tails
from rlmath.planning.planner.work import DEFAULTS, Coefficients


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 where the run fits, MISTAKE where not, or where there is no plan."""
    escape_terminal()
    given = parser().parse_intermixed_args(argv)
    try:
        if given.published:
            tables = (published(rows) for rows in (TABLE, COLOCATED, LOG))
            print("\n".join(published_lines(*tables, calibrated(), tails_of(TABLE))))
            return 0
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
    measured.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        action="append",
        default=[],
        help="metrics.jsonl of a run, with config.yaml beside it; may be given several times",
    )
    measured.add_argument(
        "--calibrate-ranks", type=int, help="ranks of those runs, where their files do not have it"
    )
    measured.add_argument(
        "--calibrate-gpu",
        choices=[*GPUS, CPU],
        help="where those runs were; default: their memory.gpu, or --gpu",
    )
    measured.add_argument("--calibrate-gpus-per-node", type=int, help="default: 8, or all ranks of the run")
    measured.add_argument("--calibrate-network-gbps", type=float, help="default: the table's")
    measured.add_argument("--coefficients", type=Path, metavar="FILE", help="calibrated before")
    measured.add_argument("--write-coefficients", type=Path, metavar="FILE", help="write the calibrated ones")
    measured.add_argument("--published", action="store_true", help="compare with published step times")
    made.add_argument(
        "--search-tails",
        action="store_true",
        help="predict other settings of rollout.tail=carry and defer, and of engines on ranks of their own, too",
    )
    made.add_argument(
        "--asynchronous",
        action="store_true",
        help="give engines ranks of their own, as many as are predicted fastest, where rollout.ranks is 0",
    )
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
        given.gpus_per_node,
        given.network_gbps,
        given.mean_response_tokens,
        given.mean_prompt_tokens,
        given.prompts,
    )
    place = place_run(load_config(given.config, given.overrides, stand_ins=NOT_NEEDED), asked)
    coefficients, runs = coefficients_of(given, place)
    prediction = predict_run(place, asked, coefficients, runs)
    tails = compare_rollout_tails(prediction, coefficients, given.search_tails)
    if given.asynchronous and place.config.rollout.ranks == 0:
        place = with_ranks_of_their_own(prediction, coefficients)
        prediction = predict_run(place, asked, coefficients, runs)
    beside = place.config.rollout.ranks > 0
    splits = compare_rank_splits(prediction, coefficients) if beside else None
    layouts = compare_layouts(prediction, coefficients) if given.layouts > 0 else None
    if given.json:
        data = run_data(prediction, tails, splits, layouts, coefficients, given.layouts)
        print(json.dumps(data, indent=2))
    else:
        lines = run_lines(prediction, tails, splits, layouts, given.layouts)
        lines += coefficient_lines(coefficients, DEFAULTS[place.target.kind])
        print("\n".join([*calibration_lines(runs, coefficients), *lines]))
    for problem in prediction.memory_problems:
        print(f"  - {problem}", file=sys.stderr)
    return MISTAKE if prediction.memory_problems else 0


def coefficients_of(
    given: argparse.Namespace, place: ClusterPlacement
) -> tuple[Coefficients, list[Measured]]:
    """Those of the kind of device, of a file, or fitted to runs, starting from either."""
    kind = place.target.kind
    start = DEFAULTS[kind] if given.coefficients is None else read_coefficients(given.coefficients, kind)
    where = Where(
        given.calibrate_gpu,
        given.calibrate_ranks,
        given.calibrate_gpus_per_node,
        given.calibrate_network_gbps,
        usual_gpu=given.gpu,
    )
    runs = [read_run(path, where) for path in given.calibrate]
    for run in runs:
        if run.target.kind != kind:
            problem = f'{run.source} was planned for "{run.target.kind}", this run for "{kind}"'
            raise ValueError(f"{problem}; name the devices by --calibrate-gpu and --gpu")
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


def published(rows: Sequence[Row]) -> list[Predicted]:
    """Every row, predicted with the default coefficients."""
    return [predict(row, *recipe_of(row)) for row in rows]


def calibrated() -> list[Calibrated]:
    """AReaL's synchronous and asynchronous figures, predicted with coefficients of the first synchronous one."""
    *recipe, defaults = recipe_of(SYNCHRONOUS[0])
    coefficients = one_factor(predict(SYNCHRONOUS[0], *recipe, defaults), defaults)
    found = []
    for row in (row for pair in zip(SYNCHRONOUS, ASYNCHRONOUS, strict=True) for row in pair):
        *recipe, defaults = recipe_of(row)
        splits = None if row.staleness is None else predict_splits(row, *recipe, coefficients)
        by_default = predict(row, *recipe, defaults).seconds
        found.append(Calibrated(predict(row, *recipe, coefficients), by_default, splits))
    return found


def tails_of(rows: Sequence[Row]) -> list[tuple[str, Tails]]:
    """The recipe of every row with every `rollout.tail`, predicted with the default coefficients."""
    return [(row.name, predict_tails(row, *recipe_of(row))) for row in rows]


def recipe_of(row: Row) -> tuple[Config, ModelShape, Target, Machine, Coefficients]:
    """What a row's prediction needs of its recipe."""
    config = load_config([recipe_file(row)], [])
    shape, _ = required_shape(config.model.path)
    target = planned_target(config)
    return config, shape, target, machine_of(config, target), DEFAULTS[target.kind]


if __name__ == "__main__":
    sys.exit(main())
