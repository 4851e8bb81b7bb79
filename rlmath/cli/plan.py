"""Plan a run before a GPU is spent: memory, seconds of a step, hours of an epoch, fastest layout.

rlmath plan --config configs/areal/7b_n16.yaml --mean-response-tokens 8600
rlmath plan --config configs/my.yaml --gpu H100-80GB --nodes 4

It is a prediction; its formulas and errors are in docs/planning.md. Of the model only config.json
is read, and for published models not even that is needed (configs/models). It exits with 2 where
the run cannot start or does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmath.cli.plan_memory import MISTAKE, NOT_NEEDED
from rlmath.cli.plan_prediction import predict_run
from rlmath.cli.plan_report import run_data, run_lines
from rlmath.config.gpu_specs import GPUS
from rlmath.config.help import nearest_word
from rlmath.config.load import load_config, make_parser
from rlmath.config.terminal import escape_terminal
from rlmath.planning.planner.cluster import CPU


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if the run fits, MISTAKE if it does not, or if there is no plan."""
    escape_terminal()
    arguments = parser().parse_intermixed_args(argv)
    try:
        run = predict_run(
            load_config(arguments.config, arguments.overrides, stand_ins=NOT_NEEDED), arguments
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    if arguments.json:
        print(json.dumps(run_data(run, arguments.layouts), indent=2))
    else:
        print("\n".join(run_lines(run, arguments.layouts)))
    for problem in run.memory_problems:
        print(f"  - {problem}", file=sys.stderr)
    return MISTAKE if run.memory_problems else 0


def parser() -> argparse.ArgumentParser:
    plan_parser = make_parser(
        "Plan a run: memory, seconds of a step, hours of an epoch, the fastest layout."
    )
    cluster = plan_parser.add_argument_group("the cluster")
    gpu_help = f"one of {', '.join([*GPUS, CPU])}; default: memory.gpu, or the CPU"
    cluster.add_argument("--gpu", type=gpu_name, help=gpu_help)
    cluster.add_argument("--nodes", type=int, help="without it as many as the layout's ranks take")
    cluster.add_argument(
        "--gpus-per-node", type=int, help="default: 8, or all ranks where they are fewer"
    )
    cluster.add_argument("--network-gbps", type=float, help="Gbit/s between nodes for each GPU")
    work = plan_parser.add_argument_group("the work")
    work.add_argument(
        "--mean-response-tokens", type=float, help="default: 0.3 x rollout.max_new_tokens"
    )
    work.add_argument(
        "--mean-prompt-tokens", type=float, help="default: 128, or data.max_prompt_tokens"
    )
    work.add_argument(
        "--mean-given-tokens",
        type=float,
        help="tokens that tools give a completion; default: the most of --mean-calls",
    )
    work.add_argument(
        "--mean-calls", type=float, help="calls of a completion; default: 0.3 x tools.max_calls"
    )
    prompts_help = (
        "training prompts, where data.train_path is not there, or is parquet without pyarrow"
    )
    work.add_argument("--prompts", type=int, help=prompts_help)
    coefficients_help = "JSON of coefficients that were measured (docs/planning.md)"
    work.add_argument("--coefficients", type=Path, metavar="FILE", help=coefficients_help)
    plan_parser.add_argument(
        "--layouts", type=int, default=5, help="fastest layouts to show; 0: none (default: 5)"
    )
    plan_parser.add_argument("--json", action="store_true", help="print plain data")
    return plan_parser


def gpu_name(word: str) -> str:
    """A word of --gpu; for any other word an ArgumentTypeError that names the nearest."""
    if word not in (known_names := [*GPUS, CPU]):
        needed = f"needed: one of {', '.join(known_names)}.{nearest_word(word, known_names)}"
        raise argparse.ArgumentTypeError(f'there is no "{word}"; {needed}')
    return word


if __name__ == "__main__":
    sys.exit(main())
