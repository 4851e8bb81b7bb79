"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
python launch/train_grpo.py --config configs/x.yaml --dry-run
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.distributed.process says why, and enables it

import sys
from collections.abc import Sequence

from rlmath.config.load import load_config, make_parser, parse_arguments
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs, load_inputs, load_validation
from rlmath.distributed import process
from rlmath.distributed.device import environment_rank, environment_world_size
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.trainer.checkpointing import output_bytes
from rlmath.trainer.preflight.checks import check_config
from rlmath.trainer.resume import find_recovery, origin_of
from rlmath.trainer.run_dir import check_output_folder
from rlmath.trainer.startup import Prepared, start


def main(argv: Sequence[str] | None = None) -> int:
    """One of `rlmath.distributed.fault_tolerance.exit_codes`."""
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
    from rlmath.trainer.preflight.dry_run import plan_lines, plan_run

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


def train(prepared: Prepared[Inputs], rendezvous: Rendezvous | None) -> int:
    # Imported only now: a mistake is told before Megatron and vLLM are loaded.
    from rlmath.trainer.run_grpo import run_training

    process.settle()
    return run_training(prepared, rendezvous)


if __name__ == "__main__":
    sys.exit(main())
