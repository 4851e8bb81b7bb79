"""What every run does from start to end, whatever it learns from: claim its folder, go on from a checkpoint, stop when
asked, leave a model behind. GRPO (`run`) and supervised training (`sft.run`) are made of these."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from rlmath.checkpoint.directory import CHECKPOINTS
from rlmath.checkpoint.load import load_checkpoint
from rlmath.checkpoint.manager import CheckpointStore, Retention
from rlmath.checkpoint.run_progress import Progress
from rlmath.config.load import config_as_yaml
from rlmath.config.schema import Config
from rlmath.distributed.collectives import gather_objects
from rlmath.distributed.device import Device, environment_rank, init_process_group
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    SAVED_AND_STOPPED,
    write_exit_status,
)
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.fault_tolerance.torchrun import launcher_advice
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.process import outlive_parent
from rlmath.distributed.ranks import Decision, Word, hosts_text
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.distributed.versions import library_versions
from rlmath.trainer.checkpointing import Saver, Training
from rlmath.trainer.resume import Chosen, choose_checkpoint
from rlmath.trainer.run_dir import CONFIG_NAME, EXPORT_FOLDER, claim_run_folder
from rlmath.trainer.startup import Prepared, compare_clocks

logger = logging.getLogger(__name__)


def enter_run(
    stack: ExitStack,
    prepared: Prepared,
    rendezvous: Rendezvous | None,
    mesh: Mesh,
    device: Device,
    stop: StopRequest,
    lines: Iterable[str],
) -> tuple[Heartbeat, Chosen | None]:
    """Start the process group and the heartbeat, which `stack` ends; choose what the run goes on from, and claim its
    folder, saying these lines. Returns the heartbeat, and what was chosen. A collective.
    No `rendezvous`: this rank is alone."""
    config = prepared.config
    init_process_group(device, config.run.distributed_timeout_seconds, _group_store(rendezvous, config))
    heartbeat = Heartbeat(config.run, mesh.rank, mesh.world_size, config.run.output_dir, stop)
    stack.enter_context(heartbeat)
    outlive_parent()
    stack.push(_tell_error)
    compare_clocks()
    heartbeat.entered("check checkpoint")
    chosen = choose_checkpoint(prepared.recovery, heartbeat.progress)
    _claim_folder(config, mesh, chosen, lines)
    return heartbeat, chosen


def _group_store(rendezvous: Rendezvous | None, config: Config) -> dist.Store | None:
    """Once more all ranks meet: what a process group would wait for in silence is told by name."""
    if rendezvous is None:
        return None
    run, place = config.run, rendezvous.place
    rendezvous.roll_call(
        "group", Word(place.host, place.node), run.start_timeout_seconds, lambda said: Decision()
    )
    return rendezvous.group_store(run.distributed_timeout_seconds)


def _tell_error(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """In one line, at once: what is closed next may take its time, and the heartbeat does not wait for it."""
    if kind is not None:
        rank, host = environment_rank(), socket.gethostname()
        logger.error("rank %d on %s failed; the run ends: %s: %s", rank, host, kind.__name__, error)


def _claim_folder(config: Config, mesh: Mesh, chosen: Chosen | None, lines: Iterable[str]) -> None:
    """Make the folder this run's and tell its settings, with further lines. A collective. ValueError where a rank does
    not see the folder."""
    if mesh.rank == 0:
        steps_done = None if chosen is None else chosen[1].step
        claim_run_folder(config.run.output_dir, config, steps_done)
        logger.info("The settings of this run:\n%s", config_as_yaml(config))
        advice = launcher_advice(config.run.stop_grace_seconds)
        versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
        for line in (*filter(None, [advice]), f"Versions: {versions}", *lines):
            logger.info("%s", line)
    dist.barrier()
    folder = Path(config.run.output_dir)
    host = None if (folder / CONFIG_NAME).is_file() else socket.gethostname()
    blind = list(dict.fromkeys(one for one in gather_objects(host) if one is not None))
    if blind:
        raise ValueError(
            f'what rank 0 wrote into run.output_dir "{folder}" is not seen on {hosts_text(blind)}; it must lie on a '
            "disk that all nodes share"
        )


def open_store(training: Training, metadata_files: dict[str, bytes]) -> CheckpointStore:
    """Where this run's checkpoints go; `metadata_files` are what a model has beside its weights."""
    save, actor = training.config.save, training.actor
    return CheckpointStore(
        Path(training.config.run.output_dir) / CHECKPOINTS,
        actor.chunks,
        actor.learner.optimizer,
        actor.forward_backward.device,
        metadata_files,
        Retention(save.keep_last, save.keep_models),
    )


def go_on(training: Training, chosen: Chosen | None, heartbeat: Heartbeat) -> Progress | None:
    """Load what was chosen, if anything; where its run stands."""
    if chosen is None:
        return None
    checkpoint, progress = chosen
    heartbeat.entered("load checkpoint")
    actor = training.actor
    load_checkpoint(
        actor.chunks, actor.learner.optimizer, actor.forward_backward.device, checkpoint, progress
    )
    actor.learner.restore_schedule(progress.updates)
    if training.mesh.rank == 0:
        logger.info(
            "Going on from %s, made on %s: %d steps and %d updates are done",
            checkpoint.folder,
            progress.layout,
            progress.step,
            progress.updates,
        )
    return progress


def stop_early(training: Training, saver: Saver, step: int, reason: str, stop: StopRequest) -> int:
    """Tell that the run stops before its end; its exit status."""
    stop.done()
    saved = step in (0, saver.newest)
    status = SAVED_AND_STOPPED if saved else FAILURE
    message = f"stopped by {reason} after step {step}, " + (
        "which is saved: the same command goes on" if saved else "which could not be saved"
    )
    if training.mesh.rank == 0:
        logger.warning("The run has %s", message)
        write_exit_status(training.config.run.output_dir, status, message)
    dist.barrier()
    return status


def export_model(training: Training, saver: Saver, stop: StopRequest) -> None:
    """Leave the trained model in Hugging Face form; a request to stop comes too late now."""
    stop.done()
    folder = Path(training.config.run.output_dir) / EXPORT_FOLDER
    with training.timers.phase("export"):
        saver.export(folder)
    if training.mesh.rank == 0:
        logger.info("The trained model is in %s", folder)


def finish(training: Training, total_steps: int) -> int:
    """Tell that the run has come to its end; its exit status."""
    if training.mesh.rank == 0:
        write_exit_status(training.config.run.output_dir, FINISHED, f"all {total_steps} steps are done")
    dist.barrier()
    return FINISHED


class Leaving(Protocol):
    """What rank 0 tells of the run, and closes at its end."""

    def leave(self) -> None: ...


def leave(reporter: Leaving | None, status: int) -> int:
    """Close the reporter last: it may wait for a network, and all is saved and told by then, and no rank waits."""
    if reporter is not None:
        reporter.leave()
    return status
