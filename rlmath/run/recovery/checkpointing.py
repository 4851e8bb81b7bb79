"""Checkpoints and models of a run: what is saved after a step, and whether the run stops there.

All ranks decide alike."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlmath.checkpoint import save_schedule
from rlmath.checkpoint.directory import (
    Checkpoint,
    Progress,
    complete_checkpoints,
    remove,
)
from rlmath.checkpoint.hf.headers import source_formats
from rlmath.checkpoint.hf.metadata_files import (
    read_metadata_files,
    with_chat_template,
    with_stop_tokens,
)
from rlmath.checkpoint.hf.peft import adapter_files
from rlmath.checkpoint.hf.weight_map import adapter_rules
from rlmath.checkpoint.hf.weights import lora_kept, stream_hf_tensors, write_hf_folder
from rlmath.checkpoint.manager import CheckpointManager
from rlmath.checkpoint.retention import Retention, sound_checkpoints
from rlmath.config.length_curriculum import has_length_stages
from rlmath.config.load import config_as_yaml, shown_values
from rlmath.config.run_files import (
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    MODELS_FOLDER,
    stage_folder,
    write_whole,
)
from rlmath.distributed.collectives import broadcast_from_rank_zero, reduce_over_ranks
from rlmath.distributed.fault_tolerance.preemption import REASONS, StopRequest
from rlmath.distributed.process import library_versions
from rlmath.rollout.sampling import CPU_SAMPLER_VERSION
from rlmath.run.divergence import DivergenceCheck
from rlmath.run.recovery.model_card import CARD_FILE, kept_text, model_card
from rlmath.run.recovery.resume import Origin
from rlmath.telemetry.events import event
from rlmath.trainer.base import Trainer

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves between steps, and decides there whether the run stops.

    All ranks call it alike."""

    def __init__(
        self,
        trainer: Trainer,
        origin: Origin,
        stop: StopRequest,
        divergence: DivergenceCheck,
        on_progress: Callable[[], None],
    ) -> None:
        """`on_progress` is called during long operations."""
        config = trainer.config
        start_time = time.monotonic()
        per_epoch = trainer.order.steps_per_epoch
        points = save_schedule.recovery_frequency(config.save)
        models = save_schedule.kept_frequency(config.save)
        self._trainer = trainer
        files = with_chat_template(read_metadata_files(config.model.path), trainer.chat_template)
        self._metadata_files = with_stop_tokens(files, trainer.stop_token_ids)
        self._store = CheckpointManager(
            Path(config.run.output_dir) / CHECKPOINTS_FOLDER,
            trainer.saved_models,
            trainer.device,
            metadata_files=self._metadata_files,
            retention=Retention(
                config.save.keep_last,
                config.save.keep_models,
                0 if divergence.rule is None else divergence.rule.steps,
                always=save_schedule.steps_before_captures(config),
            ),
        )
        self._origin = origin
        formats = source_formats(Path(config.model.path))
        self._model_formats = {} if formats is None else formats.as_json()
        self._stop = stop
        self._divergence = divergence
        self._on_progress = on_progress
        self._points = save_schedule.SaveTimes(
            points, per_epoch, start_time, first=save_schedule.FIRST_POINT
        )
        self._models = save_schedule.SaveTimes(models, per_epoch, start_time)
        self._last_step_too = not points.never
        self._before_captures = save_schedule.steps_before_captures(config)
        self._length_stages = trainer.shapes.length_stages
        self._folder = Path(config.run.output_dir)
        self.newest: int | None = None
        """Steps done in the newest complete checkpoint, None where there is none."""
        self._kept = 1.0
        """The share of what the adapters learned that the final model has, merged and rounded."""
        self.seconds = 0.0
        """Seconds for which training stood still for saving after the last step."""
        self.steps_done = 0

    def after_step(self, step: int, is_last: bool) -> str | None:
        """Save what is due.

        The reason, if any rank was asked to stop: the save is then on disk, or has failed."""
        started = time.perf_counter()
        self.steps_done = step
        with self._trainer.timers.phase("save"):
            model_due = self._models.due(step, time.monotonic())
            point_due = self._points.due(step, time.monotonic()) or (
                is_last and self._last_step_too
            )
            point_due |= step in self._before_captures
            agreed = self._agree(model_due, point_due)
            reason = REASONS[int(agreed["stop"])]
            ends = is_last or reason is not None
            needs_save = (
                agreed["kept"] + agreed["point"] > 0 or reason is not None
            ) and self.newest != step
            if reason is not None and not is_last:
                self._log_last_save(step)
            if self._store.busy and (needs_save or ends or not agreed["writing"]):
                self._finish()
            if needs_save:
                self._start(step, agreed["kept"] > 0)
            if self._store.busy and (ends or not self._trainer.config.save.background):
                self._finish()
            if agreed["kept"] and self._trainer.config.save.export_hf:
                self._export_kept(step)
            if ends:
                self._store.wait_for_removals()
        self.seconds = time.perf_counter() - started
        return reason

    def save_to_stop(self, step: int) -> None:
        """Save what `after_step` left out, of a run that stops before the next one is made."""
        with self._trainer.timers.phase("save"):
            self._log_last_save(step)
            self.finish()
            if step not in (0, self.newest):
                self._start(step, is_kept=False)
            self.finish()
            self._store.wait_for_removals()

    def finish(self) -> None:
        """Complete the save that is being written, if there is one.

        A collective."""
        if self._store.busy:
            self._finish()

    def sound(self) -> list[Checkpoint]:
        """The sound checkpoints, the newest first.

        Their weights learned in a later step, and are no worse than the best. Reads the disk;
        ValueError if it cannot."""
        checkpoints, _ = complete_checkpoints(self._folder / CHECKPOINTS_FOLDER)
        return sound_checkpoints(checkpoints, self._divergence.sound_before)

    def asked_to_stop(self) -> str | None:
        """The reason if any rank was asked to stop, without saving.

        Collective: all ranks call it."""
        return REASONS[int(self._agree(False, False)["stop"])]

    def _agree(self, model_due: bool, point_due: bool) -> dict[str, float]:
        """Flags on which all ranks act: rank 0's clock, any rank's signal and unfinished writing.

        A collective."""
        is_clock = self._trainer.mesh.rank == 0
        flags = {
            "stop": float(REASONS.index(self._stop.requested)),
            "kept": float(model_due and is_clock),
            "point": float(point_due and is_clock),
            "writing": float(self._store.busy and not self._store.written),
        }
        return reduce_over_ranks({}, flags)[1]

    def export(self, folder: Path, further_files: Mapping[str, bytes] | None = None) -> float:
        """Write the model in Hugging Face form, and its adapters in ADAPTER_FOLDER there.

        Returns the share of what the adapters learned that the model has, merged and rounded.
        `further_files` are written beside them. A collective. OSError on rank 0 if the disk
        refuses, DivergedError if the model is not finite."""
        self._divergence.raise_if_not_finite()
        trainer = self._trainer
        writes = trainer.mesh.rank == 0
        files = self._adapter_files(getattr(torch, save_schedule.adapter_format(trainer.config)))
        files |= dict(further_files or {})
        formats = save_schedule.export_formats(trainer.config)
        stream = iter(())
        written = None
        kept = 1.0
        if save_schedule.exports_merged(trainer.config):
            if trainer.config.lora.rank:
                written = formats
                kept = lora_kept(trainer.actor.chunks, trainer.shape, formats)
            stream = self._with_progress(
                stream_hf_tensors(
                    trainer.actor.chunks, trainer.shape, trainer.mesh, written=written
                )
            )
            files |= self._metadata_files
            if writes:
                files[CARD_FILE] = self._card(is_adapter=False, kept=kept)
        else:
            files |= {
                f"{ADAPTER_FOLDER}/{name}": content
                for name, content in self._metadata_files.items()
                if name != "config.json"
            }
        write_hf_folder(stream, files, folder, dtype=formats, writes=writes)
        return kept

    def _adapter_files(self, dtype: torch.dtype) -> dict[str, bytes]:
        """The adapters as a folder of PEFT's, on rank 0; none of full training.

        A collective."""
        trainer = self._trainer
        lora = self._trainer.config.lora
        rules = adapter_rules(trainer.shape.architecture, lora.rank, lora.target)
        if not rules:
            return {}
        tensors = {}
        writes = trainer.mesh.rank == 0
        for name, tensor in self._with_progress(
            stream_hf_tensors(trainer.actor.chunks, trainer.shape, trainer.mesh, rules=rules)
        ):
            if writes:
                tensors[name] = tensor.to("cpu", dtype, copy=True).contiguous()
        if not writes:
            return {}
        base = shown_values(trainer.config)["model.path"]
        files = adapter_files(tensors, lora, trainer.shape, base=base)
        files[CARD_FILE] = self._card(is_adapter=True)
        return {f"{ADAPTER_FOLDER}/{name}": content for name, content in files.items()}

    def _card(self, is_adapter: bool, kept: float = 1.0) -> bytes:
        trainer = self._trainer
        return model_card(
            trainer.config,
            self.steps_done,
            trainer.total_steps,
            is_adapter=is_adapter,
            kept=kept,
        )

    def export_final_model(self) -> str | None:
        """Write the trained model in Hugging Face form; why the disk refuses it, else None.

        A collective."""
        folder = self._folder / EXPORT_FOLDER
        refusal = None
        trainer = self._trainer
        needed_bytes = save_schedule.export_bytes(trainer.config, trainer.shape)
        try:
            with trainer.timers.phase("export"):
                self._kept = self.export(folder)
        except OSError as error:
            free_bytes = shutil.disk_usage(self._folder).free
            refusal = (
                f"{error} ({free_bytes / 2**30:.3f} GiB free, {needed_bytes / 2**30:.3f} needed)"
            )
        refusal = broadcast_from_rank_zero(refusal)
        if (
            trainer.mesh.rank == 0
            and refusal is None
            and save_schedule.exports_merged(trainer.config)
        ):
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            note = save_schedule.export_note(trainer.config, size)
            logger.info("The trained model is in %s%s", folder, note)
            if text := kept_text(self._kept, f"{folder}/{ADAPTER_FOLDER}"):
                logger.warning("%s", text)
        elif trainer.mesh.rank == 0 and refusal is None:
            logger.info("The trained adapters are in %s", folder / ADAPTER_FOLDER)
        return refusal

    def export_length_stage(self, step: int, even_if_there: bool) -> None:
        """Export the model to models/stage-N if a length stage ends with `step` steps done.

        A run that resumes there repeats an export that was cut off. A collective. If the disk is
        full the model is not kept, and the run continues."""
        config = self._trainer.config
        ending_stage = next((stage for stage in self._length_stages if stage.end == step), None)
        if ending_stage is None or not has_length_stages(config):
            return
        folder = stage_folder(config.run.output_dir, ending_stage.number)
        if not even_if_there and broadcast_from_rank_zero(folder.is_dir()):
            return
        try:
            with self._trainer.timers.phase("export"):
                self.export(folder)
        except OSError as error:
            logger.warning(
                "The model of stage %d was not kept: %s. The run continues",
                ending_stage.number + 1,
                error,
            )
        else:
            logger.info("The model of stage %d is in %s", ending_stage.number + 1, folder)

    def rewrite_card(self) -> None:
        """Write the cards of the final model and its adapters again, with later measurements.

        Rank 0 alone does."""
        model = self._folder / EXPORT_FOLDER
        for folder in (model, model / ADAPTER_FOLDER):
            card = folder / CARD_FILE
            if not card.is_file():
                continue
            try:
                is_adapter = folder != model
                content = self._card(is_adapter, kept=1.0 if is_adapter else self._kept)
                write_whole(card, content.decode())
            except OSError as error:
                logger.warning("%s has no figures of the last validation: %s", card, error)

    def close(self) -> None:
        self._store.close()

    def _export_kept(self, step: int) -> None:
        """A kept model more, and one less where they are too many.

        The run does not end for it."""
        models = self._folder / MODELS_FOLDER
        try:
            self.export(models / f"step-{step:06d}")
        except OSError as error:
            logger.warning(
                "The model of step %d was not exported: %s. The run continues", step, error
            )
        keep = self._trainer.config.save.keep_models
        if keep is not None and self._trainer.mesh.rank == 0:
            for old in sorted(models.glob("step-" + "[0-9]" * 6))[:-keep]:
                remove(old)

    def _with_progress(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in stream:
            self._on_progress()
            yield named

    def _start(self, step: int, is_kept: bool) -> None:
        self._divergence.raise_if_not_finite()
        settings = config_as_yaml(self._trainer.config)
        files = self._trainer.checkpoint_files()
        with self._trainer.models_on_device(self._trainer.saved_models()):
            error = self._store.start(self._progress(step), is_kept, settings, files=files)
        if error is not None:
            self._log_failure(step, error)

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, and log it or its failure."""
        step = self._store.step
        saved = self._store.finish(self._on_progress)
        if isinstance(saved, str):
            self._log_failure(step, saved)
            return
        self.newest = self._stop.saved_step = step
        if self._trainer.mesh.rank == 0:
            gib = sum(file.size for file in saved.files.values()) / 2**30
            extra = event("checkpoint", step)
            logger.info(
                "Checkpoint of step %d: %s (%.3f GiB)", step, saved.folder, gib, extra=extra
            )

    def _log_last_save(self, step: int) -> None:
        """Log where the step is saved before the run stops: no line may follow for long."""
        if self._trainer.mesh.rank == 0 and step not in (0, self.newest):
            folder = self._folder / CHECKPOINTS_FOLDER
            logger.info("Saving step %d in %s, then the run stops ...", step, folder)

    def _log_failure(self, step: int, error: str) -> None:
        if self._trainer.mesh.rank == 0:
            last = (
                "there is none yet"
                if self.newest is None
                else f"the newest is that of step {self.newest}"
            )
            text = "The checkpoint of step %d was not saved: %s. The run continues; %s"
            logger.warning(text, step, error, last)

    def _progress(self, step: int) -> Progress:
        """The run's progress with `step` steps done, as a checkpoint records it."""
        trainer = self._trainer
        epoch, within = divmod(step, trainer.order.steps_per_epoch)
        progress = Progress(
            step=step,
            epoch=epoch,
            position=within * trainer.order.prompts_per_step,
            updates=trainer.actor.learner.updates,
            syncs=step * trainer.weight_syncs_per_step,
            layout=trainer.mesh.training_layout,
            world_size=trainer.mesh.world_size,
            optimizer_tensors=(),
            random_states=(),
            model_fingerprint=self._origin.model,
            data_fingerprint=self._origin.data,
            reward_fingerprint=self._origin.reward,
            hooks_fingerprint=self._origin.hooks,
            adapter_fingerprint=self._origin.adapter,
            model_formats=self._model_formats,
            versions=library_versions(),
            cpu_sampler=CPU_SAMPLER_VERSION,
            discarded_steps=self._divergence.discarded_steps,
            learned_step=self._divergence.learned_step,
            loss_scale=trainer.actor.learner.loss_scale_state,
            good_step=self._divergence.good_step,
            rewards=tuple(self._divergence.rewards),
            rollback_steps=tuple(rollback.step for rollback in trainer.rollbacks),
            rollback_draw_steps=tuple(rollback.draw_step for rollback in trainer.rollbacks),
        )
        return trainer.complete_progress(progress)
