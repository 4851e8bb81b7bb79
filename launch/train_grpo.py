"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
python launch/train_grpo.py --config configs/x.yaml --dry-run

The step is in rlmath/trainer/grpo.py.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.distributed.process says why, and enables it

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.config.load import load_config, make_parser, parse_arguments, without_secrets
from rlmath.config.terminal import escape_terminal
from rlmath.distributed.device import environment_rank
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.trainer.startup import prepare_grpo, start

if TYPE_CHECKING:
    from rlmath.trainer.grpo import GrpoTrainer


def main(argv: Sequence[str] | None = None) -> int:
    """One of `rlmath.distributed.fault_tolerance.exit_codes`."""
    escape_terminal()
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
        parser.error("--ranks is for --dry-run; torchrun decides how many ranks a run has.")
    return start(lambda: load_config(given.config, given.overrides), prepare_grpo, load_trainer)


def dry_run(config_files: Sequence[Path], overrides: Sequence[str], ranks: int | None) -> int:
    """0 where the run could start, else MISTAKE with all problems."""
    # Imported only now: a start has no use for it.
    from rlmath.trainer.preflight.dry_run import plan_lines, plan_run

    rank = 0
    try:
        rank = environment_rank()
        lines = plan_lines(plan_run(load_config(config_files, overrides), ranks))
    except ValueError as error:
        lines, status, stream = [str(error)], MISTAKE, sys.stderr
    else:
        status, stream = 0, sys.stdout
    if rank == 0:
        print(without_secrets("\n".join(lines)), file=stream)
    return status


def load_trainer() -> type[GrpoTrainer]:
    # Imported only now: a mistake is reported before Megatron and vLLM are loaded.
    from rlmath.trainer.grpo import GrpoTrainer

    return GrpoTrainer


if __name__ == "__main__":
    sys.exit(main())
