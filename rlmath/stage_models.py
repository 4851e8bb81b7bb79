"""The models that a run leaves at the ends of its stages: `models/stage-1`, `models/stage-2`, ..."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlmath.parallel.collectives import from_rank_zero
from rlmath.run_folder import stage_folder
from rlmath.saver import Saver
from rlmath.stages import Stage, has_stages

logger = logging.getLogger(__name__)


def keep_stage_model(saver: Saver, stages: Sequence[Stage], step: int, even_if_there: bool) -> None:
    """Export the model where a stage ends with `step` steps done. A collective. What the disk refuses costs the model,
    and not the run.

    A run that goes on right after a stage makes up for what the end of the run before may have cut off.
    """
    config = saver.training.config
    ended = next((stage for stage in stages if stage.end == step), None)
    if ended is None or not has_stages(config):
        return
    folder = stage_folder(config.run.output_dir, ended.number)
    if not even_if_there and from_rank_zero(folder.is_dir()):
        return
    try:
        with saver.training.timers.phase("export"):
            saver.export(folder)
    except OSError as error:
        logger.warning("The model of stage %d was not kept: %s. The run goes on", ended.number + 1, error)
    else:
        logger.info("The model of stage %d is in %s", ended.number + 1, folder)
