"""The parts of a run, built from its settings: engine, actor, reference, sync, switch, collector."""

from __future__ import annotations

from rlmath.config import Config, MemoryConfig
from rlmath.guard.heartbeat import Heart
from rlmath.inputs import Inputs, most_updates
from rlmath.model_shape import ModelShape
from rlmath.parallel.collectives import from_rank_zero
from rlmath.parallel.device import Device, local_world_size
from rlmath.parallel.mesh import Mesh
from rlmath.parts import Parts
from rlmath.policy.actor import Actor, build_actor
from rlmath.policy.model import start_megatron
from rlmath.policy.offload import training_sets
from rlmath.policy.reference import build_reference
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.collect import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.memory import MemorySwitch
from rlmath.rollout.memory_watch import MemoryWatch
from rlmath.stages import engine_length, stages_of, training_alone
from rlmath.sync.checked import CheckedSync
from rlmath.sync.layouts import engine_shapes, training_layout
from rlmath.sync.plan import bucket_bytes
from rlmath.sync.probe import Probe
from rlmath.sync.transfer import WeightSync
from rlmath.telemetry.timers import PhaseTimers


def build_parts(
    config: Config,
    shape: ModelShape,
    inputs: Inputs,
    mesh: Mesh,
    device: Device,
    pool: VerifierPool | None,
    heart: Heart,
) -> tuple[Parts, Engine]:
    """Everything a run works with, on this rank; the engine sleeps. Needs the process group."""
    start_megatron(mesh, device, config.run.seed, config.run.distributed_timeout_seconds)
    shapes = engine_shapes(shape, mesh.engine_size)
    heart.entered("build engine")
    engine = Engine(config.model.path, config.rollout, engine_length(config), mesh, device, shapes)
    engine.memory.sleep()
    heart.entered("build model")
    updates = most_updates(config, inputs.total_steps)
    stops = inputs.stop_token_ids
    actor = build_actor(config, shape, mesh, device, updates, stops)
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = build_reference(config, shape, mesh, device, stops)
    engine.on_step = actor.executor.on_microbatch = heart.progress
    sync = _build_sync(config, shape, mesh, device, actor, engine)
    offload, timers = training_sets(actor, reference, config.memory, device), PhaseTimers(heart.entered)
    watch = _memory_watch(config.memory, mesh.rank)
    switch = MemorySwitch(engine, offload, sync, watch, timers, device)
    collector = Collector(engine, mesh, inputs.tokenizer, config.rollout, config.reward, pool)
    data = (inputs.prompts, inputs.order)
    machinery = (offload, sync, switch, collector, timers)
    stages = stages_of(config, inputs.total_steps)
    return Parts(config, stages, shape, mesh, *data, actor, reference, *machinery), engine


def _memory_watch(settings: MemoryConfig, rank: int) -> MemoryWatch:
    return MemoryWatch(int(settings.leak_threshold_mib * 2**20), settings.stop_on_leak, rank)


def _build_sync(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, actor: Actor, engine: Engine
) -> CheckedSync:
    parallel = config.parallel
    layout = training_layout(shape.num_layers, mesh, parallel.first_stage_layers, parallel.last_stage_layers)
    bucket = bucket_bytes(config.sync.bucket_mib, device.kind, mesh.world_size)
    sync = WeightSync(
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
    length = engine_length(training_alone(stages_of(config, None)[0].config))
    return CheckedSync(sync, Probe(actor.executor, engine, mesh, length), config.sync)
