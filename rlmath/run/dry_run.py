"""A dry run: every check that needs no GPU, no weights and no process group, and the plan.

Nothing is written. If the model lies elsewhere, its config.json (`config_json.planned_shape`) or a
published shape is enough; without a tokenizer prompts are counted and their lengths are not
checked. A folder with weights must be complete.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.checkpoint import save_schedule
from rlmath.checkpoint.hf.config_json import (
    PlannedShape,
    has_weights,
    hub_name,
    inspect_model_folder,
    missing_folder_problem,
    planned_shape,
)
from rlmath.checkpoint.hf.peft import other_base_warnings
from rlmath.checkpoint.hf.run_shapes import RunShapes, inspect_run_shapes
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config import length_curriculum
from rlmath.config.help import as_yaml_word, counted, raise_problems, setting_values
from rlmath.config.hub import HubFailedError
from rlmath.config.load import load_config, preset_values
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, Kind
from rlmath.data.audit import EXAMPLES
from rlmath.data.dataset import most_updates
from rlmath.data.picture import call_picture
from rlmath.distributed.device_kind import number_format
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, FINISHED, MISTAKE
from rlmath.distributed.memory import total_bytes
from rlmath.distributed.ranks import environment_rank
from rlmath.planning import checks
from rlmath.planning.machine_room import OVERSUBSCRIBE, room_advice, room_problems, this_machine
from rlmath.planning.memory_estimate import (
    Target,
    captured_route_bytes,
    carried_route_bytes,
    mesh_of,
)
from rlmath.planning.memory_fit import GIB, host_bytes, planned_target, start_up_lines
from rlmath.planning.memory_formulas import route_bytes
from rlmath.planning.model_checks import routing_warnings
from rlmath.planning.parallelism import planned_ranks, roles
from rlmath.planning.reward_checks import hook_lines, reward_lines
from rlmath.planning.setting_warnings import config_warnings
from rlmath.rollout.unfinished_rules import slice_tokens, unfinished_bytes, unfinished_rules
from rlmath.run.prepare import RunData, dropped_warning, read_inputs, tokenizer_problem, try_data
from rlmath.run.recovery.hub_inputs import download_lines, fetch_inputs
from rlmath.run.recovery.resume import Recovery, find_recovery
from rlmath.run.run_dir import folder_problems
from rlmath.telemetry.console import terminal_width, wrapped

DATA_FUNCTIONS = ("run.plugins:", "data.format:", "data.template:", "validation.template:")
"""How the problems begin that concern functions without which the data cannot be read."""


@dataclass(frozen=True)
class RunPlan:
    """What a run would do, as far as files and settings show."""

    config: Config
    """The run's settings, with the kind of device that is planned for as `run.device`.

    Settings without effect in a supervised run are at their defaults there."""
    shapes: RunShapes
    shape_note: str
    ranks: int
    target: Target
    data: RunData
    kind: Kind = "grpo"
    unused: tuple[str, ...] = ()
    """Settings that have no effect in a supervised run."""
    missing: tuple[str, ...] = ()
    """Parts of the model that a start needs and that are not here."""
    recovery: Recovery | None = None
    """The checkpoints that a start here would resume from."""
    ranks_are_least: bool = False
    """Neither settings nor a launcher nor the user named their number."""
    not_here: tuple[str, ...] = ()
    """Why a start on this machine would be refused, in a plan for another."""
    crowding: str = ""
    """Why this machine has no room for ranks that are asked for all the same."""

    @property
    def total_steps(self) -> int:
        return self.data.inputs.total_steps


def dry_run(
    config_files: Sequence[Path],
    overrides: Sequence[str],
    ranks: int | None,
    kind: Kind = "grpo",
    oversubscribe: bool = False,
) -> int:
    """Print the plan of a run, or all problems, and return the exit status.

    It is MISTAKE if the run could not start and FAILURE if the hub could not be asked.
    `oversubscribe` is as in `plan_run`."""
    rank = 0
    try:
        rank = environment_rank()
        config = load_config(config_files, overrides)
        if rank == 0 and sys.stderr.isatty():
            print("Reading the settings, the model and the data ...", file=sys.stderr)
        config = fetch_inputs(config, None, weights=False)
        title, *lines = plan_lines(plan_run(config, ranks, kind, oversubscribe=oversubscribe))
        lines = [title, *download_lines(config), *lines]
    except (ValueError, HubFailedError) as error:
        status = FAILURE if isinstance(error, HubFailedError) else MISTAKE
        lines = [str(error)]
        stream = sys.stderr
    else:
        status = FINISHED
        stream = sys.stdout
    if rank == 0:
        text = "\n".join(lines)
        width = terminal_width(stream)
        print(text if width is None else wrapped(text, width), file=stream)
    return status


def plan_run(
    settings: Config, ranks: int | None = None, kind: Kind = "grpo", *, oversubscribe: bool = False
) -> RunPlan:
    """The plan of a run that could start; else a ValueError that lists all problems.

    `ranks` is the number of ranks; without it `parallelism.planned_ranks` finds one. With
    `oversubscribe` they may be more than this machine has room for.
    """
    config, unused = checks.only_used(settings) if kind == "sft" else (settings, [])
    planned = planned_shape(config.model.path)
    world_size = planned_ranks(config.parallel, config.rollout, ranks)
    if world_size < 1:
        raise_problems("this run", [f"--ranks is {world_size}; needed: at least 1."])
    shape = planned.shape
    inspected = None if shape is None else inspect_run_shapes(config, shape, kind)
    problems_of_settings = checks.run_problems(config, world_size, inspected, kind=kind)
    problems_of_files = list(checks.file_problems(config, kind))
    problems_of_model, missing = model_problems(config.model.path, planned)
    problems = [*problems_of_settings, *problems_of_model, *problems_of_files]
    data = None
    if shape is not None and not problems_of_files:
        data, problems_of_data = _read_data(
            config,
            shape,
            kind,
            problems_of_settings=problems_of_settings,
            has_whole_model=not problems_of_model,
        )
        problems += problems_of_data
    recovery, problems_of_recovery = _recovery(config, data)
    problems += problems_of_recovery
    problems += _output_problems(config, resumes=bool(recovery or problems_of_recovery))
    target = None
    if inspected is not None and not problems_of_settings:
        target, problems_of_device = _device(config, inspected.shapes, world_size, kind=kind)
        problems += problems_of_device
    raise_problems("this run", problems)
    assert inspected is not None and data is not None and target is not None
    shapes = inspected.shapes.with_total_steps(config, data.inputs.total_steps)
    crowding = _crowding(config, shapes, world_size, target=target, kind=kind)
    return RunPlan(
        replace(config, run=replace(config.run, device=target.kind)),
        shapes,
        shape_note=planned.note,
        ranks=world_size,
        target=target,
        data=data,
        kind=kind,
        unused=tuple(unused),
        missing=tuple(missing),
        recovery=recovery,
        ranks_are_least=ranks is None
        and config.parallel.data is None
        and "WORLD_SIZE" not in os.environ,
        not_here=(
            *checks.cuda_problems(config.run.device),
            *(checks.isolation_problems(config.tools) if kind == "grpo" else ()),
            *([f"{crowding} {room_advice(world_size)}"] if crowding and not oversubscribe else ()),
        ),
        crowding=crowding if oversubscribe else "",
    )


def _read_data(
    config: Config,
    shape: ModelShape,
    kind: Kind,
    problems_of_settings: Sequence[str],
    has_whole_model: bool,
) -> tuple[RunData | None, list[str]]:
    """The run's data, and why they cannot be used.

    Neither is known where other problems keep them from being read."""
    problems_before_reading = [
        problem
        for problem in checks.value_problems(config)
        if problem.startswith(("data.", "sft."))
    ]
    problems_before_reading += [
        problem for problem in problems_of_settings if problem.startswith(DATA_FUNCTIONS)
    ]
    try:
        if problems_before_reading or any(length_curriculum.stage_list_problems(config)):
            return None, []
        if kind == "sft" and not has_whole_model and tokenizer_problem(config) is not None:
            return None, []
        run_data = read_inputs(config, shape, kind)
        # A function that cannot be imported is among the problems already.
        return try_data(
            config, shape, run_data, calls_functions=not problems_of_settings, examples=EXAMPLES
        ), []
    except ValueError as error:
        return None, [str(error)]


def _output_problems(config: Config, resumes: bool) -> list[str]:
    """Problems of the run's folder."""
    output_dir = config.run.output_dir
    return [
        f'run.output_dir "{output_dir}": {problem}'
        for problem in folder_problems(output_dir, config, needed_bytes=0, resumes=resumes)
    ]


def _device(
    config: Config, shapes: RunShapes, world_size: int, kind: Kind
) -> tuple[Target | None, list[str]]:
    """The device that is planned for, and why the run does not fit it."""
    target = None
    problems: list[str] = []
    try:
        target = planned_target(config.memory, config.policy, config.run.device)
        if target.kind == "cpu":
            for problem in checks.cuda_problems(config.run.device):
                problems.append(
                    f"{problem} To plan for a GPU that is not here, name it by memory.gpu."
                )
            problems += checks.device_problems(config, shapes.policy, on_gpu=False, kind=kind)
            problems += checks.host_memory_problems(config.rollout) if kind == "grpo" else ()
        problems += checks.memory_problems(config, shapes, world_size, kind=kind)
    except ValueError as error:
        problems.append(str(error))
    return target, problems


def _crowding(
    config: Config, shapes: RunShapes, world_size: int, target: Target, kind: Kind
) -> str:
    """Why this machine has no room for the ranks; empty where it has, and for a GPU."""
    if target.kind != "cpu":
        return ""
    needed_bytes = host_bytes(config, shapes, world_size, kind=kind)
    return " ".join(room_problems(world_size, this_machine(gpus=0), needed_bytes))


def _recovery(config: Config, data: RunData | None) -> tuple[Recovery | None, list[str]]:
    """The recovery that a start here would make, and why it would refuse to.

    Without data neither is known."""
    if data is None:
        return None, []
    try:
        return find_recovery(config, data.origin, data.inputs.total_steps), []
    except ValueError as error:
        return None, [str(error).replace("\n", "\n  ")]


def model_problems(model_path: str, planned: PlannedShape) -> tuple[list[str], list[str]]:
    """Problems of the model's folder, and parts that a start needs and that are not here.

    In a folder without any weights only config.json must be right, so that a plan can be made
    where the model is not."""
    folder = Path(model_path)
    if not os.path.exists(folder):
        return ([missing_folder_problem(folder)] if hub_name(folder) else planned.problems), []
    problems = inspect_model_folder(folder)[1]
    if not folder.is_dir() or has_weights(folder):
        return problems, []
    return planned.problems, [problem for problem in problems if problem not in planned.problems]


# ---------------------------------------------------------------- the plan as text


def plan_lines(plan: RunPlan) -> list[str]:
    """The lines of the plan for the console."""
    config = plan.config
    shape = plan.shapes.policy
    mesh = mesh_of(config.parallel, config.rollout, plan.ranks, rank=0)
    layout = mesh.describe() if plan.kind == "grpo" else mesh.training_layout
    warnings = list(_warnings(plan))
    return [
        "Dry run: nothing is started, nothing is written.",
        f"Model: {config.model.path}, {parameter_count(shape) / 1e9:.3g} B parameters, "
        f"{shape.num_layers} layers, "
        f"{shape.max_positions} positions",
        *([f"  {plan.shape_note}"] if plan.shape_note else ()),
        f"Layout: {counted(plan.ranks, 'rank')}, {layout}",
        *([f"  {roles_text}"] if (roles_text := roles(plan.ranks, mesh.engine_ranks)) else ()),
        *(
            ["  (the least for this layout; --ranks N plans for others)"]
            if plan.ranks_are_least
            else ()
        ),
        "Data:",
        *(f"  {line}" for line in plan.data.lines),
        *(_tool_lines(plan) if plan.kind == "grpo" else ()),
        *(_turn_lines(plan.config) if plan.kind == "grpo" else ()),
        *hook_lines(config, plan.kind),
        *(preset_lines(config) if plan.kind == "grpo" else ()),
        *(_reward_lines(config) if plan.kind == "grpo" else ()),
        *(_step_lines(plan) if plan.kind == "grpo" else _sft_step_lines(plan)),
        *start_up_lines(config, plan.shapes, plan.ranks, kind=plan.kind),
        *_disk_lines(plan),
        *_resume_lines(plan),
        *(["Worth knowing:"] if warnings else ()),
        *(f"  - {warning}".replace("\n", "\n    ") for warning in warnings),
        _verdict(plan),
    ]


def _turn_lines(config: Config) -> Iterator[str]:
    """A line about further turns, where there are some."""
    turns = config.turns
    if not config.answers_turns:
        return
    source = f'turns.feedback "{turns.feedback}", behind wrong ones'
    if config.environment.function is not None:
        source = config.environment.function
    yield (
        f"Turns: {turns.max} answers of a completion at most; between two up to "
        f"{turns.max_feedback_tokens} tokens of {source}"
    )


def _tool_lines(plan: RunPlan) -> Iterator[str]:
    """Lines about the tool, and a prompt with a made-up call as the model would see it."""
    tools = plan.config.tools
    if tools.format is None:
        return
    form = "in fences" if tools.format == "fence" else "in the form of the chat template"
    yield (
        f"Tool: Python {form}, {counted(tools.max_calls, 'call')} of a completion at most, each "
        f"with up to {tools.max_output_tokens} tokens of output; isolation {tools.isolation}, "
        f"state {tools.state}"
    )
    tokenizer = getattr(plan.data.inputs, "tokenizer", None)
    if tokenizer is not None:
        prompt = plan.data.inputs.prompts[0]
        yield "  a made-up answer to the first prompt (* is learned, │ ends a token):"
        lines = call_picture(prompt.text, prompt.token_ids, tools, tokenizer=tokenizer)
        yield from (f"  {line}" for line in lines)


def _verdict(plan: RunPlan) -> str:
    """The last line, which agrees with what is said above it."""
    verdict = "No problem was found"
    if plan.not_here:
        verdict += ", but a start on this machine would be refused"
    elif plan.crowding:
        verdict += ", but this machine has no room for so many ranks"
    is_elsewhere = plan.missing or plan.shape_note
    return f"{verdict}." + " A start needs the whole model, which is not here." * bool(is_elsewhere)


def preset_lines(config: Config) -> Iterator[str]:
    """Lines with the settings of `algorithm.preset`, and where the run differs from them."""
    if (name := config.algorithm.preset) is None:
        return
    yield f"Preset: {name} is configs/algorithms/{name}.yaml"
    values = setting_values(config)
    for key, preset_value in preset_values(config).items():
        difference = "" if values[key] == preset_value else f", here {as_yaml_word(values[key])}"
        yield f"  {key}={as_yaml_word(preset_value)}{difference}"


def _reward_lines(config: Config) -> Iterator[str]:
    """Lines about the rewards of a GRPO run's longest completions."""
    longest = length_curriculum.with_longest_lengths(config).rollout.max_new_tokens
    return reward_lines(config.reward, config.algorithm, config.teacher, longest=longest)


def _step_lines(plan: RunPlan) -> Iterator[str]:
    """Lines about a GRPO run's steps and validation."""
    config = plan.config
    data = plan.data
    prompts = config.data.prompts_per_step
    group = config.rollout.group_size
    yield (
        f"Step: {counted(prompts, 'prompt')} x {counted(group, 'completion')} = "
        f"{prompts * group:,} sequences"
    )
    if (learned := config.learned_group_size) < group:
        yield (
            f"  {learned} of the {group} are learned from, {prompts * learned:,} sequences a step: "
            "of right answers those with the fewest failed calls, of wrong ones any"
        )
    minibatches = config.algorithm.n_minibatches
    epochs = config.algorithm.epochs
    yield (
        f"  {minibatches} minibatch{'es' * (minibatches != 1)} x {counted(epochs, 'epoch')} over "
        "them: "
        f"{counted(minibatches * epochs, 'update')} a step, "
        f"{most_updates(config, plan.total_steps):,} in all at most"
    )
    if (critic := plan.shapes.critic) is not None:
        yield (
            f"  a critic of {parameter_count(critic) / 1e9:.3g} B parameters learns from the "
            "same minibatches"
        )
    shape = plan.shapes.policy
    if config.policy.routing_replay != "none":
        token_bytes = route_bytes(shape, shape.num_layers, tokens=1)
        whose = (
            "the engines chose" if config.policy.routing_replay == "engine" else "it chose first"
        )
        yield (
            f"  the policy replays the experts that {whose}, {token_bytes:,} bytes a token on the "
            "ranks that have it"
        )
    if config.selection.dynamic_sampling is not None:
        extra = counted(config.selection.max_extra_prompts, "prompt")
        yield f"  dynamic sampling may ask for up to {extra} more a step"
    stages = plan.shapes.length_stages
    slices = ", ".join(dict.fromkeys(f"{slice_tokens(stage.config.rollout):,}" for stage in stages))
    staleness = config.rollout.max_staleness
    if config.rollout.ranks:
        most_groups_begun = (staleness + 1) * prompts
        yield (
            f"  asynchronous: {most_groups_begun:,} groups at most are begun before the first step, "
            f"{prompts:,} more after each, "
            f"learned from within {counted(staleness, 'step')} of their first token"
        )
    elif config.rollout.tail == "carry":
        yield (
            f"  partial rollouts: slices of {slices} tokens, at most "
            f"{unfinished_rules(config).max_groups:,} "
            f"groups in flight, learned from within {counted(staleness, 'step')} of their first "
            "token"
        )
    elif config.rollout.tail == "defer":
        yield (
            f"  tail batching: groups with a completion of more than {slices} tokens are sampled "
            "anew, with the same "
            "noise, in steps of their own; what that biases: docs/algorithm.md"
        )
    if len(stages) == 1:
        yield f"  {_tokens(config)}"
    yield _steps(data)
    if length_curriculum.has_length_stages(config):
        for stage in stages:
            yield f"  {stage.line(len(stages))}"
            yield f"    {_tokens(stage.config)}"
    if length_curriculum.validates(config):
        every = config.validation.every_steps
        samples = counted(config.validation.samples, "completion")
        longest = length_curriculum.validation_tokens(config)
        yield (
            f"Validation: every {counted(every, 'step')}, {samples} of each problem, of at most "
            f"{longest} tokens"
        )


def _sft_step_lines(plan: RunPlan) -> Iterator[str]:
    """Lines about the steps of supervised training."""
    config = plan.config
    sft = plan.config.sft
    sequences = config.data.prompts_per_step
    longest = sft.max_sequence_tokens
    yield (
        f"Step: {counted(sequences, 'sequence')} of at most {longest} tokens, "
        f"{sequences * longest:,} in all, "
        f"packed into micro-batches of {config.policy.max_tokens_per_microbatch}; one update"
    )
    yield _steps(plan.data)
    if sft.eval_every_steps is not None:
        yield f"Held-out sequences: their loss every {counted(sft.eval_every_steps, 'step')}"


def _steps(data: RunData) -> str:
    per_epoch = data.inputs.order.steps_per_epoch
    epochs = f"{data.inputs.total_steps / per_epoch:,.1f}".removesuffix(".0")
    in_all = f"({epochs} epoch{'s' * (epochs != '1')})"
    return f"Steps: {data.inputs.total_steps:,} in all, {per_epoch:,} an epoch {in_all}"


def _tokens(config: Config) -> str:
    longest_sequence = length_curriculum.sequence_length(config)
    sequences = config.data.prompts_per_step * config.rollout.group_size
    most_given = length_curriculum.unsampled_limit(config)
    return (
        f"at most {sequences * longest_sequence:,} tokens a step: sequences of at most "
        f"{length_curriculum.sequence_text(config, keys=False)} = {longest_sequence}, "
        f"{f'of which up to {most_given} are not sampled, ' if most_given else ''}packed into "
        f"micro-batches of {config.policy.max_tokens_per_microbatch}"
    )


# ---------------------------------------------------------------- disk


def kept_checkpoints(config: Config, total_steps: int, steps_per_epoch: int) -> int:
    """Most checkpoints that `save.save_freq_epochs` and `save.save_freq_steps` leave after a run.

    The number of those of `save_freq_secs` depends on the run's speed and is not counted.

    >>> from rlmath.config.schema import SaveConfig
    >>> kept_checkpoints(Config(save=SaveConfig(save_freq_steps=4, save_freq_epochs=1)), 12, 6)
    5
    """
    frequency = save_schedule.kept_frequency(config.save)
    periods = [frequency.steps or math.inf, (frequency.epochs or math.inf) * steps_per_epoch]
    count = sum(int(total_steps // period) for period in periods)
    return count if config.save.keep_models is None else min(count, config.save.keep_models)


def checkpoint_disk(plan: RunPlan) -> int:
    """Most bytes of a checkpoint on the disk, with what it has of groups in flight."""
    config = plan.config
    size = save_schedule.checkpoint_bytes(config, plan.shapes) + unfinished_bytes(config)
    return size + carried_route_bytes(config, plan.shapes)


def needed_disk(plan: RunPlan) -> int:
    """Most bytes that the run takes on the disk, with the checkpoint that is being written.

    Captured steps count with their routes alone, which are most of them."""
    config = plan.config
    save = plan.config.save
    model = save_schedule.export_bytes(config, plan.shapes.policy)
    kept_count = kept_checkpoints(config, plan.total_steps, plan.data.inputs.order.steps_per_epoch)
    never = (
        save_schedule.recovery_frequency(save).never and save_schedule.kept_frequency(save).never
    )
    recovery_points = 0 if never else save.keep_last + 1
    models = save_schedule.most_models(config) + (kept_count if save.export_hf else 0)
    checkpoints = (recovery_points + kept_count) * checkpoint_disk(plan)
    return checkpoints + models * model + captured_route_bytes(config, plan.shapes)


def _disk_lines(plan: RunPlan) -> Iterator[str]:
    """The line about checkpoints, exported models and the disk space for all of them."""
    uncounted = (
        " without those of save.save_freq_secs"
        if plan.config.save.save_freq_secs is not None
        else ""
    )
    yield (
        f"Disk: a checkpoint is {_gib(checkpoint_disk(plan))} "
        "GiB, the exported "
        f"model {_gib(save_schedule.export_bytes(plan.config, plan.shapes.policy))}; needed at most "
        f"{_gib(needed_disk(plan))} "
        f"GiB in all{uncounted}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB else f"{size / GIB:.3f}"


def _resume_lines(plan: RunPlan) -> Iterator[str]:
    if plan.recovery is not None:
        checkpoint = plan.recovery.candidates[0][0]
        yield (
            f"Resumes: after step {checkpoint.step}, from {checkpoint.folder}, where its files "
            "are whole"
        )


# ---------------------------------------------------------------- warnings


def _warnings(plan: RunPlan) -> Iterator[str]:
    """Warnings about what does not keep the run from starting."""
    config = plan.config
    yield from plan.data.warnings
    yield from other_base_warnings(config.model.adapter_path, config.model.path)
    if plan.kind == "grpo" and (dropped := dropped_warning(config, plan.data)) is not None:
        yield dropped
    yield from length_curriculum.fewer_steps_warnings(
        config, plan.data.inputs.order.steps_per_epoch
    )
    yield from length_curriculum.late_steps_warnings(config, plan.total_steps)
    if plan.recovery is not None:
        yield from (*plan.recovery.notes, *plan.recovery.warnings)
    for problem in plan.missing:
        yield f"a start needs more of the model: {problem}"
    if plan.crowding:
        yield f"{OVERSUBSCRIBE} starts all ranks: {plan.crowding}"
    for problem in plan.not_here:
        yield f"a start on this machine would be refused: {problem}"
    yield from config_warnings(config, plan.unused, parameter_count(plan.shapes.policy))
    if plan.kind == "grpo":
        yield from routing_warnings(config.policy, plan.shapes.policy)
    if plan.target.total_bytes is None:
        planned_format = number_format(config.policy.dtype, plan.target.kind)
        yield (
            f"the plan is for the CPU, in {planned_format}; name a GPU by memory.gpu or "
            "memory.gpu_gib."
        )
        with_cache = config.rollout.ranks or plan.ranks
        caches = config.rollout.cpu_kv_cache_gib * with_cache
        if plan.kind == "grpo" and caches * GIB > total_bytes():
            yield (
                f"the KV caches of {counted(with_cache, 'rank')} (rollout.cpu_kv_cache_gib) take "
                f"{caches:g} GiB, more "
                f"than this machine's {total_bytes() / GIB:.1f}: the ranks need several such "
                "machines, or a smaller "
                "cache."
            )
    output = Path(config.run.output_dir).absolute()
    free_bytes = shutil.disk_usage(
        next(path for path in (output, *output.parents) if path.is_dir())
    ).free
    needed_bytes = needed_disk(plan)
    if free_bytes < needed_bytes:
        yield (
            f'the disk of "{config.run.output_dir}" has {_gib(free_bytes)} GiB free on this '
            "machine, and the run may leave "
            f"{_gib(needed_bytes)} GiB. A start there refuses when not even the recovery points fit."
        )
