"""The check that a run fits its GPU, before anything starts.

A phase that holds too much is reported with its three largest parts and up to three changes of
settings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.config import length_curriculum
from rlmath.config.gpu_specs import GPUS
from rlmath.config.help import counted
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, Kind, MemoryConfig, PolicyConfig
from rlmath.distributed.device_kind import cuda_is_available
from rlmath.distributed.memory import total_bytes
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import local_world_size
from rlmath.planning import memory_estimate
from rlmath.planning.machine_room import GIB, PROCESS_GIB
from rlmath.planning.memory_estimate import TRAINING_PHASES, MemoryPlan, Target
from rlmath.planning.memory_formulas import longest_sequence_bytes
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters

RESERVE_GIB = 3.0
RESERVE_SHARE = 0.04
"""Memory that a plan leaves free of a GPU.

3 GiB are for the CUDA context, libraries' kernels and what they allocate themselves, and 4% of the
device for fragmentation and NCCL's buffers. On an H100, one rank, the driver counted 2.93 GiB
beyond what torch had reserved in an update with Transformer Engine, and 3.4 in a run with an engine
(docs/benchmarks.md), whose CUDA graphs the plan counts apart; 4% is an estimate."""
RESERVE = (
    f"the {RESERVE_GIB:g} GiB and {RESERVE_SHARE:.0%} that stay free for CUDA, NCCL and "
    "fragmentation"
)


def planned_target(memory: MemoryConfig, policy: PolicyConfig, device: str) -> Target:
    """The device that a run is planned for: a GPU that `memory` names or that is there, or the CPU.

    `device` is `run.device`. Where a run would use a GPU that is there, and another is named, it is
    the smaller of both. ValueError where the GPU is named twice, or its memory cannot be read."""
    if memory.gpu is not None and memory.gpu_gib is not None:
        problem = (
            f'memory.gpu is "{memory.gpu}" and memory.gpu_gib is {memory.gpu_gib:g}; give one '
            "of the two."
        )
        raise ValueError(f"{problem} Set the other to null.")
    gib = memory.gpu_gib if memory.gpu is None else GPUS[memory.gpu].gib
    gpu = partial(
        Target, "cuda", local_layers=policy.transformer_impl == "local", dtype=policy.dtype
    )
    named = None if gib is None else gpu(memory.gpu or "the GPU", int(gib * GIB))
    if device == "cpu" or not cuda_is_available():
        return named or cpu_target(policy)
    try:
        present = gpu("the GPU that is there", _bytes_of_gpu_here())
    except ValueError as error:
        if named is not None:
            return named
        raise ValueError(
            f"the GPU that is there: {error}. Name it by memory.gpu or memory.gpu_gib."
        ) from error
    return min(filter(None, (named, present)), key=lambda target: target.total_bytes or 0)


def cpu_target(policy: PolicyConfig) -> Target:
    """The CPU, whose memory has no bound of its own."""
    return Target("cpu", "CPU", None, local_layers=True, dtype=policy.dtype)


def _bytes_of_gpu_here() -> int:
    """Memory of the first GPU that this process may use, as NVML reads it.

    torch would start CUDA in this process, too early for settings that CUDA reads at its start, and
    for the reward workers. NVML says half a percent more than CUDA. ValueError where it cannot be
    read."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml
    except ImportError as error:
        raise ValueError("its memory cannot be read without the package nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            if device.startswith(("GPU-", "MIG-")):
                handle = pynvml.nvmlDeviceGetHandleByUUID(device)
            else:
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(device) if device.isdecimal() else 0)
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        variable = f', with "{device}" first in CUDA_VISIBLE_DEVICES' if device else ""
        raise ValueError(f"its memory cannot be read by NVML{variable}: {error}") from error


def usable_bytes(target: Target) -> int:
    """Bytes of a GPU that a plan may fill; 0 where the reserve alone is more than it has."""
    assert target.total_bytes is not None
    return max(0, int(target.total_bytes * (1 - RESERVE_SHARE) - RESERVE_GIB * GIB))


def fit_problems(
    config: Config, shapes: RunShapes, world_size: int, kind: Kind = "grpo"
) -> list[str]:
    """Problems of what does not fit the GPU; empty on CPU.

    The settings are those of the run with its largest lengths. The layout must have no problems
    (`parallelism`)."""
    try:
        target = planned_target(config.memory, config.policy, config.run.device)
    except ValueError as error:
        return [str(error)]
    if target.total_bytes is None:
        return []
    if usable_bytes(target) == 0:
        total = _gib(target.total_bytes)
        return [
            f"memory: {target.name} has {total} GiB, no more than {RESERVE}. Take a larger GPU."
        ]
    plans = all_plans(config, shapes, world_size, target=target, kind=kind)
    problems = []
    phase_groups = (TRAINING_PHASES,)
    if kind == "grpo":
        problems += _engine_problems(config, shapes.policy, target)
        phase_groups = (memory_estimate.GENERATION_PHASES, *phase_groups)
    for phases in phase_groups:
        plan, phase = memory_estimate.largest(plans, phases)
        if plan.held(phase) > usable_bytes(target):
            advice = _advice(config, plan, phase, kind=kind)
            problems.append(
                f"memory: {plan.name} needs {figures(plan, phase, 3)} in the phase "
                f'"{phase}"; {target.name} has {_gib(target.total_bytes)} GiB, of which a run may '
                "fill "
                f"{_gib(usable_bytes(target))} (without {RESERVE}). {advice}"
            )
    return problems


def keeps_base(config: Config, shapes: RunShapes, world_size: int, target: Target) -> bool:
    """Whether an engine's weights stay on the device while it trains, so that they are sent once.

    With LoRA they do not change where `lora.engine` is "adapters". They stay where every phase of
    all ranks fits with them, always on CPU, and with engines on ranks of their own. It is the same
    on all ranks whose GPUs have the same memory. The layout must have no problems
    (`parallelism`)."""
    if not engine_adapters(shapes.policy, config.lora):
        return False
    if config.rollout.ranks or target.total_bytes is None:
        return True
    plans = memory_estimate.plan_ranks(config, shapes, world_size, target=target, keeps_base=True)
    plan, phase = memory_estimate.largest(plans)
    return plan.held(phase) <= usable_bytes(target)


def all_plans(
    config: Config, shapes: RunShapes, world_size: int, target: Target, kind: Kind = "grpo"
) -> list[MemoryPlan]:
    """A plan for every kind of rank.

    There is one for each pipeline stage, and one for engines with ranks of their own."""
    if kind == "sft":
        return memory_estimate.plan_ranks(config, shapes, world_size, target=target, kind=kind)
    keeps = keeps_base(config, shapes, world_size, target=target)
    return [
        *memory_estimate.plan_ranks(config, shapes, world_size, target=target, keeps_base=keeps),
        *memory_estimate.plan_engine_ranks(config, shapes.policy, world_size, target=target),
    ]


def adapter_lines(
    config: Config, shapes: RunShapes, world_size: int, target: Target
) -> Iterator[str]:
    """The line about what an engine samples with and what a sync sends; none without adapters."""
    engine = memory_estimate.engine_of_run(config, shapes.policy, target)
    if engine.adapters == 0:
        return
    base = _gib(engine.weights - engine.adapters)
    stays = f"stay on the device, {base} GiB a rank, and are sent once"
    if not keeps_base(config, shapes, world_size, target=target):
        stays = (
            f"have no room on the device while it trains, and are sent again at each rollout: {base} "
            "GiB a rank"
        )
    yield (
        f"Engines sample with LoRA's adapters, {_gib(engine.adapters)} GiB a rank; the model's "
        f"weights {stays}"
    )


def start_up_lines(
    config: Config, shapes: RunShapes, world_size: int, kind: Kind = "grpo"
) -> list[str]:
    """The plan of the rank that holds the most, with a line for each phase.

    Where engines have ranks of their own, there is the plan of the training rank that holds the
    most and that of an engine's rank. On CPU a line also says where all ranks need more than this
    machine has."""
    target = planned_target(config.memory, config.policy, config.run.device)
    plans = all_plans(config, shapes, world_size, target=target, kind=kind)
    largest_plan, _ = memory_estimate.largest([plan for plan in plans if not plan.is_engine])
    limit = "" if target.total_bytes is None else f", may fill {_gib(usable_bytes(target))} GiB"
    lines = []
    for plan in (largest_plan, *(plan for plan in plans if plan.is_engine)):
        lines.append(f"Planned memory of {plan.name} on {target.name}{limit}:")
        lines += [f"  {phase}: {figures(plan, phase)}" for phase in plan.phases]
    if kind == "grpo":
        lines += adapter_lines(config, shapes, world_size, target=target)
    lines += route_lines(plans)
    if target.total_bytes is None:
        ranks_here = local_world_size() or world_size
        planned = host_bytes(config, shapes, world_size, kind=kind) * ranks_here // world_size
        needed = planned + int(ranks_here * PROCESS_GIB * GIB)
        available = total_bytes()
        if needed > available:
            lines.append(
                f"  With {PROCESS_GIB:g} GiB for the processes of each, that is {_gib(needed)} "
                "GiB for "
                f"{counted(ranks_here, 'rank')} on this machine, which has {_gib(available)}: the "
                "kernel would kill the "
                "run. memory.gpu plans for a GPU."
            )
    return lines


def route_lines(plans: Sequence[MemoryPlan]) -> Iterator[str]:
    """The line about the routes of a mixture's tokens; none where no rank holds any."""
    recorded = max(plan.routes.recorded for plan in plans)
    sampled = max(plan.routes.sampled for plan in plans)
    replayed = max(plan.routes.replayed for plan in plans)
    if not replayed:
        return
    engine_text = (
        f"{_mib(sampled)} of what an engine samples, {_mib(recorded)} of its KV cache, "
        if sampled
        else ""
    )
    yield (
        f"Routes of experts, in the host's memory: {engine_text}{_mib(replayed)} of what a rank "
        "learns from (a rank at most)"
    )


def host_bytes(config: Config, shapes: RunShapes, world_size: int, kind: Kind = "grpo") -> int:
    """Most bytes that the ranks of a run on CPU hold together, by the plan.

    The layout must have no problems."""
    target = cpu_target(config.policy)
    plans = all_plans(config, shapes, world_size, target=target, kind=kind)
    engines = [plan for plan in plans if plan.is_engine]
    trainer, phase = memory_estimate.largest([plan for plan in plans if not plan.is_engine])
    engine_ranks = config.rollout.ranks if engines else 0
    planned = (world_size - engine_ranks) * trainer.held(phase)
    if engines:
        engine, phase = memory_estimate.largest(engines)
        planned += engine_ranks * engine.held(phase)
    return planned


def measured_line(
    config: Config, shapes: RunShapes, mesh: Mesh, kind: Kind, most: int, engine: int, used: int
) -> str:
    """The line that compares a rank's plan with what was measured.

    `most` is what torch has reserved on this rank's GPU until the end of the first step, `engine`
    what its engine's weights and KV cache have of that, and `used` what the driver counts now
    (bytes). Torch goes on counting what a sleeping engine has given back: vLLM's allocator unmaps
    it without torch's knowledge."""
    target = planned_target(config.memory, config.policy, config.run.device)
    keeps = keeps_base(config, shapes, mesh.world_size + mesh.engine_ranks, target=target)
    plan = memory_estimate.plan_rank(
        config, shapes, mesh, target=target, kind=kind, keeps_base=keeps
    )
    beside = {phase: plan.held(phase) - _of_engine(parts) for phase, parts in plan.phases.items()}
    worst = max(beside, key=beside.__getitem__)
    planned_engine = max(map(_of_engine, plan.phases.values()))
    without = (
        f"beside the engine's weights and KV cache ({_gib(engine)} GiB, planned "
        f"{_gib(planned_engine)}) "
        if planned_engine
        else ""
    )
    return (
        f"GPU memory of rank {mesh.rank} until the end of its first step: {without}torch held "
        f"{_gib(most - engine)} "
        f"GiB at most, planned {_gib(beside[worst])} ({worst}); now, with the engine asleep if "
        "there is one, the "
        f"driver counts {_gib(used)} GiB"
    )


def _of_engine(parts: Mapping[str, int]) -> int:
    return parts.get("engine_weights", 0) + parts.get("kv_cache", 0)


def figures(plan: MemoryPlan, phase: str, most: int | None = None) -> str:
    """A phase's memory as text: "61.2 GiB (activations 40.1, parameters 14.2)".

    It names at most `most` parts, the largest first, and none of 0."""
    sizes = sorted(plan.phases[phase].items(), key=lambda part_and_size: -part_and_size[1])[:most]
    parts = [f"{part} {_gib(size)}" for part, size in sizes if size >= 0.005 * GIB]
    return f"{_gib(plan.held(phase))} GiB" + (f" ({', '.join(parts)})" if parts else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


# ---------------------------------------------------------------- a phase that holds too much


def _advice(config: Config, plan: MemoryPlan, phase: str, kind: Kind) -> str:
    """At most three changes, not made yet, that each make a part of the phase smaller.

    Offloading comes first, then what takes ranks or time; the largest parts come first."""
    sizes = plan.phases[phase]
    parts = sorted(sizes, key=lambda part: -sizes[part])
    offloads = [text for part in parts for text in _offloads(config.memory, part, phase)]
    changes = [text for part in parts for text in _changes(config, part, phase, kind=kind)]
    return " ".join(list(dict.fromkeys([*offloads, *changes]))[:3] or ["Take a larger GPU."])


def _offloads(memory: MemoryConfig, part: str, phase: str) -> Iterator[str]:
    """The setting that offloads a part, where it can be in the host's memory in this phase."""
    model = part.partition("_")[0]
    if model in ("gradients", "optimizer", "parameters"):
        may_leave = phase == "generate" or (phase == "sync" and model != "parameters")
    else:
        may_leave = model in ("reference", "critic", "teacher") and phase != model
        may_leave = may_leave and (part, phase) != ("teacher_head", "update")
    if may_leave and not getattr(memory, f"offload_{model}"):
        yield f"Set memory.offload_{model}=true."


def _changes(config: Config, part: str, phase: str, kind: Kind) -> Iterator[str]:
    """Changes that make a part smaller; whether the layout allows one shows when it is tried."""
    parallel = config.parallel
    policy = config.policy
    rollout = config.rollout
    if part in ("activations", "working") and policy.recompute_granularity != "full":
        yield (
            "Set policy.recompute_granularity=full policy.recompute_method=uniform "
            "policy.recompute_num_layers=1."
        )
    if part in ("activations", "working", "logits"):
        length = "the longest sequence, "
        longest = length_curriculum.sequence_length(config)
        if kind == "sft":
            length = "sft.max_sequence_tokens="
            longest = config.sft.max_sequence_tokens
        if (tokens := policy.max_tokens_per_microbatch) > longest:
            yield (
                f"Lower policy.max_tokens_per_microbatch (now {tokens}, at least "
                f"{length}{longest})."
            )
    if part == "optimizer" and config.optimizer.kind == "adam":
        clause = " that train" if rollout.ranks else ""
        shared = "" if config.optimizer.distributed else " with optimizer.distributed=true"
        yield f"Start more ranks{clause}{shared}, which share the optimizer."
    if part in ("activations", "logits", "parameters", "gradients", "optimizer"):
        yield (
            f"Raise parallel.tensor (now {parallel.tensor}) or parallel.pipeline (now "
            f"{parallel.pipeline})."
        )
    if part == "kv_cache" and rollout.kv_cache_gib is not None:
        yield f"Lower rollout.kv_cache_gib (now {rollout.kv_cache_gib:g})."
    elif part == "kv_cache":
        yield f"Lower rollout.memory_share (now {rollout.memory_share:g})."
    if part == "engine_workspace" and rollout.cuda_graphs and phase != "generate":
        yield "Set rollout.cuda_graphs=false."
    if part == "engine_weights" and phase != "generate":  # else the cache takes the room
        yield f"Raise rollout.tensor_parallel (now {rollout.tensor_parallel})."
    if part == "sync_buffers":
        yield "Lower sync.bucket_mib."


# --------------------------------------------------------------- an engine whose share is too small


def _engine_problems(config: Config, shape: ModelShape, target: Target) -> Iterator[str]:
    """Problems of the engine's share of the GPU.

    It must hold the engine's weights, its workspace and the KV cache of one longest sequence."""
    rollout = config.rollout
    tokens = length_curriculum.sequence_length(config)
    engine = memory_estimate.engine_of_run(config, shape, target)
    sequence = longest_sequence_bytes(
        shape, rollout.tensor_parallel, target.itemsize, tokens=tokens, device_kind=target.kind
    )
    if engine.kv_cache >= sequence:
        return
    if rollout.kv_cache_gib is not None:
        yield (
            f"rollout.kv_cache_gib is {rollout.kv_cache_gib:g}; one sequence of {tokens} tokens "
            f"({length_curriculum.sequence_text(config)}) needs {sequence / GIB:.3g} GiB. "
            "Raise it."
        )
        return
    assert target.total_bytes is not None
    total = engine.weights + engine.workspace + sequence
    least = math.ceil(100 * total / target.total_bytes) / 100
    largest_share = usable_bytes(target) / target.total_bytes
    yield (
        f"rollout.memory_share is {rollout.memory_share}, "
        f"{_gib(int(rollout.memory_share * target.total_bytes))} GiB "
        f"of the {_gib(target.total_bytes)} of {target.name}; an engine rank needs {_gib(total)} "
        "GiB (weights "
        f"{_gib(engine.weights)}, workspace {_gib(engine.workspace)}, KV cache of one sequence of "
        f"{tokens} tokens "
        f"{_gib(sequence)}), a share of {least:.2f}, and {largest_share:.2f} is the largest. "
        "Raise it, or raise "
        f"rollout.tensor_parallel (now {rollout.tensor_parallel}), set rollout.cuda_graphs=false, "
        "or take a larger GPU."
    )
