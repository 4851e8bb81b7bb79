"""The checkpoint that a run resumes from: the newest one that all ranks together find whole."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from rlmath.checkpoint import directory
from rlmath.checkpoint.directory import Checkpoint
from rlmath.distributed.collectives import all_gather_objects, broadcast_from_rank_zero
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.run.recovery.resume import START_OVER, CheckpointToResume, Recovery, out_of_reach_text

logger = logging.getLogger(__name__)


def choose_checkpoint(
    recovery: Recovery | None, on_progress: Callable[[], None] = lambda: None
) -> CheckpointToResume | None:
    """The newest candidate of rank 0's whose files are all as they were written. A collective: each rank reads a share
    of the files, and calls `on_progress` for every few MiB of them. ValueError on all ranks where one cannot read what
    rank 0 can, and where no candidate is whole."""
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
        f"no checkpoint is whole: {'. '.join([*recovery.notes, *damaged])}. {START_OVER.capitalize()}."
    )


def _damage(checkpoint: Checkpoint, on_progress: Callable[[], None]) -> str | None:
    """What is wrong with the files, as all ranks together find it."""
    rank, ranks = environment_rank(), environment_world_size()
    mine, unreadable, out_of_reach = [], None, None
    for name in sorted(checkpoint.files)[rank::ranks]:
        try:
            mine += directory.wrong_contents(checkpoint, [name], on_progress)
        except OSError as error:
            text = f"rank {rank} on {socket.gethostname()} cannot read {name} ({error.strerror})"
            unreadable = name, text
            try:
                directory.raise_if_out_of_reach(checkpoint.folder / name, error)
            except directory.OutOfReachError as refused:
                out_of_reach = out_of_reach_text(refused)
    gathered = all_gather_objects((mine, unreadable, out_of_reach))
    found = [(wrong, one) for wrong, one, _ in gathered]
    names = [one for _, one in found if one is not None]
    if names:
        _shared_or_raise(checkpoint, names, on_progress)
    if texts := [text for *_, text in gathered if text is not None]:
        raise ValueError(texts[0])
    return next((text for wrong, one in found for text in (*wrong, *([one[1]] if one else []))), None)


def _shared_or_raise(
    checkpoint: Checkpoint, unreadable: Sequence[tuple[str, str]], on_progress: Callable[[], None]
) -> None:
    """A file that rank 0 can read and another rank cannot is not damaged: it is not shared."""
    for name, text in unreadable:
        try:
            file = checkpoint.folder / name
            readable = environment_rank() == 0 and bool(directory.file_entry(file, on_progress))
        except OSError:
            readable = False
        if broadcast_from_rank_zero(readable):
            raise ValueError(
                f"{text}, and rank 0 can. run.output_dir must lie on a disk that all nodes share and may read."
            )
