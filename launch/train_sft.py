"""Train a model on written solutions: cross-entropy on completions.

torchrun --nproc-per-node=N launch/train_sft.py --config configs/x.yaml key.sub=value ...
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.distributed.process says why, and enables it

import sys
from dataclasses import replace

from rlmath.config.load import load_config, split_arguments
from rlmath.config.schema import Config
from rlmath.data.dataset import SftInputs, load_sft_inputs
from rlmath.distributed import process
from rlmath.distributed.device import environment_world_size
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.trainer.checkpointing import output_bytes
from rlmath.trainer.preflight.sft import check_config, notes, only_used, used_keys
from rlmath.trainer.resume import find_recovery, sft_origin_of
from rlmath.trainer.run_dir import check_output_folder
from rlmath.trainer.startup import Prepared, start


def load() -> Config:
    description = "Train a model on written solutions (supervised, cross-entropy on completions)."
    return load_config(*split_arguments(description, keys=used_keys()))


def prepare(given: Config) -> Prepared[SftInputs]:
    """ValueError for all that can be known to be wrong before the start."""
    config, unused = only_used(given)
    shape = check_config(config, environment_world_size())
    inputs = load_sft_inputs(config, shape)
    inputs = replace(inputs, lines=(*notes(config, unused), *inputs.lines))
    origin = sft_origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    return Prepared(config, shape, inputs, origin, recovery)


def train(prepared: Prepared[SftInputs], rendezvous: Rendezvous | None) -> int:
    # Imported only now: a mistake is told before Megatron is loaded.
    from rlmath.trainer.run_sft import run_sft

    process.settle()
    return run_sft(prepared, rendezvous)


if __name__ == "__main__":
    sys.exit(start(load, prepare, train))
