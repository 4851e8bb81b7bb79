"""A run without ranks: every check of a start that needs no GPU, no weights and no process group, and then the plan.

Nothing is written. Of the model only config.json is needed (`hf_config.planned_shape`); where its
tokenizer is missing, prompts are counted and their lengths are not looked at.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config import length_curriculum as curriculum
from rlmath.config.help import raise_problems
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.dataset import load_inputs, load_prompt_files, load_validation, most_updates
from rlmath.data.loader import PromptOrder
from rlmath.models.hf_config import inspect_model_folder, planned_shape
from rlmath.trainer import save_schedule
from rlmath.trainer.preflight import checks
from rlmath.trainer.preflight.length_curriculum import stage_list_problems
from rlmath.trainer.preflight.memory_estimate import Target, mesh_of
from rlmath.trainer.preflight.memory_fit import GIB, planned_target, start_up_lines
from rlmath.trainer.preflight.parallelism import planned_ranks
from rlmath.trainer.run_dir import folder_problems
from rlmath.trainer.telemetry.alerts import dropped_alert


@dataclass(frozen=True)
class CountedData:
    """The prompts of a run, counted."""

    order: PromptOrder
    total_steps: int
    lines: tuple[str, ...]
    """One or more for each file, for the console."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class RunPlan:
    """What a run would do, as far as files and settings show."""

    config: Config
    """As given, but for `run.device`: the kind of device that is planned for."""
    shape: ModelShape
    shape_note: str
    ranks: int
    target: Target
    data: CountedData


def plan_run(config: Config, ranks: int | None = None) -> RunPlan:
    """The plan of a run that could start; ValueError that lists everything that keeps it from starting.

    `ranks` is the number of ranks; without it `parallelism.planned_ranks` finds one.
    """
    found, size = planned_shape(config.model.path), planned_ranks(config, ranks)
    if size < 1:
        raise_problems("this run", [f"--ranks is {size}; needed: at least 1."])
    shape, target, data = found.shape, None, None
    of_settings, of_files = checks.run_problems(config, size, shape), list(checks.file_problems(config))
    problems = [*of_settings, *found.problems, *of_files]
    for problem in folder_problems(config.run.output_dir, config, 0, resumes=False):
        problems.append(f'run.output_dir "{config.run.output_dir}": {problem}')
    of_data = [one for one in checks.value_problems(config) if one.startswith("data.")]
    try:
        if shape is not None and not of_files and not of_data and not any(stage_list_problems(config)):
            data = count_data(config, shape)
    except ValueError as error:
        problems.append(str(error))
    try:
        if shape is not None and not of_settings:
            target = planned_target(config)
            if target.kind == "cpu":
                problems += checks.device_problems(config, shape, on_gpu=False)
            problems += checks.memory_problems(config, shape, size)
    except ValueError as error:
        problems.append(str(error))
    raise_problems("this run", problems)
    assert shape is not None and data is not None and target is not None
    planned = replace(config, run=replace(config.run, device=target.kind))
    return RunPlan(planned, shape, found.note, size, target, data)


# ---------------------------------------------------------------- data


def count_data(config: Config, shape: ModelShape) -> CountedData:
    """The prompts that the run would use; ValueError for those that it could not. Without a tokenizer none is dropped
    for its length."""
    tokenizer = None
    folder = Path(config.model.path)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        found = load_inputs(config, shape)
        tokenizer = found.tokenizer
    else:
        found = load_prompt_files(config, tokenizer)
    validation = load_validation(config, tokenizer, shape.vocab_size)
    lines = (*found.lines, *(file.line() for file in validation))
    warning = dropped_alert(found.dropped_share, config.telemetry)
    if tokenizer is None:
        warning = (
            f'lengths were not checked: "{config.model.path}" has no tokenizer here. Prompts longer than '
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} will be dropped, and steps may be fewer."
        )
    return CountedData(found.order, found.total_steps, lines, () if warning is None else (warning,))


# ---------------------------------------------------------------- the plan as text


def plan_lines(plan: RunPlan) -> list[str]:
    """For the console."""
    config, shape = plan.config, plan.shape
    mesh = mesh_of(config, plan.ranks, 0)
    warnings = list(_warnings(plan))
    return [
        "Dry run: nothing is started, nothing is written.",
        f"Model: {config.model.path}, {parameter_count(shape) / 1e9:.3g} B parameters, {shape.num_layers} layers, "
        f"{shape.max_positions} positions",
        *([f"  {plan.shape_note}"] if plan.shape_note else ()),
        f"Layout: {plan.ranks} rank{'s' * (plan.ranks != 1)}, {mesh.describe()}",
        "Data:",
        *(f"  {line}" for line in plan.data.lines),
        *_step_lines(plan),
        *start_up_lines(curriculum.with_longest_lengths(config), shape, plan.ranks),
        *_disk_lines(plan),
        *(["Worth knowing:", *(f"  - {warning}" for warning in warnings)] if warnings else ()),
        "No problem was found.",
    ]


def _step_lines(plan: RunPlan) -> Iterator[str]:
    config, data = plan.config, plan.data
    prompts, group = config.data.prompts_per_step, config.rollout.group_size
    yield f"Step: {prompts} prompts x {group} completions = {prompts * group:,} sequences"
    minibatches, epochs = config.algorithm.n_minibatches, config.algorithm.epochs
    updates = minibatches * epochs
    yield (
        f"  {minibatches} minibatch{'es' * (minibatches != 1)} x {epochs} epoch{'s' * (epochs != 1)} over them: "
        f"{updates} update{'s' * (updates != 1)} a step, {most_updates(config, data.total_steps):,} in all at most"
    )
    if config.selection.dynamic_sampling is not None:
        yield f"  dynamic sampling may ask for up to {config.selection.max_extra_prompts} prompts more a step"
    stages, per_epoch = curriculum.length_stages(config, data.total_steps), data.order.steps_per_epoch
    if len(stages) == 1:
        yield f"  {_tokens(config)}"
    epochs_in_all = f"{data.total_steps / per_epoch:,.1f}".removesuffix(".0")
    yield f"Steps: {data.total_steps:,} in all, {per_epoch:,} an epoch ({epochs_in_all} epochs)"
    if curriculum.has_length_stages(config):
        for stage in stages:
            yield f"  {stage.line(len(stages))}"
            yield f"    {_tokens(stage.config)}"
    if curriculum.validates(config):
        every, samples = config.validation.every_steps, config.validation.samples
        yield (
            f"Validation: every {every} steps, {samples} completion{'s' * (samples != 1)} of each problem, of at most "
            f"{curriculum.validation_tokens(config)} tokens"
        )


def _tokens(config: Config) -> str:
    longest_sequence = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    sequences = config.data.prompts_per_step * config.rollout.group_size
    return (
        f"at most {sequences * longest_sequence:,} tokens a step: sequences of at most "
        f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens} = {longest_sequence}, packed into "
        f"micro-batches of {config.policy.max_tokens_per_microbatch}"
    )


# ---------------------------------------------------------------- disk


def kept_checkpoints(config: Config, total_steps: int, steps_per_epoch: int) -> int:
    """Checkpoints that `save.save_freq_epochs` and `save.save_freq_steps` leave at the end of a run; those of
    `save_freq_secs` depend on its speed.

    >>> from rlmath.config.schema import SaveConfig
    >>> kept_checkpoints(Config(save=SaveConfig(save_freq_steps=4, save_freq_epochs=1)), 12, 6)
    4
    """
    every = save_schedule.kept_frequency(config.save)
    periods = [] if every.steps is None else [every.steps]
    if every.epochs is not None:
        periods.append(every.epochs * steps_per_epoch)
    count = sum(total_steps // period for period in periods)
    if len(periods) == 2:
        count -= total_steps // math.lcm(*periods)
    return count if config.save.keep_models is None else min(count, config.save.keep_models)


def needed_disk(plan: RunPlan) -> int:
    """What the run leaves at most, with the checkpoint that is being written (bytes)."""
    config, save = plan.config, plan.config.save
    checkpoint = save_schedule.checkpoint_bytes(config, plan.shape)
    model = save_schedule.export_bytes(config, plan.shape)
    kept = kept_checkpoints(config, plan.data.total_steps, plan.data.order.steps_per_epoch)
    never = save_schedule.recovery_frequency(save).never and save_schedule.kept_frequency(save).never
    points = 0 if never else save.keep_last + 1
    models = save_schedule.most_models(config) + (kept if save.export_hf else 0)
    return (points + kept) * checkpoint + models * model


def _disk_lines(plan: RunPlan) -> Iterator[str]:
    config, save = plan.config, plan.config.save
    kept = kept_checkpoints(config, plan.data.total_steps, plan.data.order.steps_per_epoch)
    yield (
        f"Disk: a checkpoint is {_gib(save_schedule.checkpoint_bytes(config, plan.shape))} GiB, the exported model "
        f"{_gib(save_schedule.export_bytes(config, plan.shape))}"
    )
    what = []
    if not save_schedule.recovery_frequency(save).never:
        what.append(f"{save.keep_last} recovery points and the one that is being written")
    if kept:
        exported = ", each with its exported model" if save.export_hf else ""
        what.append(f"{kept} checkpoints to keep{exported}")
    if config.stages.steps:
        what.append(f"the models of {len(config.stages.steps)} stages")
    if config.validation.keep_best:
        what.append("the best model, and the better one that takes its place")
    yield f"  needed at most {_gib(needed_disk(plan))} GiB: {'; '.join([*what, 'the model at the end'])}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB else f"{size / GIB:.3f}"


# ---------------------------------------------------------------- what is no problem, and should be known


def _warnings(plan: RunPlan) -> Iterator[str]:
    config = plan.config
    yield from plan.data.warnings
    folder = Path(config.model.path)
    for problem in inspect_model_folder(folder)[1] if folder.exists() else ():
        yield f"a start needs more of the model: {problem}"
    yield from checks.config_warnings(config)
    if plan.target.total_bytes is None:
        yield "the plan is for the CPU, in float32; name a GPU by memory.gpu or memory.gpu_gib."
    if config.save.save_freq_secs is not None:
        yield "save.save_freq_secs: how many checkpoints it keeps depends on the run's speed; they are not counted."
    output = Path(config.run.output_dir).absolute()
    free = shutil.disk_usage(next(path for path in (output, *output.parents) if path.is_dir())).free
    needed = needed_disk(plan)
    if free < needed:
        yield (
            f'the disk of "{config.run.output_dir}" has {_gib(free)} GiB free on this machine, and the run may leave '
            f"{_gib(needed)} GiB. A start there refuses when not even the recovery points fit."
        )
