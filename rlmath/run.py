"""A run from start to end: build the parts, make the steps, tell about them, leave a model behind."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path

import torch.distributed as dist

from rlmath.assembly import build_parts
from rlmath.checkpoint.folders import CHECKPOINTS
from rlmath.checkpoint.hf_io import read_companions
from rlmath.checkpoint.loading import load_checkpoint
from rlmath.checkpoint.store import CheckpointStore, Retention
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
from rlmath.memory_checks import start_up_lines
from rlmath.memory_plan import mesh_of
from rlmath.parallel.collectives import first_error
from rlmath.parallel.device import (
    Device,
    environment_rank,
    environment_world_size,
    held_bytes,
    init_process_group,
    open_device,
)
from rlmath.parallel.mesh import Mesh
from rlmath.preflight import harmless_settings
from rlmath.prepared import Prepared
from rlmath.recovery import Chosen, choose_checkpoint
from rlmath.reporter import Reporter
from rlmath.rewards.judge import open_judges
from rlmath.run_folder import CONFIG_NAME, claim_run_folder
from rlmath.saver import EXPORT_FOLDER, Saver, library_versions
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
        stack.push(_tell_error)
        heart.entered("check checkpoint")
        chosen = choose_checkpoint(prepared.recovery, heart.progress)
        _claim_folder(prepared, mesh, chosen)
        parts, engine = build_parts(config, prepared.shape, prepared.inputs, mesh, device, pool, heart)
        companions = read_companions(config.model.path)
        store = _open_store(parts, device, companions)
        stack.callback(store.close)
        saver = Saver(parts, store, prepared.origin, companions, stop, heart.progress)
        status = _train(parts, prepared, saver, chosen, heart, stop, started)
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _tell_error(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """In one line, at once: what is closed next may take its time, and the heart does not wait for it."""
    if kind is not None:
        rank, host = environment_rank(), socket.gethostname()
        logger.error("rank %d on %s failed; the run ends: %s: %s", rank, host, kind.__name__, error)


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
    folder = Path(config.run.output_dir)
    hidden = None if (folder / CONFIG_NAME).is_file() else f"rank {mesh.rank} on {socket.gethostname()}"
    hidden = first_error(hidden)
    if hidden is not None:
        raise ValueError(
            f'{hidden} does not see what rank 0 wrote into run.output_dir "{folder}"; it must lie on a disk that all '
            "nodes share"
        )


def _open_store(parts: Parts, device: Device, companions: dict[str, bytes]) -> CheckpointStore:
    save, actor = parts.config.save, parts.actor
    return CheckpointStore(
        Path(parts.config.run.output_dir) / CHECKPOINTS,
        actor.chunks,
        actor.learner.optimizer,
        device,
        companions,
        Retention(save.keep_last, save.keep_models),
    )


def _go_on(parts: Parts, chosen: Chosen | None, heart: Heart) -> int:
    """Load what was chosen, if anything; the number of steps done."""
    if chosen is None:
        return 0
    checkpoint, progress = chosen
    heart.entered("load checkpoint")
    actor = parts.actor
    load_checkpoint(actor.chunks, actor.learner.optimizer, actor.executor.device, checkpoint, progress)
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
    saver: Saver,
    chosen: Chosen | None,
    heart: Heart,
    stop: StopRequest,
    started: float,
) -> int:
    device, total_steps = parts.actor.executor.device, prepared.inputs.total_steps
    folder = Path(parts.config.run.output_dir)
    steps_done = _go_on(parts, chosen, heart)
    trainer = Trainer(parts)
    saver.newest = None if chosen is None else steps_done
    reason = saver.asked_to_stop()
    if reason is not None and steps_done < total_steps:
        return _stop(parts, saver, steps_done, reason, stop)
    heart.entered("first step")
    reporter = Reporter(parts, prepared.inputs, folder, steps_done) if parts.mesh.rank == 0 else None
    for number in range(steps_done, total_steps):
        heart.step = number + 1
        record = trainer.step(number)
        memory = held_bytes(device) / 2**30
        if reporter is not None:
            reporter.step(number, record, memory, saver.seconds)
        reason = saver.after(number + 1, is_last=number + 1 == total_steps)
        if reason is not None and number + 1 < total_steps:
            return _stop(parts, saver, number + 1, reason, stop)
    stop.done()
    with parts.timers.phase("export"):
        saver.export(folder / EXPORT_FOLDER)
    if reporter is not None:
        logger.info("The trained model is in %s", folder / EXPORT_FOLDER)
        reporter.close(time.perf_counter() - started)
        write_exit_status(folder, FINISHED, f"all {total_steps} steps are done")
    dist.barrier()
    return FINISHED


def _stop(parts: Parts, saver: Saver, step: int, reason: str, stop: StopRequest) -> int:
    """Tell that the run stops before its end."""
    stop.done()
    saved = step in (0, saver.newest)
    status = SAVED_AND_STOPPED if saved else FAILURE
    message = f"stopped by {reason} after step {step}, " + (
        "which is saved: the same command goes on" if saved else "which could not be saved"
    )
    if parts.mesh.rank == 0:
        logger.warning("The run has %s", message)
        write_exit_status(parts.config.run.output_dir, status, message)
    dist.barrier()
    return status
