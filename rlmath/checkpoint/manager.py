"""Saves and loads the checkpoints of a run with Megatron's distributed checkpointing.

A save is written by a process of its own (`async_writer`) while training continues:

    start   every rank copies its part to shared memory and resumes training (it stands still only for that copy)
    poll    are all ranks' parts on disk?
    finish  rank 0 writes Megatron's metadata and the manifest and renames the folder to its final name

`load_checkpoint` reads one in any layout. All of these are collectives: every rank calls them, in
the same order.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import CheckpointingException, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from megatron_patches import checkpointing
from rlmath.checkpoint import directory, sharded_state
from rlmath.checkpoint.async_writer import WriterProcess, Written, lacks_memory
from rlmath.checkpoint.directory import STATE, Checkpoint, FileEntry, Progress
from rlmath.checkpoint.hf.weights import write_files
from rlmath.checkpoint.retention import Retention, set_superseded_aside
from rlmath.checkpoint.safe_metadata import SafeReader, read_metadata
from rlmath.checkpoint.sharded_state import (
    ALWAYS_FLOAT32,
    MASTER,
    POLICY,
    Piece,
    SavedModel,
    held_by,
    model_pieces,
    optimizer_pieces,
)
from rlmath.distributed import collectives
from rlmath.distributed.device import Device

logger = logging.getLogger(__name__)

_MASTERS = f"{sharded_state.OPTIMIZER_PREFIX}.{MASTER}."
_LAST_REMOVALS_SECONDS = 30.0
"""Seconds that the end of a run waits for superseded checkpoints to be removed."""


@dataclass
class _SaveInFlight:
    partial: Path
    step: int
    kept: bool
    learned_step: int
    writes: bool = False
    """Whether this rank has something to write."""
    files: Any = None
    """Megatron's writer of the files; it also writes the index, when all ranks' files are there."""
    metadata: Any = None
    """Contents of the index; None but on rank 0."""
    beside: dict[str, FileEntry] = field(default_factory=dict)
    """The files that this rank has written beside its part."""


class CheckpointManager:
    """Saves the models of this rank.

    One save at a time."""

    def __init__(
        self,
        root: Path,
        models: Callable[[], Sequence[SavedModel]],
        device: Device,
        metadata_files: Mapping[str, bytes],
        retention: Retention,
    ) -> None:
        """`models` returns the models that a save holds, the policy among them."""
        checkpointing.patch(SafeReader)
        self._root = root
        self._metadata_files = metadata_files
        self._retention = retention
        self._models = models
        self._device = device
        self._rank = dist.get_rank()
        self._writer: WriterProcess | None = None
        self._unfinished: _SaveInFlight | None = None
        self._removals: list[threading.Thread] = []

    def _running_writer(self) -> WriterProcess:
        if self._writer is not None and not self._writer.alive:
            self.close()
        if self._writer is None:
            self._writer = WriterProcess()
        return self._writer

    @property
    def busy(self) -> bool:
        """A save was started and is not finished; the same on all ranks."""
        return self._unfinished is not None

    @property
    def step(self) -> int:
        """Steps done in the save in flight."""
        assert self._unfinished is not None
        return self._unfinished.step

    @property
    def written(self) -> bool:
        """Whether this rank's part of the save in flight is on disk, or has failed.

        Not a collective."""
        assert self._unfinished is not None
        return not self._unfinished.writes or (self._writer is not None and self._writer.ready())

    def start(
        self,
        progress: Progress,
        kept: bool,
        settings_yaml: str,
        files: Mapping[str, bytes] | None = None,
    ) -> str | None:
        """Start a save.

        Returns why it failed, where all its files are removed, or None. The names of tensors in
        `progress` are filled in here. `files` are written beside, by each rank its own and at once:
        their names differ."""
        assert not self.busy, "finish the save in flight first"
        state, progress = self._state(progress)
        partial = directory.partial_of(self._root, progress.step)
        self._unfinished = save = _SaveInFlight(
            partial, progress.step, kept, learned_step=progress.sound_before
        )
        files = files or {}
        beside_bytes = sum(map(len, files.values()))
        error = self._room_for(state, beside_bytes) or self._open(progress, settings_yaml, files)
        if error is None:
            buckets = self._plan(save, state)
            error = collectives.first_error(lacks_memory(buckets))
            error = error or collectives.first_error(self._submit(save, buckets))
        return None if error is None else self._give_up(error)

    def finish(self, waiting: Callable[[], None] = lambda: None) -> Checkpoint | str:
        """Wait until all ranks' parts are on disk, and complete the checkpoint.

        After a failure its files are removed, and the error is returned. Calls `waiting` while the
        writer process advances."""
        save = self._unfinished
        assert save is not None
        rank_result = Written([], {}, None)
        if save.writes:
            assert self._writer is not None
            rank_result = self._writer.result(waiting)
        error = rank_result.error or _flush_beside(save)
        error = collectives.first_error(error and f"rank {self._rank}: {error}")
        if error is not None:
            return self._give_up(error)
        written = collectives.gather_to_rank_zero(rank_result)
        beside_by_rank = collectives.gather_to_rank_zero(save.beside)
        outcome = None
        if written is not None and beside_by_rank is not None:
            outcome = self._complete(save, written, beside_by_rank)
        outcome = collectives.broadcast_from_rank_zero(outcome)
        if isinstance(outcome, str):
            return self._give_up(outcome)
        self._unfinished = None
        return outcome

    def close(self) -> None:
        """End the writer process.

        A save in flight is aborted, and never becomes visible."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def wait_for_removals(self) -> None:
        """Wait, within limits, until superseded checkpoints are removed.

        Call it at the end of the run."""
        for thread in self._removals:
            thread.join(_LAST_REMOVALS_SECONDS)

    # ------------------------------------------------------------ steps of a save

    def _state(self, progress: Progress) -> tuple[dict[str, Any], Progress]:
        """This rank's parts of the checkpoint, and the progress with the names of what it holds."""
        models = self._models()
        optimizers = [model.optimizer for model in models if model.optimizer is not None]
        local_names = {
            name
            for optimizer in optimizers
            for parameter_state in held_by(optimizer)
            for name in parameter_state.tensors()
        }
        names = sorted(set().union(*collectives.all_gather_objects(local_names)))
        states = sharded_state.random_states(self._device)
        parts = []
        for model in models:
            pieces, objects = model_pieces(model)
            parts += [*(piece.sharded for piece in pieces), *objects]
            if model.optimizer is not None:
                parts += optimizer_pieces(model.optimizer, pieces, names)
        parts += sharded_state.random_rows(states)
        filled = replace(
            progress,
            optimizer_tensors=tuple(names),
            random_states=tuple(states),
            models=tuple(model.name for model in models if model.name != POLICY),
        )
        return {str(number): part for number, part in enumerate(parts)}, filled

    def _room_for(self, state: Mapping[str, Any], beside_bytes: int) -> str | None:
        """The error if the disk lacks room for all ranks' parts and `beside_bytes` more of each."""
        local_bytes = beside_bytes + sum(
            part.data.nbytes
            for part in state.values()
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id)
        )
        # 64 MiB stay free.
        needed_bytes = sum(collectives.all_gather_objects(local_bytes)) + 64 * 2**20
        error = None
        if self._rank == 0:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(self._root).free < needed_bytes:
                    self.wait_for_removals()  # what they free counts
                if (free_bytes := shutil.disk_usage(self._root).free) < needed_bytes:
                    error = (
                        f"{self._root} has {free_bytes / 2**30:.2f} GiB free; needed: "
                        f"{needed_bytes / 2**30:.2f} GiB"
                    )
            except OSError as os_error:
                error = f"{self._root} cannot be used: {os_error}"
        return collectives.broadcast_from_rank_zero(error)

    def _open(
        self, progress: Progress, settings_yaml: str, files: Mapping[str, bytes]
    ) -> str | None:
        """Rank 0 creates the folder and the small files; every rank must see it."""
        error = None
        if self._rank == 0:
            try:
                partial = directory.open_partial(self._root, progress.step)
                directory.write_progress(partial, progress)
                (partial / directory.SETTINGS).write_text(settings_yaml, encoding="utf-8")
                write_files(partial / directory.METADATA_FILES, self._metadata_files)
            except OSError as os_error:
                error = f"{self._root} cannot be written: {os_error}"
        error = collectives.broadcast_from_rank_zero(error)
        save = self._unfinished
        assert save is not None
        partial = save.partial
        if error is None and not (partial / STATE).is_dir():
            error = f"rank {self._rank} does not see {partial}: run.output_dir must be shared"
        if error is None:
            try:
                for name, content in files.items():
                    (partial / name).write_bytes(content)
                    save.beside[name] = directory.content_entry(content)
            except OSError as os_error:
                error = f"{self._root} cannot be written: {os_error}"
        return collectives.first_error(error)

    def _plan(self, save: _SaveInFlight, state: dict[str, Any]) -> list[Any]:
        """Let Megatron plan which rank writes what; returns what this rank writes.

        Not by its `save`, which writes on rank 0 between collectives: a full disk must not leave
        the other ranks waiting."""
        strategy = _Strategy("torch_dist", 1, thread_count=1)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        shared = FullyParallelSaveStrategyWrapper(strategy, group)
        sharded, _ = save_preprocess(state, validate_access_integrity=False)  # the sharing does it
        request = checkpointing.start_save(shared, sharded, str(save.partial / STATE))
        save.files, save.metadata = strategy.planned
        return request.async_fn_args[1] if request.async_fn is not None else []

    def _submit(self, save: _SaveInFlight, buckets: Sequence[Any]) -> str | None:
        """Hand this rank's files to the writer process; the error if that fails."""
        save.writes = bool(buckets)
        try:
            if buckets:
                self._running_writer().submit(buckets)
        except OSError as error:
            return f"rank {self._rank}: {error}"
        finally:
            save.files.write_buckets = None  # Megatron's own copies
        return None

    def _complete(
        self,
        save: _SaveInFlight,
        written: Sequence[Written],
        beside_by_rank: Sequence[Mapping[str, FileEntry]],
    ) -> Checkpoint | str:
        """Complete the checkpoint on rank 0, and rename superseded ones; the error if that fails.

        `written` and `beside_by_rank` are those of all ranks: what rank 0 sees of their files may be late.
        No collectives are called: the other ranks wait for the outcome, whatever the disk does."""
        known_entries = {
            f"{STATE}/{name}": entry for part in written for name, entry in part.files.items()
        }
        for entries in beside_by_rank:
            known_entries |= entries
        state = save.partial / STATE
        try:
            save.files.finish(save.metadata, [part.results for part in written])
            save_config(CheckpointingConfig("torch_dist", 1), str(state))
            torch.save(
                {}, state / "common.pt"
            )  # what Megatron keeps beside the tensors; of ours it is empty
            read_metadata(state)
            checkpoint = directory.finish_partial(
                save.partial, save.step, save.kept, known=known_entries
            )
        except (OSError, RuntimeError, ValueError) as error:
            return directory.write_error_text(error, save.partial)
        try:
            self._remove(set_superseded_aside(self._root, self._retention, save.learned_step))
        except (OSError, ValueError) as error:
            logger.warning("superseded checkpoints cannot be removed: %s", error)
        return checkpoint

    def _remove(self, folders: Sequence[Path]) -> None:
        """Remove folders in threads, as large files take long.

        The next run removes what a killed run leaves."""
        self._removals = [thread for thread in self._removals if thread.is_alive()]
        for folder in folders:
            self._removals.append(
                threading.Thread(target=directory.remove, args=(folder,), daemon=True)
            )
            self._removals[-1].start()

    def _give_up(self, error: str) -> str:
        save = self._unfinished
        assert save is not None
        self.close()
        dist.barrier()
        if self._rank == 0:
            directory.remove(save.partial)
        self._unfinished = None
        return error


def _flush_beside(save: _SaveInFlight) -> str | None:
    """Sync the files that this rank has written beside its part to disk; the error if that fails."""
    try:
        for name in save.beside:
            directory.flush(save.partial / name)
    except OSError as error:
        return directory.write_error_text(error, save.partial)
    return None


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, with the metadata kept.

    Megatron's own finalize would leave ranks waiting if rank 0's disk is full."""

    planned: tuple[Any, Any]
    """The writer of the files, and the metadata (None but on rank 0)."""

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, *arguments: Any
    ) -> Any:
        self.planned = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *arguments)


# ---------------------------------------------------------------- loading


def load_checkpoint(
    models: Sequence[SavedModel], device: Device, checkpoint: Checkpoint, progress: Progress
) -> None:
    """Load the models that a checkpoint has (`Progress.has_model`), with their optimizers.

    With the same number of ranks random states are loaded, too. A collective. ValueError if the
    checkpoint does not fit a model."""
    checkpointing.patch(SafeReader)
    parts = []
    for model in (model for model in models if progress.has_model(model.name)):
        pieces, _ = model_pieces(model)
        updates = progress.updates if model.name == POLICY else progress.critic_updates
        # An optimizer that has made no step has no state.
        names = [name for name in progress.optimizer_tensors if updates or name == MASTER]
        if model.optimizer is not None:
            sharded_state.make_room(model.optimizer, names, updates)
        parts += _weights(model.optimizer, pieces, names)
    states: dict[str, torch.Tensor] = {}
    if progress.world_size == dist.get_world_size():
        local_states = sharded_state.random_states(device)
        if set(local_states) == set(progress.random_states):
            states = {name: torch.empty_like(state) for name, state in local_states.items()}
    parts += sharded_state.random_rows(states)
    by_number: dict[str, Any] = {str(number): part for number, part in enumerate(parts)}
    try:
        dist_checkpointing.load(by_number, str(checkpoint.state), validate_access_integrity=False)
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise ValueError(
            f"the checkpoint {checkpoint.folder} does not fit the model: {error}"
        ) from error
    if states:
        sharded_state.restore_random_states(states, device)


def _weights(
    optimizer: Any | None, pieces: Sequence[Piece], saved: Sequence[str]
) -> list[ShardedTensor]:
    """The tensors to load of a model and its optimizer, among the tensors `saved`.

    Weights are read at the highest precision saved: a bfloat16 run has float32 copies of its
    parameters, but none of what is float32 in any run."""
    plain = [piece.sharded for piece in pieces]
    if optimizer is None:
        return plain
    local_names = {
        name for parameter_state in held_by(optimizer) for name in parameter_state.tensors()
    }
    stored = [name for name in saved if name in local_names]
    optimizer_parts = optimizer_pieces(optimizer, pieces, stored)
    if MASTER in saved and MASTER not in local_names:
        masters = [
            piece.sharded
            if getattr(piece.parameter, ALWAYS_FLOAT32, False)
            else replace(piece.sharded, key=f"{_MASTERS}{piece.sharded.key}")
            for piece in pieces
        ]
        return [*masters, *optimizer_parts]
    if MASTER in local_names and MASTER not in stored:
        copies = optimizer_pieces(optimizer, pieces, [MASTER])
        optimizer_parts += [replace(copy, key=copy.key.removeprefix(_MASTERS)) for copy in copies]
    return [*plain, *optimizer_parts]
