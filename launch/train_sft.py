"""Train a model on written solutions: cross-entropy on completions.

torchrun --nproc-per-node=N launch/train_sft.py --config configs/x.yaml key.sub=value ...
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # rlmath.garbage says why, and enables it

import sys
from dataclasses import replace

from rlmath import garbage
from rlmath.config import Config
from rlmath.config_files import load_config, split_arguments
from rlmath.export_format import output_bytes
from rlmath.parallel.device import environment_world_size
from rlmath.parallel.meeting import Meeting
from rlmath.prepared import Prepared
from rlmath.recovery import find_recovery
from rlmath.run_folder import check_output_folder
from rlmath.sft.inputs import SftInputs, load_sft_inputs, origin_of
from rlmath.sft.settings import check_config, notes, only_used, used_keys
from rlmath.start import start


def load() -> Config:
    description = "Train a model on written solutions (supervised, cross-entropy on completions)."
    return load_config(*split_arguments(description, keys=used_keys()))


def prepare(given: Config) -> Prepared[SftInputs]:
    """ValueError for all that can be known to be wrong before the start."""
    config, unused = only_used(given)
    shape = check_config(config, environment_world_size())
    inputs = load_sft_inputs(config, shape)
    inputs = replace(inputs, lines=(*notes(config, unused), *inputs.lines))
    origin = origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    return Prepared(config, shape, inputs, origin, recovery)


def train(prepared: Prepared[SftInputs], meeting: Meeting | None) -> int:
    # Imported only now: a mistake is told before Megatron is loaded.
    from rlmath.sft.run import run_sft

    garbage.settle()
    return run_sft(prepared, meeting)


if __name__ == "__main__":
    sys.exit(start(load, prepare, train))
