"""Train a model on written solutions: cross-entropy on completions.

torchrun --nproc-per-node=N launch/train_sft.py --config configs/x.yaml key.sub=value ...

The step is in rlmath/trainer/sft.py.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.distributed.process says why, and enables it

import sys
from typing import TYPE_CHECKING

from rlmath.config.load import load_config, split_arguments
from rlmath.config.schema import Config
from rlmath.trainer.preflight.checks import used_keys
from rlmath.trainer.startup import prepare_sft, start

if TYPE_CHECKING:
    from rlmath.trainer.sft import SftTrainer


def main() -> int:
    """One of `rlmath.distributed.fault_tolerance.exit_codes`."""
    return start(load, prepare_sft, load_trainer)


def load() -> Config:
    description = "Train a model on written solutions (supervised, cross-entropy on completions)."
    return load_config(*split_arguments(description, keys=used_keys()))


def load_trainer() -> type[SftTrainer]:
    # Imported only now: a mistake is reported before Megatron is loaded.
    from rlmath.trainer.sft import SftTrainer

    return SftTrainer


if __name__ == "__main__":
    sys.exit(main())
