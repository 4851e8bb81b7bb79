"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
python launch/train_grpo.py --config configs/x.yaml --dry-run

The step is in rlmath/trainer/grpo.py.
"""

from __future__ import annotations

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlmath.config.load import load_config
from rlmath.config.terminal import escape_terminal
from rlmath.trainer.startup import prepare_grpo, read_command_line, start

if TYPE_CHECKING:
    from rlmath.trainer.grpo import GrpoTrainer


def main(argv: Sequence[str] | None = None) -> int:
    """One of `rlmath.distributed.fault_tolerance.exit_codes`."""
    escape_terminal()
    given = read_command_line("Train a model with GRPO.", argv)
    if given.dry_run:
        # Imported only now: a start has no use for it.
        from rlmath.trainer.preflight.dry_run import dry_run

        return dry_run(given.config, given.overrides, given.ranks)
    return start(lambda: load_config(given.config, given.overrides), prepare_grpo, load_trainer)


def load_trainer() -> type[GrpoTrainer]:
    # Imported only now: a mistake is reported before Megatron and vLLM are loaded.
    from rlmath.trainer.grpo import GrpoTrainer

    return GrpoTrainer


if __name__ == "__main__":
    sys.exit(main())
