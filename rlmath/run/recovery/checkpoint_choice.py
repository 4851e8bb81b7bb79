"""The checkpoint that a run resumes from: the newest one that all ranks together find whole."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from rlmath.checkpoint import directory
from rlmath.checkpoint.directory import Checkpoint
from rlmath.distributed.collectives import all_gather_objects, broadcast_from_rank_zero
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.run.recovery.resume import START_OVER, CheckpointToResume, Recovery, out_of_reach_text

logger = logging.getLogger(__name__)


def choose_checkpoint(
    recovery: Recovery | None, on_progress: Callable[[], None] = lambda: None
) -> CheckpointToResume | None:
    """The newest candidate of rank 0's whose files are all as they were written.

    A collective: each rank reads a share of the files, and calls `on_progress` for every few MiB of
    them. ValueError on all ranks where one cannot read what is there, and where no candidate is
    whole."""
    recovery = broadcast_from_rank_zero(recovery)
    if recovery is None:
        return None
    if environment_rank() == 0:
        for note in (*recovery.notes, *recovery.warnings):
            logger.warning("%s", note)
    damaged = []
    for checkpoint, progress in recovery.candidates:
        damage = _damage(checkpoint, on_progress)
        if damage is None:
            return checkpoint, progress
        damaged.append(f"the checkpoint {checkpoint.folder} is damaged and is skipped: {damage}")
        if environment_rank() == 0:
            logger.warning("%s", damaged[-1])
    raise ValueError(
        f"no checkpoint is whole: {'. '.join([*recovery.notes, *damaged])}. "
        f"{START_OVER.capitalize()}."
    )


def _damage(checkpoint: Checkpoint, on_progress: Callable[[], None]) -> str | None:
    """The first damage that all ranks together find; None if the checkpoint is whole.

    A file that another rank than 0 cannot read is not lost: that rank may lack the disk."""
    rank = environment_rank()
    ranks = environment_world_size()
    problems = []
    refusal = None
    for name in sorted(checkpoint.files)[rank::ranks]:
        try:
            problems += directory.wrong_contents(checkpoint, [name], on_progress)
        except OSError as error:
            text = f"rank {rank} on {socket.gethostname()} cannot read {name} ({error.strerror})"
            if rank == 0 and directory.means_loss(error):
                problems.append(text)
            else:
                refusal = out_of_reach_text(ValueError(f"of {checkpoint.folder} {text}"))
    gathered = all_gather_objects((problems, refusal))
    for _, text in gathered:
        if text is not None:
            raise ValueError(text)
    return next((text for rank_problems, _ in gathered for text in rank_problems), None)
