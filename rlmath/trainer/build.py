"""What a run works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.algorithms.types import Prompt
from rlmath.config.length_curriculum import LengthStage, engine_length, length_stages, without_validation
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, MemoryConfig
from rlmath.data.dataset import Inputs, most_updates
from rlmath.data.loader import PromptOrder
from rlmath.distributed.collectives import from_rank_zero
from rlmath.distributed.device import Device, local_world_size
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import Actor, build_actor, build_reference
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.megatron import start_megatron
from rlmath.models.offload import OffloadSets, training_sets
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.collector import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.memory_monitor import MemoryMonitor
from rlmath.rollout.memory_switch import MemorySwitch
from rlmath.rollout.weight_sync.logprob_probe import Probe
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes, training_layout
from rlmath.rollout.weight_sync.weight_sync import WeightSync, WeightTransfer


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, built by `assembly`."""

    config: Config
    stages: Sequence[LengthStage]
    """At least one; all steps of the run are in them."""
    shape: ModelShape
    mesh: Mesh
    prompts: Sequence[Prompt]
    order: PromptOrder
    actor: Actor
    reference: ForwardBackward | None
    offload: OffloadSets
    sync: WeightSync
    switch: MemorySwitch
    collector: Collector
    timers: PhaseTimers


def build_parts(
    config: Config,
    shape: ModelShape,
    inputs: Inputs,
    mesh: Mesh,
    device: Device,
    pool: VerifierPool | None,
    heartbeat: Heartbeat,
) -> tuple[Parts, Engine]:
    """Everything a run works with, on this rank; the engine sleeps. Needs the process group."""
    start_megatron(mesh, device, config.run.seed, config.run.distributed_timeout_seconds)
    shapes = engine_shapes(shape, mesh.engine_size)
    heartbeat.entered("build engine")
    engine = Engine(config.model.path, config.rollout, engine_length(config), mesh, device, shapes)
    engine.memory.sleep()
    heartbeat.entered("build model")
    updates = most_updates(config, inputs.total_steps)
    stops = inputs.stop_token_ids
    actor = build_actor(config, shape, mesh, device, updates, stops)
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = build_reference(config, shape, mesh, device, stops)
    engine.on_step = actor.forward_backward.on_microbatch = heartbeat.progress
    sync = _build_sync(config, shape, mesh, device, actor, engine)
    offload, timers = training_sets(actor, reference, config.memory, device), PhaseTimers(heartbeat.entered)
    monitor = _memory_monitor(config.memory, mesh.rank)
    switch = MemorySwitch(engine, offload, sync.run, monitor, timers, device)
    collector = Collector(engine, mesh, inputs.tokenizer, config.rollout, config.reward, pool)
    data = (inputs.prompts, inputs.order)
    machinery = (offload, sync, switch, collector, timers)
    stages = length_stages(config, inputs.total_steps)
    return Parts(config, stages, shape, mesh, *data, actor, reference, *machinery), engine


def _memory_monitor(settings: MemoryConfig, rank: int) -> MemoryMonitor:
    return MemoryMonitor(int(settings.leak_threshold_mib * 2**20), settings.stop_on_leak, rank)


def _build_sync(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, actor: Actor, engine: Engine
) -> WeightSync:
    parallel = config.parallel
    layout = training_layout(shape.num_layers, mesh, parallel.first_stage_layers, parallel.last_stage_layers)
    bucket = bucket_bytes(config.sync.bucket_mib, device.kind, mesh.world_size)
    transfer = WeightTransfer(
        actor.chunks,
        shape,
        layout,
        mesh,
        device,
        engine.weights,
        bucket,
        from_rank_zero(local_world_size()),
    )
    # The first stage's: the probe's tokens are the same in all, and with any validation.
    length = engine_length(without_validation(length_stages(config, None)[0].config))
    return WeightSync(transfer, Probe(actor.forward_backward, engine, mesh, length), config.sync)
