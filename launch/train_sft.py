"""Train a model on written solutions: cross-entropy on completions.

torchrun --nproc-per-node=N launch/train_sft.py --config configs/x.yaml key.sub=value ...
python launch/train_sft.py --config configs/x.yaml --dry-run

The step is in rlmath/trainer/sft.py.
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
from rlmath.trainer.preflight.checks import used_keys
from rlmath.trainer.startup import prepare_sft, read_command_line, start

if TYPE_CHECKING:
    from rlmath.trainer.sft import SftTrainer


def main(argv: Sequence[str] | None = None) -> int:
    """One of `rlmath.distributed.fault_tolerance.exit_codes`."""
    escape_terminal()
    description = "Train a model on written solutions (supervised, cross-entropy on completions)."
    given = read_command_line(description, argv, used_keys())
    if given.dry_run:
        # Imported only now: a start has no use for it.
        from rlmath.trainer.preflight.dry_run import dry_run

        return dry_run(given.config, given.overrides, given.ranks, "sft")
    return start(lambda: load_config(given.config, given.overrides), prepare_sft, load_trainer)


def load_trainer() -> type[SftTrainer]:
    # Imported only now: a mistake is reported before Megatron is loaded.
    from rlmath.trainer.sft import SftTrainer

    return SftTrainer


if __name__ == "__main__":
    sys.exit(main())
