"""A run from start to end: build the parts, make the steps, tell about them, leave a model behind."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import torch.distributed as dist

from rlmath.checkpoint.folders import CHECKPOINTS
from rlmath.checkpoint.hf_io import read_companions
from rlmath.checkpoint.store import CheckpointStore, Retention
from rlmath.config import Config
from rlmath.config_files import config_as_yaml
from rlmath.guard.exit_status import (
    FAILURE,
    FINISHED,
    SAVED_AND_STOPPED,
    write_exit_status,
)
from rlmath.guard.heartbeat import Heart
from rlmath.guard.launcher import launcher_advice
from rlmath.guard.signals import StopRequest
from rlmath.inputs import Inputs, most_updates
from rlmath.memory_checks import start_up_lines
from rlmath.memory_plan import mesh_of
from rlmath.model_shape import ModelShape
from rlmath.parallel.collectives import from_rank_zero
from rlmath.parallel.device import (
    Device,
    environment_rank,
    environment_world_size,
    held_bytes,
    init_process_group,
    local_world_size,
    open_device,
)
from rlmath.parallel.mesh import Mesh
from rlmath.policy.actor import Actor, build_actor
from rlmath.policy.model import start_megatron
from rlmath.policy.offload import training_sets
from rlmath.policy.reference import build_reference
from rlmath.preflight import harmless_settings
from rlmath.prepared import Prepared
from rlmath.recovery import Chosen, choose_checkpoint
from rlmath.reporter import Reporter
from rlmath.rewards.judge import open_judges
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.collect import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.memory import MemorySwitch
from rlmath.rollout.memory_watch import MemoryWatch
from rlmath.run_folder import claim_run_folder, sole_user
from rlmath.saver import EXPORT_FOLDER, Saver, library_versions
from rlmath.sync.checked import CheckedSync
from rlmath.sync.layouts import engine_shapes, training_layout
from rlmath.sync.plan import bucket_bytes
from rlmath.sync.probe import Probe
from rlmath.sync.transfer import WeightSync
from rlmath.telemetry.timers import PhaseTimers
from rlmath.trainer import Parts, Trainer

logger = logging.getLogger(__name__)


def run_training(prepared: Prepared) -> int:
    """Train as prepared; the exit status of the program. All that can be known to be wrong was checked before.

    After an error the process group is left as it is: peers may wait in it, and taking it down could wait for them.
    Whoever calls this ends the process then.
    """
    started = time.perf_counter()
    config = prepared.config
    mesh = mesh_of(config, environment_world_size(), environment_rank())
    device = open_device(config.run.device)
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, mesh.rank)
    stop.install()
    with contextlib.ExitStack() as stack:
        pool = None
        if mesh.speaks_for_engine:
            # The judges start before process groups and engines, whose threads they must not inherit.
            pool = stack.enter_context(open_judges(config.reward))
        init_process_group(device, config.run.distributed_timeout_seconds)
        heart = stack.enter_context(
            Heart(config.run, mesh.rank, mesh.world_size, config.run.output_dir, stop)
        )
        if mesh.rank == 0:
            stack.enter_context(sole_user(config.run.output_dir))
        chosen = choose_checkpoint(prepared.recovery)
        _claim_folder(prepared, mesh, chosen)
        parts, engine = _build(config, prepared.shape, prepared.inputs, mesh, device, pool, heart)
        store = stack.enter_context(contextlib.closing(_open_store(parts, device)))
        status = _train(parts, prepared, store, chosen, stop, heart, started)
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _claim_folder(prepared: Prepared, mesh: Mesh, chosen: Chosen | None) -> None:
    config = prepared.config
    if mesh.rank == 0:
        steps_done = None if chosen is None else chosen[1].step
        claim_run_folder(config.run.output_dir, config, steps_done)
        logger.info("The settings of this run:\n%s", config_as_yaml(config))
        lines = (
            *filter(None, [launcher_advice(config.run.stop_grace_seconds)]),
            *harmless_settings(config),
            *prepared.inputs.lines,
            "Versions: " + ", ".join(f"{name} {version}" for name, version in library_versions().items()),
            f"Layout: {mesh.describe()}",
            *start_up_lines(config, prepared.shape, mesh.world_size),
        )
        for line in lines:
            logger.info("%s", line)
    dist.barrier()


def _build(
    config: Config,
    shape: ModelShape,
    inputs: Inputs,
    mesh: Mesh,
    device: Device,
    pool: VerifierPool | None,
    heart: Heart,
) -> tuple[Parts, Engine]:
    start_megatron(mesh, device, config.run.seed, config.run.distributed_timeout_seconds)
    max_sequence = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    shapes = engine_shapes(shape, mesh.engine_size)
    engine = Engine(config.model.path, config.rollout, max_sequence, mesh, device, shapes)
    engine.memory.sleep()
    updates = most_updates(config, inputs.total_steps)
    stops = inputs.stop_token_ids
    actor = build_actor(config, shape, mesh, device, updates, stops)
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = build_reference(config, shape, mesh, device, stops)
    engine.on_step = actor.executor.on_microbatch = heart.progress
    sync = _build_sync(config, shape, mesh, device, actor, engine)
    offload, timers = training_sets(actor, reference, config.memory, device), PhaseTimers(heart.entered)
    threshold = int(config.memory.leak_threshold_mib * 2**20)
    watch = MemoryWatch(threshold, config.memory.stop_on_leak, mesh.rank)
    switch = MemorySwitch(engine, offload, sync, watch, timers, device)
    collector = Collector(engine, mesh, inputs.tokenizer, config.rollout, config.reward, pool)
    parts = Parts(
        config,
        shape,
        mesh,
        inputs.prompts,
        inputs.order,
        actor,
        reference,
        offload,
        sync,
        switch,
        collector,
        timers,
    )
    return parts, engine


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
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return CheckedSync(sync, Probe(actor.executor, engine, mesh, longest), config.sync)


def _open_store(parts: Parts, device: Device) -> CheckpointStore:
    save, actor = parts.config.save, parts.actor
    return CheckpointStore(
        Path(parts.config.run.output_dir) / CHECKPOINTS,
        actor.chunks,
        actor.learner.optimizer,
        device,
        read_companions(parts.config.model.path),
        Retention(save.keep_last, save.keep_models),
    )


def _go_on(parts: Parts, store: CheckpointStore, chosen: Chosen | None) -> int:
    """Load what was chosen, if anything; the number of steps done."""
    if chosen is None:
        return 0
    checkpoint, progress = chosen
    store.load(checkpoint, progress)
    parts.actor.learner.goes_on_after(progress.updates)
    parts.sync.count = progress.syncs
    if parts.mesh.rank == 0:
        logger.info(
            "Going on from %s, made on %s: %d steps and %d updates are done",
            checkpoint.folder,
            progress.layout,
            progress.step,
            progress.updates,
        )
    return progress.step


def _train(
    parts: Parts,
    prepared: Prepared,
    store: CheckpointStore,
    chosen: Chosen | None,
    stop: StopRequest,
    heart: Heart,
    started: float,
) -> int:
    device, total_steps = parts.actor.executor.device, prepared.inputs.total_steps
    folder = Path(parts.config.run.output_dir)
    steps_done = _go_on(parts, store, chosen)
    trainer = Trainer(parts)
    heart.entered("first step")
    newest = None if chosen is None else steps_done
    saver = Saver(parts, store, prepared.origin, stop, heart.progress, newest)
    reporter = Reporter(parts, prepared.inputs, folder, steps_done) if parts.mesh.rank == 0 else None
    for number in range(steps_done, total_steps):
        heart.step = number + 1
        record = trainer.step(number)
        memory = held_bytes(device) / 2**30
        if reporter is not None:
            reporter.step(number, record, memory, saver.seconds)
        reason = saver.after(number + 1, is_last=number + 1 == total_steps)
        if reason is not None and number + 1 < total_steps:
            return _stop(parts, saver, number + 1, reason)
    with parts.timers.phase("export"):
        saver.export(folder / EXPORT_FOLDER)
    if reporter is not None:
        logger.info("The trained model is in %s", folder / EXPORT_FOLDER)
        reporter.close(time.perf_counter() - started)
        write_exit_status(folder, FINISHED, f"all {total_steps} steps are done")
    dist.barrier()
    return FINISHED


def _stop(parts: Parts, saver: Saver, step: int, reason: str) -> int:
    """Tell that the run stops before its end."""
    saved = saver.newest == step
    status = SAVED_AND_STOPPED if saved else FAILURE
    message = f"stopped by {reason} after step {step}, " + (
        "which is saved: the same command goes on" if saved else "which could not be saved"
    )
    if parts.mesh.rank == 0:
        logger.warning("The run has %s", message)
        write_exit_status(parts.config.run.output_dir, status, message)
    dist.barrier()
    return status
