"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time

from rlmath.config import Config
from rlmath.config_files import load_config, split_arguments
from rlmath.export_format import export_bytes
from rlmath.inputs import Inputs, load_inputs
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import environment_rank, environment_world_size
from rlmath.preflight import check_config
from rlmath.run_folder import check_output_folder
from rlmath.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

OTHERS_WAIT_SECONDS = 10.0
MISTAKE, FAILURE = 2, 1
"""Exit status: the run cannot be as it was asked for; it broke."""


def prepare() -> tuple[Config, ModelShape, Inputs]:
    """Settings, model shape and prompts; ValueError for all that can be known to be wrong before the start."""
    config = load_config(*split_arguments("Train a model with GRPO."))
    shape = check_config(config, environment_world_size())
    check_output_folder(config.run.output_dir, config, export_bytes(config, shape))
    return config, shape, load_inputs(config, shape)


def main() -> int:
    """Exit status 0, MISTAKE or FAILURE."""
    setup_logging(environment_rank())
    try:
        config, shape, inputs = prepare()
    except ValueError as error:
        # Rank 0 speaks first: the launcher ends all others as soon as one has ended. A mistake that only another
        # node sees (a path that is missing there) is told after the wait.
        if environment_rank() != 0:
            time.sleep(OTHERS_WAIT_SECONDS)
        logger.error("%s", error)
        return MISTAKE
    # Imported only now: a mistake is told before Megatron and vLLM are loaded.
    from rlmath.run import run_training

    try:
        run_training(config, shape, inputs)
    except BaseException:
        logger.exception("rank %d on %s failed; the run ends", environment_rank(), socket.gethostname())
        logging.shutdown()
        # At once: threads and process groups of a broken run may wait for peers that wait for us.
        os._exit(FAILURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
