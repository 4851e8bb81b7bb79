"""The shapes of a run's models and its length stages, read once before the run is planned.

Code that plans or builds the run takes this record and opens no config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.checkpoint.hf.config_json import (
    TABLES,
    VALUE_TABLES,
    critic_shape,
    planned_shape,
    read_shape,
    sound_shape,
)
from rlmath.config.length_curriculum import (
    LengthStage,
    checked_length_stages,
    length_stages,
    stage_list_problems,
)
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, Kind


@dataclass(frozen=True)
class RunShapes:
    """The shapes of a run's models, and the lengths of what they compute."""

    policy: ModelShape
    critic: ModelShape | None
    """None where the run has none, as in supervised training."""
    teacher: ModelShape | None
    length_stages: tuple[LengthStage, ...]
    """The stages in their order, one in a run without `stages`."""

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens of a micro-batch in any length stage."""
        return max(stage.config.policy.max_tokens_per_microbatch for stage in self.length_stages)

    def with_total_steps(self, config: Config, total_steps: int) -> RunShapes:
        """The same shapes, with the stages of a run whose data, and so its steps, are known."""
        return replace(self, length_stages=tuple(length_stages(config, total_steps)))


@dataclass(frozen=True)
class InspectedShapes:
    """The shapes of a run that is still to be checked."""

    shapes: RunShapes
    """Without models whose config.json cannot be used; without length stages where the lists of
    `stages` do not go together."""
    problem_of_model: Mapping[str, str]
    """Why a "critic" or "teacher" that the settings ask for has no shape."""


def inspect_run_shapes(config: Config, policy: ModelShape, kind: Kind = "grpo") -> InspectedShapes:
    """The shapes of a run that starts from a model of shape `policy`, as far as they are known."""
    problem_of_model: dict[str, str] = {}
    critic = teacher = None
    if kind == "grpo":
        try:
            critic = _critic_shape(config, policy)
        except ValueError as error:
            problem_of_model["critic"] = str(error)
        try:
            teacher = _teacher_shape(config.teacher.path)
        except ValueError as error:
            problem_of_model["teacher"] = str(error)
    shapes = RunShapes(policy, critic, teacher, length_stages=checked_length_stages(config))
    return InspectedShapes(shapes, problem_of_model)


def read_run_shapes(config: Config, policy: ModelShape, kind: Kind = "grpo") -> RunShapes:
    """The shapes of a run that starts from a model of shape `policy`.

    ValueError for a critic or teacher whose config.json cannot be used, and for lists of `stages`
    that do not go together."""
    inspected = inspect_run_shapes(config, policy, kind)
    if problems := [*inspected.problem_of_model.values(), *stage_list_problems(config)]:
        raise ValueError("\n".join(problems))
    return inspected.shapes


def _critic_shape(config: Config, policy: ModelShape) -> ModelShape | None:
    """The shape of a run's critic, None where it has none.

    ValueError where its config.json cannot be used."""
    if config.algorithm.advantage != "gae":
        return None
    start = policy if config.critic.path is None else _critic_start(config.critic.path)
    return critic_shape(start, policy)


def _critic_start(path: str) -> ModelShape:
    if os.path.isdir(path):
        shape, problems = read_shape(Path(path), "critic.path", (*TABLES, *VALUE_TABLES))
    else:
        planned = planned_shape(path, "critic.path")
        shape = planned.shape
        problems = list(planned.problems)
    return sound_shape(f'the critic "{path}"', shape, problems)


def _teacher_shape(path: str | None) -> ModelShape | None:
    """The shape of the model in `teacher.path`, by `planned_shape`; None without a teacher.

    ValueError that lists the model's problems."""
    if path is None:
        return None
    planned = planned_shape(path, "teacher.path")
    return sound_shape(f'the teacher "{path}"', planned.shape, planned.problems)
