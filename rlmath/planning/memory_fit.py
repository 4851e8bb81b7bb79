"""Whether a run fits its GPU, known before anything starts, and what to change where it does not.

A phase that holds too much is reported with its three largest parts and up to three changes of settings. Changes are
tried out: `_changes` lists what could help, and only what leads to a legal layout and a smaller phase is advised.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlmath.config.gpu_specs import GPUS
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, StagesConfig, ValidationConfig
from rlmath.distributed.device_kind import cuda_is_available
from rlmath.distributed.mesh import Mesh
from rlmath.planning import memory_estimate
from rlmath.planning.memory_estimate import Kind, MemoryPlan, Target
from rlmath.planning.memory_formulas import EngineBytes, engine_bytes, longest_sequence_bytes
from rlmath.planning.parallelism import layout_problems, rank_problems, split_problems

GIB = 2**30
RESERVE_GIB = 3.0
RESERVE_SHARE = 0.04
"""What a plan leaves free of a GPU: 3 GiB for the CUDA context, libraries' kernels and what they allocate themselves,
and 4% of the device for fragmentation and NCCL's buffers. On an H100, one rank, the driver counted 2.93 GiB beyond what
torch had reserved in an update with Transformer Engine, and 3.4 in a run with an engine (docs/benchmarks.md), whose
CUDA graphs the plan has apart; 4% is an estimate."""
RESERVE = f"the {RESERVE_GIB:g} GiB and {RESERVE_SHARE:.0%} that stay free for CUDA, NCCL and fragmentation"


def planned_target(config: Config) -> Target:
    """The GPU that `memory` names, or the one that is there, or the CPU; the smaller one where a run with these
    settings would run on a GPU that is there, and another is named.

    Errors: ValueError where the GPU is named twice, or its memory cannot be read.
    """
    memory = config.memory
    if memory.gpu is not None and memory.gpu_gib is not None:
        both = f'memory.gpu is "{memory.gpu}" and memory.gpu_gib is {memory.gpu_gib:g}; give one of the two.'
        raise ValueError(f"{both} Set the other to null.")
    gib = memory.gpu_gib if memory.gpu is None else GPUS[memory.gpu].gib
    local_layers = config.policy.transformer_impl == "local"
    named = None if gib is None else Target("cuda", memory.gpu or "the GPU", int(gib * GIB), local_layers)
    if config.run.device == "cpu" or not cuda_is_available():
        return named or Target("cpu", "CPU", None, local_layers=True)
    try:
        here = Target("cuda", "the GPU that is there", _bytes_of_gpu_here(), local_layers)
    except ValueError as error:
        if named is None:
            how = "Name the GPU by memory.gpu or memory.gpu_gib."
            raise ValueError(f"the GPU that is there: {error}. {how}") from error
        return replace(named, name=f"{named.name} as named (the one that is there: {error})")
    return here if named is None else _smaller(named, here)


def _smaller(named: Target, here: Target) -> Target:
    assert named.total_bytes is not None and here.total_bytes is not None
    if here.total_bytes < named.total_bytes:
        setting = named.name if named.name in GPUS else f"memory.gpu_gib={named.total_bytes / GIB:g}"
        return replace(here, name=f"{here.name} (smaller than {setting})")
    name = f"{named.name} as named (the one that is there has {_gib(here.total_bytes)} GiB)"
    return replace(named, name=name)


def _bytes_of_gpu_here() -> int:
    """Memory of the first GPU that this process may use, by NVML: torch would start CUDA in this process, too early for
    settings that CUDA reads at its start, and for the reward workers. Half a percent above what CUDA reports.

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


def fit_problems(config: Config, shape: ModelShape, world_size: int, kind: Kind = "grpo") -> list[str]:
    """What does not fit the GPU; empty on CPU. The layout must have no problems (`parallelism`)."""
    try:
        target = planned_target(config)
    except ValueError as error:
        return [str(error)]
    if target.total_bytes is None:
        return []
    config = replace(with_longest_lengths(config), stages=StagesConfig(), validation=ValidationConfig())
    if usable_bytes(target) == 0:
        total = _gib(target.total_bytes)
        return [f"memory: {target.name} has {total} GiB, no more than {RESERVE}. Take a larger GPU."]
    plans = all_plans(config, shape, world_size, target, kind)
    problems, phase_groups = [], (memory_estimate.TRAINING_PHASES,)
    if kind == "grpo":
        problems += _engine_problems(config, shape, world_size, target)
        phase_groups = (memory_estimate.GENERATION_PHASES, *phase_groups)
    for phases in phase_groups:
        plan, phase = memory_estimate.largest(plans, phases)
        if plan.held(phase) > usable_bytes(target):
            advice = _advice(
                config, shape, world_size=world_size, target=target, plan=plan, phase=phase, kind=kind
            )
            problems.append(
                f"memory: {plan.name} needs {figures(plan, phase, 3)} in the phase "
                f'"{phase}"; {target.name} has {_gib(target.total_bytes)} GiB, of which a run may fill '
                f"{_gib(usable_bytes(target))} (without {RESERVE}). {advice}"
            )
    return problems


def all_plans(
    config: Config, shape: ModelShape, world_size: int, target: Target, kind: Kind = "grpo"
) -> list[MemoryPlan]:
    """A plan for every kind of rank: of each pipeline stage, and of engines with ranks of their own."""
    engines = memory_estimate.plan_engine_ranks(config, shape, world_size, target) if kind == "grpo" else []
    return [*memory_estimate.plan_ranks(config, shape, world_size, target, kind), *engines]


def start_up_lines(config: Config, shape: ModelShape, world_size: int, kind: Kind = "grpo") -> list[str]:
    """The plan of the rank that holds the most, a line per phase; where engines have ranks of their own, that of the
    training rank that does, and of an engine's."""
    target = planned_target(config)
    plans = all_plans(config, shape, world_size, target, kind)
    most, _ = memory_estimate.largest([plan for plan in plans if not plan.is_engine])
    limit = "" if target.total_bytes is None else f", may fill {_gib(usable_bytes(target))} GiB"
    lines = []
    for plan in (most, *(plan for plan in plans if plan.is_engine)):
        lines.append(f"Planned memory of {plan.name} on {target.name}{limit}:")
        lines += [f"  {phase}: {figures(plan, phase)}" for phase in plan.phases]
        if plan.host:
            parts = ", ".join(f"{part} {_gib(size)}" for part, size in plan.host.items())
            lines.append(f"  beside, in the host's memory: {_gib(sum(plan.host.values()))} GiB ({parts})")
    return lines


def measured_line(config: Config, shape: ModelShape, mesh: Mesh, kind: Kind, most: int, used: int) -> str:
    """The `most` that torch has held on this rank's GPU (bytes) beside the plan, and what the driver counts as `used`
    after the first step."""
    plan = memory_estimate.plan_rank(config, shape, mesh, planned_target(config), kind)
    return (
        f"GPU memory of rank {mesh.rank} until the end of its first step: torch held {_gib(most)} GiB at most, planned "
        f"{_gib(plan.held(plan.worst))} ({plan.worst}); now, with the engine asleep if there is one, the driver "
        f"counts {_gib(used)} GiB"
    )


def figures(plan: MemoryPlan, phase: str, most: int | None = None) -> str:
    """ "61.2 GiB (activations 40.1, parameters 14.2)", at most so many parts, largest first; what rounds to 0 is left
    out."""
    held = sorted(plan.phases[phase].items(), key=lambda item: -item[1])[:most]
    parts = [f"{part} {_gib(size)}" for part, size in held if size >= 0.005 * GIB]
    return f"{_gib(plan.held(phase))} GiB" + (f" ({', '.join(parts)})" if parts else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


# ---------------------------------------------------------------- a phase that holds too much


@dataclass(frozen=True)
class Change:
    """One piece of advice, and the run that follows it."""

    text: str
    config: Config
    world_size: int


def _advice(
    config: Config,
    shape: ModelShape,
    world_size: int,
    target: Target,
    plan: MemoryPlan,
    phase: str,
    kind: Kind,
) -> str:
    """The three best changes: those without further ranks first, of these the cheapest that make the phase fit, else
    those that free most."""
    helpful = []
    for change in _changes(config, shape, world_size, target, kind):
        parallel, rollout = change.config.parallel, change.config.rollout
        if any(rank_problems(parallel, rollout.tensor_parallel, change.world_size, rollout.ranks)) or any(
            layout_problems(parallel, rollout.tensor_parallel, change.config.policy, shape)
        ):
            continue
        plans = all_plans(change.config, shape, change.world_size, target, kind)
        plans = [other for other in plans if other.is_engine == plan.is_engine]
        held = max(other.held(phase) for other in plans)
        if plans[min(plan.stage, len(plans) - 1)].held(phase) < plan.held(phase):
            too_much = max(0, held - usable_bytes(target))
            helpful.append((change.world_size > world_size, too_much, change.text))
    best = [text for *_, text in sorted(helpful, key=lambda found: found[:2])[:3]]
    return " ".join(best or ["Take a larger GPU: no single setting makes this phase smaller."])


def _changes(
    config: Config, shape: ModelShape, world_size: int, target: Target, kind: Kind
) -> Iterator[Change]:
    """What could make a phase smaller, cheapest first; not all of it helps, or is legal, in this run."""
    memory, parallel, policy, rollout = config.memory, config.parallel, config.policy, config.rollout
    own = rollout.ranks
    twice_trainers = 2 * (world_size - own) + own

    def change(text: str, ranks: int = world_size, **sections: dict[str, Any]) -> Change:
        changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
        return Change(text, replace(config, **changed), ranks)

    if kind == "grpo":
        yield _fitting_engine(config, shape, world_size, target)
        for part in ("gradients", "optimizer", "parameters", "reference", "critic", "teacher"):
            if not getattr(memory, f"offload_{part}"):
                yield change(f"Set memory.offload_{part}=true.", memory={f"offload_{part}": True})
        yield change("Set rollout.cuda_graphs=false.", rollout={"cuda_graphs": False})
        yield change("Lower sync.bucket_mib.", sync={"bucket_mib": 0.9 * config.sync.bucket_mib})
    if config.optimizer.kind == "adam" and not config.optimizer.distributed:
        yield change("Set optimizer.distributed=true.", optimizer={"distributed": True})
    if policy.recompute_granularity is None and not target.local_layers:
        selective = {"recompute_granularity": "selective"}
        yield change("Set policy.recompute_granularity=selective.", policy=selective)
    if policy.recompute_granularity != "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield change(f"Set {' '.join(f'policy.{key}={value}' for key, value in full.items())}.", policy=full)
    length, longest = "the longest sequence, ", config.data.max_prompt_tokens + rollout.max_new_tokens
    if kind == "sft":
        length, longest = "sft.max_sequence_tokens=", config.sft.max_sequence_tokens
    if (now := policy.max_tokens_per_microbatch) > longest:
        text = f"Lower policy.max_tokens_per_microbatch (now {now}, at least {length}{longest})."
        yield change(text, policy={"max_tokens_per_microbatch": longest})
    if parallel.tensor > 1 and not parallel.sequence:
        yield change("Set parallel.sequence=true.", parallel={"sequence": True})
    if config.optimizer.distributed:
        more = " that train" if own else ""
        text = f"Start more ranks{more}, which share the optimizer."
        yield change(text, twice_trainers, parallel={"data": None})
    for name in ("tensor", "pipeline"):
        now = getattr(parallel, name)
        more = {name: 2 * now, "data": None}
        yield change(f"Raise parallel.{name} (now {now}).", twice_trainers, parallel=more)
    now = rollout.tensor_parallel
    larger = {"tensor_parallel": 2 * now}
    if own:
        yield change(f"Raise rollout.tensor_parallel (now {now}).", rollout=larger)
        text = f"Raise rollout.tensor_parallel (now {now}) and rollout.ranks (now {own})."
        yield change(text, world_size + own, rollout=larger | {"ranks": 2 * own})
    else:
        yield change(f"Raise rollout.tensor_parallel (now {now}).", 2 * world_size, rollout=larger)


# ---------------------------------------------------------------- an engine whose share is too small


def _engine_needs(config: Config, shape: ModelShape, target: Target) -> tuple[EngineBytes, int]:
    """(an engine rank, KV cache of one longest sequence), in bytes."""
    rollout, tokens = config.rollout, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    engine = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes)
    ranks = rollout.tensor_parallel
    return engine, longest_sequence_bytes(shape, ranks, target.itemsize, tokens, target.kind)


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
        + _fitting_engine(config, shape, world_size, target).text
    )


def _fitting_engine(config: Config, shape: ModelShape, world_size: int, target: Target) -> Change:
    """The smallest share that is enough, in whole hundredths: of the engine as it is, else of one without CUDA graphs,
    else of one on the fewest ranks that are enough."""
    assert target.total_bytes is not None
    now, share, own = config.rollout.tensor_parallel, config.rollout.memory_share, config.rollout.ranks
    choices = [{}, {"cuda_graphs": False}]
    choices += [{"tensor_parallel": ranks} for ranks in range(now + 1, shape.num_heads + 1)]
    for choice in choices:
        ranks = choice.get("tensor_parallel", now)
        if any(split_problems(config.parallel, ranks, shape)):
            continue
        changed = replace(config, rollout=replace(config.rollout, **choice))
        engine, sequence = _engine_needs(changed, shape, target)
        least = math.ceil(100 * (engine.weights + engine.workspace + sequence) / target.total_bytes) / 100
        if least > usable_bytes(target) / target.total_bytes:
            continue
        text = f"Raise it to {least:.2f} or more, or raise rollout.tensor_parallel (now {now})."
        if ranks != now:
            start = f", start a multiple of {ranks} ranks"
            if own:
                start = f", rollout.ranks to a multiple of {ranks} (now {own})"
            if (own or world_size) % ranks == 0:
                start = ""
            text = f"Set rollout.tensor_parallel={ranks} (now {now}){start}, and "
        elif choice:
            text = "Set rollout.cuda_graphs=false and "
        elif least < share:
            text = f"Lower rollout.memory_share (now {share:g}, at least {least:.2f})."
        if choice:
            text += f"rollout.memory_share to {least:.2f} or a little more."
        engine_ranks = -(-(own or world_size) // ranks) * ranks
        more = {"ranks": engine_ranks} if own else {}
        fitting = replace(changed, rollout=replace(changed.rollout, memory_share=least, **more))
        return Change(text, fitting, world_size - own + engine_ranks if own else engine_ranks)
    text = (
        "Lower rollout.max_num_batched_tokens, rollout.max_num_seqs or rollout.max_new_tokens, or take a larger GPU: "
        "no rollout.tensor_parallel makes the engine fit."
    )
    return Change(text, config, world_size)
