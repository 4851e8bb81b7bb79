"""When a checkpoint is due."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlmath.checkpoint.directory import CHECKPOINTS, complete_checkpoints
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.checkpoint.hf.weights import write_hf_folder
from rlmath.checkpoint.manager import CheckpointStore, Saved
from rlmath.checkpoint.run_progress import Progress
from rlmath.config.length_curriculum import LengthStage, has_length_stages
from rlmath.config.load import config_as_yaml
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, SaveConfig
from rlmath.data.loader import PromptOrder
from rlmath.distributed.collectives import from_rank_zero, max_over_ranks
from rlmath.distributed.device import resolve_kind
from rlmath.distributed.fault_tolerance.preemption import REASONS, StopRequest
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.versions import library_versions
from rlmath.models.build import Actor
from rlmath.rollout.weight_sync.weight_sync import hf_stream
from rlmath.trainer.resume import Origin
from rlmath.trainer.run_dir import BEST_FOLDER, MODELS_FOLDER, stage_folder

FIRST_POINT = 2
"""Steps after which a run makes its first recovery point, as AReaL does."""


@dataclass(frozen=True)
class Frequency:
    """Every so many epochs, steps or seconds, whichever comes; None: not by this."""

    epochs: int | None
    steps: int | None
    secs: float | None

    @property
    def never(self) -> bool:
        return self.epochs is None and self.steps is None and self.secs is None


def points_of(save: SaveConfig) -> Frequency:
    """How often the settings want a recovery point."""
    return Frequency(save.ckpt_freq_epochs, save.ckpt_freq_steps, save.ckpt_freq_secs)


def models_of(save: SaveConfig) -> Frequency:
    """How often they want a checkpoint to keep."""
    return Frequency(save.save_freq_epochs, save.save_freq_steps, save.save_freq_secs)


class SaveTimes:
    """Says after each step whether something is due. Seconds count from the start, and then from the last time.

    >>> times = SaveTimes(Frequency(None, 3, None), steps_per_epoch=10, now=0.0)
    >>> [step for step in range(1, 8) if times.due(step, now=float(step))]
    [3, 6]
    """

    def __init__(
        self, frequency: Frequency, steps_per_epoch: int, now: float, first: int | None = None
    ) -> None:
        """`first` is a step after which it is due in any case, unless it never is. `now` in seconds."""
        self._frequency = frequency
        self._steps_per_epoch = steps_per_epoch
        self._first = None if frequency.never else first
        self._last = now

    def due(self, step: int, now: float) -> bool:
        """Whether it is due with `step` steps done."""
        every = self._frequency
        epochs, within = divmod(step, self._steps_per_epoch)
        is_due = (
            step == self._first
            or (every.epochs is not None and within == 0 and epochs % every.epochs == 0)
            or (every.steps is not None and step % every.steps == 0)
            or (every.secs is not None and now - self._last >= every.secs)
        )
        if is_due:
            self._last = now
        return is_due


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_TRAINED = {"cpu": torch.float32, "cuda": torch.bfloat16}


def export_dtype(config: Config) -> torch.dtype:
    """What `save.export_dtype` says; "auto" is the format of training."""
    return _DTYPES.get(config.save.export_dtype, _TRAINED[resolve_kind(config.run.device)])


def export_bytes(config: Config, shape: ModelShape) -> int:
    """Size of the model's weights on disk (bytes)."""
    return parameter_count(shape) * export_dtype(config).itemsize


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Size of a checkpoint on disk: parameters, Adam's two moments, and float32 copies of bfloat16 parameters
    (bytes)."""
    weights = _TRAINED[resolve_kind(config.run.device)].itemsize
    state = 8 if config.optimizer.kind == "adam" else 0
    copies = 4 if weights < 4 else 0
    return parameter_count(shape) * (weights + state + copies)


def output_bytes(config: Config, shape: ModelShape) -> int:
    """Disk space that a run still needs: for the models it leaves and, where it makes any, for the checkpoints that
    stay and the one that is being written, less those that are there (bytes)."""
    save = config.save
    wanted = 0
    if not (points_of(save).never and models_of(save).never):
        wanted = (save.keep_last + 1) * checkpoint_bytes(config, shape)
    found, _ = complete_checkpoints(Path(config.run.output_dir) / CHECKPOINTS)
    there = sum(entry.size for one in found for entry in one.files.values())
    models = most_models(config) - _models_there(config)
    return models * export_bytes(config, shape) + max(0, wanted - there)


def most_models(config: Config) -> int:
    """The models that a run has on disk at most, without those of kept checkpoints: the last one, those of its stages,
    and the best one, which is written anew before the one before it goes."""
    return 1 + len(config.stages.steps) + 2 * config.validation.keep_best


def _models_there(config: Config) -> int:
    """Those of its stages, and the best one, that an earlier start has left."""
    run = config.run.output_dir
    folders = [stage_folder(run, number) for number in range(len(config.stages.steps))]
    folders += [Path(run) / BEST_FOLDER] * config.validation.keep_best
    return sum(folder.is_dir() for folder in folders)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """What every run has, whatever it learns from."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    order: PromptOrder
    actor: Actor
    timers: PhaseTimers
    syncs_a_step: int = 0
    """Weight syncs of every step: 1 where there are engines."""


class Saver:
    """Makes checkpoints between steps. All ranks call it alike."""

    def __init__(
        self,
        training: Training,
        store: CheckpointStore,
        origin: Origin,
        metadata_files: Mapping[str, bytes],
        stop: StopRequest,
        on_progress: Callable[[], None],
    ) -> None:
        """`metadata_files` are what an exported model has beside its weights; `on_progress` is called in what takes
        long."""
        save, now = training.config.save, time.monotonic()
        per_epoch = training.order.steps_per_epoch
        points = points_of(save)
        models = models_of(save)
        self.training = training
        self._store = store
        self._origin = origin
        self._metadata_files = metadata_files
        self._stop = stop
        self._on_progress = on_progress
        self._points = SaveTimes(points, per_epoch, now, FIRST_POINT)
        self._models = SaveTimes(models, per_epoch, now)
        self._last_step_too = not points.never
        self._folder = Path(training.config.run.output_dir)
        self.newest: int | None = None
        """Steps done in the newest complete checkpoint, None where there is none."""
        self.seconds = 0.0
        """How long training stood still for saving after the last step."""
        if not (points.never and models.never):
            store.warm_up()

    def after(self, step: int, is_last: bool) -> str | None:
        """Save what is due with `step` steps done. What asked any rank to stop, if anything did: then all is on disk,
        or has failed."""
        started = time.perf_counter()
        with self.training.timers.phase("save"):
            kept = self._models.due(step, time.monotonic())
            point = self._points.due(step, time.monotonic()) or (is_last and self._last_step_too)
            agreed = self._agree(kept, point)
            reason = REASONS[int(agreed["stop"])]
            ends = is_last or reason is not None
            wanted = (agreed["kept"] + agreed["point"] > 0 or reason is not None) and self.newest != step
            if self._store.busy and (wanted or ends or not agreed["writing"]):
                self._finish()
            if wanted:
                self._start(step, agreed["kept"] > 0)
            if self._store.busy and (ends or not self.training.config.save.background):
                self._finish()
            if agreed["kept"] and self.training.config.save.export_hf:
                self._export_kept(step)
            if ends:
                self._store.settle()
        self.seconds = time.perf_counter() - started
        return reason

    def save_to_stop(self, step: int) -> None:
        """Save what `after` this step left out, of a run that stops before the next one is made."""
        with self.training.timers.phase("save"):
            if self._store.busy:
                self._finish()
            if step not in (0, self.newest):
                self._start(step, kept=False)
            if self._store.busy:
                self._finish()
            self._store.settle()

    def asked_to_stop(self) -> str | None:
        """What asked any rank to stop, before there is anything to save."""
        return REASONS[int(self._agree(False, False)["stop"])]

    def _agree(self, kept: bool, point: bool) -> dict[str, float]:
        """What holds for all ranks: rank 0's clock, anybody's signal and unfinished writing."""
        is_clock = self.training.mesh.rank == 0
        mine = {
            "stop": float(REASONS.index(self._stop.requested)),
            "kept": float(kept and is_clock),
            "point": float(point and is_clock),
            "writing": float(self._store.busy and not self._store.written),
        }
        return max_over_ranks(mine, self.training.actor.forward_backward.device.torch_device)

    def export(self, folder: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write the model as it is now in Hugging Face form, with some files `more`. A collective. OSError on rank 0
        where the disk refuses."""
        training = self.training
        stream = self._telling(hf_stream(training.actor.chunks, training.shape, training.mesh))
        dtype, writes = export_dtype(training.config), training.mesh.rank == 0
        write_hf_folder(stream, {**self._metadata_files, **(more or {})}, folder, dtype, writes)

    def _export_kept(self, step: int) -> None:
        """A kept model more, and one less where they are too many. The run does not end for it."""
        models = self._folder / MODELS_FOLDER
        try:
            self.export(models / f"step-{step:06d}")
        except OSError as error:
            logger.warning("The model of step %d was not exported: %s. The run goes on", step, error)
        keep = self.training.config.save.keep_models
        if keep is not None and self.training.mesh.rank == 0:
            for old in sorted(models.glob("step-" + "[0-9]" * 6))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)

    def _telling(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in stream:
            self._on_progress()
            yield named

    def _start(self, step: int, kept: bool) -> None:
        failed = self._store.start(self._progress(step), kept, config_as_yaml(self.training.config))
        if failed is not None:
            self._tell_failure(failed)

    def _finish(self) -> None:
        saved = self._store.finish(self._on_progress)
        if saved.checkpoint is None:
            self._tell_failure(saved)
            return
        self.newest = saved.step
        if self.training.mesh.rank == 0:
            size = sum(entry.size for entry in saved.checkpoint.files.values())
            logger.info(
                "Checkpoint of step %d: %s (%.3f GiB)", saved.step, saved.checkpoint.folder, size / 2**30
            )

    def _tell_failure(self, saved: Saved) -> None:
        if self.training.mesh.rank == 0:
            last = "there is none yet" if self.newest is None else f"the newest is that of step {self.newest}"
            logger.warning(
                "The checkpoint of step %d was not saved: %s. The run goes on; %s",
                saved.step,
                saved.error,
                last,
            )

    def _progress(self, step: int) -> Progress:
        training = self.training
        epoch, within = divmod(step, training.order.steps_per_epoch)
        return Progress(
            step=step,
            epoch=epoch,
            position=within * training.order.prompts_per_step,
            updates=training.actor.learner.updates,
            syncs=step * training.syncs_a_step,
            layout=training.mesh.training_layout,
            world_size=training.mesh.world_size,
            optimizer_tensors=(),
            random_states=(),
            model_fingerprint=self._origin.model,
            data_fingerprint=self._origin.data,
            versions=library_versions(),
        )


def keep_stage_model(saver: Saver, stages: Sequence[LengthStage], step: int, even_if_there: bool) -> None:
    """Export the model where a stage ends with `step` steps done. A collective. What the disk refuses costs the model,
    and not the run.

    A run that goes on right after a stage makes up for what the end of the run before may have cut off.
    """
    config = saver.training.config
    ended = next((stage for stage in stages if stage.end == step), None)
    if ended is None or not has_length_stages(config):
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
