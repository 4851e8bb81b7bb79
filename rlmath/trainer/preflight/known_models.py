"""What a plan needs of a machine that is not there: the shape of a model without its weights, ranks without processes.

A model whose folder is missing is known by its folder's name, if it is one of those whose config.json is published and
kept, as far as its shape goes, in configs/models.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from rlmath.config.help import nearest_path, nearest_word, raise_problems
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, ParallelConfig
from rlmath.distributed.device import environment_world_size
from rlmath.models.hf_config import read_shape, read_shape_file

PUBLISHED = Path(__file__).resolve().parents[3] / "configs" / "models"
"""<name of the model>.json; only in a checkout of the repository."""


@dataclass(frozen=True)
class PlannedShape:
    """A model's shape, as far as it is known, and where it is from."""

    shape: ModelShape | None
    problems: list[str]
    note: str
    """What to say of a shape that is not the folder's own; else ""."""


def planned_shape(model_path: str) -> PlannedShape:
    """The shape of the folder's config.json, or the published one where there is no such folder. Weights and tokenizer
    need not be there."""
    folder = Path(model_path)
    if os.path.exists(folder):
        return PlannedShape(*read_shape(folder), "")
    known = published_names()
    if folder.name in known:
        file = PUBLISHED / f"{folder.name}.json"
        note = (
            f'There is no folder "{folder}": planned with the published shape of {folder.name}, '
            f"configs/models/{file.name}."
        )
        return PlannedShape(*read_shape_file(file), note)
    names = f" Shapes are known of {', '.join(known)}.{nearest_word(folder.name, known)}" if known else ""
    problem = f'model.path: there is no folder "{folder}".{nearest_path(folder)}{names}'
    return PlannedShape(None, [problem], "")


def required_shape(model_path: str) -> tuple[ModelShape, str]:
    """The shape and its note; ValueError that lists what is wrong with the model."""
    found = planned_shape(model_path)
    raise_problems(f'the model "{model_path}"', found.problems)
    assert found.shape is not None
    return found.shape, found.note


def published_names() -> list[str]:
    """Models whose shape is in configs/models."""
    return sorted(path.name.removesuffix(".json") for path in PUBLISHED.glob("*.json"))


def planned_ranks(config: Config, told: int | None) -> int:
    """Ranks of the run: as told, or those that `parallel.data` makes, or those that a launcher started."""
    if told is not None:
        return told
    return told_by_layout(config.parallel) or environment_world_size()


def told_by_layout(parallel: ParallelConfig) -> int | None:
    """Ranks that `parallel.data` replicas take; None where it is left open.

    >>> told_by_layout(ParallelConfig(data=8, tensor=4))
    32
    """
    if parallel.data is None:
        return None
    sizes = (parallel.data, parallel.tensor, parallel.context, parallel.pipeline)
    return math.prod(max(1, size) for size in sizes)


def ranks_or_least(config: Config, told: int | None) -> int:
    """Ranks of the run: as told, or those that `parallel.data` makes, or the least that the layout takes."""
    if told is not None:
        return told
    return told_by_layout(config.parallel) or least_ranks(config)


def least_ranks(config: Config) -> int:
    """Ranks of one replica of the model, or of as many as make whole engines."""
    parallel = config.parallel
    sizes = (parallel.tensor, parallel.context, parallel.expert, parallel.expert_tensor)
    tensor, context, expert, expert_tensor = (max(1, size) for size in sizes)
    stage = math.lcm(tensor * context, expert * expert_tensor)
    return math.lcm(stage * max(1, parallel.pipeline), max(1, config.rollout.tensor_parallel))
