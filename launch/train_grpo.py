"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rlmath.config import Config
from rlmath.config_files import load_config, split_arguments
from rlmath.export_format import output_bytes
from rlmath.guard.exit_status import FAILURE, MISTAKE, clear_exit_status, write_exit_status
from rlmath.inputs import load_inputs
from rlmath.parallel.device import environment_rank, environment_world_size
from rlmath.preflight import check_config
from rlmath.prepared import Prepared
from rlmath.recovery import find_recovery, origin_of
from rlmath.run_folder import check_output_folder, sole_user
from rlmath.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

OTHERS_WAIT_SECONDS = 10.0


def prepare(config: Config) -> Prepared:
    """ValueError for all that can be known to be wrong before the start."""
    shape = check_config(config, environment_world_size())
    inputs = load_inputs(config, shape)
    origin = origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    return Prepared(config, shape, inputs, origin, recovery)


def take_folder(prepared: Prepared, stack: ExitStack) -> Prepared:
    """For rank 0: keep other runs out of the folder, and look again at what an earlier one may just have left there."""
    config = prepared.config
    stack.enter_context(sole_user(config.run.output_dir))
    clear_exit_status(config.run.output_dir)
    recovery = find_recovery(config, prepared.origin, prepared.inputs.total_steps)
    return replace(prepared, recovery=recovery)


def main() -> int:
    """One of `rlmath.guard.exit_status`."""
    setup_logging(environment_rank())
    config = None
    with ExitStack() as stack:
        try:
            config = load_config(*split_arguments("Train a model with GRPO."))
            prepared = prepare(config)
            if environment_rank() == 0:
                prepared = take_folder(prepared, stack)
        except ValueError as error:
            # Rank 0 speaks first: the launcher ends all others as soon as one has ended. A mistake that only another
            # node sees (a path that is missing there) is told after the wait.
            if environment_rank() != 0:
                time.sleep(OTHERS_WAIT_SECONDS)
            logger.error("%s", error)
            if environment_rank() == 0 and config is not None:
                leave_word(config.run.output_dir, str(error).partition("\n")[0])
            return MISTAKE
        return train(prepared)


def leave_word(output_dir: str, message: str) -> None:
    """Tell whoever looks at the folder's exit status; not in one that is not there, nor in one where a run is at
    work."""
    with suppress(ValueError, OSError):
        if Path(output_dir).is_dir():
            with sole_user(output_dir):
                write_exit_status(output_dir, MISTAKE, message)


def train(prepared: Prepared) -> int:
    """The run; after an error this process ends at once."""
    # Imported only now: a mistake is told before Megatron and vLLM are loaded.
    from rlmath.run import run_training

    try:
        return run_training(prepared)
    except BaseException:
        logger.exception("What rank %d on %s failed with:", environment_rank(), socket.gethostname())
        logging.shutdown()
        # Threads and process groups of a broken run may wait for peers that wait for us.
        os._exit(FAILURE)


if __name__ == "__main__":
    sys.exit(main())
