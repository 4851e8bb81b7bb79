"""Checkpoints of LoRA runs: they hold adapters, and name the model that these belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlmath.checkpoint.convert.torch_dist_io import StateReader
from rlmath.checkpoint.directory import SETTINGS, read_progress
from rlmath.checkpoint.hf.headers import (
    TensorFormats,
    fingerprint_to_compare,
    model_fingerprint,
    weight_problems,
)
from rlmath.checkpoint.hf.lora_merge import merged_weight
from rlmath.checkpoint.hf.weight_map import adapter_name, hf_tensors
from rlmath.checkpoint.hf.weights import HFReader
from rlmath.config.help import raise_problems
from rlmath.config.hub import cached_folder, local_folder
from rlmath.config.load import load_config
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config


def lora_run(reader: StateReader) -> Config | None:
    """The settings of the run whose checkpoint has adapters; None: it has none.

    ValueError where they are missing."""
    if not any(".adapter." in key for key in reader.tensors):
        return None
    settings = reader.folder.parent / SETTINGS
    if not settings.is_file():
        raise ValueError(
            f"{reader.folder} has adapters (LoRA), and no {SETTINGS} of its run beside it."
        )
    return load_config([settings], [], saved=True)


def base_model(
    reader: StateReader, run: Config, shape: ModelShape, base: Path | None, fetches: bool = True
) -> Path:
    """The folder of the adapters' model, `base` or the run's `model.path`.

    An id of the hub is fetched, or looked up in the cache alone where `fetches` is false.
    ValueError if it is missing or wrong."""
    folder = base
    if folder is None:
        find = local_folder if fetches else cached_folder
        folder = find(run.model.path, "model.path")
    change = (
        "Name it by rlmath convert to-hf --base." if base is None else "Name another by --base."
    )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f'{reader.folder} has adapters (LoRA) for a model that is not in "{folder}". {change}'
        )
    raise_problems(f"the model of the adapters, {folder}", weight_problems(folder, shape))
    check_base(reader.folder.parent, folder, change)
    return folder


def check_base(checkpoint: Path, base: Path, change: str) -> None:
    """ValueError, which advises a `change`, unless a checkpoint's adapters belong to `base`."""
    needed = read_progress(checkpoint).model_fingerprint
    fingerprint = fingerprint_to_compare(needed, model_fingerprint(base), base)
    if fingerprint != needed:
        raise ValueError(
            f'{checkpoint} has adapters (LoRA) for another model than that in "{base}" '
            f"(fingerprint {needed} there, {fingerprint} here). {change}"
        )


def merged_tensors(
    adapters: Mapping[str, Tensor],
    run: Config,
    shape: ModelShape,
    base: Path,
    dtype: torch.dtype,
    sums: list[Tensor],
    written: TensorFormats | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of the trained model (`merged_weight`).

    It was trained in `dtype`; what has adapters is rounded once, to its format in `written` (None:
    `dtype`). What each merge keeps is appended to `sums`, for `kept_share`."""
    reader = HFReader(base)
    scale = run.lora.alpha / run.lora.rank
    for name in hf_tensors(shape):
        weight = reader.tensor(name).to(dtype)
        if (a := adapters.get(adapter_name(name, "A"))) is not None:
            rounded = None if written is None else getattr(torch, written.of(name))
            b = adapters[adapter_name(name, "B")]
            weight, kept = merged_weight(weight, b, a, scale, written=rounded)
            sums.append(kept)
        yield name, weight
