"""What is saved after a step, and whether the run stops there: the same on all ranks."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlmath.checkpoint.hf_io import write_hf_folder
from rlmath.checkpoint.progress import Progress
from rlmath.checkpoint.store import CheckpointStore, Saved
from rlmath.config import Config
from rlmath.config_files import config_as_yaml
from rlmath.data.loader import PromptOrder
from rlmath.export_format import export_dtype
from rlmath.guard.signals import REASONS, StopRequest
from rlmath.model_shape import ModelShape
from rlmath.parallel.collectives import max_over_ranks
from rlmath.parallel.mesh import Mesh
from rlmath.policy.actor import Actor
from rlmath.recovery import Origin
from rlmath.run_folder import MODELS_FOLDER
from rlmath.save_times import FIRST_POINT, SaveTimes, models_of, points_of
from rlmath.sync.transfer import hf_stream
from rlmath.telemetry.timers import PhaseTimers
from rlmath.versions import library_versions

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
    syncs: Callable[[], int] = lambda: 0
    """Weight syncs done so far, where there are engines."""


class Saver:
    """Makes checkpoints between steps. All ranks call it alike."""

    def __init__(
        self,
        training: Training,
        store: CheckpointStore,
        origin: Origin,
        companions: Mapping[str, bytes],
        stop: StopRequest,
        sign_of_life: Callable[[], None],
    ) -> None:
        """`companions` are what an exported model has beside its weights; `sign_of_life` is called in what takes
        long."""
        save, now = training.config.save, time.monotonic()
        per_epoch = training.order.steps_per_epoch
        points = points_of(save)
        models = models_of(save)
        self.training = training
        self._store = store
        self._origin = origin
        self._companions = companions
        self._stop = stop
        self._sign_of_life = sign_of_life
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
        return max_over_ranks(mine, self.training.actor.executor.device.torch_device)

    def export(self, folder: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write the model as it is now in Hugging Face form, with some files `more`. A collective. OSError on rank 0
        where the disk refuses."""
        training = self.training
        stream = self._telling(hf_stream(training.actor.chunks, training.shape, training.mesh))
        dtype, writes = export_dtype(training.config), training.mesh.rank == 0
        write_hf_folder(stream, {**self._companions, **(more or {})}, folder, dtype, writes)

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
            self._sign_of_life()
            yield named

    def _start(self, step: int, kept: bool) -> None:
        failed = self._store.start(self._progress(step), kept, config_as_yaml(self.training.config))
        if failed is not None:
            self._tell_failure(failed)

    def _finish(self) -> None:
        saved = self._store.finish(self._sign_of_life)
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
            syncs=training.syncs(),
            layout=training.mesh.training_layout,
            world_size=training.mesh.world_size,
            optimizer_tensors=(),
            random_states=(),
            model_fingerprint=self._origin.model,
            data_fingerprint=self._origin.data,
            versions=library_versions(),
        )
