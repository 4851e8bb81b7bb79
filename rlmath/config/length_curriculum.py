"""The stages of a run: which step belongs to which, and the settings that each has.

A run without `stages` is one stage with the settings as they are. Stages share everything but their lengths: weights,
optimizer, learning-rate schedule, order of prompts and seeds go on from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.config.schema import Config, StagesConfig, ValidationConfig


@dataclass(frozen=True)
class LengthStage:
    """Some steps of a run in a row."""

    number: int
    """Counted from 0."""
    first_step: int
    """Counted from 0 over the whole run."""
    steps: int
    """How many; 0 where a run without stages does not know its steps yet."""
    config: Config
    """The settings as a run of this stage alone would have them, without `stages`."""

    @property
    def end(self) -> int:
        """Steps of the run that are done when the stage is."""
        return self.first_step + self.steps

    def line(self, stages: int) -> str:
        """For the console: "Stage 2 of 3: steps 101 to 150, ..."."""
        limits = self.config.rollout.max_new_tokens, self.config.policy.max_tokens_per_microbatch
        return (
            f"Stage {self.number + 1} of {stages}: steps {self.first_step + 1} to {self.end}, completions of at most "
            f"{limits[0]} tokens, {limits[1]} tokens per micro-batch"
        )


def has_length_stages(config: Config) -> bool:
    """Whether any list of `stages` is given."""
    return bool(
        config.stages.steps or config.stages.max_new_tokens or config.stages.max_tokens_per_microbatch
    )


def length_stages(config: Config, total_steps: int | None) -> list[LengthStage]:
    """The stages in their order; one where `stages` is empty, which has `total_steps` (None: not known yet).

    The lists of `stages` must have no problems (`stage_checks`).
    """
    lists = config.stages
    if not has_length_stages(config):
        return [LengthStage(0, 0, total_steps or 0, config)]
    budgets: Sequence[int | None] = lists.max_tokens_per_microbatch or [None] * len(lists.steps)
    stages, first = [], 0
    for number, (steps, max_new_tokens, budget) in enumerate(
        zip(lists.steps, lists.max_new_tokens, budgets, strict=True)
    ):
        stages.append(LengthStage(number, first, steps, _with_lengths(config, max_new_tokens, budget)))
        first += steps
    return stages


def _with_lengths(config: Config, max_new_tokens: int, budget: int | None) -> Config:
    policy = config.policy if budget is None else replace(config.policy, max_tokens_per_microbatch=budget)
    rollout = replace(config.rollout, max_new_tokens=max_new_tokens)
    return replace(config, stages=StagesConfig(), rollout=rollout, policy=policy)


def length_stage_lines(config: Config) -> list[str]:
    """What the console says of the stages at the start; nothing where there are none."""
    if not has_length_stages(config):
        return []
    stages = length_stages(config, None)
    head = (
        f"Stages: {len(stages)}, {stages[-1].end} steps in all; epochs go on until they are done "
        "(run.total_epochs is no limit)"
    )
    return [head, *(f"  {stage.line(len(stages))}" for stage in stages)]


def length_stage_at(stages: Sequence[LengthStage], step: int) -> LengthStage:
    """The stage of a step, counted from 0; the last one of a step beyond the end."""
    return next((stage for stage in stages if step < stage.end), stages[-1])


def planned_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run: those of its stages, or of `run.total_epochs` and `run.total_steps`."""
    if has_length_stages(config):
        return sum(config.stages.steps)
    steps = config.run.total_epochs * steps_per_epoch
    return steps if config.run.total_steps is None else min(steps, config.run.total_steps)


def with_longest_lengths(config: Config) -> Config:
    """The settings with the largest lengths of any stage, and of validation: what engine and memory must have room for.

    `rollout.max_new_tokens` is the longest completion of training or validation, `policy.max_tokens_per_microbatch` the
    largest budget. Of settings without stages and validation it is these themselves.
    """
    stages = config.stages
    max_new_tokens = max([validation_tokens(config)] if validates(config) else [0])
    max_new_tokens = max([max_new_tokens, *(stages.max_new_tokens or [config.rollout.max_new_tokens])])
    budget = max(stages.max_tokens_per_microbatch or [config.policy.max_tokens_per_microbatch])
    return replace(
        config,
        rollout=replace(config.rollout, max_new_tokens=max_new_tokens),
        policy=replace(config.policy, max_tokens_per_microbatch=budget),
    )


def engine_length(config: Config) -> int:
    """The longest sequence, prompt and completion, that the engines of the run must hold (tokens)."""
    return config.data.max_prompt_tokens + with_longest_lengths(config).rollout.max_new_tokens


def without_validation(config: Config) -> Config:
    """The settings without validation."""
    return replace(config, validation=ValidationConfig())


def validates(config: Config) -> bool:
    """Whether the run measures its accuracy on the way."""
    return config.validation.every_steps is not None


def validation_names(paths: Sequence[str]) -> list[str]:
    """What files of `validation.paths` are called: ["aime24", "amc23"] of ["b/aime24.jsonl", "b/amc23.jsonl"]."""
    return [Path(path).stem for path in paths]


def validation_tokens(config: Config) -> int:
    """The longest completion of a validation (tokens). Where the settings leave it open it is that of the longest
    stage, from the beginning on, so that all measurements of a run can be compared."""
    own = config.validation.max_new_tokens
    return own if own is not None else max(config.stages.max_new_tokens or [config.rollout.max_new_tokens])
