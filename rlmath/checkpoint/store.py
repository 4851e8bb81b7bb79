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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import CheckpointingException, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from megatron_patches import checkpointing
from rlmath.checkpoint.folders import (
    COMPANIONS,
    PARTIAL,
    SETTINGS,
    STATE,
    Checkpoint,
    folder_of,
    open_partial,
    publish,
    set_superseded_aside,
)
from rlmath.checkpoint.pieces import MASTER, held_by, make_room, model_pieces, optimizer_pieces
from rlmath.checkpoint.progress import Progress, write_progress
from rlmath.checkpoint.random_states import random_states, restore_random_states
from rlmath.checkpoint.torch_dist import SafeReader
from rlmath.checkpoint.writer import WriterProcess, Written
from rlmath.parallel.collectives import from_rank_zero, gather_objects
from rlmath.parallel.device import Device

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 * 2**20
"""Disk space that a checkpoint leaves free."""


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay; see `folders.remove_superseded`."""

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
    """Megatron's writer of the files, and"""
    metadata: Any = None
    """its metadata, on rank 0: what is written when all ranks' files are."""


class CheckpointStore:
    """Saves and loads the actor of this rank. One save at a time."""

    def __init__(
        self,
        root: Path,
        chunks: Sequence[Any],
        optimizer: Any,
        device: Device,
        companions: Mapping[str, bytes],
        retention: Retention,
    ) -> None:
        checkpointing.patch(SafeReader)
        self._root = root
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self._companions = companions
        self._retention = retention
        self._rank = dist.get_rank()
        self._writer: WriterProcess | None = None
        self._in_flight: _InFlight | None = None
        self._validated = False
        self._removals: list[threading.Thread] = []

    def warm_up(self) -> None:
        """Start the process that writes, so that the first save does not wait for it."""
        if self._writer is None or not self._writer.alive:
            if self._writer is not None:
                self._writer.close()
            self._writer = WriterProcess()

    @property
    def busy(self) -> bool:
        """A save was started and is not finished; the same on all ranks."""
        return self._in_flight is not None

    @property
    def written(self) -> bool:
        """This rank's part of the save in flight is on disk, or has failed. Not a collective."""
        assert self._in_flight is not None and self._writer is not None
        return not self._in_flight.writes or self._writer.ready()

    def start(self, progress: Progress, kept: bool, settings_yaml: str) -> Saved | None:
        """Begin a save. Returns None, or why it could not begin. `progress` needs no names of tensors: they are filled
        in here."""
        assert not self.busy, "the save before it is to be finished first"
        self.warm_up()
        state, progress = self._state(progress)
        partial = self._root / f"{folder_of(self._root, progress.step).name}{PARTIAL}"
        self._in_flight = save = _InFlight(partial, progress.step, kept)
        error = self._room_for(state) or self._open(progress, settings_yaml)
        if error is None:
            buckets = self._plan(save, state)
            save.writes = bool(buckets)
            error = _first_error(self._submit(buckets))
        return None if error is None else self._give_up(error)

    def finish(self) -> Saved:
        """Wait until all ranks' parts are on disk, and make the checkpoint complete; or remove what there is."""
        save = self._in_flight
        assert save is not None and self._writer is not None
        mine = self._writer.result() if save.writes else Written([], {}, None)
        written = gather_objects(mine)
        error = next((f"rank {rank}: {one.error}" for rank, one in enumerate(written) if one.error), None)
        if error is not None:
            return self._give_up(error)
        outcome = from_rank_zero(self._publish(save, written) if self._rank == 0 else None)
        if isinstance(outcome, str):
            return self._give_up(outcome)
        self._in_flight = None
        return Saved(save.step, outcome, None)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Bring parameters, optimizer and, with as many ranks as then, random states back. ValueError where the
        checkpoint does not fit the model."""
        pieces, _ = model_pieces(self._chunks)
        make_room(self._optimizer, progress.optimizer_tensors, progress.updates)
        there = {name for held in held_by(self._optimizer) for name in held.tensors()}
        names = [name for name in progress.optimizer_tensors if name in there]
        wanted = [piece.sharded for piece in pieces] + optimizer_pieces(self._optimizer, pieces, names)
        states: dict[str, torch.Tensor] = {}
        if progress.world_size == dist.get_world_size():
            states = {name: torch.empty_like(state) for name, state in random_states(self._device).items()}
            states = {name: state for name, state in states.items() if name in progress.random_states}
            wanted += self._random_rows(states)
        by_number: dict[str, Any] = {str(number): one for number, one in enumerate(wanted)}
        try:
            dist_checkpointing.load(by_number, str(checkpoint.state), validate_access_integrity=False)
        except (CheckpointingException, CheckpointException, KeyError) as error:
            raise ValueError(f"the checkpoint {checkpoint.folder} does not fit the model: {error}") from error
        if MASTER not in names and any(held.is_copy for held in held_by(self._optimizer)):
            self._optimizer.reload_model_params()
        if set(states) == set(progress.random_states) and states:
            restore_random_states(states, self._device)

    def close(self) -> None:
        """End the process that writes. A save in flight is broken off, and never becomes visible."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for thread in self._removals:
            thread.join()

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
            *self._random_rows(states),
        ]
        filled = replace(progress, optimizer_tensors=tuple(names), random_states=tuple(states))
        return {str(number): part for number, part in enumerate(parts)}, filled

    def _random_rows(self, states: Mapping[str, torch.Tensor]) -> list[ShardedTensor]:
        """Each rank's random states, a row of one table for each generator."""
        ranks = dist.get_world_size()
        return [
            ShardedTensor.from_rank_offsets(f"random.{name}", state.unsqueeze(0), (0, self._rank, ranks))
            for name, state in states.items()
        ]

    def _room_for(self, state: Mapping[str, Any]) -> str | None:
        """What is wrong where the disk has no room for all ranks' parts."""
        mine = sum(
            part.data.nbytes
            for part in state.values()
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id)
        )
        needed = sum(gather_objects(mine)) + SPARE_BYTES
        free = from_rank_zero(_free_bytes(self._root) if self._rank == 0 else 0)
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
                for name, content in self._companions.items():
                    (partial / COMPANIONS / name).write_bytes(content)
            except OSError as trouble:
                error = f"{self._root} cannot be written: {trouble}"
        error = from_rank_zero(error)
        assert self._in_flight is not None
        if error is None and not (self._in_flight.partial / STATE).is_dir():
            error = f"rank {self._rank} does not see {self._in_flight.partial}: run.output_dir must be shared"
        return _first_error(error)

    def _plan(self, save: _InFlight, state: dict[str, Any]) -> list[Any]:
        """Let Megatron plan who writes what; what this rank is to write."""
        strategy = _Strategy("torch_dist", 1, thread_count=1)
        shared = FullyParallelSaveStrategyWrapper(
            strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        request = dist_checkpointing.save(
            state,
            str(save.partial / STATE),
            shared,
            validate_access_integrity=not self._validated,
            async_sharded_save=True,
        )
        self._validated = True  # the layout does not change in a run
        save.files, save.metadata = strategy.planned
        return request.async_fn_args[1] if request.async_fn is not None else []

    def _submit(self, buckets: Sequence[Any]) -> str | None:
        assert self._writer is not None
        try:
            if buckets:
                self._writer.submit(buckets)
        except MemoryError as trouble:
            return f"rank {self._rank}: {trouble}"
        return None

    def _publish(self, save: _InFlight, written: Sequence[Written]) -> Checkpoint | str:
        """Rank 0 alone, without collectives: the others wait for the outcome, whatever the disk does."""
        known = {f"{STATE}/{name}": entry for one in written for name, entry in one.files.items()}
        try:
            save.files.finish(save.metadata, [one.results for one in written])
            save_config(CheckpointingConfig("torch_dist", 1), str(save.partial / STATE))
            checkpoint = publish(save.partial, save.step, save.kept, known)
            superseded = set_superseded_aside(
                self._root, self._retention.keep_last, self._retention.keep_models
            )
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        self._remove(superseded)
        return checkpoint

    def _remove(self, folders: Sequence[Path]) -> None:
        """In a thread: large files take long. What a run that is killed does not get to, the next one removes."""
        self._removals = [thread for thread in self._removals if thread.is_alive()]
        for folder in folders:
            self._removals.append(threading.Thread(target=shutil.rmtree, args=(folder, True)))
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


def _free_bytes(root: Path) -> int:
    root.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(root).free


def _first_error(mine: str | None) -> str | None:
    """The first error of any rank, on all ranks."""
    return next((error for error in gather_objects(mine) if error is not None), None)
