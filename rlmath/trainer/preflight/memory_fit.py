"""Whether a run fits its GPU, told before anything starts, and what to change where it does not."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlmath.config.gpus import GPUS
from rlmath.config.help import raise_problems
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.trainer.preflight.engine_memory import EngineBytes, engine_bytes, longest_sequence_bytes
from rlmath.trainer.preflight.memory_estimate import (
    GENERATION_PHASES,
    TRAINING_PHASES,
    MemoryPlan,
    Target,
    largest,
    plan_ranks,
)
from rlmath.trainer.preflight.parallelism import split_problems

GIB = 2**30
RESERVE_GIB = 2.0
RESERVE_SHARE = 0.04
"""What a plan leaves free of a GPU: 2 GiB for the CUDA context, cuBLAS and NCCL's buffers, and 4% of the device for
fragmentation. Both are reckoned, not measured."""
RESERVE = f"the {RESERVE_GIB:g} GiB and {RESERVE_SHARE:.0%} that stay free for CUDA, NCCL and fragmentation"


def planned_target(config: Config) -> Target:
    """The GPU that `memory` names, or the one that is there, or the CPU; the smaller one where a run with these
    settings would run on a GPU that is there, and another is named.

    For a GPU that is not there Transformer Engine's layers are planned, as `requirements/gpu.txt` installs them.
    Errors: ValueError where the GPU is named twice, or its memory cannot be read.
    """
    memory = config.memory
    if memory.gpu is not None and memory.gpu_gib is not None:
        told = f'memory.gpu is "{memory.gpu}" and memory.gpu_gib is {memory.gpu_gib:g}; give one of the two.'
        raise_problems("this run", [f"{told} Set the other to null."])
    gib = memory.gpu_gib if memory.gpu is None else GPUS[memory.gpu].gib
    named = None if gib is None else Target("cuda", memory.gpu or "the GPU", int(gib * GIB), False)
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return named or Target("cpu", "CPU", None, local_layers=True)
    local_layers = importlib.util.find_spec("transformer_engine_torch") is None
    try:
        here = Target("cuda", "the GPU that is there", _bytes_of_gpu_here(), local_layers)
    except ValueError as error:
        if named is None:
            how = "Name the GPU by memory.gpu or memory.gpu_gib."
            raise_problems("this run", [f"the GPU that is there: {error}. {how}"])
        assert named is not None
        return replace(named, name=f"{named.name} as told (the one that is there: {error})")
    return here if named is None else _smaller(named, here)


def _smaller(named: Target, here: Target) -> Target:
    """The target that is told has the layers of this machine, where the run would be."""
    assert named.total_bytes is not None and here.total_bytes is not None
    if here.total_bytes < named.total_bytes:
        told = named.name if named.name in GPUS else f"memory.gpu_gib={named.total_bytes / GIB:g}"
        return replace(here, name=f"{here.name} (smaller than {told})")
    name = f"{named.name} as told (the one that is there has {_gib(here.total_bytes)} GiB)"
    return replace(named, name=name, local_layers=here.local_layers)


def _bytes_of_gpu_here() -> int:
    """Memory of the first GPU that this process may use, by NVML: torch would start CUDA in this process, too early for
    settings that CUDA reads at its start, and for the judges' processes. Half a percent above what CUDA tells.

    Errors: ValueError where it cannot be read.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml
    except ImportError as error:
        raise ValueError("its memory cannot be read without the package nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            if first.startswith(("GPU-", "MIG-")):
                handle = pynvml.nvmlDeviceGetHandleByUUID(first)
            else:
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdecimal() else 0)
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        seen = f', with "{first}" first in CUDA_VISIBLE_DEVICES' if first else ""
        raise ValueError(f"its memory cannot be read by NVML{seen}: {error}") from error


def usable_bytes(target: Target) -> int:
    """What a plan may fill of a GPU; 0 where the reserve alone is more than it has."""
    assert target.total_bytes is not None
    return max(0, int(target.total_bytes * (1 - RESERVE_SHARE) - RESERVE_GIB * GIB))


def fit_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """What does not fit the GPU; empty on CPU. The layout must have no problems (`layout_checks`)."""
    target = planned_target(config)
    if target.total_bytes is None:
        return []
    if usable_bytes(target) == 0:
        total = _gib(target.total_bytes)
        return [f"memory: {target.name} has {total} GiB, no more than {RESERVE}. Take a larger GPU."]
    plans = plan_ranks(config, shape, world_size, target)
    problems = list(_engine_problems(config, shape, world_size, target))
    for phases in (GENERATION_PHASES, TRAINING_PHASES):
        plan, phase = largest(plans, phases)
        if plan.held(phase) > usable_bytes(target):
            found = TooMuch(config, shape, world_size, target, plan, phase)
            problems.append(_too_much(found))
    return problems


def start_up_lines(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """The plan of the rank that holds the most, a line per phase."""
    target = planned_target(config)
    plan, _ = largest(plan_ranks(config, shape, world_size, target))
    limit = "" if target.total_bytes is None else f", may fill {_gib(usable_bytes(target))} GiB"
    head = f"Planned memory of rank {plan.rank} (pipeline stage {plan.stage}) on {target.name}{limit}:"
    return [head, *(f"  {phase}: {figures(plan, phase)}" for phase in plan.phases)]


def figures(plan: MemoryPlan, phase: str) -> str:
    """ "61.2 GiB (activations 40.1, parameters 14.2)", largest first; what rounds to 0 is left out."""
    held = sorted(plan.phases[phase].items(), key=lambda item: -item[1])
    parts = [f"{part} {_gib(size)}" for part, size in held if size >= 0.005 * GIB]
    return f"{_gib(plan.held(phase))} GiB" + (f" ({', '.join(parts)})" if parts else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


# ---------------------------------------------------------------- a phase that holds too much


@dataclass(frozen=True)
class TooMuch:
    """A phase of a rank that holds more than its GPU lets it, in a run with these settings."""

    config: Config
    shape: ModelShape
    world_size: int
    target: Target
    plan: MemoryPlan
    phase: str


def _too_much(found: TooMuch) -> str:
    """The figures, and what makes the two largest parts smaller that different keys do; parts below a twentieth of what
    is too much are passed over."""
    plan, phase, target = found.plan, found.phase, found.target
    held = sorted(plan.phases[phase].items(), key=lambda item: -item[1])
    excess = plan.held(phase) - usable_bytes(target)
    remedies = list(dict.fromkeys(_remedy(found, part) for part, size in held if 20 * size >= excess))
    assert target.total_bytes is not None
    return (
        f'memory: rank {plan.rank} (pipeline stage {plan.stage}) needs {figures(plan, phase)} in the phase "{phase}"; '
        f"{target.name} has {_gib(target.total_bytes)} GiB, of which a run may fill {_gib(usable_bytes(target))} "
        f"(without {RESERVE}). " + " ".join(remedies[:2])
    )


def _remedy(found: TooMuch, part: str) -> str:
    """What makes a part smaller in a phase: a key that costs no rank where there is one, else more ranks."""
    config, phase = found.config, found.phase
    memory, parallel = config.memory, config.parallel
    generating = phase in GENERATION_PHASES
    if part in ("activations", "logits", "working", "gather_buffer"):
        return _pass_remedy(config, part)
    if part in ("engine_weights", "engine_workspace", "kv_cache"):
        return _engine_remedy(found, part)
    if part == "sync_buffers":
        return "Lower sync.bucket_mib."
    offload = {
        "gradients": ("memory.offload_gradients", memory.offload_gradients, generating),
        "optimizer": ("memory.offload_optimizer", memory.offload_optimizer, generating),
        "parameters": ("memory.offload_parameters", memory.offload_parameters, phase == "generate"),
        "reference": ("memory.offload_reference", memory.offload_reference, phase != "reference"),
    }
    key, done, helps = offload[part]
    if helps and not done:
        return f"Set {key}=true."
    split = f"raise parallel.tensor (now {parallel.tensor}) or parallel.pipeline (now {parallel.pipeline})."
    if part == "optimizer" and config.optimizer.kind == "adam":
        if config.optimizer.distributed:
            return f"Start more ranks, which share the optimizer, or {split}"
        if found.world_size > parallel.tensor * parallel.pipeline:
            return "Set optimizer.distributed=true."
    return split[0].upper() + split[1:]


def _engine_remedy(found: TooMuch, part: str) -> str:
    """While it generates, an engine fills its share, whatever its weights take: the KV cache takes the rest."""
    rollout = found.config.rollout
    if found.phase == "generate" and found.plan.phases["generate"].get("kv_cache"):
        least = _least_share(found.config, found.shape, found.target)
        if least > _most_share(found.target):
            return _smaller_engine(found.config, found.shape, found.world_size, found.target)
        if least < rollout.memory_share:
            return f"Lower rollout.memory_share (now {rollout.memory_share:g}, at least {least:.2f})."
        return (
            f"Raise rollout.tensor_parallel (now {rollout.tensor_parallel}) and lower rollout.memory_share."
        )
    if part == "engine_workspace":
        fewer = "Lower rollout.max_num_batched_tokens or rollout.max_num_seqs."
        return fewer if found.phase == "generate" else "Set rollout.cuda_graphs=false."
    return f"Raise rollout.tensor_parallel (now {rollout.tensor_parallel})."


def _pass_remedy(config: Config, part: str) -> str:
    policy, parallel = config.policy, config.parallel
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if part == "activations" and policy.recompute_granularity != "full":
        return "Set policy.recompute_granularity=full policy.recompute_method=uniform policy.recompute_num_layers=1."
    if policy.max_tokens_per_microbatch > longest:
        return (
            f"Lower policy.max_tokens_per_microbatch (now {policy.max_tokens_per_microbatch}, at least the longest "
            f"sequence, {longest})."
        )
    if part == "activations" and parallel.tensor > 1 and not parallel.sequence:
        return "Set parallel.sequence=true."
    shorter = "lower rollout.max_new_tokens and policy.max_tokens_per_microbatch with it."
    if part == "gather_buffer":
        return shorter.capitalize()
    return f"Raise parallel.tensor (now {parallel.tensor}), or {shorter}"


# ---------------------------------------------------------------- an engine whose share is too small


def _engine_needs(config: Config, shape: ModelShape, target: Target) -> tuple[EngineBytes, int]:
    """(an engine rank, KV cache of one longest sequence), in bytes."""
    rollout, tokens = config.rollout, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    engine = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes)
    return engine, longest_sequence_bytes(
        shape, rollout.tensor_parallel, target.itemsize, tokens, target.kind
    )


def _least_share(config: Config, shape: ModelShape, target: Target, **changed: Any) -> float:
    """Smallest rollout.memory_share that is enough, in whole hundredths, where `rollout` is `changed` so."""
    config = replace(config, rollout=replace(config.rollout, **changed))
    engine, sequence = _engine_needs(config, shape, target)
    assert target.total_bytes is not None
    return math.ceil(100 * (engine.weights + engine.workspace + sequence) / target.total_bytes) / 100


def _most_share(target: Target) -> float:
    """Largest rollout.memory_share that the reserve leaves."""
    assert target.total_bytes is not None
    return usable_bytes(target) / target.total_bytes


def _engine_problems(config: Config, shape: ModelShape, world_size: int, target: Target) -> Iterator[str]:
    """The engine's share must hold its weights, its workspace and the KV cache of one longest sequence."""
    rollout = config.rollout
    engine, sequence = _engine_needs(config, shape, target)
    if engine.kv_cache >= sequence:
        return
    assert target.total_bytes is not None
    total = engine.weights + engine.workspace + sequence
    share = int(rollout.memory_share * target.total_bytes)
    tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
    yield (
        f"rollout.memory_share is {rollout.memory_share}, {_gib(share)} GiB of the {_gib(target.total_bytes)} of "
        f"{target.name}; an engine rank needs {_gib(total)} GiB (weights {_gib(engine.weights)}, workspace "
        f"{_gib(engine.workspace)}, KV cache of one sequence of {tokens} tokens {_gib(sequence)}). "
        + _room_for_engine(config, shape, world_size, target)
    )


def _room_for_engine(config: Config, shape: ModelShape, world_size: int, target: Target) -> str:
    """A larger share as far as the GPU has one, else a smaller engine."""
    least = _least_share(config, shape, target)
    if least > _most_share(target):
        return _smaller_engine(config, shape, world_size, target)
    ranks = config.rollout.tensor_parallel
    return f"Raise it to {least:.2f} or more, or raise rollout.tensor_parallel (now {ranks})."


def _smaller_engine(config: Config, shape: ModelShape, world_size: int, target: Target) -> str:
    """What makes room for an engine that needs more than the GPU has: no CUDA graphs, else the fewest ranks that do."""
    most, now = _most_share(target), config.rollout.tensor_parallel
    share = "rollout.memory_share to {:.2f} or a little more."
    if (least := _least_share(config, shape, target, cuda_graphs=False)) <= most:
        return f"Set rollout.cuda_graphs=false and {share.format(least)}"
    for ranks in range(now + 1, shape.num_heads + 1):
        if any(split_problems(config.parallel, ranks, shape)):
            continue
        if (least := _least_share(config, shape, target, tensor_parallel=ranks)) <= most:
            start = "" if world_size % ranks == 0 else f", start a multiple of {ranks} ranks"
            return f"Set rollout.tensor_parallel={ranks} (now {now}){start}, and {share.format(least)}"
    return (
        "Lower rollout.max_num_batched_tokens, rollout.max_num_seqs or rollout.max_new_tokens, or take a larger GPU: "
        "no rollout.tensor_parallel makes the engine fit."
    )
