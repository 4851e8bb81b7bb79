"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
python launch/train_grpo.py --config configs/x.yaml --dry-run
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.garbage says why, and enables it

import sys
from collections.abc import Sequence

from rlmath import garbage
from rlmath.config import Config
from rlmath.config_files import load_config, make_parser, parse_arguments
from rlmath.export_format import output_bytes
from rlmath.guard.exit_status import MISTAKE
from rlmath.inputs import Inputs, load_inputs
from rlmath.parallel.device import environment_rank, environment_world_size
from rlmath.parallel.meeting import Meeting
from rlmath.preflight import check_config
from rlmath.prepared import Prepared
from rlmath.recovery import find_recovery, origin_of
from rlmath.run_folder import check_output_folder
from rlmath.start import start
from rlmath.validation_files import load_validation


def main(argv: Sequence[str] | None = None) -> int:
    """One of `rlmath.guard.exit_status`."""
    parser = make_parser("Train a model with GRPO.")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the settings and print the plan; nothing is started or written",
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks of a dry run; without it those of parallel.data, else WORLD_SIZE"
    )
    given = parse_arguments(parser, argv)
    if given.dry_run:
        return dry_run(given.config, given.overrides, given.ranks)
    if given.ranks is not None:
        parser.error("--ranks is for --dry-run; how many ranks a run has is told to torchrun.")
    return start(lambda: load_config(given.config, given.overrides), prepare, train)


def dry_run(config_files: list, overrides: list[str], ranks: int | None) -> int:
    """0 where the run could start, else MISTAKE with all problems."""
    # Imported only now: a start has no use for it.
    from rlmath.dry_run import plan_lines, plan_run

    try:
        lines = plan_lines(plan_run(load_config(config_files, overrides), ranks))
    except ValueError as error:
        lines, status, stream = [str(error)], MISTAKE, sys.stderr
    else:
        status, stream = 0, sys.stdout
    if environment_rank() == 0:
        print("\n".join(lines), file=stream)
    return status


def prepare(config: Config) -> Prepared[Inputs]:
    """ValueError for all that can be known to be wrong before the start."""
    shape = check_config(config, environment_world_size())
    inputs = load_inputs(config, shape)
    origin = origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    validation = load_validation(config, inputs.tokenizer, shape.vocab_size)
    return Prepared(config, shape, inputs, origin, recovery, validation)


def train(prepared: Prepared[Inputs], meeting: Meeting | None) -> int:
    # Imported only now: a mistake is told before Megatron and vLLM are loaded.
    from rlmath.run import run_training

    garbage.settle()
    return run_training(prepared, meeting)


if __name__ == "__main__":
    sys.exit(main())
