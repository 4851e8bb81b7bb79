"""A trainer goes on from a checkpoint: weights, optimizer, schedule, and what its program keeps."""

from __future__ import annotations

import logging

from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.manager import load_checkpoint
from rlmath.config.help import counted
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.run.recovery.resume import CheckpointToResume
from rlmath.telemetry.events import event
from rlmath.trainer.base import Trainer
from rlmath.workers.user_functions import UserFunctionError

logger = logging.getLogger(__name__)


class CannotResumeError(Exception):
    """A function of the user's fails on what the run would go on with."""


def restore(
    trainer: Trainer, resumed: CheckpointToResume | None, heartbeat: Heartbeat
) -> Progress | None:
    """Load weights, optimizer and schedule of the checkpoint, if there is one; its progress.

    CannotResumeError if a user's function fails on it."""
    if resumed is None:
        return None
    checkpoint, progress = resumed
    heartbeat.enter_phase("load checkpoint")
    actor = trainer.actor
    with trainer.models_on_device(trainer.models):
        load_checkpoint(trainer.models, trainer.device, checkpoint, progress=progress)
    actor.learner.restore_schedule(progress.updates, progress.loss_scale)
    try:
        trainer.resume(checkpoint.folder, progress)
    except UserFunctionError as error:
        raise CannotResumeError(str(error)) from error
    if trainer.mesh.rank == 0:
        progress_text = (
            f"{counted(progress.step, 'step')} and {counted(progress.updates, 'update')} are done"
        )
        if progress.step == trainer.total_steps:
            progress_text += (
                ", which are all; the model is exported again. For more raise run.total_steps "
                "or run.total_epochs"
            )
        extra = event("resume", progress.step)
        logger.info(
            "Resuming from %s, made on %s: %s",
            checkpoint.folder,
            progress.layout,
            progress_text,
            extra=extra,
        )
    return progress
