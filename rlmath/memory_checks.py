"""Whether a run fits its GPU, told before anything starts, and what to change where it does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from rlmath.config import Config
from rlmath.engine_bytes import engine_bytes, longest_sequence_bytes
from rlmath.gpus import GPU_GIB
from rlmath.memory_plan import (
    GENERATION_PHASES,
    TRAINING_PHASES,
    MemoryPlan,
    Target,
    largest,
    plan_ranks,
)
from rlmath.model_shape import ModelShape

GIB = 2**30
RESERVE_GIB = 2.0
RESERVE_SHARE = 0.04
"""What a plan leaves free of a GPU: 2 GiB for the CUDA context, cuBLAS and NCCL's buffers, and 4% of the device for
fragmentation. Both are reckoned, not measured."""


def planned_target(config: Config) -> Target:
    """The GPU that `memory` names, or the one that is there, or the CPU.

    A named GPU is planned for wherever the plan is made, with Transformer Engine's layers, as `requirements/gpu.txt`
    installs them.
    """
    memory = config.memory
    if memory.gpu_gib is not None:
        return Target("cuda", memory.gpu or "the GPU", int(memory.gpu_gib * GIB), local_layers=False)
    if memory.gpu is not None:
        return Target("cuda", memory.gpu, int(GPU_GIB[memory.gpu] * GIB), local_layers=False)
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return Target("cpu", "CPU", None, local_layers=True)
    local_layers = importlib.util.find_spec("transformer_engine_torch") is None
    return Target("cuda", "the GPU that is there", _bytes_of_gpu_here(), local_layers)


def _bytes_of_gpu_here() -> int:
    """Memory of this machine's first GPU, by NVML: torch would start CUDA in this process, too early for settings that
    CUDA reads at its start, and for the judges' processes. Half a percent above what CUDA tells."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    finally:
        pynvml.nvmlShutdown()


def usable_bytes(target: Target) -> int:
    """What a plan may fill of a GPU."""
    assert target.total_bytes is not None
    return int(target.total_bytes * (1 - RESERVE_SHARE) - RESERVE_GIB * GIB)


def fit_problems(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """What does not fit the GPU; empty on CPU. The layout must have no problems (`layout_checks`)."""
    target = planned_target(config)
    if target.total_bytes is None:
        return []
    plans = plan_ranks(config, shape, world_size, target)
    problems = list(_engine_problems(config, shape, target))
    for phases in (GENERATION_PHASES, TRAINING_PHASES):
        plan, phase = largest(plans, phases)
        if plan.held(phase) > usable_bytes(target):
            problems.append(_too_much(config, plan, phase, target))
    return problems


def start_up_lines(config: Config, shape: ModelShape, world_size: int) -> list[str]:
    """The plan of the rank that holds the most, a line per phase."""
    target = planned_target(config)
    plan, _ = largest(plan_ranks(config, shape, world_size, target))
    limit = "" if target.total_bytes is None else f", may fill {_gib(usable_bytes(target))} GiB"
    head = f"Planned memory of rank {plan.rank} (pipeline stage {plan.stage}) on {target.name}{limit}:"
    return [head, *(f"  {phase}: {_figures(plan, phase)}" for phase in plan.phases)]


def _figures(plan: MemoryPlan, phase: str) -> str:
    """ "61.2 GiB (activations 40.1, parameters 14.2)", largest first; what rounds to 0 is left out."""
    held = sorted(plan.phases[phase].items(), key=lambda item: -item[1])
    parts = [f"{part} {_gib(size)}" for part, size in held if size >= 0.005 * GIB]
    return f"{_gib(plan.held(phase))} GiB" + (f" ({', '.join(parts)})" if parts else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _too_much(config: Config, plan: MemoryPlan, phase: str, target: Target) -> str:
    """The figures, and what makes the two largest parts smaller that different keys do."""
    held = sorted(plan.phases[phase].items(), key=lambda item: -item[1])
    remedies = list(dict.fromkeys(_remedy(config, part, phase) for part, _ in held))
    assert target.total_bytes is not None
    return (
        f'memory: rank {plan.rank} (pipeline stage {plan.stage}) needs {_figures(plan, phase)} in the phase "{phase}"; '
        f"{target.name} has {_gib(target.total_bytes)} GiB, of which a run may fill {_gib(usable_bytes(target))} "
        f"({RESERVE_GIB:g} GiB and {RESERVE_SHARE:.0%} stay free for CUDA, NCCL and fragmentation). "
        + " ".join(remedies[:2])
    )


def _remedy(config: Config, part: str, phase: str) -> str:
    """What makes a part smaller in a phase: a key that costs no rank where there is one, else more ranks."""
    generating = phase in GENERATION_PHASES
    memory, parallel = config.memory, config.parallel
    if part in ("activations", "logits", "working", "gather_buffer"):
        return _pass_remedy(config, part)
    if part == "kv_cache":
        return "Lower rollout.memory_share."
    if part == "engine_weights":
        return f"Raise rollout.tensor_parallel (now {config.rollout.tensor_parallel})."
    if part == "engine_workspace":
        fewer = "Lower rollout.max_num_batched_tokens or rollout.max_num_seqs."
        return fewer if phase == "generate" else "Set rollout.cuda_graphs=false."
    if part == "sync_buffers":
        return "Lower sync.bucket_mib."
    if part == "optimizer" and config.optimizer.kind == "adam" and not config.optimizer.distributed:
        return "Set optimizer.distributed=true."
    if part == "reference" and phase != "reference" and not memory.offload_reference:
        return "Set memory.offload_reference=true."
    offload = {
        "gradients": ("memory.offload_gradients", memory.offload_gradients, generating),
        "optimizer": ("memory.offload_optimizer", memory.offload_optimizer, generating),
        "parameters": ("memory.offload_parameters", memory.offload_parameters, phase == "generate"),
    }
    if part in offload:
        key, done, helps = offload[part]
        if helps and not done:
            return f"Set {key}=true."
    split = f"raise parallel.tensor (now {parallel.tensor}) or parallel.pipeline (now {parallel.pipeline})."
    if part == "optimizer" and config.optimizer.distributed:
        return f"Start more ranks, which share the optimizer, or {split}"
    return split.capitalize()


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
    return (
        f"Raise parallel.tensor (now {parallel.tensor}), or lower rollout.max_new_tokens and "
        "policy.max_tokens_per_microbatch with it."
    )


def _engine_problems(config: Config, shape: ModelShape, target: Target) -> Iterator[str]:
    """The engine's share must hold its weights, its workspace and the KV cache of one longest sequence."""
    rollout = config.rollout
    assert target.total_bytes is not None
    engine = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes)
    tokens = config.data.max_prompt_tokens + rollout.max_new_tokens
    needed = longest_sequence_bytes(shape, rollout.tensor_parallel, target.itemsize, tokens, target.kind)
    if engine.kv_cache >= needed:
        return
    total = engine.weights + engine.workspace + needed
    share = int(rollout.memory_share * target.total_bytes)
    yield (
        f"rollout.memory_share is {rollout.memory_share}, {_gib(share)} GiB of the {_gib(target.total_bytes)} of "
        f"{target.name}; an engine rank needs {_gib(total)} GiB (weights {_gib(engine.weights)}, workspace "
        f"{_gib(engine.workspace)}, KV cache of one sequence of {tokens} tokens {_gib(needed)}). "
        f"Raise it to {_hundredth_up(total / target.total_bytes)} or more, or raise rollout.tensor_parallel "
        f"(now {rollout.tensor_parallel})."
    )


def _hundredth_up(share: float) -> str:
    return f"{int(share * 100) / 100 + 0.01:.2f}"
