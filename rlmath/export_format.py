"""In which number format a run leaves its model, and how large what it leaves is."""

from __future__ import annotations

from pathlib import Path

import torch

from rlmath.checkpoint.folders import CHECKPOINTS, complete_checkpoints
from rlmath.checkpoint.hf_tables import parameter_count
from rlmath.config import Config
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import resolve_kind
from rlmath.run_folder import BEST_FOLDER, stage_folder
from rlmath.save_times import models_of, points_of

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
