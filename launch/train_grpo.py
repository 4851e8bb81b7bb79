"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
"""

from __future__ import annotations

import logging
import sys
import time

from rlmath.config_files import load_config, split_arguments
from rlmath.inputs import load_inputs
from rlmath.parallel.device import environment_rank, environment_world_size
from rlmath.preflight import check_config
from rlmath.run_folder import check_output_folder
from rlmath.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

OTHERS_WAIT_SECONDS = 10.0


def main() -> int:
    """Exit status 0, or 2 when the run cannot start as it was asked for."""
    setup_logging(environment_rank())
    try:
        config = load_config(*split_arguments("Train a model with GRPO."))
        shape = check_config(config, environment_world_size())
        check_output_folder(config.run.output_dir, config)
        inputs = load_inputs(config)
    except ValueError as error:
        # Rank 0 speaks first: the launcher ends all others as soon as one has ended. A mistake that only another
        # node sees (a path that is missing there) is told after the wait.
        if environment_rank() != 0:
            time.sleep(OTHERS_WAIT_SECONDS)
        logger.error("%s", error)
        return 2
    # Imported only now: a mistake is told in a second, not after Megatron and vLLM were loaded.
    from rlmath.run import run_training

    run_training(config, shape, inputs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
