"""What can be wrong with `stages` and `validation` before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rlmath.config import length_curriculum as curriculum
from rlmath.config.schema import Config, PolicyConfig, RolloutConfig, ValidationConfig

Check = Callable[[Config], Iterable[str]]


def stage_list_problems(config: Config) -> Iterator[str]:
    """Lists of `stages` that do not go together."""
    if not curriculum.has_length_stages(config):
        return
    lists = ("steps", "max_new_tokens", "max_tokens_per_microbatch")
    counts = {name: len(getattr(config.stages, name)) for name in lists}
    given = {name: count for name, count in counts.items() if count or name != lists[-1]}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"stages.{name} has {count}" for name, count in given.items())
        yield f"{listed}; each needs one number for every stage. Make them equally long."
    if config.run.total_steps is not None:
        yield (
            f"run.total_steps is {config.run.total_steps} beside stages.steps, which give the length of the run. "
            "Set run.total_steps=null."
        )


def in_every_stage(config: Config, check: Check) -> list[str]:
    """The problems of every stage, which is named; one that all stages have alike is listed once.

    Where the lists do not go together, there is no stage to check.
    """
    if any(stage_list_problems(config)):
        return []
    stages = curriculum.length_stages(config, None)
    found = [list(check(stage.config)) for stage in stages]
    if not curriculum.has_length_stages(config):
        return found[0]
    common = [problem for problem in found[0] if all(problem in other for other in found[1:])]
    return [_renamed(problem, _names(config)) for problem in common] + [
        f"Stage {stage.number + 1}: {_renamed(problem, _names(config))}"
        for stage, problems in zip(stages, found, strict=True)
        for problem in problems
        if problem not in common
    ]


def of_longest_stage(config: Config, check: Check) -> list[str]:
    """The problems of the run's largest lengths (`with_longest_lengths`)."""
    if any(stage_list_problems(config)):
        return []
    names = _names(config)
    if curriculum.engine_length(config) > curriculum.engine_length(curriculum.without_validation(config)):
        names["rollout.max_new_tokens"] = "validation.max_new_tokens"
    return [_renamed(problem, names) for problem in check(curriculum.with_longest_lengths(config))]


def _names(config: Config) -> dict[str, str]:
    """What the keys of lengths are called that stages have of their own."""
    names = {}
    if curriculum.has_length_stages(config):
        names["rollout.max_new_tokens"] = "stages.max_new_tokens"
    if config.stages.max_tokens_per_microbatch:
        names["policy.max_tokens_per_microbatch"] = "stages.max_tokens_per_microbatch"
    return names


def in_validation(config: Config, check: Check) -> list[str]:
    """The problems that validation has with its own longest completion, which is named so."""
    if not curriculum.validates(config) or config.validation.max_new_tokens is None:
        return []
    rollout = replace(config.rollout, max_new_tokens=curriculum.validation_tokens(config))
    found = check(replace(config, rollout=rollout))
    own = [problem for problem in found if "rollout.max_new_tokens" in problem]
    return [_renamed(problem, {"rollout.max_new_tokens": "validation.max_new_tokens"}) for problem in own]


def _renamed(problem: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        problem = problem.replace(old, new)
    return problem


def validation_problems(config: Config) -> Iterator[str]:
    """Settings of `validation` that do not go together."""
    settings = config.validation
    if settings.keep_best and settings.every_steps is None:
        yield "validation.keep_best needs accuracies to compare. Set validation.every_steps, or keep_best=false."
    if curriculum.validates(config) and not settings.paths:
        yield (
            f"validation.every_steps is {settings.every_steps}, and validation.paths is empty. Name files of problems, "
            "or set validation.every_steps=null."
        )
    names = Counter(curriculum.validation_names(settings.paths))
    for name in (name for name, count in names.items() if count > 1):
        yield f'validation.paths: {names[name]} files are named "{name}", and so would be their metrics. Rename one.'


def in_flight_problem(config: Config, total_steps: int, steps_done: int, wanted: int) -> str | None:
    """What is wrong where a run resumes with more groups in flight than the rest of their stage learns from: the next
    stage has other lengths. `wanted` are those that selection does not drop; those of the last stage may be left."""
    stages = curriculum.length_stages(config, total_steps)
    stage, per_step = curriculum.length_stage_at(stages, steps_done - 1), config.data.prompts_per_step
    left, needed = stage.end - steps_done, -(-wanted // per_step)
    if stage is stages[-1] or wanted <= per_step * left:
        return None
    return (
        f"stages: stage {stage.number + 1} ends after step {stage.end}, and the checkpoint of step {steps_done} has "
        f"{wanted} groups in flight, which need {needed} steps of data.prompts_per_step={per_step} "
        f"groups; the stage has {left} left, and the next one has other lengths. Let it end after step "
        f"{steps_done + needed} or later."
    )


def length_stage_warnings(config: Config) -> Iterator[str]:
    """Settings of `stages` and `validation` that change nothing in this run."""
    stages, validation = config.stages, config.validation
    if curriculum.has_length_stages(config):
        if config.run.total_epochs != 1:
            yield f"run.total_epochs={config.run.total_epochs} has no effect beside stages.steps."
        if config.rollout.max_new_tokens != RolloutConfig().max_new_tokens:
            yield f"rollout.max_new_tokens={config.rollout.max_new_tokens} has no effect beside stages.max_new_tokens."
        budget = config.policy.max_tokens_per_microbatch
        if stages.max_tokens_per_microbatch and budget != PolicyConfig().max_tokens_per_microbatch:
            yield (
                f"policy.max_tokens_per_microbatch={budget} has no effect beside stages.max_tokens_per_microbatch."
            )
    if not curriculum.validates(config):
        own, usual = vars(validation), vars(ValidationConfig())
        changed = [f"validation.{name}" for name in usual if name != "keep_best" and own[name] != usual[name]]
        if changed:
            yield f"{', '.join(changed)}: no effect without validation.every_steps."
    elif validation.temperature == 0:
        if validation.samples > 1:
            yield (
                f"validation.samples={validation.samples} samples the same completion again and again with "
                "validation.temperature=0."
            )
        if validation.top_p < 1:
            yield "validation.top_p has no effect with validation.temperature=0."
