"""Checkpoints of a run, out and in: Megatron's distributed checkpointing, written by a process of its own.

    start   every rank copies its part aside and goes on training (seconds of standing still: that copy)
    poll    are all ranks' parts on disk?
    finish  rank 0 writes Megatron's metadata and the manifest and gives the folder its name

All of these are collectives: every rank calls them, in the same order.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_patches import checkpointing
from rlmath.checkpoint.async_writer import WriterProcess, Written, lacks_memory
from rlmath.checkpoint.directory import (
    METADATA_FILES,
    SETTINGS,
    STATE,
    Checkpoint,
    open_partial,
    partial_of,
    publish,
    set_superseded_aside,
)
from rlmath.checkpoint.rng_state import random_rows, random_states
from rlmath.checkpoint.run_progress import Progress, write_progress
from rlmath.checkpoint.safe_metadata import SafeReader, read_metadata
from rlmath.checkpoint.sharded_state import held_by, model_pieces, optimizer_pieces
from rlmath.distributed.collectives import first_error, from_rank_zero, gather_objects, to_rank_zero
from rlmath.distributed.device import Device

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 * 2**20
"""Disk space that a checkpoint leaves free."""
_COMMON = "common.pt"
"""What Megatron keeps beside the tensors; of ours it is empty."""
_LAST_REMOVALS_SECONDS = 30.0
"""How long the end of a run waits for superseded checkpoints to be removed."""


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay; see `folders.set_superseded_aside`."""

    keep_last: int
    keep_models: int | None


@dataclass(frozen=True)
class Saved:
    """A save that came to its end."""

    step: int
    checkpoint: Checkpoint | None
    """None where it failed; `error` says why, and nothing is left of it."""
    error: str | None


@dataclass
class _InFlight:
    partial: Path
    step: int
    kept: bool
    writes: bool = False
    """This rank has something to write."""
    files: Any = None
    """Megatron's writer of the files; it also writes the index, when all ranks' files are there."""
    metadata: Any = None
    """What the index says; None but on rank 0."""


class CheckpointManager:
    """Saves the actor of this rank. One save at a time."""

    def __init__(
        self,
        root: Path,
        chunks: Sequence[Any],
        optimizer: Any,
        device: Device,
        metadata_files: Mapping[str, bytes],
        retention: Retention,
    ) -> None:
        checkpointing.patch(SafeReader)
        self._root = root
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self._metadata_files = metadata_files
        self._retention = retention
        self._rank = dist.get_rank()
        self._writer: WriterProcess | None = None
        self._in_flight: _InFlight | None = None
        self._removals: list[threading.Thread] = []

    def warm_up(self) -> None:
        """Start the process that writes, so that the first save does not wait for it. Where that fails, the next save
        tries again and says why."""
        try:
            self._have_writer()
        except OSError as error:
            logger.warning("the process that writes checkpoints does not start: %s", error)

    def _have_writer(self) -> WriterProcess:
        if self._writer is not None and not self._writer.alive:
            self.close()
        if self._writer is None:
            self._writer = WriterProcess()
        return self._writer

    @property
    def busy(self) -> bool:
        """A save was started and is not finished; the same on all ranks."""
        return self._in_flight is not None

    @property
    def written(self) -> bool:
        """This rank's part of the save in flight is on disk, or has failed. Not a collective."""
        assert self._in_flight is not None
        return not self._in_flight.writes or (self._writer is not None and self._writer.ready())

    def start(self, progress: Progress, kept: bool, settings_yaml: str) -> Saved | None:
        """Begin a save. Returns None, or why it could not begin. `progress` needs no names of tensors: they are filled
        in here."""
        assert not self.busy, "the save before it is to be finished first"
        state, progress = self._state(progress)
        self._in_flight = save = _InFlight(partial_of(self._root, progress.step), progress.step, kept)
        error = self._room_for(state) or self._open(progress, settings_yaml)
        if error is None:
            buckets = self._plan(save, state)
            error = first_error(lacks_memory(buckets)) or first_error(self._submit(save, buckets))
        return None if error is None else self._give_up(error)

    def finish(self, waiting: Callable[[], None] = lambda: None) -> Saved:
        """Wait until all ranks' parts are on disk, and make the checkpoint complete; or remove what there is. Calls
        `waiting` while the process that writes gets on."""
        save = self._in_flight
        assert save is not None
        mine = Written([], {}, None)
        if save.writes:
            assert self._writer is not None
            mine = self._writer.result(waiting)
        error = first_error(mine.error and f"rank {self._rank}: {mine.error}")
        if error is not None:
            return self._give_up(error)
        written = to_rank_zero(mine)
        outcome = from_rank_zero(None if written is None else self._publish(save, written))
        if isinstance(outcome, str):
            return self._give_up(outcome)
        self._in_flight = None
        return Saved(save.step, outcome, None)

    def close(self) -> None:
        """End the process that writes. A save in flight is broken off, and never becomes visible."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def wait_for_removals(self) -> None:
        """Let superseded checkpoints be removed to the end, within limits: the run ends."""
        for thread in self._removals:
            thread.join(_LAST_REMOVALS_SECONDS)

    # ------------------------------------------------------------ steps of a save

    def _state(self, progress: Progress) -> tuple[dict[str, Any], Progress]:
        """Everything to save, and the progress with the names of it."""
        pieces, objects = model_pieces(self._chunks)
        mine = {name for held in held_by(self._optimizer) for name in held.tensors()}
        names = sorted(set().union(*gather_objects(mine)))
        states = random_states(self._device)
        parts = [
            *(piece.sharded for piece in pieces),
            *objects,
            *optimizer_pieces(self._optimizer, pieces, names),
            *random_rows(states),
        ]
        filled = replace(progress, optimizer_tensors=tuple(names), random_states=tuple(states))
        return {str(number): part for number, part in enumerate(parts)}, filled

    def _room_for(self, state: Mapping[str, Any]) -> str | None:
        """What is wrong where the disk has no room for all ranks' parts."""
        mine = sum(
            part.data.nbytes
            for part in state.values()
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id)
        )
        needed = sum(gather_objects(mine)) + SPARE_BYTES
        return from_rank_zero(self._lacks(needed) if self._rank == 0 else None)

    def _lacks(self, needed: int) -> str | None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._root).free < needed:
                for thread in self._removals:  # what they free counts
                    thread.join(_LAST_REMOVALS_SECONDS)
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            return f"{self._root} cannot be used: {error}"
        if free >= needed:
            return None
        return f"the disk of {self._root} has {free / 2**30:.2f} GiB free; needed: {needed / 2**30:.2f} GiB"

    def _open(self, progress: Progress, settings_yaml: str) -> str | None:
        """Rank 0 makes the folder and puts the small files there; every rank must see it."""
        error = None
        if self._rank == 0:
            try:
                partial = open_partial(self._root, progress.step)
                write_progress(partial, progress)
                (partial / SETTINGS).write_text(settings_yaml, encoding="utf-8")
                for name, content in self._metadata_files.items():
                    (partial / METADATA_FILES / name).write_bytes(content)
            except OSError as trouble:
                error = f"{self._root} cannot be written: {trouble}"
        error = from_rank_zero(error)
        assert self._in_flight is not None
        if error is None and not (self._in_flight.partial / STATE).is_dir():
            error = f"rank {self._rank} does not see {self._in_flight.partial}: run.output_dir must be shared"
        return first_error(error)

    def _plan(self, save: _InFlight, state: dict[str, Any]) -> list[Any]:
        """Let Megatron plan who writes what; what this rank is to write."""
        strategy = _Strategy("torch_dist", 1, thread_count=1)
        shared = FullyParallelSaveStrategyWrapper(
            strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        with checkpointing.common_part_left_out():
            request = dist_checkpointing.save(
                state,
                str(save.partial / STATE),
                shared,
                validate_access_integrity=False,  # the sharing does it
                async_sharded_save=True,
            )
        save.files, save.metadata = strategy.planned
        return request.async_fn_args[1] if request.async_fn is not None else []

    def _submit(self, save: _InFlight, buckets: Sequence[Any]) -> str | None:
        """Hand this rank's part over; what went wrong."""
        save.writes = bool(buckets)
        try:
            if buckets:
                self._have_writer().submit(buckets)
        except OSError as trouble:
            return f"rank {self._rank}: {trouble}"
        finally:
            save.files.write_buckets = None  # Megatron's own copies
        return None

    def _publish(self, save: _InFlight, written: Sequence[Written]) -> Checkpoint | str:
        """Rank 0 alone, without collectives: the others wait for the outcome, whatever the disk does."""
        known = {f"{STATE}/{name}": entry for one in written for name, entry in one.files.items()}
        state = save.partial / STATE
        try:
            save.files.finish(save.metadata, [one.results for one in written])
            save_config(CheckpointingConfig("torch_dist", 1), str(state))
            torch.save({}, state / _COMMON)
            read_metadata(state)
            checkpoint = publish(save.partial, save.step, save.kept, known)
        except (OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        try:
            self._remove(
                set_superseded_aside(self._root, self._retention.keep_last, self._retention.keep_models)
            )
        except OSError as error:
            logger.warning("superseded checkpoints cannot be removed: %s", error)
        return checkpoint

    def _remove(self, folders: Sequence[Path]) -> None:
        """In a thread: large files take long. What a run that is killed does not get to, the next one removes."""
        self._removals = [thread for thread in self._removals if thread.is_alive()]
        for folder in folders:
            self._removals.append(threading.Thread(target=shutil.rmtree, args=(folder, True), daemon=True))
            self._removals[-1].start()

    def _give_up(self, error: str) -> Saved:
        """Break off what writers are at, and leave nothing of the save."""
        save = self._in_flight
        assert save is not None
        self.close()
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(save.partial, ignore_errors=True)
        self._in_flight = None
        return Saved(save.step, None, error)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's, which also says what belongs to the metadata; its own way to finish would leave the other ranks
    waiting where the disk is full on rank 0."""

    planned: tuple[Any, Any]
    """The writer of the files, and the metadata (None but on rank 0)."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *more: Any) -> Any:
        self.planned = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *more)
