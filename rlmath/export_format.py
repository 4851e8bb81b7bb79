"""In which number format a run leaves its model, and how large that is."""

from __future__ import annotations

import torch

from rlmath.checkpoint.hf_tables import parameter_count
from rlmath.config import Config
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import resolve_kind

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TRAINED = {"cpu": torch.float32, "cuda": torch.bfloat16}


def export_dtype(config: Config) -> torch.dtype:
    """What `save.export_dtype` says; "auto" is the format of training."""
    return _DTYPES.get(config.save.export_dtype, _TRAINED[resolve_kind(config.run.device)])


def export_bytes(config: Config, shape: ModelShape) -> int:
    """Size of the model's weights on disk (bytes)."""
    return parameter_count(shape) * export_dtype(config).itemsize
