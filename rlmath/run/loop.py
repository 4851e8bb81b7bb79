"""The life cycle of a training program, whatever it learns from.

    process group -> heartbeat -> checkpoint to resume from -> run folder -> trainer -> steps -> model -> exit status

`run_training` is called on every rank once all ranks have met (`startup.start`). A program is a `Trainer`: its models,
its data and its step. GRPO (`grpo`) and supervised training (`sft`) are two of them.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmath.checkpoint.directory import Progress, read_progress
from rlmath.checkpoint.manager import load_checkpoint
from rlmath.config.help import all_settings, as_yaml_word
from rlmath.config.load import config_as_yaml, shown_values
from rlmath.config.run_files import CONFIG_FILE, LOG_FILE, ROLLBACKS_FILE
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.data.loader import write_report
from rlmath.distributed import process
from rlmath.distributed.bridge import Bridge, open_worlds
from rlmath.distributed.collectives import all_gather_objects, broadcast_from_rank_zero
from rlmath.distributed.device import Device, device_bytes, held_bytes, init_process_group, open_device
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.failure import may_be_caused_by_peer
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest, launcher_advice
from rlmath.distributed.fault_tolerance.stragglers import StragglerDetector
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.process import library_versions, outlive_parent
from rlmath.distributed.ranks import (
    RankReport,
    RendezvousResult,
    environment_rank,
    environment_world_size,
    hosts_text,
)
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.planning.memory_estimate import Kind, mesh_of
from rlmath.planning.memory_fit import measured_line
from rlmath.run.divergence import ADVICE, DivergedError, DivergenceCheck, RewardRule
from rlmath.run.nodes import compare_clocks
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.checkpoint_choice import choose_checkpoint
from rlmath.run.recovery.checkpointing import Checkpointer
from rlmath.run.recovery.hub_inputs import push_model
from rlmath.run.recovery.resume import CheckpointToResume, Recovery
from rlmath.run.recovery.rollback import RollbackRecord, numbered, records_of, unnumbered, write_rollbacks
from rlmath.run.run_dir import claim_run_folder, take_back
from rlmath.telemetry.console import open_log_file
from rlmath.telemetry.events import event
from rlmath.telemetry.profile import StepProfiler
from rlmath.telemetry.reporter import Reporter, write_run_report
from rlmath.trainer.base import Interrupted, Trainer
from rlmath.workers.user_functions import UserFunctionError

logger = logging.getLogger(__name__)


def run_training(
    trainer_class: type[Trainer], prepared: PreparedRun[Any], rendezvous: Rendezvous | None
) -> int:
    """Train as prepared; the exit status of the program. `rendezvous` is None where there is one rank.

    After an error the process group is left as it is: peers may wait in it, and taking it down could wait for them.
    The caller ends the process.
    """
    started, config = time.perf_counter(), prepared.config
    mesh = mesh_of(config, environment_world_size(), environment_rank())
    device = open_device(config.run.device, config.policy.transformer_impl == "local")
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, mesh.rank)
    stop.install()
    with ExitStack() as stack:
        workers = stack.enter_context(trainer_class.open_workers(config, mesh))
        on_error = OnError()
        bridge, heartbeat = join_run(stack, config, device, rendezvous, stop, on_error)
        compare_clocks()
        heartbeat.enter_phase("check checkpoint")
        resumed = choose_checkpoint(prepared.recovery, heartbeat.report_progress)
        claim_folder(prepared, mesh, resumed, trainer_class.kind)
        trainer = trainer_class(
            prepared.on_rank(mesh, device, workers, bridge, heartbeat.enter_phase, heartbeat.report_progress)
        )
        on_error.trainer = trainer
        process.freeze_live_objects()
        divergence = DivergenceCheck(
            trainer,
            config.run.max_discarded_steps,
            None if resumed is None else resumed[1],
            reward_rule(config.algorithm),
        )
        checkpointer = Checkpointer(trainer, prepared.origin, stop, divergence, heartbeat.report_progress)
        stack.callback(checkpointer.close)
        if resumed is not None:
            trainer.roll_back(numbered(shared_rollbacks(trainer, resumed[1])))
        try:
            progress = restore(trainer, resumed, heartbeat)
        except UserFunctionError as error:
            status = end_at_resume(trainer, error, stop)
            trainer.close(status)
            return status
        reporter = open_reporter(trainer, prepared, progress)
        while True:
            try:
                status = _train(
                    trainer, progress, checkpointer, divergence, reporter, heartbeat, stop, started
                )
            except DivergedError as error:
                if mesh.rank == 0:
                    trainer.write_last_step(f"diverged: {error}")
                try:
                    progress = roll_back(trainer, checkpointer, heartbeat, error)
                except UserFunctionError as failed:
                    status = end_at_resume(trainer, failed, stop)
                    break
                if progress is not None:
                    divergence.begin_at(progress)
                    if reporter is not None:
                        reporter.close()
                    take_back_files(trainer, progress)
                    reporter = open_reporter(trainer, prepared, progress)
                    continue
                status = end_diverged(trainer, checkpointer, heartbeat.step, error, stop)
            except UserFunctionError as error:
                if mesh.rank == 0:
                    trainer.write_last_step(f"the step after it failed: {error}")
                status = end_at_failed_function(trainer, checkpointer, heartbeat.step, error, stop)
            break
        if reporter is not None:
            reporter.close()  # it may wait for a network: all is saved by now, and no rank waits
            if status != exit_codes.SAVED_AND_STOPPED:  # who stopped it may not wait
                write_run_report(config)
        trainer.close(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    if status == exit_codes.FINISHED and mesh.rank == 0:
        push_model(config, trainer.total_steps)
    return status


def _train(
    trainer: Trainer,
    progress: Progress | None,
    checkpointer: Checkpointer,
    divergence: DivergenceCheck,
    reporter: Reporter | None,
    heartbeat: Heartbeat,
    stop: StopRequest,
    started: float,
) -> int:
    """All steps that are left, then the model and the summary; the exit status. DivergedError, on all ranks, where the
    policy can no longer be trained."""
    config, mesh, total_steps = trainer.config, trainer.mesh, trainer.total_steps
    steps_done = 0 if progress is None else progress.step
    checkpointer.newest = stop.saved_step = steps_done or None
    reason = checkpointer.asked_to_stop()
    if reason is not None and steps_done < total_steps:
        return stop_early(trainer, checkpointer, steps_done, reason, stop)
    checkpointer.export_length_stage(steps_done, even_if_there=False)
    heartbeat.enter_phase("first step")
    trainer.begin(steps_done, checkpointer.export, checkpointer.asked_to_stop)
    if mesh.rank == 0:
        logger.info("Ready, %.1f s after this program's start", process.seconds_since_start())
    if steps_done == 0:
        before = trainer.evaluate_before_training()
        if reporter is not None:
            reporter.before_training(before)
    stragglers = StragglerDetector(mesh)
    profiler = StepProfiler(
        config.telemetry.profile_steps, Path(config.run.output_dir), mesh.rank, trainer.device.kind == "cuda"
    )
    stop.in_steps = True
    for number in range(steps_done, total_steps):
        heartbeat.step = number + 1
        with profiler.step(number + 1):
            record = trainer.step(number)
        if isinstance(record, Interrupted):
            checkpointer.save_to_stop(number)
            return stop_early(trainer, checkpointer, number, record.reason, stop)
        if number == steps_done and mesh.rank == 0 and trainer.device.kind == "cuda":
            most, used = (
                torch.cuda.max_memory_reserved(trainer.device.torch_device),
                device_bytes(trainer.device),
            )
            logger.info("%s", measured_line(config, trainer.shape, mesh, trainer.kind, most, used))
        metrics = stragglers.after_step(trainer.busy_seconds(), heartbeat.slowest_answer())
        metrics |= {"memory_gib": held_bytes(trainer.device) / 2**30, "seconds/save": checkpointer.seconds}
        if reporter is not None:
            reporter.step(number, record, metrics)
        divergence.after_step(number + 1, record.results, record.metrics.get("task_reward"))
        is_last = number + 1 == total_steps
        reason = checkpointer.after_step(number + 1, is_last)
        if reason is not None and not is_last:
            return stop_early(trainer, checkpointer, number + 1, reason, stop)
        checkpointer.export_length_stage(number + 1, even_if_there=True)
    if config.algorithm.rollback > 0:
        divergence.raise_if_not_finite()  # while the run may go back
    stop.done()  # a request to stop comes too late now
    checkpointer.export_final_model()
    validated = trainer.validate_at_end()
    more = trainer.at_end()
    if reporter is not None:
        if validated is not None:
            reporter.validation(validated)
        reporter.write_summary(time.perf_counter() - started, more)
        message = f"all {total_steps} steps are done"
        exit_codes.write_exit_status(config.run.output_dir, exit_codes.FINISHED, message)
    dist.barrier()
    return exit_codes.FINISHED


# ---------------------------------------------------------------- the steps of the life cycle


def join_run(
    stack: ExitStack,
    config: Config,
    device: Device,
    rendezvous: Rendezvous | None,
    stop: StopRequest,
    on_error: OnError | None = None,
) -> tuple[Bridge | None, Heartbeat]:
    """Join the process group, or, where engines have ranks of their own, this rank's of the two; and the heartbeat of
    all ranks, which `stack` ends. A collective of all ranks of the run."""
    store, timeout = group_store(rendezvous, config), config.run.distributed_timeout_seconds
    bridge = None
    if config.rollout.ranks:
        assert store is not None, "a run with engines on ranks of their own has several ranks"
        bridge = open_worlds(device, timeout, store, config.rollout.ranks)
    else:
        init_process_group(device, timeout, store)
    heartbeat = Heartbeat(
        config.run,
        environment_rank(),
        environment_world_size(),
        config.run.output_dir,
        stop,
        broadcast_from_rank_zero if bridge is None else bridge.broadcast,
    )
    stack.enter_context(heartbeat)
    outlive_parent()
    stack.push(on_error or OnError())
    return bridge, heartbeat


def group_store(rendezvous: Rendezvous | None, config: Config) -> dist.Store | None:
    """The store of the process group. All ranks meet once more before: ranks that are missing are named, where a
    process group would wait for them in silence."""
    if rendezvous is None:
        return None
    run, place = config.run, rendezvous.rank_info
    report = RankReport(place.host, place.node)
    rendezvous.sync("group", report, run.start_timeout_seconds, lambda reports: RendezvousResult())
    return rendezvous.group_store(run.distributed_timeout_seconds)


class OnError:
    """What a rank does about an error before anything else."""

    trainer: Trainer | None = None
    """Once it is there."""

    def __call__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Log it in one line, at once: what is closed next may take its time, and the heartbeat does not wait for it.
        Then write the last step; where a peer may have failed, rank 0 alone does."""
        if kind is None or error is None:
            return
        rank, host = environment_rank(), socket.gethostname()
        logger.error("rank %d on %s failed; the run ends: %s: %s", rank, host, kind.__name__, error)
        if self.trainer is not None and (rank == 0 or not may_be_caused_by_peer(error)):
            self.trainer.write_last_step(f"failed on rank {rank}: {kind.__name__}: {error}")


def claim_folder(
    prepared: PreparedRun[Any], mesh: Mesh, resumed: CheckpointToResume | None, kind: Kind
) -> None:
    """Make `run.output_dir` this run's, and log its settings and start-up lines. A collective. ValueError where a rank
    does not see the folder."""
    config = prepared.config
    if mesh.rank == 0:
        claim_run_folder(config.run.output_dir, config, None if resumed is None else resumed[1].step)
        log_settings(config, kind)
        advice = launcher_advice(config.run.stop_grace_seconds)
        for text in with_details((*filter(None, [advice]), *prepared.lines)):
            logger.info("%s", text)
        for text in prepared.warnings:
            logger.warning("%s", text)
        write_report(config.run.output_dir, prepared.inputs.reports)
    dist.barrier()
    folder = Path(config.run.output_dir)
    host = None if (folder / CONFIG_FILE).is_file() else socket.gethostname()
    blind = list(dict.fromkeys(one for one in all_gather_objects(host) if one is not None))
    if blind:
        raise ValueError(
            f'what rank 0 wrote into run.output_dir "{folder}" is not seen on {hosts_text(blind)}; it must lie on a '
            "disk that all nodes share"
        )


def log_settings(config: Config, kind: Kind) -> None:
    """Open the run's log file, and log all settings there; on the console those that are not at their defaults."""
    folder = Path(config.run.output_dir)
    try:
        open_log_file(folder)
    except OSError as error:
        logger.warning("%s cannot be written: %s. The run continues without it", folder / LOG_FILE, error)
    changed = changed_settings(config)
    unused = changed.pop("sft", []) if kind == "grpo" else []
    shown = "\n".join(f"  {section}: {', '.join(settings)}" for section, settings in changed.items())
    logger.info("Settings that are not at their defaults; all are in %s:\n%s", CONFIG_FILE, shown)
    if unused:
        logger.warning("Without effect in a GRPO run: %s", ", ".join(f"sft.{one}" for one in unused))
    logger.debug("The settings of this run:\n%s", config_as_yaml(config))
    logger.debug(
        "Versions: %s", ", ".join(f"{name} {version}" for name, version in library_versions().items())
    )


def with_details(lines: Iterable[str]) -> list[str]:
    """Texts of a line and the indented ones below it, which are its details.

    >>> with_details(["Memory:", "  sync: 1 GiB", "Layout: TP1"])
    ['Memory:\\n  sync: 1 GiB', 'Layout: TP1']
    """
    texts: list[str] = []
    for line in lines:
        if texts and line.startswith(" "):
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return texts


def changed_settings(config: Config) -> dict[str, list[str]]:
    """By section the settings that are not at their defaults: {"data": ["prompts_per_step=8"], ...}."""
    sections: dict[str, list[str]] = {}
    for key, value in shown_values(config).items():
        setting = all_settings()[key]
        if value != setting.default:
            sections.setdefault(setting.section, []).append(f"{setting.name}={as_yaml_word(value)}")
    return sections


def open_reporter(trainer: Trainer, prepared: PreparedRun[Any], progress: Progress | None) -> Reporter | None:
    """Rank 0's reporter; None elsewhere."""
    if trainer.mesh.rank != 0:
        return None
    steps_done = 0 if progress is None else progress.step
    return Reporter(trainer.config, prepared.inputs, trainer.kind, trainer.layout, steps_done)


def restore(trainer: Trainer, resumed: CheckpointToResume | None, heartbeat: Heartbeat) -> Progress | None:
    """Load weights, optimizer and schedule of the checkpoint, if there is one; where its run stands."""
    if resumed is None:
        return None
    checkpoint, progress = resumed
    heartbeat.enter_phase("load checkpoint")
    actor = trainer.actor
    with trainer.models_on_device(trainer.models):
        load_checkpoint(trainer.models, trainer.device, checkpoint, progress)
    actor.learner.restore_schedule(progress.updates)
    trainer.resume(checkpoint.folder, progress)
    if trainer.mesh.rank == 0:
        done = f"{progress.step} steps and {progress.updates} updates are done"
        extra = event("resume", progress.step)
        logger.info("Resuming from %s, made on %s: %s", checkpoint.folder, progress.layout, done, extra=extra)
    return progress


def reward_rule(algorithm: AlgorithmConfig) -> RewardRule | None:
    """Rewards are looked at only where the run may go back."""
    if algorithm.rollback == 0 or algorithm.rollback_reward_drop is None:
        return None
    return RewardRule(algorithm.rollback_reward_drop, algorithm.rollback_reward_steps)


def shared_rollbacks(trainer: Trainer, progress: Progress | None) -> list[RollbackRecord]:
    """The run's rollbacks, as rank 0 reads them. A collective. ValueError on all ranks where it cannot."""
    found: list[RollbackRecord] | str = []
    if trainer.mesh.rank == 0:
        try:
            found = records_of(trainer.config.run.output_dir, progress)
        except ValueError as error:
            found = str(error)
    found = broadcast_from_rank_zero(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def roll_back(
    trainer: Trainer, checkpointer: Checkpointer, heartbeat: Heartbeat, error: DivergedError
) -> Progress | None:
    """Go back to the last good checkpoint, after a divergence: where its run stands; None where the run must end, as it
    has no such checkpoint, or no rollback left. A collective. The rollback is on the disk when it returns, and nothing
    else there is changed."""
    config, diverged_step = trainer.config, heartbeat.step
    most = config.algorithm.rollback
    if most == 0:
        return None
    checkpointer.finish()
    records = shared_rollbacks(trainer, None)
    if len(records) < len(trainer.rollbacks):  # the file is lost
        records = unnumbered(trainer.rollbacks)
    resumed = None
    if len(records) < most:
        resumed = good_checkpoint(trainer, checkpointer, heartbeat)
    if resumed is None:
        if trainer.mesh.rank == 0:
            why = (
                "no checkpoint is good"
                if len(records) < most
                else f"all {most} of algorithm.rollback are made"
            )
            logger.error("No rollback after the divergence in step %d: %s", diverged_step, why)
        return None
    checkpoint, progress = resumed
    number = len(records) + 1
    trainer.roll_back(
        numbered([*records, RollbackRecord(progress.step, progress.step)])
    )  # the rate, for `restore`
    restore(trainer, resumed, heartbeat)
    records.append(
        RollbackRecord(progress.step, trainer.next_draw_step(progress.step), diverged_step, str(error))
    )
    trainer.roll_back(numbered(records))
    refused = None
    if trainer.mesh.rank == 0:
        try:
            write_rollbacks(config.run.output_dir, records)
        except OSError as failed:
            refused = str(failed)
    refused = broadcast_from_rank_zero(refused)
    if trainer.mesh.rank == 0:
        if refused is not None:
            logger.error(
                "No rollback: %s cannot be written, and it would not be counted: %s", ROLLBACKS_FILE, refused
            )
        else:
            logger.error(
                "Rollback %d of at most %d: the run diverged in step %d: %s. It goes back to %s, of step %d; the "
                "learning rate is %g times what the settings say, and from step %d on prompts and samples have other "
                "seeds",
                number,
                most,
                diverged_step,
                error,
                checkpoint.folder,
                progress.step,
                trainer.actor.learner.lr_scale,
                records[-1].draw_step + 1,
                extra=event("rollback", progress.step, diverged_step=diverged_step),
            )
    return None if refused is not None else progress


def good_checkpoint(
    trainer: Trainer, checkpointer: Checkpointer, heartbeat: Heartbeat
) -> CheckpointToResume | None:
    """The newest good one whose files are as they were written. A collective."""
    heartbeat.enter_phase("check checkpoint")
    recovery = None
    if trainer.mesh.rank == 0:
        try:
            found = [(one, read_progress(one.folder)) for one in checkpointer.sound()]
            recovery = Recovery(found, []) if found else None
        except (OSError, ValueError) as refused:
            logger.warning("The checkpoints cannot be looked at: %s", refused)
    try:
        return choose_checkpoint(recovery, heartbeat.report_progress)
    except ValueError as refused:
        if trainer.mesh.rank == 0:
            logger.warning("%s", refused)
        return None


def take_back_files(trainer: Trainer, progress: Progress) -> None:
    """What the discarded steps left in the run's folder. A collective."""
    if trainer.mesh.rank == 0:
        take_back(Path(trainer.config.run.output_dir), progress.step)
    dist.barrier()


def stop_early(
    trainer: Trainer, checkpointer: Checkpointer, step: int, reason: str, stop: StopRequest
) -> int:
    """Log that the run stops before its end; its exit status."""
    stop.done()
    status = exit_codes.SAVED_AND_STOPPED
    if step == 0:
        message = f"stopped by {reason} before the end of its first step: nothing was saved, "
        message += "and the same command begins again"
    elif step == checkpointer.newest:
        message = f"stopped by {reason} after step {step}, which is saved: the same command resumes"
    else:
        status = exit_codes.FAILURE
        message = f"stopped by {reason} after step {step}, which could not be saved"
    if trainer.mesh.rank == 0:
        logger.warning("The run was %s", message)
        exit_codes.write_exit_status(trainer.config.run.output_dir, status, message)
    dist.barrier()
    return status


def end_diverged(
    trainer: Trainer, checkpointer: Checkpointer, step: int, error: DivergedError, stop: StopRequest
) -> int:
    """Log that the run ends in step `step`, counted from 1, since its policy has diverged, and what is left; its exit
    status. Nothing is saved but what is being written."""
    checkpointer.finish()
    stop.done()
    if trainer.mesh.rank == 0:
        left = "no checkpoint is from before that"
        try:
            sound = checkpointer.newest_sound()
        except (OSError, ValueError) as refused:
            sound, left = None, f"the checkpoints cannot be looked at: {refused}"
        if sound is not None:
            left = (
                f"the newest checkpoint from before that is {sound}, of which "
                "rlmath convert to-hf makes a model"
            )
        message = f"diverged in step {step}: {error}; {left}"
        logger.error("The run has %s. %s", message, ADVICE)
        exit_codes.write_exit_status(trainer.config.run.output_dir, exit_codes.DIVERGED, message)
    dist.barrier()
    return exit_codes.DIVERGED


def end_at_resume(trainer: Trainer, error: UserFunctionError, stop: StopRequest) -> int:
    """Log that a function of the user's fails on what the run would go on with; its exit status. Nothing is changed."""
    stop.done()
    if trainer.mesh.rank == 0:
        text = f"cannot go on from its checkpoint: {error}"
        logger.error("The run %s\nCorrect the function: the same command then resumes", text)
        first = text.partition("\n")[0]
        exit_codes.write_exit_status(trainer.config.run.output_dir, exit_codes.MISTAKE, first)
    dist.barrier()
    return exit_codes.MISTAKE


def end_at_failed_function(
    trainer: Trainer, checkpointer: Checkpointer, step: int, error: UserFunctionError, stop: StopRequest
) -> int:
    """Save the steps before `step`, counted from 1, of which a function of the user's failed, and log why the run
    ends; its exit status."""
    checkpointer.save_to_stop(step - 1)
    stop.done()
    if trainer.mesh.rank == 0:
        saved = f"step {step - 1} is saved, and " if step > 1 and checkpointer.newest == step - 1 else ""
        text = f"ended in step {step}, of which nothing was learned: {error}"
        advice = f"Correct the function: {saved}the same command resumes from there"
        logger.error("The run has %s\n%s", text, advice if saved else "Correct the function and start again")
        first = text.partition("\n")[0]
        exit_codes.write_exit_status(trainer.config.run.output_dir, exit_codes.MISTAKE, first)
    dist.barrier()
    return exit_codes.MISTAKE
