"""A supervised run from start to end: build the policy, make the steps, tell about them, leave a model behind."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist

from rlmath.checkpoint.hf.weights import read_metadata_files
from rlmath.data.dataset import SftInputs
from rlmath.data.loader import write_report
from rlmath.distributed.device import (
    Device,
    environment_rank,
    environment_world_size,
    held_bytes,
    open_device,
)
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.fault_tolerance.stragglers import SlowRanks
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.models.build import build_sft_actor
from rlmath.models.megatron import start_megatron
from rlmath.trainer.checkpointing import Saver, Training
from rlmath.trainer.preflight.memory_estimate import mesh_of
from rlmath.trainer.preflight.sft import start_up_line
from rlmath.trainer.reporter import SftReporter
from rlmath.trainer.run_steps import enter_run, export_model, finish, go_on, leave, open_store, stop_early
from rlmath.trainer.sft import SftTrainer
from rlmath.trainer.startup import Prepared


def run_sft(prepared: Prepared[SftInputs], rendezvous: Rendezvous | None) -> int:
    """Train as prepared; the exit status of the program. All that can be known to be wrong was checked before, and the
    ranks have met.

    After an error the process group is left as it is: peers may wait in it, and taking it down could wait for them.
    Whoever calls this ends the process then.
    """
    started = time.perf_counter()
    config = prepared.config
    mesh = mesh_of(config, environment_world_size(), environment_rank())
    device = open_device(config.run.device)
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, mesh.rank)
    stop.install()
    with ExitStack() as stack:
        lines = _start_lines(prepared, mesh)
        heartbeat, chosen = enter_run(stack, prepared, rendezvous, mesh, device, stop, lines)
        if mesh.rank == 0:
            write_report(config.run.output_dir, prepared.inputs.reports)
        training = _build(prepared, mesh, device, heartbeat)
        metadata_files = read_metadata_files(config.model.path)
        store = open_store(training, metadata_files)
        stack.callback(store.close)
        saver = Saver(training, store, prepared.origin, metadata_files, stop, heartbeat.progress)
        progress = go_on(training, chosen, heartbeat)
        if progress is not None:
            saver.newest = progress.step
        status = _train(prepared.inputs, saver, heartbeat, stop, started)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _start_lines(prepared: Prepared[SftInputs], mesh: Mesh) -> list[str]:
    return [
        *prepared.inputs.lines,
        f"Layout: {mesh.training_layout}",
        start_up_line(prepared.config, prepared.shape, mesh.world_size),
    ]


def _build(prepared: Prepared[SftInputs], mesh: Mesh, device: Device, heartbeat: Heartbeat) -> Training:
    config, shape, inputs = prepared.config, prepared.shape, prepared.inputs
    start_megatron(mesh, device, config.run.seed, config.run.distributed_timeout_seconds)
    heartbeat.entered("build model")
    actor = build_sft_actor(config, shape, mesh, device, inputs.total_steps)
    actor.forward_backward.on_microbatch = heartbeat.progress
    return Training(config, shape, mesh, inputs.order, actor, PhaseTimers(heartbeat.entered))


def _train(inputs: SftInputs, saver: Saver, heartbeat: Heartbeat, stop: StopRequest, started: float) -> int:
    training, steps_done, total_steps = saver.training, saver.newest or 0, inputs.total_steps
    reason = saver.asked_to_stop()
    if reason is not None and steps_done < total_steps:
        return stop_early(training, saver, steps_done, reason, stop)
    trainer = SftTrainer(training, inputs)
    reporter = SftReporter(training, inputs, steps_done) if training.mesh.rank == 0 else None
    if steps_done == 0:
        before = trainer.evaluate()
        if reporter is not None:
            reporter.before_training(before)
    slow = SlowRanks(training.mesh)
    for number in range(steps_done, total_steps):
        heartbeat.step = number + 1
        record = trainer.step(number)
        times = slow.after_step(
            training.actor.forward_backward.take_seconds_alone(), heartbeat.slowest_answer()
        )
        memory = held_bytes(training.actor.forward_backward.device) / 2**30
        if reporter is not None:
            reporter.step(number, replace(record, metrics=record.metrics | times), memory, saver.seconds)
        reason = saver.after(number + 1, is_last=number + 1 == total_steps)
        if reason is not None and number + 1 < total_steps:
            return leave(reporter, stop_early(training, saver, number + 1, reason, stop))
    export_model(training, saver, stop)
    if reporter is not None:
        reporter.sum_up(time.perf_counter() - started)
    return leave(reporter, finish(training, total_steps))
