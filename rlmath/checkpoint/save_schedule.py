"""The schedule of saves: when a checkpoint is due, and the disk space of checkpoints and models."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.directory import complete_checkpoints
from rlmath.checkpoint.hf.headers import TensorFormats, source_formats
from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.checkpoint.hf.weight_map import adapter_rules, hf_tensors, parameter_count
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import BEST_FOLDER, CHECKPOINTS_FOLDER, stage_folder
from rlmath.config.schema import Config, SaveConfig
from rlmath.distributed.device_kind import FORMAT_BYTES, NumberFormat, number_format, resolve_kind

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


def recovery_frequency(save: SaveConfig) -> Frequency:
    return Frequency(save.ckpt_freq_epochs, save.ckpt_freq_steps, save.ckpt_freq_secs)


def kept_frequency(save: SaveConfig) -> Frequency:
    """The frequency of checkpoints that stay."""
    return Frequency(save.save_freq_epochs, save.save_freq_steps, save.save_freq_secs)


class SaveTimes:
    """Says after each step whether something is due.

    Seconds count from the start, and then from the last time.

    >>> times = SaveTimes(Frequency(None, 3, None), steps_per_epoch=10, now=0.0)
    >>> [step for step in range(1, 8) if times.due(step, now=float(step))]
    [3, 6]
    """

    def __init__(
        self, frequency: Frequency, steps_per_epoch: int, now: float, first: int | None = None
    ) -> None:
        """`first` is a step after which it is due in any case, unless it never is.

        `now` in seconds."""
        self._frequency = frequency
        self._steps_per_epoch = steps_per_epoch
        self._first = None if frequency.never else first
        self._last = now

    def due(self, step: int, now: float) -> bool:
        frequency = self._frequency
        epochs, within = divmod(step, self._steps_per_epoch)
        is_due = (
            step == self._first
            or (frequency.epochs is not None and within == 0 and epochs % frequency.epochs == 0)
            or (frequency.steps is not None and step % frequency.steps == 0)
            or (frequency.secs is not None and now - self._last >= frequency.secs)
        )
        if is_due:
            self._last = now
        return is_due


# ---------------------------------------------------------------- sizes


def _trained_format(config: Config) -> NumberFormat:
    return number_format(config.policy.dtype, resolve_kind(config.run.device))


def adapter_format(config: Config) -> NumberFormat:
    """The number format of exported adapters, by its name in torch; "auto" is that of training."""
    named = config.save.export_dtype
    return _trained_format(config) if named == "auto" else named


def export_formats(config: Config) -> TensorFormats:
    """The number formats of the exported model.

    "auto" is that of model.path, tensor by tensor, or, if it is not known, of training."""
    named = config.save.export_dtype
    if config.lora.rank:
        named = config.save.merged_dtype or named
    if named != "auto":
        return TensorFormats(named)
    return source_formats(Path(config.model.path)) or TensorFormats(_trained_format(config))


def export_note(config: Config, size: int) -> str:
    """A note about an exported model of `size` bytes in another format than model.path; else ""."""
    exported = export_formats(config)
    original = source_formats(Path(config.model.path))
    if original is None or original == exported:
        return ""
    by_lora = config.lora.rank > 0 and config.save.merged_dtype is not None
    return (
        f", in {exported.most}, {size / 1e9:.3f} GB; that of model.path has {original.most} "
        f"({'save.merged_dtype' if by_lora else 'save.export_dtype'})"
    )


def exports_merged(config: Config) -> bool:
    """Whether exports have the whole model, and not its adapters alone."""
    return config.save.merged or not config.lora.rank


def _adapter_parameters(config: Config, shape: ModelShape) -> int:
    lora = config.lora
    return parameter_count(shape, adapter_rules(shape.architecture, lora.rank, lora.target))


def export_bytes(config: Config, shape: ModelShape) -> int:
    """Size of an export on disk: of the model's weights, and of its adapters (bytes)."""
    size = _adapter_parameters(config, shape) * FORMAT_BYTES[adapter_format(config)]
    if exports_merged(config):
        formats = export_formats(config)
        bytes_of_format = {str(word): width for word, width in FORMAT_BYTES.items()}
        tensors = hf_tensors(shape).items()
        size += sum(math.prod(axes) * bytes_of_format[formats.of(name)] for name, axes in tensors)
    return size


def checkpoint_bytes(config: Config, shapes: RunShapes) -> int:
    """Bytes of a checkpoint on disk.

    They are those of policy (or adapters) and critic: parameters, Adam's two moments, and float32
    copies of parameters in 16 bits; and the parameters of a reference that moves."""
    weights = FORMAT_BYTES[_trained_format(config)]
    state = 8 if config.optimizer.kind == "adam" else 0
    copies = 4 if weights < 4 else 0
    shape = shapes.policy
    critic = shapes.critic
    parameters = _adapter_parameters(config, shape) if config.lora.rank else parameter_count(shape)
    parameters += 0 if critic is None else parameter_count(critic)
    moves = config.algorithm.kl_coef > 0 and config.algorithm.reference_every_steps is not None
    return parameters * (weights + state + copies) + moves * parameter_count(shape) * weights


def steps_before_captures(config: Config) -> frozenset[int]:
    """Steps done in the checkpoints that `telemetry.capture_steps` needs, where replays begin.

    >>> from rlmath.config.schema import TelemetryConfig
    >>> sorted(steps_before_captures(Config(telemetry=TelemetryConfig(capture_steps=[1, 10]))))
    [9]
    """
    return frozenset(step - 1 for step in config.telemetry.capture_steps if step > 1)


def output_bytes(config: Config, shapes: RunShapes) -> int:
    """Bytes on the disk that a run still needs.

    They are those of the models it leaves and, if it makes any, of the checkpoints that stay and
    the one that is being written, less the models and checkpoints that exist already."""
    save = config.save
    needed_bytes = 0
    captures = len(steps_before_captures(config))
    if captures or not (recovery_frequency(save).never and kept_frequency(save).never):
        needed_bytes = (save.keep_last + 1 + captures) * checkpoint_bytes(config, shapes)
    checkpoints = []
    with suppress(
        ValueError
    ):  # `find_recovery` raises it, unless the run is to start from the beginning
        checkpoints, _ = complete_checkpoints(Path(config.run.output_dir) / CHECKPOINTS_FOLDER)
    present_bytes = sum(
        file.size for checkpoint in checkpoints for file in checkpoint.files.values()
    )
    folders = [
        stage_folder(config.run.output_dir, number) for number in range(len(config.stages.steps))
    ]
    folders += [Path(config.run.output_dir) / BEST_FOLDER] * config.validation.keep_best
    models = most_models(config) - sum(folder.is_dir() for folder in folders)
    return models * export_bytes(config, shapes.policy) + max(0, needed_bytes - present_bytes)


def most_models(config: Config) -> int:
    """Most models that a run has on disk, without those of kept checkpoints.

    They are the last one, those of its stages, and the best one twice, as the new one is written
    before the old one is removed."""
    return 1 + len(config.stages.steps) + 2 * config.validation.keep_best
