"""Rollbacks of a run (`algorithm.rollback`) to the last good checkpoint.

Other seeds and a smaller learning rate follow:

    divergence -> last good checkpoint -> weights, optimizer, draws from there -> rollbacks.json
               -> newer checkpoints and rows set aside -> the steps again

`roll_back` does all of it up to rollbacks.json (`rollbacks_file`), which is on the disk before
anything else in the run's folder is changed; `run.loop` does the rest.
"""

from __future__ import annotations

import logging

from rlmath.checkpoint.directory import Progress, read_progress
from rlmath.config.run_files import ROLLBACKS_FILE
from rlmath.data.order import Rollback
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.run.divergence import DivergedError
from rlmath.run.recovery.checkpoint_choice import choose_checkpoint
from rlmath.run.recovery.checkpointing import Checkpointer
from rlmath.run.recovery.restore import restore
from rlmath.run.recovery.resume import CheckpointToResume, Recovery
from rlmath.run.recovery.rollbacks_file import rollbacks_of, write_rollbacks
from rlmath.telemetry.events import event
from rlmath.trainer.base import Trainer

logger = logging.getLogger(__name__)


def roll_back(
    error: DivergedError, trainer: Trainer, checkpointer: Checkpointer, heartbeat: Heartbeat
) -> Progress | None:
    """Go back to the last good checkpoint, and return its progress.

    A collective. None if there is no good checkpoint, or no rollback is left. The rollback is on
    the disk when this returns, and nothing else there is changed."""
    diverged_step = heartbeat.step
    max_rollbacks = trainer.config.algorithm.rollback
    if max_rollbacks == 0:
        return None
    checkpointer.finish()
    rollbacks = shared_rollbacks(trainer, None)
    if len(rollbacks) < len(trainer.rollbacks):  # the file is lost
        rollbacks = list(trainer.rollbacks)
    resumed = (
        _good_checkpoint(trainer, checkpointer, heartbeat)
        if len(rollbacks) < max_rollbacks
        else None
    )
    if resumed is None:
        reason = (
            "no checkpoint is good"
            if len(rollbacks) < max_rollbacks
            else f"all {max_rollbacks} of algorithm.rollback are made"
        )
        if trainer.mesh.rank == 0:
            logger.error("No rollback after the divergence in step %d: %s", diverged_step, reason)
        return None
    checkpoint, progress = resumed
    number = len(rollbacks) + 1
    step = progress.step
    # The optimizer is restored with the learning rate of the new rollback.
    trainer.roll_back([*rollbacks, Rollback(number, step, step)])
    restore(trainer, resumed, heartbeat)
    draw_step = trainer.next_draw_step(step)
    rollbacks.append(
        Rollback(number, step, draw_step, diverged_step=diverged_step, reason=str(error))
    )
    trainer.roll_back(rollbacks)
    refused = _write_on_rank_zero(trainer, rollbacks)
    if trainer.mesh.rank == 0 and refused is not None:
        logger.error("No rollback, which would not be counted: %s: %s", ROLLBACKS_FILE, refused)
    elif trainer.mesh.rank == 0:
        logger.error(
            "Rollback %d of at most %d: the run diverged in step %d: %s. It goes back to %s; "
            "the learning rate is %g times what the settings say, and prompts and samples have "
            "other seeds from step %d on",
            number,
            max_rollbacks,
            diverged_step,
            error,
            checkpoint.folder,
            trainer.actor.learner.lr_scale,
            draw_step + 1,
            extra=event("rollback", step, diverged_step=diverged_step),
        )
    return progress if refused is None else None


def _good_checkpoint(
    trainer: Trainer, checkpointer: Checkpointer, heartbeat: Heartbeat
) -> CheckpointToResume | None:
    """The newest good checkpoint whose files are as they were written.

    A collective."""
    heartbeat.enter_phase("check checkpoint")
    recovery = None
    if trainer.mesh.rank == 0:
        try:
            candidates = [
                (checkpoint, read_progress(checkpoint.folder))
                for checkpoint in checkpointer.sound()
            ]
            recovery = Recovery(candidates, []) if candidates else None
        except (OSError, ValueError) as error:
            logger.warning("The checkpoints cannot be looked at: %s", error)
    try:
        return choose_checkpoint(recovery, heartbeat.report_progress)
    except ValueError as error:
        if trainer.mesh.rank == 0:
            logger.warning("%s", error)
        return None


def _write_on_rank_zero(trainer: Trainer, rollbacks: list[Rollback]) -> str | None:
    """Write the list on rank 0, and return the error on all ranks; None where it is on the disk."""
    refused = None
    if trainer.mesh.rank == 0:
        try:
            write_rollbacks(trainer.config.run.output_dir, rollbacks)
        except OSError as error:
            refused = str(error)
    return broadcast_from_rank_zero(refused)


def shared_rollbacks(trainer: Trainer, progress: Progress | None) -> list[Rollback]:
    """The run's rollbacks, as rank 0 reads them.

    A collective. ValueError on all ranks if it cannot read them."""
    rollbacks_or_error: list[Rollback] | str = []
    if trainer.mesh.rank == 0:
        try:
            rollbacks_or_error = rollbacks_of(trainer.config.run.output_dir, progress)
        except ValueError as error:
            rollbacks_or_error = str(error)
    rollbacks_or_error = broadcast_from_rank_zero(rollbacks_or_error)
    if isinstance(rollbacks_or_error, str):
        raise ValueError(rollbacks_or_error)
    return rollbacks_or_error
