"""Whether a supervised run fits its GPU: there is no engine, and training is the only phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from rlmath.config.help import all_settings, raise_problems, setting_values
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.files import existing_place
from rlmath.distributed.device import environment_rank
from rlmath.models.hf_config import inspect_model_folder
from rlmath.trainer.preflight.checks import config_warnings, value_problems
from rlmath.trainer.preflight.memory_estimate import MemoryPlan, Target, largest, plan_ranks
from rlmath.trainer.preflight.memory_fit import GIB, RESERVE, figures, planned_target, usable_bytes
from rlmath.trainer.preflight.parallelism import (
    context_problems,
    expert_problems,
    expert_tensor_problems,
    rank_problems,
    split_problems,
    stage_problems,
)
from rlmath.trainer.telemetry.wandb import wandb_problems

PHASE = "update"

_OF_THE_ENGINE = "engine_workspace"


def plan_training(config: Config, shape: ModelShape, world_size: int, target: Target) -> list[MemoryPlan]:
    """The plan of the first rank of every pipeline stage. The layout must have no problems (`layout_checks`)."""
    return [
        MemoryPlan(
            plan.rank,
            plan.stage,
            {PHASE: {part: size for part, size in plan.phases[PHASE].items() if part != _OF_THE_ENGINE}},
        )
        for plan in plan_ranks(config, shape, world_size, target)
    ]


def fit_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """What does not fit the GPU; empty on CPU."""
    target = planned_target(config)
    if target.total_bytes is None:
        return []
    plan, phase = largest(plan_training(config, shape, world_size, target))
    if plan.held(phase) <= usable_bytes(target):
        return []
    policy, parallel = config.policy, config.parallel
    return [
        f"memory: rank {plan.rank} (pipeline stage {plan.stage}) needs {figures(plan, phase)}; {target.name} has "
        f"{target.total_bytes / GIB:.2f} GiB, of which a run may fill {usable_bytes(target) / GIB:.2f} (without "
        f"{RESERVE}). Lower policy.max_tokens_per_microbatch (now {policy.max_tokens_per_microbatch}, at least "
        f"sft.max_sequence_tokens={config.sft.max_sequence_tokens}), set policy.recompute_granularity=full "
        f"policy.recompute_method=uniform policy.recompute_num_layers=1, or raise parallel.tensor (now "
        f"{parallel.tensor}) or parallel.pipeline (now {parallel.pipeline})."
    ]


def start_up_line(config: Config, shape: ModelShape, world_size: int) -> str:
    """The plan of the rank that holds the most."""
    target = planned_target(config)
    plan, phase = largest(plan_training(config, shape, world_size, target))
    return f"Planned memory of rank {plan.rank} (pipeline stage {plan.stage}) on {target.name}: {figures(plan, phase)}"


_USED = (
    "run.",
    "model.",
    "data.train_path",
    "data.more_train_paths",
    "data.train_weights",
    "data.template",
    "data.prompts_per_step",
    "data.max_unusable_share",
    "data.shuffle",
    "parallel.",
    "policy.",
    "optimizer.",
    "memory.gpu",
    "memory.gpu_gib",
    "sft.",
    "telemetry.tensorboard",
    "telemetry.wandb",
    "telemetry.wandb_project",
    "telemetry.wandb_name",
    "save.",
)
"""Settings, or whole sections, that a supervised run has."""


def used_keys() -> list[str]:
    """Of all settings those that have an effect."""
    return [key for key in all_settings() if _is_used(key)]


def _is_used(key: str) -> bool:
    return any(key.startswith(one) if one.endswith(".") else key == one for one in _USED)


def only_used(config: Config) -> tuple[Config, list[str]]:
    """The settings with the defaults of those that have no effect, and the keys that were not at them."""
    defaults, changed = all_settings(), []
    sections = {name: {} for name, _, _ in (key.partition(".") for key in defaults)}
    for key, value in setting_values(config).items():
        section, _, name = key.partition(".")
        if not _is_used(key) and value != defaults[key].default:
            sections[section][name] = defaults[key].default
            changed.append(key)
    replaced = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in sections.items()
        if values
    }
    return dataclasses.replace(config, **replaced), changed


def notes(config: Config, unused: list[str]) -> list[str]:
    """What changes nothing in this run, to be told at its start."""
    without_effect = [f"Without effect in supervised training: {', '.join(unused)}."] if unused else []
    return [*without_effect, *config_warnings(config)]


def check_config(config: Config, world_size: int) -> ModelShape:
    """The shape of the model that the run starts from. ValueError that lists every problem of settings, model folder
    and files; nothing is written."""
    shape, model_problems = inspect_model_folder(Path(config.model.path))
    on_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    problems = [
        *run_problems(config, world_size, shape),
        *context_problems(config.parallel, on_gpu),
        *expert_tensor_problems(config.parallel, on_gpu),
        *_device_problems(config),
        *model_problems,
        *(wandb_problems(config.telemetry) if environment_rank() == 0 else ()),
    ]
    if shape is not None and not problems:
        problems += fit_problems(config, shape, world_size)
    raise_problems("this run", problems)
    assert shape is not None
    return shape


def run_problems(config: Config, world_size: int, shape: ModelShape | None) -> list[str]:
    """What is wrong whatever machine the run is on; None: what can be told without the model's shape."""
    problems = [
        *value_problems(config),
        *rank_problems(config.parallel, 1, world_size),
        *_length_problems(config),
        *_place_problems(config),
    ]
    if shape is not None:
        problems += split_problems(config.parallel, 1, shape)
        problems += expert_problems(config.parallel, shape)
        problems += stage_problems(config.parallel, config.policy, shape.num_layers)
        problems += _position_problems(config, shape)
    return problems


def _length_problems(config: Config) -> Iterator[str]:
    longest, budget = config.sft.max_sequence_tokens, config.policy.max_tokens_per_microbatch
    if budget < longest:
        yield (
            f"policy.max_tokens_per_microbatch is {budget}; a sequence of sft.max_sequence_tokens={longest} tokens "
            "must fit. Raise the former, or lower the latter."
        )


def _position_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    longest = config.sft.max_sequence_tokens
    if longest > shape.max_positions:
        yield (
            f"sft.max_sequence_tokens is {longest}; the model has {shape.max_positions} positions "
            f"(max_position_embeddings). Lower it to {shape.max_positions} or less."
        )


def _device_problems(config: Config) -> Iterator[str]:
    if config.run.device == "cuda" and not torch.cuda.is_available():
        yield 'run.device is "cuda", and torch finds no CUDA device. Use run.device=cpu, or a GPU machine.'


def _place_problems(config: Config) -> Iterator[str]:
    data, held_out = config.data, config.sft.held_out_path
    places = [("data.train_path", data.train_path)]
    places += [("data.more_train_paths", path) for path in data.more_train_paths]
    places += [("sft.held_out_path", held_out)] if held_out is not None else []
    for key, path in places:
        try:
            existing_place(path)
        except ValueError as error:
            yield f"{key}: {error}. Give a file or folder of sequences."
