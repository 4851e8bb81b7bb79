"""Memory that each rank of a run holds in each phase of a step, by part, as plain arithmetic.

A step drops what training alone needs, wakes the engine's weights, syncs, wakes the KV cache,
generates, puts the engine to sleep, brings the training's parts back, and computes log-probs and
updates:

    sync       parameters, engine weights, buffers of the transfer
    generate   engine weights, workspace and KV cache; parameters unless they are offloaded
    logprobs   parameters, gradients, optimizer; one forward pass
    reference  the same with the reference's pass
    critic     the same with the critic, its gradients, its optimizer and the activations of its backward pass
    teacher    the same with the teacher's
    update     the same with the activations of a backward pass

Where the engines' experts are replayed (`policy.routing_replay`), a phase "pack" comes before
logprobs: a rank then holds the routes that it has sampled and those that it has fetched. Routes are
in the host's memory, so that the phases have them on CPU alone.

What stays beside in the first two follows `MemoryConfig`; on CPU only gradients can leave, since
what is copied to the host stays in the same memory. With LoRA an engine that samples with adapters
keeps its weights in the other phases, too, where they fit (`memory_fit.keeps_base`). Counted are
the device's tensors in a step that is not the first; what CUDA, NCCL and fragmentation take is the
reserve of `memory_fit`. Supervised training ("sft") has one phase, the update. Where engines have
ranks of their own (`rollout.ranks`), a training rank has the phases of training, an engine's
"generate".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from rlmath.algorithms.partial_rollouts import with_reserve
from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.checkpoint.hf.weight_map import (
    Rule,
    adapter_rules,
    merging_bytes,
    rules_of,
    shard_shape,
)
from rlmath.config.length_curriculum import sequence_length
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import (
    NO_LORA,
    Config,
    Kind,
    LoraConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
)
from rlmath.distributed.device_kind import FORMAT_BYTES, DeviceKind, NumberFormat, number_format
from rlmath.distributed.mesh import Mesh
from rlmath.planning import memory_formulas as formulas
from rlmath.rollout.unfinished_rules import slice_tokens, unfinished_rules
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes
from rlmath.rollout.weight_sync.shard_layouts import stage_layers

PARTS = """
parameters gradients optimizer reference critic_parameters critic_gradients critic_optimizer teacher teacher_head
activations logits working gather_buffer dummy_gradients engine_weights engine_workspace kv_cache sync_buffers
recorded_routes sampled_routes replayed_routes
""".split()
"""Every part that a plan may name.

"working" is what a pass needs beside activations and logits, "teacher_head" the output layer of a
teacher where the update needs it; the three of routes are those of `formulas.RouteBytes`."""
ENGINE_PARTS = ("engine_weights", "engine_workspace", "kv_cache", "sync_buffers")
"""Parts that training does without."""
GENERATION_PHASES = ("sync", "generate")
TRAINING_PHASES = ("pack", "logprobs", "reference", "critic", "teacher", "update")


@dataclass(frozen=True)
class Target:
    """The device that a run is planned for."""

    kind: DeviceKind
    name: str
    """Name in messages: "H100-80GB", "CPU"."""
    total_bytes: int | None
    """Memory of the device; None where nothing is to be refused."""
    local_layers: bool
    """The policy runs Megatron's local layers, not Transformer Engine's."""
    dtype: NumberFormat | Literal["auto"] = "auto"
    """Number format of the weights, as `policy.dtype`."""

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return FORMAT_BYTES[number_format(self.dtype, self.kind)]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of one rank: what it holds in each phase."""

    rank: int
    """Number of the rank among all of the run."""
    stage: int
    """Pipeline stage of the rank; its ranks all hold the same."""
    phases: Mapping[str, Mapping[str, int]]
    """Bytes by phase and part, in the order of a step; parts that are not held are left out."""
    is_engine: bool = False
    """Whether an engine has the rank for itself, with stage 0; all such ranks hold the same."""
    routes: formulas.RouteBytes = formulas.NO_ROUTES
    """Bytes in the host's memory, on CPU among those of the phases."""

    @property
    def name(self) -> str:
        """Name of the rank in messages."""
        return (
            f"engine rank {self.rank}"
            if self.is_engine
            else f"rank {self.rank} (pipeline stage {self.stage})"
        )

    def held(self, phase: str) -> int:
        """Bytes of a phase at its fullest moment."""
        return sum(self.phases[phase].values())

    @property
    def worst(self) -> str:
        """The phase that holds the most."""
        return max(self.phases, key=self.held)

    def part(self, name: str) -> int:
        """The most that a part takes in any phase (bytes)."""
        return max(parts.get(name, 0) for parts in self.phases.values())


def plan_ranks(
    config: Config,
    shapes: RunShapes,
    world_size: int,
    target: Target,
    kind: Kind = "grpo",
    keeps_base: bool = False,
) -> list[MemoryPlan]:
    """The plan of the first rank of every pipeline stage; all ranks of a stage hold the same.

    The engines' own ranks are not among them (`plan_engine_ranks`). The layout must have no
    problems (`parallelism`). `keeps_base` is as in `plan_rank`."""
    parallel = config.parallel
    rollout = config.rollout
    per_stage = training_ranks(world_size, rollout.ranks) // parallel.pipeline
    meshes = [
        mesh_of(parallel, rollout, world_size, rank=stage * per_stage)
        for stage in range(parallel.pipeline)
    ]
    return [
        plan_rank(config, shapes, mesh, target=target, kind=kind, keeps_base=keeps_base)
        for mesh in meshes
    ]


def plan_engine_ranks(
    config: Config, policy: ModelShape, world_size: int, target: Target
) -> list[MemoryPlan]:
    """The plan of the engines' own ranks, which all hold the same; empty where they have none."""
    if config.rollout.ranks == 0:
        return []
    engine = engine_of_run(config, policy, target)
    sizes = {
        "engine_weights": engine.weights,
        "engine_workspace": engine.workspace,
        "kv_cache": max(0, engine.kv_cache),
    }
    first = training_ranks(world_size, config.rollout.ranks)
    return [MemoryPlan(first, 0, {"generate": _in_order(sizes)}, is_engine=True)]


def engine_of_run(config: Config, policy: ModelShape, target: Target) -> formulas.EngineBytes:
    """The memory of an engine rank of a run with a policy of this shape."""
    return formulas.engine_bytes(
        policy,
        config.rollout,
        target.kind,
        itemsize=target.itemsize,
        device_bytes=target.total_bytes,
        lora=config.lora,
    )


def largest(
    plans: list[MemoryPlan], phases: tuple[str, ...] | None = None
) -> tuple[MemoryPlan, str]:
    """The plan and the phase that hold the most, of all phases or of some."""
    return max(
        (
            (plan, phase)
            for plan in plans
            for phase in plan.phases
            if phases is None or phase in phases
        ),
        key=lambda candidate: candidate[0].held(candidate[1]),
    )


def training_ranks(world_size: int, engine_ranks: int) -> int:
    """Ranks of a run that train: the first ones, all where the engines have none of their own."""
    return world_size - engine_ranks


def mesh_of(parallel: ParallelConfig, rollout: RolloutConfig, world_size: int, rank: int) -> Mesh:
    """Place of a training rank of a run with these settings, among all that train."""
    trainers = training_ranks(world_size, rollout.ranks)
    assert 0 <= rank < trainers, f"rank {rank} is none of the {trainers} that train"
    return Mesh(
        rank,
        trainers,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        engine_size=rollout.tensor_parallel,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        engine_ranks=rollout.ranks,
    )


def engine_mesh_of(rollout: RolloutConfig, world_size: int, rank: int) -> Mesh:
    """Place of one of the engines' own ranks among all of these; `rank` is that of the run."""
    trainers = training_ranks(world_size, rollout.ranks)
    assert trainers <= rank < world_size, (
        f"rank {rank} is none of the {rollout.ranks} of the engines"
    )
    return Mesh(
        rank - trainers, rollout.ranks, tensor=1, pipeline=1, engine_size=rollout.tensor_parallel
    )


def plan_rank(
    config: Config,
    shapes: RunShapes,
    mesh: Mesh,
    target: Target,
    kind: Kind = "grpo",
    keeps_base: bool = False,
) -> MemoryPlan:
    """The plan of one rank, for the longest of its length stages.

    `keeps_base`: the engine's weights stay while the rank trains (`memory_fit.keeps_base`)."""
    shape = shapes.policy
    policy = replace(config.policy, max_tokens_per_microbatch=shapes.microbatch_tokens)
    layers = own_layers(config.parallel, shape, mesh)
    work = stage_work(policy, config.parallel, config.lora, mesh=mesh, target=target, layers=layers)
    critic = plan_critic(
        shapes.critic,
        policy=policy,
        parallel=config.parallel,
        optimizer=config.optimizer,
        mesh=mesh,
        target=target,
    )
    teacher = plan_teacher(
        shapes.teacher,
        policy=policy,
        parallel=config.parallel,
        vocab_size=shape.vocab_size,
        whole_vocabulary=config.teacher.loss == "full",
        mesh=mesh,
        target=target,
    )
    resident = _policy_bytes(config, shape, mesh, target=target, layers=layers, work=work)
    resident |= critic.resident | teacher.resident
    resident["gather_buffer"] = max(
        formulas.gather_bytes(shape, work), critic.gather, teacher.gather
    )
    memory = _offloads_that_free_memory(config.memory, target.kind)
    update = formulas.backward_bytes(shape, work, policy, in_loss=teacher.in_loss)
    routes = formulas.NO_ROUTES
    if kind == "sft":
        phases = {"update": _while_training(resident, memory) | asdict(update)}
    else:
        forward = formulas.forward_bytes(shape, work)
        engine = engine_of_run(config, shape, target)
        routes = plan_routes(
            policy.routing_replay,
            shape,
            [step_sequences(stage.config) for stage in shapes.length_stages],
            mesh=mesh,
            work=work,
            layers=layers,
            kv_cache=engine.kv_cache,
        )
        asleep: dict[str, int] = {}
        phases = {}
        if not mesh.engine_ranks:
            sync_buffers = _sync_bytes(
                config.lora,
                shape,
                mesh,
                target=target,
                bucket_mib=config.sync.bucket_mib,
                sent=engine.adapters if keeps_base else engine.weights,
            )
            asleep = {
                "engine_workspace": engine.asleep,
                "engine_weights": engine.weights if keeps_base else 0,
            }
            phases = _generation_phases(resident, memory, engine, sync_buffers=sync_buffers)
        phases |= _training_phases(
            resident,
            memory,
            asleep=asleep,
            forward=forward,
            reference=forward if config.algorithm.kl_coef > 0 else None,
            critic=critic.largest_pass,
            teacher=teacher.largest_pass,
            update=update,
        )
        if target.kind == "cpu":
            phases = _with_routes(phases, routes, resident)
    return MemoryPlan(
        mesh.rank,
        mesh.pipeline_rank,
        {name: _in_order(sizes) for name, sizes in phases.items()},
        routes=routes,
    )


def step_sequences(config: Config) -> formulas.StepSequences:
    """The sequences of a step with these settings, all of the greatest length.

    Every prompt that selection may ask for has its group. With "carry" the most groups are in
    flight; with "defer" all of a short round of the most groups end with their slice."""
    prompts = config.data.prompts_per_step
    rollout = config.rollout
    rules = unfinished_rules(config)
    longest = sequence_length(config)
    groups = prompts + rules.max_dropped
    short = carried = 0
    if rollout.tail == "carry":
        groups = rules.max_groups + rules.max_dropped
        carried = (groups - prompts) * rollout.group_size
    elif rollout.tail == "defer":
        tokens = config.data.max_prompt_tokens + slice_tokens(rollout)
        completions = with_reserve(prompts, share=0.0) * rollout.group_size
        short = -(-completions * tokens // longest)
    return formulas.StepSequences(
        longest,
        sampled=groups * rollout.group_size + short,
        learned=prompts * config.learned_group_size,
        minibatches=config.algorithm.n_minibatches,
        carried=carried,
    )


def plan_routes(
    replay: str,
    shape: ModelShape,
    stages: Sequence[formulas.StepSequences],
    mesh: Mesh,
    work: formulas.StageWork,
    layers: int,
    kv_cache: int,
) -> formulas.RouteBytes:
    """Routes of a rank, the first of its engine, that replays those of this kind.

    Of several length `stages` each part is the largest. `kv_cache` are the bytes of its engine's,
    and `layers` those of its own stage."""
    if replay == "none" or not stages:
        return formulas.NO_ROUTES
    tensor = mesh.tensor if work.sequence else 1
    replayed = [
        formulas.replayed_route_bytes(
            shape,
            sequences,
            layers,
            data=mesh.data,
            multiple=tensor,
            parts=tensor if replay == "old" else 1,
        )
        for sequences in stages
    ]
    if replay == "old":
        return formulas.RouteBytes(0, 0, max(replayed))
    token = formulas.kv_bytes_per_token(shape, mesh.engine_size, work.itemsize)
    return formulas.RouteBytes(
        recorded=formulas.route_bytes(shape, shape.num_layers, kv_cache // token + 1),
        sampled=max(
            formulas.sampled_route_bytes(shape, stage.tokens, stage.sampled, mesh.num_engines)
            for stage in stages
        ),
        replayed=max(replayed),
        carried=max(
            formulas.sampled_route_bytes(shape, stage.tokens, stage.carried, mesh.num_engines)
            for stage in stages
        ),
    )


def carried_route_bytes(config: Config, shapes: RunShapes) -> int:
    """The most that a checkpoint has of routes: those of what is carried, not compressed (bytes)."""
    if config.policy.routing_replay != "engine":
        return 0
    stages = [step_sequences(stage.config) for stage in shapes.length_stages]
    return max(
        formulas.sampled_route_bytes(shapes.policy, stage.tokens, stage.carried, engines=1)
        for stage in stages
    )


def captured_route_bytes(config: Config, shapes: RunShapes) -> int:
    """The most that `telemetry.capture_steps` write of routes, not compressed (bytes)."""
    if config.policy.routing_replay != "engine":
        return 0
    stages = [step_sequences(stage.config) for stage in shapes.length_stages]
    return len(config.telemetry.capture_steps) * max(
        formulas.sampled_route_bytes(shapes.policy, stage.tokens, stage.learned, engines=1)
        for stage in stages
    )


def _with_routes(
    phases: Mapping[str, Mapping[str, int]],
    routes: formulas.RouteBytes,
    resident: Mapping[str, int],
) -> dict[str, dict[str, int]]:
    """The phases with what they hold of routes, and "pack" before those that replay an engine's."""
    with_routes: dict[str, dict[str, int]] = {}
    for phase, sizes in phases.items():
        if phase == "logprobs" and routes.sampled:
            asleep = {part: sizes[part] for part in ENGINE_PARTS if part in sizes}
            fetched = {"sampled_routes": routes.sampled, "replayed_routes": routes.replayed}
            with_routes["pack"] = {**resident, **asleep, **fetched}
        routes_of_phase = {"sampled_routes": routes.carried}
        if phase == "generate":
            routes_of_phase = {"sampled_routes": routes.sampled}
        elif phase != "sync":
            routes_of_phase["replayed_routes"] = routes.replayed
        with_routes[phase] = {**sizes, **routes_of_phase}
    return {
        phase: sizes | {"recorded_routes": routes.recorded} for phase, sizes in with_routes.items()
    }


@dataclass(frozen=True)
class ModelBytes:
    """Bytes that one rank holds of a critic or a teacher, and for it."""

    resident: dict[str, int]
    """Bytes by part; empty without such a model."""
    largest_pass: formulas.PassBytes | None
    """None without such a model."""
    gather: int = 0
    """Bytes of the buffer of gathered hidden states (`formulas.gather_bytes`)."""
    in_loss: int = 0
    """Bytes beside the policy's logits in the update: a teacher's hidden states and blocks of
    logits."""


NO_MODEL = ModelBytes({}, largest_pass=None)


def plan_critic(
    critic: ModelShape | None,
    policy: PolicyConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    mesh: Mesh,
    target: Target,
) -> ModelBytes:
    """The plan of a critic of this shape on a rank; None: the run has none."""
    if critic is None:
        return NO_MODEL
    layers = own_layers(parallel, critic, mesh)
    sizes = _learner_bytes(optimizer, NO_LORA, critic, mesh=mesh, target=target, layers=layers)
    work = stage_work(policy, parallel, NO_LORA, mesh=mesh, target=target, layers=layers)
    return ModelBytes(
        {f"critic_{name}": size for name, size in sizes.items()},
        formulas.backward_bytes(critic, work, policy),
        formulas.gather_bytes(critic, work),
    )


def _policy_bytes(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    target: Target,
    layers: int,
    work: formulas.StageWork,
) -> dict[str, int]:
    """Bytes by part of the policy, and of the reference if that is a model of its own."""
    sizes = _learner_bytes(
        config.optimizer, config.lora, shape, mesh=mesh, target=target, layers=layers
    )
    if config.lora.rank:  # the reference is the policy without its adapters
        return sizes
    if config.algorithm.kl_coef > 0:
        sizes["reference"] = _elements(shape, mesh, layers) * target.itemsize
    with_head = work.head_itemsize == work.itemsize
    sizes["dummy_gradients"] = _dummy_gradient_bytes(shape, mesh, target, with_head=with_head)
    return sizes


def own_layers(parallel: ParallelConfig, shape: ModelShape, mesh: Mesh) -> int:
    """Layers of a model of this shape that the stage of `mesh.rank` has."""
    stages = stage_layers(
        shape.num_layers,
        mesh.pipeline,
        mesh.virtual_pipeline,
        first=parallel.first_stage_layers,
        last=parallel.last_stage_layers,
    )
    return len(stages[mesh.pipeline_rank])


class GradientBuffer(NamedTuple):
    """One of Megatron's flat buffers of a rank."""

    sizes: list[int]
    """Elements of its parameters."""
    ranks: int
    """Ranks that share it."""
    stride: int
    """Distance from one of them to the next."""


def gradient_buffers(
    lora: LoraConfig, shape: ModelShape, mesh: Mesh, layers: int
) -> list[GradientBuffer]:
    """The buffers of what learns: with LoRA the adapters."""
    shares = mesh.data * mesh.context
    stride = mesh.expert * mesh.expert_tensor
    if lora.rank:
        dense = adapter_sizes(lora, shape, mesh, layers=layers)
        experts = []
    else:
        dense = parameter_sizes(shape, mesh, layers)
        experts = expert_sizes(shape, mesh, layers)
    buffers = [GradientBuffer(sizes, shares, mesh.tensor) for sizes in dense]
    return buffers + [GradientBuffer(sizes, mesh.expert_data, stride) for sizes in experts]


def plan_teacher(
    teacher: ModelShape | None,
    policy: PolicyConfig,
    parallel: ParallelConfig,
    vocab_size: int,
    whole_vocabulary: bool,
    mesh: Mesh,
    target: Target,
) -> ModelBytes:
    """The plan of a teacher of this shape on a rank; None: the run has none.

    `vocab_size` is the policy's: the teacher's embedding has as many rows. `whole_vocabulary`: the
    loss takes its log-probs of all tokens."""
    if teacher is None:
        return NO_MODEL
    teacher = replace(teacher, vocab_size=vocab_size)
    layers = own_layers(parallel, teacher, mesh)
    head = (
        formulas.head_bytes(teacher, mesh.tensor, target.itemsize)
        if whole_vocabulary and mesh.is_last_stage
        else 0
    )
    weights = _elements(teacher, mesh, layers) * target.itemsize
    resident = {"teacher": weights - head, "teacher_head": head}
    work = stage_work(policy, parallel, NO_LORA, mesh=mesh, target=target, layers=layers)
    in_loss = formulas.teacher_loss_bytes(teacher, work) if whole_vocabulary else 0
    # For hidden states alone the pass ends before the output layer.
    pass_work = replace(work, has_head=work.has_head and not whole_vocabulary)
    gather = formulas.gather_bytes(teacher, pass_work)
    return ModelBytes(resident, formulas.forward_bytes(teacher, pass_work), gather, in_loss)


def stage_work(
    policy: PolicyConfig,
    parallel: ParallelConfig,
    lora: LoraConfig,
    mesh: Mesh,
    target: Target,
    layers: int,
) -> formulas.StageWork:
    """Work of the stage of `mesh.rank` on one micro-batch."""
    return formulas.StageWork(
        chunk_layers=layers // mesh.virtual_pipeline,
        in_flight=formulas.in_flight(mesh.pipeline, mesh.pipeline_rank, mesh.virtual_pipeline),
        has_embedding=mesh.pipeline_rank == 0,
        has_head=mesh.is_last_stage,
        pipelined=mesh.pipeline > 1,
        tokens=-(-policy.max_tokens_per_microbatch // mesh.context),
        tensor=mesh.tensor,
        sequence=parallel.sequence and mesh.tensor > 1,
        itemsize=target.itemsize,
        head_itemsize=FORMAT_BYTES[policy.head_dtype] if policy.head_dtype else target.itemsize,
        device_kind=target.kind,
        local_layers=target.local_layers,
        chunks=mesh.virtual_pipeline,
        expert_tensor=mesh.expert_tensor,
        lora=lora,
    )


# ---------------------------------------------------------------- parameters and what hangs on them


def parameter_sizes(
    shape: ModelShape, mesh: Mesh, layers: int, rules: tuple[Rule, ...] | None = None
) -> list[list[int]]:
    """Elements of every parameter of a rank by model chunk, except those of experts.

    With `rules`, of the parameters of these. The stage has so many layers. The table of Hugging
    Face tensors says how each is split. Behind a pipeline, a tied model's last stage has a copy of
    the embedding as its head."""
    sizes = {"first": [], "layer": [], "last": []}
    for rule in rules_of(shape.architecture) if rules is None else rules:
        is_head = rule.megatron == ("output_layer.weight",)
        if is_head and shape.tied_embeddings and mesh.pipeline == 1:
            continue
        if rule.owner != "expert":
            sizes[rule.owner].append(math.prod(shard_shape(rule, shape, mesh.tensor)))
    virtual = mesh.virtual_pipeline
    return [
        [
            *(sizes["first"] if mesh.pipeline_rank == 0 and chunk == 0 else []),
            *(sizes["layer"] * (layers // virtual)),
            *(sizes["last"] if mesh.is_last_stage and chunk == virtual - 1 else []),
        ]
        for chunk in range(virtual)
    ]


def adapter_sizes(lora: LoraConfig, shape: ModelShape, mesh: Mesh, layers: int) -> list[list[int]]:
    """Elements of LoRA's adapters, in the form of `parameter_sizes`."""
    return parameter_sizes(
        shape, mesh, layers, rules=adapter_rules(shape.architecture, lora.rank, lora.target)
    )


def expert_sizes(shape: ModelShape, mesh: Mesh, layers: int) -> list[list[int]]:
    """Elements of every expert's parameters on a rank, by model chunk.

    Megatron keeps them in buffers of their own."""
    rules = [rule for rule in rules_of(shape.architecture) if rule.owner == "expert"]
    expert = [math.prod(shard_shape(rule, shape, mesh.expert_tensor)) for rule in rules]
    experts = shape.num_experts // mesh.expert * (layers // mesh.virtual_pipeline)
    return [expert * experts] * mesh.virtual_pipeline if expert else []


def _elements(shape: ModelShape, mesh: Mesh, layers: int) -> int:
    """Elements of all of a model's parameters on a rank."""
    sizes = [*parameter_sizes(shape, mesh, layers), *expert_sizes(shape, mesh, layers)]
    return sum(map(sum, sizes))


def _dummy_gradient_bytes(shape: ModelShape, mesh: Mesh, target: Target, with_head: bool) -> int:
    """Bytes of the empty gradients that Transformer Engine keeps (`get_dummy_wgrad`).

    Where the multiplication itself adds gradients to their buffers (with apex's kernel), autograd
    gets an empty tensor in their place, one for each shape of a weight. `with_head`: the output
    layer has one, too."""
    if target.kind != "cuda" or target.local_layers:
        return 0
    matrices = set()
    for rule in rules_of(shape.architecture):
        ranks = mesh.expert_tensor if rule.owner == "expert" else mesh.tensor
        size = shard_shape(rule, shape, ranks)
        head = rule.megatron == ("output_layer.weight",) and mesh.is_last_stage and with_head
        is_matrix = len(size) >= 2 and not rule.megatron[-1].endswith(("bias", "router.weight"))
        if is_matrix and (rule.owner in ("layer", "expert") or head):
            matrices.add(size)
    return sum(map(math.prod, matrices)) * target.itemsize


def buffer_elements(sizes: list[int], distributed: bool, shares: int) -> int:
    """Elements of Megatron's flat buffer of one model chunk.

    With the distributed optimizer every parameter starts at a multiple of 64, and the end is a
    multiple of 128 and of the ranks that share it (megatron-core 0.16, `_ParamAndGradBuffer`). A
    tied embedding has a bucket of its own, which changes it by less than that."""
    if not distributed:
        return sum(sizes)
    end = 0
    for size in sizes:
        end = _up(end, 64) + size
    return _up(end, math.lcm(shares, 128))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _learner_bytes(
    optimizer: OptimizerConfig,
    lora: LoraConfig,
    shape: ModelShape,
    mesh: Mesh,
    target: Target,
    layers: int,
) -> dict[str, int]:
    """Bytes of what outlives a pass of a model that learns: parameters, gradients, optimizer.

    Gradients are float32 on every device. Adam keeps two float32 moments, SGD nothing; where
    parameters have 16 bits the optimizer also keeps them in float32. The distributed optimizer
    divides these among data-parallel ranks. With LoRA all this is of the adapters alone, and the
    weights are in no buffer."""
    buffers = gradient_buffers(lora, shape, mesh, layers=layers)
    learned = sum(sum(gradient_buffer.sizes) for gradient_buffer in buffers)
    lengths = [
        buffer_elements(gradient_buffer.sizes, optimizer.distributed, gradient_buffer.ranks)
        for gradient_buffer in buffers
    ]
    buffer = sum(lengths)
    moments = 2 if optimizer.kind == "adam" else 0
    main_copies = 0 if target.itemsize == formulas.FLOAT32_BYTES else 1
    states = learned
    if optimizer.distributed:
        states = sum(
            length // gradient_buffer.ranks
            for length, gradient_buffer in zip(lengths, buffers, strict=True)
        )
    frozen = _elements(shape, mesh, layers) if lora.rank else 0
    return {
        "parameters": (frozen + buffer) * target.itemsize,
        "gradients": buffer * formulas.FLOAT32_BYTES,
        "optimizer": states * (moments + main_copies) * formulas.FLOAT32_BYTES,
    }


def _offloads_that_free_memory(memory: MemoryConfig, device_kind: DeviceKind) -> MemoryConfig:
    """The settings without offloads of no use: on CPU only dropping gradients frees memory."""
    if device_kind == "cuda":
        return memory
    return replace(
        memory,
        offload_optimizer=False,
        offload_parameters=False,
        offload_reference=False,
        offload_teacher=False,
        offload_critic=False,
    )


def _generation_phases(
    resident: Mapping[str, int],
    memory: MemoryConfig,
    engine: formulas.EngineBytes,
    sync_buffers: int,
) -> dict[str, dict[str, int]]:
    """Bytes by part in GENERATION_PHASES of a rank that trains and has an engine."""
    return {
        "sync": _while_generating(resident, memory, with_parameters=True)
        | {
            "engine_weights": engine.weights,
            "engine_workspace": engine.asleep,
            "sync_buffers": sync_buffers,
        },
        "generate": _while_generating(resident, memory, not memory.offload_parameters)
        | {
            "engine_weights": engine.weights,
            "engine_workspace": engine.workspace,
            "kv_cache": max(0, engine.kv_cache),
        },
    }


def _training_phases(
    resident: Mapping[str, int],
    memory: MemoryConfig,
    asleep: dict[str, int],
    forward: formulas.PassBytes,
    reference: formulas.PassBytes | None,
    critic: formulas.PassBytes | None,
    teacher: formulas.PassBytes | None,
    update: formulas.PassBytes,
) -> dict[str, dict[str, int]]:
    """Bytes by part in TRAINING_PHASES, with the largest pass of each; None: no such phase.

    `asleep` are the bytes by part that a sleeping engine keeps."""
    passes = {
        "logprobs": ("", forward),
        "reference": ("reference", reference),
        "critic": ("critic", critic),
        "teacher": ("teacher", teacher),
        "update": ("teacher_head", update),
    }
    return {
        phase: _while_training(resident, memory, model) | asleep | asdict(largest_pass)
        for phase, (model, largest_pass) in passes.items()
        if largest_pass is not None
    }


def _while_generating(
    resident: Mapping[str, int], memory: MemoryConfig, with_parameters: bool
) -> dict[str, int]:
    """Bytes by part while the engine is awake."""
    gone = {
        "parameters": not with_parameters,
        "gradients": memory.offload_gradients,
        "optimizer": memory.offload_optimizer,
    }
    return {
        part: size
        for part, size in _while_training(resident, memory).items()
        if not gone.get(part, False)
    }


def _while_training(
    resident: Mapping[str, int], memory: MemoryConfig, model: str = ""
) -> dict[str, int]:
    """Bytes by part while the policy or another model computes.

    `model` is the part that is needed even where it is offloaded otherwise: "reference", "critic",
    "teacher", or the "teacher_head" of the update."""
    gone = {
        "reference": memory.offload_reference,
        "critic_parameters": memory.offload_critic,
        "critic_gradients": memory.offload_critic or memory.offload_gradients,
        "critic_optimizer": memory.offload_critic,
        "teacher": memory.offload_teacher,
        "teacher_head": memory.offload_teacher,
    }
    return {
        part: size
        for part, size in resident.items()
        if not gone.get(part, False) or (model and part.startswith(model))
    }


def _sync_bytes(
    lora: LoraConfig,
    shape: ModelShape,
    mesh: Mesh,
    target: Target,
    bucket_mib: float,
    sent: int,
) -> int:
    """Bytes of a weight sync that sends so many: two buckets for sending and two for receiving.

    Ranks that share memory have two in all. There are none where every rank has what its engine
    needs (except rows of the vocabulary that two paddings put on different ranks). With LoRA there
    is also the matrix of which merging needs most, or, where adapters are sent, the largest B times
    its scale."""
    largest_matrix = 0
    rules = adapter_rules(shape.architecture, lora.rank, lora.target)
    for a, b in zip(rules[::2], rules[1::2], strict=True):
        parts, rank, columns = shard_shape(a, shape, mesh.tensor)
        elements = math.prod(shard_shape(b, shape, mesh.tensor))
        size = elements * target.itemsize
        if lora.engine == "merged":
            rows = elements // rank
            size = merging_bytes(rows, columns, parts * rank, itemsize=target.itemsize)
        largest_matrix = max(largest_matrix, size)
    if mesh.pipeline == mesh.expert == 1 and mesh.tensor in (1, mesh.engine_size):
        return largest_matrix
    bucket = bucket_bytes(bucket_mib, target.kind, mesh.world_size)
    return largest_matrix + (4 if target.kind == "cuda" else 2) * min(bucket, sent)


def _in_order(held: Mapping[str, int]) -> dict[str, int]:
    return {part: held[part] for part in PARTS if held.get(part)}
