"""Checks of a run before it starts: settings, files, model folder, machine and memory.

`check_config` is what the launch scripts call, for GRPO ("grpo") and supervised training ("sft");
it raises one ValueError with all problems. The other functions each return the problems of one
kind, as one text per problem: what was given, what is needed and what to change."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlmath.algorithms.types import GROUP_ADVANTAGES
from rlmath.checkpoint.hf.config_json import inspect_model_folder
from rlmath.checkpoint.hf.run_shapes import InspectedShapes, RunShapes, inspect_run_shapes
from rlmath.config.help import (
    all_settings,
    is_among,
    nearest_path,
    raise_problems,
    schema_problems,
    setting_values,
)
from rlmath.config.hub import is_hub_id, push_problems
from rlmath.config.length_curriculum import (
    LengthStage,
    checked_length_stages,
    sequence_length,
    sequence_text,
    stage_list_problems,
    validates,
)
from rlmath.config.load import preset_settings
from rlmath.config.model_shape import ModelShape, cpu_head_dim_problem
from rlmath.config.schema import (
    Config,
    DataConfig,
    Kind,
    PolicyConfig,
    RolloutConfig,
    SelectionConfig,
    SftConfig,
    ToolsConfig,
)
from rlmath.data.chat import chat_settings
from rlmath.distributed.device_kind import (
    FORMAT_BYTES,
    cuda_is_available,
    number_format,
    set_cuda_defaults,
)
from rlmath.distributed.memory import available_bytes, total_bytes
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.planning import model_checks, parallelism
from rlmath.planning import rollout_checks as rollouts
from rlmath.planning.memory_fit import GIB, fit_problems
from rlmath.planning.memory_formulas import longest_sequence_bytes
from rlmath.planning.reward_checks import hook_problems, reward_problems
from rlmath.planning.setting_tables import conflicts, learns_from_the_teacher_alone
from rlmath.rewards.several_rewards import reward_hooks
from rlmath.sandbox.kernel import lacking
from rlmath.telemetry.wandb import wandb_problems
from rlmath.workers.hooks import function_problem
from rlmath.workers.user_functions import advantage_hook


def check_config(config: Config, world_size: int, kind: Kind = "grpo") -> RunShapes:
    """Check a run and return the shapes of its models.

    It reads, and writes nothing: every rank may call it. `world_size` is the number of ranks of the
    run. Errors: ValueError that lists every problem of the config, the model's folder and the
    training files."""
    shape, model_problems = inspect_model_folder(Path(config.model.path))
    inspected = None if shape is None else inspect_run_shapes(config, shape, kind)
    on_gpu = runs_on_gpu(config.run.device)
    problems = [
        *run_problems(config, world_size, inspected, kind=kind),
        *machine_problems(config, shape, kind),
        *(host_memory_problems(config.rollout) if kind == "grpo" and not on_gpu else ()),
        *file_problems(config, kind),
        *(isolation_problems(config.tools) if kind == "grpo" else ()),
        *(wandb_problems(config.telemetry) if environment_rank() == 0 else ()),
        *push_problems(config.save, environment_rank() == 0),
        *model_problems,
        *(_folder_problems(config, shape) if kind == "grpo" else ()),
    ]
    return _fitting_shapes(
        "this run", problems, config=config, inspected=inspected, world_size=world_size, kind=kind
    )


def check_replay(
    config: Config, world_size: int, samples: bool, has_routes: bool = False
) -> RunShapes:
    """The shapes of the models for the replay of a captured step (`replay`), after its checks.

    They are those of `check_config`, but data files are not checked, and reward functions and
    engines only if it `samples`. `has_routes`: the capture has those of its completions."""
    shape, problems = inspect_model_folder(Path(config.model.path))
    inspected = None if shape is None else inspect_run_shapes(config, shape)
    stages = checked_length_stages(config) if inspected is None else inspected.shapes.length_stages
    problems += setting_problems(config, stages, world_size)
    if inspected is not None:
        problems += shape_problems(config, inspected)
    if samples:
        problems += cuda_problems(config.run.device)
        problems += filter(
            None, map(function_problem, reward_hooks(config.reward, config.run.plugins))
        )
        problems += () if runs_on_gpu(config.run.device) else host_memory_problems(config.rollout)
    else:
        problems += machine_problems(config, shape)
        problems += _folder_problems(config, shape)
        problems += () if has_routes else model_checks.uncaptured_route_problems(config.policy)
    return _fitting_shapes(
        "this replay", problems, config=config, inspected=inspected, world_size=world_size
    )


def _folder_problems(config: Config, shape: ModelShape | None) -> list[str]:
    return model_checks.folder_problems(
        config.teacher, config.critic, config.algorithm.advantage, shape=shape
    )


def _fitting_shapes(
    what: str,
    problems: list[str],
    config: Config,
    inspected: InspectedShapes | None,
    world_size: int,
    kind: Kind = "grpo",
) -> RunShapes:
    """The shapes; a ValueError with the problems where there are some, those of memory included."""
    if inspected is not None and not problems:
        problems = memory_problems(config, inspected.shapes, world_size, kind=kind)
    raise_problems(what, problems)
    assert inspected is not None
    return inspected.shapes


def runs_on_gpu(device: str) -> bool:
    """Whether a run with this `run.device` runs on a GPU of this machine."""
    return device != "cpu" and cuda_is_available()


def machine_problems(config: Config, shape: ModelShape | None, kind: Kind = "grpo") -> list[str]:
    """Problems of the layout and the layers on this machine.

    A requested GPU that is not there is one of them."""
    on_gpu = runs_on_gpu(config.run.device)
    return [
        *device_problems(config, shape, on_gpu or config.run.device == "cuda", kind=kind),
        *(transformer_engine_problems(config.policy.transformer_impl) if on_gpu else ()),
        *cuda_problems(config.run.device),
    ]


def run_problems(
    config: Config, world_size: int, inspected: InspectedShapes | None, kind: Kind = "grpo"
) -> list[str]:
    """Problems that keep every machine from running these settings.

    `inspected` are the shapes of the run's models; None: the policy's is not known."""
    stages = checked_length_stages(config) if inspected is None else inspected.shapes.length_stages
    problems = [
        *setting_problems(config, stages, world_size, kind=kind),
        *rollouts.rollback_problems(config.algorithm, config.save),
    ]
    if kind == "grpo":
        for check in (
            algorithm_problems,
            lambda stage: reward_problems(
                stage.reward, stage.rollout.max_new_tokens, stage.run.plugins
            ),
            lambda stage: rollouts.curriculum_problems(stage.data, stage.rollout.group_size),
            lambda stage: rollouts.partial_rollout_problems(
                stage.rollout, stage.algorithm, stage.data.prompts_per_step
            ),
        ):
            problems += rollouts.in_every_stage(stages, check)
    # Once for all stages: an import may take long.
    problems += hook_problems(config, kind)
    return problems + (shape_problems(config, inspected, kind) if inspected is not None else [])


def setting_problems(
    config: Config, stages: Sequence[LengthStage], world_size: int, kind: Kind = "grpo"
) -> list[str]:
    """Problems that show without the model, the files or the machine.

    They are those of layout, lengths and single values. `stages` are those of
    `checked_length_stages`."""
    validated = kind == "grpo" and validates(config)
    problems = [
        *value_problems(config),
        *_chat_problems(config.data, config.validation.template if validated else None),
        *parallelism.rank_problems(
            config.parallel, config.rollout.tensor_parallel, world_size, config.rollout.ranks
        ),
    ]
    if kind == "sft":
        return [*problems, *_sequence_length_problems(config.sft, config.policy)]
    return [
        *problems,
        *stage_list_problems(config),
        *rollouts.in_every_stage(
            stages,
            _length_problems,
        ),
        *rollouts.of_longest_stage(config, _engine_problems),
        *rollouts.validation_name_problems(config.validation.paths),
    ]


def shape_problems(config: Config, inspected: InspectedShapes, kind: Kind = "grpo") -> list[str]:
    """Problems of the models' shapes, wherever they run."""
    shapes = inspected.shapes
    engine = config.rollout.tensor_parallel
    problems = list(
        parallelism.layout_problems(config.parallel, engine, config.policy, shapes.policy)
    )
    problems += model_checks.lora_problems(config.lora, config.model.adapter_path, shapes.policy)
    if kind == "sft":
        return [*problems, *_sequence_position_problems(config.sft, shapes.policy)]
    return [
        *problems,
        *model_checks.engine_adapter_problems(config.lora),
        *model_checks.routing_problems(config.policy, shapes.policy),
        *model_checks.critic_layout_problems(
            inspected, config.critic, config.parallel, policy=config.policy
        ),
        *model_checks.teacher_layout_problems(inspected, config.parallel),
        *rollouts.in_every_stage(
            shapes.length_stages,
            lambda stage: model_checks.length_problems(stage, shapes),
        ),
        *rollouts.in_every_stage(
            shapes.length_stages,
            lambda stage: _model_length_problems(stage, shapes.policy),
        ),
        *rollouts.in_validation(
            config,
            lambda validation: _model_length_problems(validation, shapes.policy),
        ),
    ]


def device_problems(
    config: Config, shape: ModelShape | None, on_gpu: bool, kind: Kind = "grpo"
) -> list[str]:
    """Problems of this machine's GPU, or of a CPU."""
    problems = list(parallelism.context_problems(config.parallel, config.policy, on_gpu))
    problems += parallelism.expert_tensor_problems(config.parallel, on_gpu)
    if on_gpu and config.policy.dtype == "float32":
        problems.append(
            "policy.dtype is float32; the attention of Transformer Engine and vLLM on GPU takes "
            "16 bits. Use bfloat16, "
            "or float16, which is three bits more precise."
        )
    if shape is not None:
        problems += parallelism.rotary_problems(config.policy, shape, on_gpu)
    if kind == "grpo" and on_gpu:
        problems += model_checks.route_problems_of_gpus(config.policy, config.parallel)
    if kind == "grpo" and shape is not None and not on_gpu:
        problems += rollouts.of_longest_stage(
            config,
            lambda longest: _engine_model_problems(longest, shape),
        )
    return problems


def cuda_problems(requested: str, option: str = "run.device") -> Iterator[str]:
    """Problems of a requested device that is not there."""
    if requested == "cuda" and not cuda_is_available():
        yield (
            f'{option} is "cuda", and torch finds no CUDA device. Use {option}=cpu, or a GPU '
            "machine."
        )


def isolation_problems(tools: ToolsConfig) -> Iterator[str]:
    """Problems of a requested isolation that this machine lacks."""
    if tools.format is not None and (problem := lacking(tools.isolation)) is not None:
        yield f"tools.isolation: {problem}."


def transformer_engine_problems(transformer_impl: str) -> Iterator[str]:
    """Problems of requested layers that cannot be imported on this machine's GPU."""
    if transformer_impl != "transformer_engine":
        return
    set_cuda_defaults()  # should the import start CUDA
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # of a package that does not fit torch or CUDA it may be anything
        first = (str(error).splitlines() or [""])[0]
        yield (
            'policy.transformer_impl is "transformer_engine", which cannot be imported here '
            f"({type(error).__name__}: {first:.200}). Install it as requirements/gpu.txt says; or "
            "uninstall it and set "
            "policy.transformer_impl=local, which is slower."
        )


def memory_problems(
    config: Config, shapes: RunShapes, world_size: int, kind: Kind = "grpo"
) -> list[str]:
    """Problems of the longest lengths where they do not fit the GPU.

    The layout must have no problems."""
    if kind == "sft":
        return fit_problems(config, shapes, world_size, kind=kind)
    return rollouts.of_longest_stage(
        config, lambda longest: fit_problems(longest, shapes, world_size)
    )


def host_memory_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Problems of a KV cache on CPU that this machine has no memory for.

    The caches of the other ranks here count, too: those that the launcher names
    (LOCAL_WORLD_SIZE)."""
    cache = rollout.cpu_kv_cache_gib
    cache_ranks = _kv_cache_ranks_here(rollout.ranks)
    if cache_ranks == 0:
        return
    total = total_bytes() / GIB
    free = available_bytes() / GIB
    if cache * cache_ranks > total or cache > free:
        for_all = (
            f" for each of the {cache_ranks} ranks on this machine, {cache * cache_ranks:g} in all"
            if cache_ranks > 1
            else ""
        )
        yield (
            f"rollout.cpu_kv_cache_gib is {cache:g}{for_all}; this machine has {total:.1f} GiB of "
            "memory, of which "
            f"{free:.1f} are free. Lower it."
        )


def _kv_cache_ranks_here(engine_ranks: int) -> int:
    """Ranks on this machine that have a KV cache.

    These are all, or those of the run's last `engine_ranks` that are here."""
    ranks_here_text, local_rank = (
        os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
    )
    ranks = int(ranks_here_text) if ranks_here_text.isdecimal() else 1
    if engine_ranks == 0 or not local_rank.isdecimal():
        return ranks
    first = environment_rank() - int(local_rank)
    return max(0, first + ranks - max(first, environment_world_size() - engine_ranks))


def file_problems(config: Config, kind: Kind = "grpo") -> Iterator[str]:
    """Problems of data files that are not there, or empty; ids of the hub are not files yet."""
    settings = config.data
    held_out = config.sft.held_out_path
    paths = [("data.train_path", settings.train_path)]
    paths += [("data.more_train_paths", path) for path in settings.more_train_paths]
    if kind == "sft":
        paths += [("sft.held_out_path", held_out)] if held_out is not None else []
    elif validates(config):
        paths += [("validation.paths", path) for path in config.validation.paths]
    if (settings.chat_template or "").endswith(".jinja"):
        paths.append(("data.chat_template", str(settings.chat_template)))
    if kind == "grpo" and settings.history_path is not None:
        paths.append(("data.history_path", settings.history_path))
    for key, path in ((key, Path(path)) for key, path in paths if not is_hub_id(path)):
        if (not os.path.exists(path) and not os.path.islink(path)) or path == Path():
            yield f'{key}: there is no file "{path}".{nearest_path(path)}'
        elif not (os.path.isfile(path) or os.path.isdir(path)):
            yield f'{key}: "{path}" is neither a file nor a folder, nor a link to one. Give one.'
        elif os.path.isfile(path) and path.stat().st_size == 0:
            yield (
                f'{key}: "{path}" is empty. Give a file with one row a line (forms: docs/data.md).'
            )


# ---------------------------------------------------------- single values, optimizer, recomputation


def value_problems(config: Config) -> list[str]:
    """Problems of single values, and of those that do not go together."""
    return [*schema_problems(config), *conflicts(config)]


def _chat_problems(settings: DataConfig, validation_template: str | None) -> Iterator[str]:
    """Problems of settings of conversations where no prompt is one.

    `validation_template` is that of a validation which has one of its own."""
    templates = {settings.template, validation_template or settings.template}
    chat_keys = chat_settings(settings).given
    fixed = {*all_settings()["data.template"].words} - {"auto", "chat"}
    if chat_keys and templates <= fixed:
        yield (
            f'{", ".join(chat_keys)}: data.template is "{settings.template}", which makes no '
            "conversation. Leave "
            f"{'them' if chat_keys[1:] else 'it'} out, or set data.template=chat."
        )


# ---------------------------------------------------------------- lengths, engine, rewards


def _length_problems(config: Config) -> Iterator[str]:
    """Problems of the lengths of prompts, completions and micro-batches."""
    rollout = config.rollout
    policy = config.policy
    new_tokens = rollout.max_new_tokens
    longest = sequence_length(config)
    if rollout.min_new_tokens > new_tokens:
        least = rollout.min_new_tokens
        yield (
            f"rollout.min_new_tokens is {least}, above rollout.max_new_tokens {new_tokens}. Lower "
            "it."
        )
    if policy.max_tokens_per_microbatch < longest:
        yield (
            f"policy.max_tokens_per_microbatch is {policy.max_tokens_per_microbatch}; the "
            f"longest sequence ({sequence_text(config)}) has {sequence_text(config, keys=False)} = "
            f"{longest} tokens and must fit. Raise it, or lower one of the "
            f"{'two' if config.tools.format is None else 'others'}."
        )


def _engine_problems(config: Config) -> Iterator[str]:
    """Problems of the tokens of an engine step."""
    rollout = config.rollout
    budget = rollout.max_num_batched_tokens
    if budget is None:
        return
    if budget < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens is {budget}, below rollout.max_num_seqs "
            f"{rollout.max_num_seqs}: "
            "vLLM decodes one token of each sequence a step. Raise the former, or lower the latter."
        )
    longest = sequence_length(config)
    if not rollout.chunked_prefill and budget < longest:
        yield (
            f"rollout.max_num_batched_tokens is {budget}; without rollout.chunked_prefill vLLM "
            "needs at "
            f"least the longest sequence, {longest} tokens. Raise it, leave it null, or "
            "set rollout.chunked_prefill=true."
        )


def _model_length_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """The problem of sequences that are longer than the model's positions."""
    longest = sequence_length(config)
    excess = longest - shape.max_positions
    if excess > 0:
        yield (
            f"{sequence_text(config)} is {sequence_text(config, keys=False)} = {longest}; the "
            f"model has {shape.max_positions} positions ({shape.positions_key}). Lower the sum by "
            f"{excess}."
        )


def _engine_model_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Problems of the model for an engine on CPU; on GPU vLLM measures the device first."""
    rollout = config.rollout
    if problem := cpu_head_dim_problem(shape.head_dim):
        yield problem
    longest = sequence_length(config)
    budget = rollout.max_num_batched_tokens
    if budget is not None and budget < longest and rollout.chunked_prefill:
        yield (
            f"rollout.max_num_batched_tokens is {budget}; on CPU vLLM does not split prompts and "
            "needs at least the "
            f"longest sequence, {longest} tokens. Raise it, or leave it null."
        )
    ranks = max(1, rollout.tensor_parallel)
    itemsize = FORMAT_BYTES[number_format(config.policy.dtype, "cpu")]
    needed = longest_sequence_bytes(shape, ranks, itemsize, tokens=longest, device_kind="cpu")
    if rollout.cpu_kv_cache_gib * 2**30 < needed:
        yield (
            f"rollout.cpu_kv_cache_gib is {rollout.cpu_kv_cache_gib}; one sequence of "
            f"{longest} tokens "
            f"({sequence_text(config)}) needs {needed / 2**30:.3g} GiB. "
            "Raise it."
        )


# ---------------------------------------------------------------- algorithm and selection


def algorithm_problems(config: Config) -> Iterator[str]:
    """Problems of `algorithm` and its parts."""
    algorithm = config.algorithm
    yield from _preset_problems(config)
    learns_from_rewards = not learns_from_the_teacher_alone(config.teacher)
    compares = algorithm.advantage in GROUP_ADVANTAGES and learns_from_rewards
    if config.rollout.group_size < 2 and compares:
        yield (
            f"rollout.group_size is {config.rollout.group_size}; "
            f'algorithm.advantage="{algorithm.advantage}" compares '
            "the completions of a group and needs at least 2. Raise it, or set "
            'algorithm.advantage to "ppo" or "gae".'
        )
    if (
        (hook := advantage_hook(config)) is not None
        and algorithm.kl_in == "reward"
        and algorithm.kl_coef
    ):
        yield (
            'algorithm.kl_in is "reward", which is part of the advantages, and these are of '
            f"{hook}. Set "
            "algorithm.kl_in=loss, or algorithm.advantage to a word."
        )
    if algorithm.masks_alone and not algorithm.recompute_logprobs:
        keys = ", ".join(f"algorithm.{name}" for name in algorithm.masks_alone)
        yield (
            f"{keys}: compared are recomputed log-probs with the engine's, and "
            "algorithm.recompute_logprobs is false. Set it to true, or the masks to null."
        )
    if algorithm.selects_tokens and algorithm.recompute_logprobs and not algorithm.recomputes:
        yield (
            'algorithm.proximal_logprobs is "interpolate", which saves the pass for the policy\'s '
            "log-probs, and "
            "algorithm.top_entropy_share, clip_cov_ratio and kl_cov_ratio make that pass. Set "
            "algorithm.proximal_logprobs=recompute."
        )
    samples = config.data.prompts_per_step * config.learned_group_size
    minibatches = algorithm.n_minibatches
    if samples < minibatches:
        size = (
            "rollout.group_size"
            if config.learned_group_size == config.rollout.group_size
            else "selection.resample_to"
        )
        yield (
            f"data.prompts_per_step x {size} gives {samples} samples a step, which "
            "cannot fill "
            f"{minibatches} minibatches (algorithm.n_minibatches). Raise the former or lower the "
            "latter."
        )
    yield from _selection_problems(config.selection, config.rollout)


def _selection_problems(selection: SelectionConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Problems of the lengths of completions that are selected."""
    limit = rollout.max_new_tokens
    least = selection.min_completion_tokens
    max_tokens = selection.max_completion_tokens
    if least > limit:
        yield (
            f"selection.min_completion_tokens is {least}, above rollout.max_new_tokens {limit}: "
            "every completion would "
            "be left out. Lower it."
        )
    if max_tokens is not None and max_tokens < max(least, rollout.min_new_tokens):
        yield (
            f"selection.max_completion_tokens is {max_tokens}, below "
            f"selection.min_completion_tokens {least} or "
            f"rollout.min_new_tokens {rollout.min_new_tokens}: every completion would be "
            "left out. Raise it."
        )


def _preset_problems(config: Config) -> Iterator[str]:
    """Problems of parts that a preset is named after where they are others.

    The preset's further settings would not fit them."""
    name = config.algorithm.preset
    if name not in all_settings()["algorithm.preset"].words:
        return
    values = setting_values(config)
    parts = preset_settings(name)
    for key in ("algorithm.advantage", "algorithm.loss"):
        if key in parts and values[key] != parts[key]:
            yield (
                f'algorithm.preset is "{name}", whose {key} is "{parts[key]}", and yours is '
                f'"{values[key]}". Leave '
                f"{key} out, or write the parts that you want of configs/algorithms/{name}.yaml "
                "yourself."
            )


# ---------------------------------------------------------------- supervised training


_SFT_SETTINGS = """
run. model. parallel. policy.max_tokens_per_microbatch policy.transformer_impl policy.dtype policy.head_dtype
policy.recompute_granularity policy.recompute_method policy.recompute_num_layers
lora.rank lora.alpha lora.target optimizer. sft. save. data.train_path
data.more_train_paths data.train_weights
data.template data.chat_template data.chat_template_kwargs data.system_prompt data.prompts_per_step
data.max_unusable_share data.shuffle algorithm.rollback algorithm.rollback_lr_factor memory.gpu memory.gpu_gib
telemetry.tensorboard telemetry.profile_steps telemetry.report telemetry.wandb telemetry.wandb_project
telemetry.wandb_name tools.format tools.max_output_tokens
""".split()
"""Settings, or whole sections, that a supervised run has."""


def used_keys() -> list[str]:
    """Settings that have an effect in supervised training."""
    return [key for key in all_settings() if is_among(key, _SFT_SETTINGS)]


def only_used(config: Config) -> tuple[Config, list[str]]:
    """The settings with those that have no effect at their defaults.

    Also returns the keys of the ones that were not."""
    defaults = all_settings()
    values = setting_values(config)
    changed = [
        key
        for key in values
        if not is_among(key, _SFT_SETTINGS) and values[key] != defaults[key].default
    ]
    sections: dict[str, dict[str, Any]] = {}
    for key in changed:
        sections.setdefault(defaults[key].section, {})[defaults[key].name] = defaults[key].default
    replaced = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(config, **replaced), changed


def _sequence_length_problems(sft: SftConfig, policy: PolicyConfig) -> Iterator[str]:
    """The problem of sequences that do not fit a micro-batch in supervised training."""
    longest = sft.max_sequence_tokens
    budget = policy.max_tokens_per_microbatch
    if budget < longest:
        yield (
            f"policy.max_tokens_per_microbatch is {budget}; a sequence of "
            f"sft.max_sequence_tokens={longest} tokens "
            "must fit. Raise the former, or lower the latter."
        )


def _sequence_position_problems(sft: SftConfig, shape: ModelShape) -> Iterator[str]:
    longest = sft.max_sequence_tokens
    if longest > shape.max_positions:
        yield (
            f"sft.max_sequence_tokens is {longest}; the model has {shape.max_positions} positions "
            f"(max_position_embeddings). Lower it to {shape.max_positions} or less."
        )
