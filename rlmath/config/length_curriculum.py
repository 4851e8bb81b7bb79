"""The length curriculum of a run (`stages`): the steps and the settings of each stage.

A run without `stages` is one stage with the settings as they are. Stages share everything but their
lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmath.config.help import counted
from rlmath.config.schema import Config, StagesConfig, ToolsConfig, ValidationConfig

BOUNDARY_TOKENS = 16
"""Most tokens around the output of a tool in fences: as many as these have bytes."""
CHAT_BOUNDARY_TOKENS = 64
"""Most tokens that a chat template may write around an output, to where the next turn begins."""


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
    """The settings of a run that had this stage only, without `stages`."""

    @property
    def end(self) -> int:
        """Steps of the run that are done when the stage is."""
        return self.first_step + self.steps

    def line(self, stages: int) -> str:
        """The stage as a line of the console: "Stage 2 of 3: steps 101 to 150, ..."."""
        config = self.config
        return (
            f"Stage {self.number + 1} of {stages}: steps {self.first_step + 1} to {self.end}, "
            "completions of at most "
            f"{config.rollout.max_new_tokens} tokens, {config.policy.max_tokens_per_microbatch} "
            "tokens per micro-batch"
        )


def has_length_stages(config: Config) -> bool:
    """Whether any list of `stages` is given."""
    return config.stages != StagesConfig()


def length_stages(config: Config, total_steps: int | None) -> list[LengthStage]:
    """The stages in their order; one where `stages` is empty.

    That one has `total_steps` (None: not known yet). The lists must be equally long, as
    `stage_list_problems` checks."""
    lists = config.stages
    if not has_length_stages(config):
        return [LengthStage(0, 0, total_steps or 0, config)]
    budgets = lists.max_tokens_per_microbatch or [config.policy.max_tokens_per_microbatch] * len(
        lists.steps
    )
    stages: list[LengthStage] = []
    for steps, max_new_tokens, budget in zip(
        lists.steps, lists.max_new_tokens, budgets, strict=True
    ):
        stage_config = replace(
            config,
            stages=StagesConfig(),
            rollout=replace(config.rollout, max_new_tokens=max_new_tokens),
            policy=replace(config.policy, max_tokens_per_microbatch=budget),
        )
        stages.append(
            LengthStage(len(stages), stages[-1].end if stages else 0, steps, config=stage_config)
        )
    return stages


def checked_length_stages(config: Config) -> tuple[LengthStage, ...]:
    """The stages of a run that does not know its steps yet.

    There are none where the lists of `stages` do not go together."""
    return () if any(stage_list_problems(config)) else tuple(length_stages(config, None))


def length_stage_lines(config: Config) -> list[str]:
    """The stages for the console; nothing in a run without."""
    if not has_length_stages(config):
        return []
    stages = length_stages(config, None)
    head = (
        f"Stages: {len(stages)}, {stages[-1].end} steps in all; epochs repeat until they are done "
        "(run.total_epochs is no limit)"
    )
    return [head, *(f"  {stage.line(len(stages))}" for stage in stages)]


def length_stage_at(stages: Sequence[LengthStage], step: int) -> LengthStage:
    """The stage of a step, counted from 0; the last one of a step beyond the end."""
    return next((stage for stage in stages if step < stage.end), stages[-1])


def planned_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run.

    They are those of its stages, or of `run.total_epochs` and `run.total_steps`."""
    if has_length_stages(config):
        return sum(config.stages.steps)
    steps = config.run.total_epochs * steps_per_epoch
    return steps if config.run.total_steps is None else min(steps, config.run.total_steps)


def fewer_steps_warnings(config: Config, steps_per_epoch: int) -> tuple[str, ...]:
    """A warning where `run.total_epochs` ends the run before `run.total_steps`."""
    total_steps = config.run.total_steps
    epochs = config.run.total_epochs
    steps = epochs * steps_per_epoch
    if has_length_stages(config) or total_steps is None or total_steps <= steps:
        return ()
    return (
        f"run.total_steps is {total_steps}, and the run ends after {counted(steps, 'step')}: "
        "run.total_epochs is "
        f"{epochs}, of {counted(steps_per_epoch, 'step')} each. For all {total_steps} set "
        f"run.total_epochs={math.ceil(total_steps / steps_per_epoch)}.",
    )


def late_steps_warnings(config: Config, total_steps: int) -> tuple[str, ...]:
    """Steps that are to be profiled or captured, and that the run does not make.

    >>> from rlmath.config.schema import TelemetryConfig
    >>> late_steps_warnings(Config(telemetry=TelemetryConfig(capture_steps=[5, 10])), total_steps=5)
    ('telemetry.capture_steps has 10, and the run ends after step 5.',)
    """
    telemetry = config.telemetry
    steps = {"profile_steps": telemetry.profile_steps, "capture_steps": telemetry.capture_steps}
    late = {
        key: [step for step in chosen_steps if step > total_steps]
        for key, chosen_steps in steps.items()
    }
    return tuple(
        f"telemetry.{key} has {', '.join(map(str, late_steps))}, and the run ends after step "
        f"{total_steps}."
        for key, late_steps in late.items()
        if late_steps
    )


def with_longest_lengths(config: Config) -> Config:
    """The settings with the largest lengths of any stage and validation.

    Engine and memory must have room for them. They are `rollout.max_new_tokens` and
    `policy.max_tokens_per_microbatch`."""
    lengths = config.stages.max_new_tokens or [config.rollout.max_new_tokens]
    validated = [validation_tokens(config)] if validates(config) else []
    budgets = config.stages.max_tokens_per_microbatch or [config.policy.max_tokens_per_microbatch]
    return replace(
        config,
        rollout=replace(config.rollout, max_new_tokens=max(lengths + validated)),
        policy=replace(config.policy, max_tokens_per_microbatch=max(budgets)),
    )


def engine_length(config: Config) -> int:
    """The longest sequence (tokens) that the engines of the run must hold, in any stage."""
    return sequence_length(with_longest_lengths(config))


def sequence_length(config: Config) -> int:
    """The longest sequence (tokens) of a run that had these lengths alone.

    It is a prompt and its completion, with what others write into it."""
    sampled = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return sampled + unsampled_limit(config)


def unsampled_limit(config: Config) -> int:
    """Most tokens of a completion that are not sampled: outputs of tools, and feedback."""
    return tool_tokens(config.tools) + feedback_tokens(config)


def feedback_tokens(config: Config) -> int:
    """Most tokens of the feedback to a completion's answers, or of what an environment writes."""
    if not config.answers_turns:
        return 0
    return (config.turns.max - 1) * (config.turns.max_feedback_tokens + CHAT_BOUNDARY_TOKENS)


def tool_tokens(tools: ToolsConfig) -> int:
    """Most tokens that tools write into a completion."""
    if tools.format is None:
        return 0
    return tools.max_calls * (tools.max_output_tokens + boundary_tokens(tools))


def boundary_tokens(tools: ToolsConfig) -> int:
    """Most tokens around an output."""
    return CHAT_BOUNDARY_TOKENS if tools.format == "chat" else BOUNDARY_TOKENS


def measured_tools(tools: ToolsConfig) -> dict[str, Any] | None:
    """The settings of tools that change answers; None without tools.

    Measures with the same are comparable, on whatever machines."""
    if tools.format is None:
        return None
    return {
        "format": tools.format,
        "max_calls": tools.max_calls,
        "max_output_tokens": tools.max_output_tokens,
        "state": tools.state,
        "call_cpu_seconds": tools.call_cpu_seconds,
        "completion_cpu_seconds": tools.completion_cpu_seconds,
        "memory_gib": tools.memory_gib,
    }


def sequence_text(config: Config, keys: bool = True) -> str:
    """The longest sequence as a sum for messages, named by its settings or in numbers."""
    if keys:
        names = "data.max_prompt_tokens + rollout.max_new_tokens"
        outputs = (
            f" + tools.max_calls x (tools.max_output_tokens + {boundary_tokens(config.tools)})"
        )
        feedback = (
            f" + (turns.max - 1) x (turns.max_feedback_tokens + {CHAT_BOUNDARY_TOKENS})"
            if config.answers_turns
            else ""
        )
        return names + (outputs if config.tools.format is not None else "") + feedback
    sampled = f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}"
    return sampled + (f" + {tokens}" if (tokens := unsampled_limit(config)) else "")


def without_validation(config: Config) -> Config:
    """The settings without validation."""
    return replace(config, validation=ValidationConfig())


def validates(config: Config) -> bool:
    """Whether the run measures its accuracy during training."""
    return config.validation.every_steps is not None


def validation_names(paths: Sequence[str]) -> list[str]:
    """Names of the files of `validation.paths`.

    They are ["aime24", "amc23"] for ["b/aime24.jsonl", "b/amc23.jsonl"]."""
    return [Path(path).stem for path in paths]


def validation_tokens(config: Config) -> int:
    """The longest completion of a validation (tokens).

    By default it is that of the longest stage, from the first validation on, so that all of a run
    can be compared."""
    max_new_tokens = config.validation.max_new_tokens
    return (
        max_new_tokens
        if max_new_tokens is not None
        else max(config.stages.max_new_tokens or [config.rollout.max_new_tokens])
    )


def stage_list_problems(config: Config) -> Iterator[str]:
    """Lists of `stages` that do not go together."""
    if not has_length_stages(config):
        return
    lists = ("steps", "max_new_tokens", "max_tokens_per_microbatch")
    counts = {name: len(getattr(config.stages, name)) for name in lists}
    given_counts = {name: count for name, count in counts.items() if count or name != lists[-1]}
    if len(set(given_counts.values())) > 1:
        listed = ", ".join(f"stages.{name} has {count}" for name, count in given_counts.items())
        yield f"{listed}; each needs one number for every stage. Make them equally long."


def unfinished_problem(
    stages: Sequence[LengthStage], prompts_per_step: int, steps_done: int, usable_groups: int
) -> str | None:
    """The problem of more groups in flight at a resume than the stage still learns from.

    The next stage has other lengths. `usable_groups` are the groups that selection does not drop;
    those of the last stage may be left."""
    stage = length_stage_at(stages, steps_done - 1)
    steps_left = stage.end - steps_done
    needed = -(-usable_groups // prompts_per_step)
    if stage is stages[-1] or usable_groups <= prompts_per_step * steps_left:
        return None
    return (
        f"stages: stage {stage.number + 1} ends after step {stage.end}, and the checkpoint of "
        f"step {steps_done} has "
        f"{usable_groups} groups in flight, which need {needed} steps of "
        f"data.prompts_per_step={prompts_per_step} groups; the stage has {steps_left} left, and "
        f"the next one has other lengths. Let it end after step {steps_done + needed} or later."
    )
