"""A run from start to end: build the parts, make the steps, tell about them, leave a model behind."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import torch.distributed as dist

from rlmath.checkpoint.hf.weights import read_metadata_files
from rlmath.config.length_curriculum import length_stage_lines
from rlmath.data.loader import write_report
from rlmath.distributed import process
from rlmath.distributed.device import environment_rank, environment_world_size, held_bytes, open_device
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.fault_tolerance.stragglers import SlowRanks
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.rewards.reward_manager import open_reward_workers
from rlmath.trainer.build import Parts, build_parts
from rlmath.trainer.checkpointing import Saver, Training, keep_stage_model
from rlmath.trainer.grpo import Trainer
from rlmath.trainer.preflight.checks import config_warnings
from rlmath.trainer.preflight.memory_estimate import mesh_of
from rlmath.trainer.preflight.memory_fit import start_up_lines
from rlmath.trainer.reporter import Reporter
from rlmath.trainer.resume import Chosen
from rlmath.trainer.run_steps import enter_run, export_model, finish, go_on, leave, open_store, stop_early
from rlmath.trainer.startup import Prepared
from rlmath.trainer.validation import Validator


def run_training(prepared: Prepared, rendezvous: Rendezvous | None) -> int:
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
    with contextlib.ExitStack() as stack:
        pool = None
        if mesh.is_engine_leader:
            # The judges start before process groups and engines, whose threads they must not inherit.
            pool = stack.enter_context(open_reward_workers(config.reward))
        lines = _start_lines(prepared, mesh)
        heartbeat, chosen = enter_run(stack, prepared, rendezvous, mesh, device, stop, lines)
        if mesh.rank == 0:
            write_report(config.run.output_dir, prepared.inputs.reports)
        parts, engine = build_parts(config, prepared.shape, prepared.inputs, mesh, device, pool, heartbeat)
        process.settle()
        metadata_files = read_metadata_files(config.model.path)
        training = _training(parts)
        store = open_store(training, metadata_files)
        stack.callback(store.close)
        saver = Saver(training, store, prepared.origin, metadata_files, stop, heartbeat.progress)
        status = _train(parts, prepared, saver, chosen, heartbeat, stop, started)
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _start_lines(prepared: Prepared, mesh: Mesh) -> list[str]:
    config = prepared.config
    return [
        *config_warnings(config),
        *prepared.inputs.lines,
        *length_stage_lines(config),
        *(file.line() for file in prepared.validation),
        f"Layout: {mesh.describe()}",
        *start_up_lines(config, prepared.shape, mesh.world_size),
    ]


def _training(parts: Parts) -> Training:
    shared = (parts.config, parts.shape, parts.mesh, parts.order, parts.actor, parts.timers)
    return Training(*shared, syncs_a_step=1)


def _train(
    parts: Parts,
    prepared: Prepared,
    saver: Saver,
    chosen: Chosen | None,
    heartbeat: Heartbeat,
    stop: StopRequest,
    started: float,
) -> int:
    total_steps, training, steps_done = prepared.inputs.total_steps, saver.training, 0
    progress = go_on(training, chosen, heartbeat)
    if progress is not None:
        saver.newest = steps_done = progress.step
    reason = saver.asked_to_stop()
    if reason is not None and steps_done < total_steps:
        return stop_early(training, saver, steps_done, reason, stop)
    keep_stage_model(saver, parts.stages, steps_done, even_if_there=False)
    heartbeat.entered("first step")
    done = (steps_done, total_steps)
    trainer = Trainer(parts, Validator(parts, prepared.validation, *done, saver.export, saver.asked_to_stop))
    folder = Path(parts.config.run.output_dir)
    reporter = Reporter(parts, prepared.inputs, folder, steps_done) if parts.mesh.rank == 0 else None
    stopped = _make_steps(range(*done), trainer, saver, parts, reporter, heartbeat)
    if stopped is not None:
        return leave(reporter, stop_early(training, saver, *stopped, stop))
    export_model(training, saver, stop)
    measured = trainer.validate_at_end(total_steps)
    if reporter is not None:
        if measured is not None:
            reporter.validation(measured)
        reporter.sum_up(time.perf_counter() - started)
    return leave(reporter, finish(training, total_steps))


def _seconds_alone(parts: Parts) -> float:
    models = [parts.actor.forward_backward, *([] if parts.reference is None else [parts.reference])]
    return sum(model.take_seconds_alone() for model in models)


def _make_steps(
    steps: range,
    trainer: Trainer,
    saver: Saver,
    parts: Parts,
    reporter: Reporter | None,
    heartbeat: Heartbeat,
) -> tuple[int, str] | None:
    """Where a run that stops before its end does so: how many steps are done, and what asked for it."""
    slow = SlowRanks(parts.mesh)
    for number in steps:
        heartbeat.step = number + 1
        record = trainer.step(number)
        if isinstance(record, str):
            saver.save_to_stop(number)
            return number, record
        times = slow.after_step(_seconds_alone(parts), heartbeat.slowest_answer())
        memory = held_bytes(parts.actor.forward_backward.device) / 2**30
        if reporter is not None:
            told = dataclasses.replace(record, metrics=record.metrics | times)
            reporter.step(number, told, memory, saver.seconds)
        reason = saver.after(number + 1, is_last=number + 1 == steps.stop)
        if reason is not None and number + 1 < steps.stop:
            return number + 1, reason
        keep_stage_model(saver, parts.stages, number + 1, even_if_there=True)
    return None
