"""The life cycle of a training program, whatever it learns from.

    process group -> heartbeat -> checkpoint to resume from -> run folder -> trainer -> steps ->
    model -> ending

`run_training` is called on every rank once all ranks have met (`startup.start`). A program is a
`Trainer`: its models, its data and its step. GRPO (`grpo`) and supervised training (`sft`) are two
of them.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmath.checkpoint.directory import Progress
from rlmath.config.schema import AlgorithmConfig
from rlmath.distributed import process
from rlmath.distributed.device import device_bytes, held_bytes, run_device
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.fault_tolerance.stragglers import StragglerDetector
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.planning.memory_estimate import mesh_of
from rlmath.planning.memory_fit import measured_line
from rlmath.report.write import write_run_report
from rlmath.rollout.engine_sleep import allocator_bytes
from rlmath.run.divergence import DivergedError, DivergenceCheck, RewardRule
from rlmath.run.endings import END, Ending, conclude
from rlmath.run.join import OnError, claim_folder, join_run
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.checkpoint_choice import choose_checkpoint
from rlmath.run.recovery.checkpointing import Checkpointer
from rlmath.run.recovery.hub_inputs import push_model
from rlmath.run.recovery.restore import CannotResumeError, restore
from rlmath.run.recovery.resume import CheckpointToResume
from rlmath.run.recovery.rollback import roll_back, shared_rollbacks
from rlmath.run.run_dir import take_back
from rlmath.telemetry.profile import StepProfiler
from rlmath.telemetry.reporter import Reporter
from rlmath.trainer.base import Interrupted, Trainer
from rlmath.workers.user_functions import UserFunctionError

logger = logging.getLogger(__name__)


def run_training(
    trainer_class: type[Trainer], prepared: PreparedRun[Any], rendezvous: Rendezvous | None
) -> int:
    """Train as prepared; the exit status of the program.

    `rendezvous` is None where there is one rank. After an error the process group is left as it is:
    peers may wait in it, and taking it down could wait for them. The caller ends the process."""
    started = time.perf_counter()
    config = prepared.config
    mesh = mesh_of(
        config.parallel, config.rollout, environment_world_size(), rank=environment_rank()
    )
    device = run_device(config)
    stop = StopRequest(config.run.stop_grace_seconds, config.run.output_dir, mesh.rank)
    stop.install()
    with ExitStack() as stack:
        workers = stack.enter_context(
            trainer_class.open_workers(config, mesh, prepared.inputs, prepared.validation)
        )
        on_error = OnError()
        bridge, heartbeat = join_run(
            stack, config, device=device, rendezvous=rendezvous, stop=stop, on_error=on_error
        )
        heartbeat.enter_phase("check checkpoint")
        resumed = choose_checkpoint(prepared.recovery, heartbeat.report_progress)
        claim_folder(prepared, mesh, resumed, kind=trainer_class.kind)
        trainer = trainer_class(
            prepared.on_rank(
                mesh,
                device,
                workers=workers,
                bridge=bridge,
                on_phase=heartbeat.enter_phase,
                on_progress=heartbeat.report_progress,
            )
        )
        on_error.trainer = trainer
        process.freeze_live_objects()
        run = TrainingRun(prepared, trainer, heartbeat, stop=stop, resumed=resumed)
        stack.callback(run.checkpointer.close)
        ending = run.train(started)
        status = conclude(ending, config, stop, rank=mesh.rank)
        run.close_reporter(status)
        trainer.close(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    if status == exit_codes.FINISHED and mesh.rank == 0:
        push_model(config, trainer.total_steps)
    return status


class TrainingRun:
    """A run on this rank, from its checkpoint to its ending.

    All ranks call its methods alike."""

    def __init__(
        self,
        prepared: PreparedRun[Any],
        trainer: Trainer,
        heartbeat: Heartbeat,
        stop: StopRequest,
        resumed: CheckpointToResume | None,
    ) -> None:
        self.prepared = prepared
        self.trainer = trainer
        self.heartbeat = heartbeat
        self.stop = stop
        self.resumed = resumed
        config = prepared.config
        progress = None if resumed is None else resumed[1]
        rule = reward_rule(config.algorithm)
        self.divergence = DivergenceCheck(
            trainer, config.run.max_discarded_steps, progress, rule=rule
        )
        self.checkpointer = Checkpointer(
            trainer,
            prepared.origin,
            stop,
            divergence=self.divergence,
            on_progress=heartbeat.report_progress,
        )
        self.reporter: Reporter | None = None
        """Rank 0's, once the run has begun."""

    def train(self, started: float) -> Ending:
        """Steps until the run ends, rollbacks included.

        `started`: the program's start, by `time.perf_counter`."""
        trainer = self.trainer
        try:
            if self.resumed is not None:
                trainer.roll_back(shared_rollbacks(trainer, self.resumed[1]))
            progress = restore(trainer, self.resumed, self.heartbeat)
            while True:
                self.open_reporter(progress)
                try:
                    return self.make_steps(progress, started)
                except DivergedError as error:
                    if trainer.mesh.rank == 0:
                        trainer.write_last_step(f"diverged: {error}")
                    progress = roll_back(
                        error, trainer, self.checkpointer, heartbeat=self.heartbeat
                    )
                    if progress is None:
                        return self.ending_of_divergence(error)
                    self.divergence.begin_at(progress)
                    self.close_reporter()
                    take_back_files(trainer, progress)
        except CannotResumeError as error:
            return self.ending("cannot resume", error=error)
        except UserFunctionError as error:
            if trainer.mesh.rank == 0:
                trainer.write_last_step(f"the step after it failed: {error}")
            return self.ending_of_failed_function(error)

    def make_steps(self, progress: Progress | None, started: float) -> Ending:
        """All steps that are left, then the model and the summary.

        DivergedError, on all ranks, where the policy can no longer be trained; UserFunctionError
        where a function of the user's fails."""
        trainer = self.trainer
        checkpointer = self.checkpointer
        mesh = trainer.mesh
        total_steps = trainer.total_steps
        steps_done = 0 if progress is None else progress.step
        checkpointer.newest = self.stop.saved_step = steps_done or None
        checkpointer.steps_done = steps_done
        reason = checkpointer.asked_to_stop()
        if reason is not None and steps_done < total_steps:
            return self.ending_of_stop(steps_done, reason)
        checkpointer.export_length_stage(steps_done, even_if_there=False)
        self.heartbeat.enter_phase("first step")
        trainer.begin(steps_done, checkpointer.export, checkpointer.asked_to_stop)
        if mesh.rank == 0:
            logger.info("Ready, %.1f s after this program's start", process.seconds_since_start())
        if steps_done == 0:
            before = trainer.evaluate_before_training()
            if self.reporter is not None:
                self.reporter.before_training(before)
        stragglers = StragglerDetector(mesh)
        folder = Path(trainer.config.run.output_dir)
        on_gpu = trainer.device.kind == "cuda"
        profiler = StepProfiler(
            trainer.config.telemetry.profile_steps, folder, mesh.rank, on_gpu=on_gpu
        )
        self.stop.in_steps = True
        for number in range(steps_done, total_steps):
            self.heartbeat.step = number + 1
            with profiler.step(number + 1):
                record = trainer.step(number)
            if isinstance(record, Interrupted):
                checkpointer.save_to_stop(number)
                return self.ending_of_stop(number, record.reason)
            if number == steps_done:
                self.log_measured_memory()
            metrics = stragglers.after_step(trainer.busy_seconds(), self.heartbeat.slowest_answer())
            metrics["memory_gib"] = held_bytes(trainer.device) / 2**30
            metrics["seconds/save"] = checkpointer.seconds
            if self.reporter is not None:
                self.reporter.step(number, record, metrics)
            self.divergence.after_step(
                number + 1, record.results, record.metrics.get("task_reward")
            )
            is_last = number + 1 == total_steps
            reason = checkpointer.after_step(number + 1, is_last)
            if reason is not None and not is_last:
                return self.ending_of_stop(number + 1, reason)
            checkpointer.export_length_stage(number + 1, even_if_there=True)
        self.divergence.raise_if_broken()  # while the run may go back
        self.stop.done()  # a request to stop comes too late now
        if (refused := checkpointer.export_final_model()) is not None:
            return self.ending("model not written", steps=total_steps, error=refused)
        validated = trainer.validate_at_end()
        end_metrics = trainer.at_end()
        if self.reporter is not None:
            if validated is not None:
                self.reporter.validation(validated)
                checkpointer.rewrite_card()
            self.reporter.write_summary(time.perf_counter() - started, end_metrics)
        return self.ending("finished", steps=total_steps)

    def open_reporter(self, progress: Progress | None) -> None:
        """A reporter on rank 0, of the steps after `progress`."""
        trainer = self.trainer
        if trainer.mesh.rank == 0:
            steps_done = 0 if progress is None else progress.step
            self.reporter = Reporter(
                trainer.config,
                self.prepared.inputs,
                trainer.kind,
                trainer.shapes.length_stages,
                layout=trainer.layout,
                steps_done=steps_done,
            )

    def close_reporter(self, status: int | None = None) -> None:
        """Close the reporter, which may wait for a network: all is saved by now, and no rank waits.

        With the run's exit status `report.html` is written, too, unless the run was asked to stop:
        whoever stopped it may not wait for that."""
        if self.reporter is not None:
            self.reporter.close()
            if status not in (None, exit_codes.SAVED_AND_STOPPED):
                write_run_report(self.prepared.config)

    def log_measured_memory(self) -> None:
        """Rank 0 logs what the first step held of a GPU beside what was planned."""
        trainer = self.trainer
        if trainer.mesh.rank == 0 and trainer.device.kind == "cuda":
            line = measured_line(
                trainer.config,
                trainer.shapes,
                mesh=trainer.mesh,
                kind=trainer.kind,
                most=torch.cuda.max_memory_reserved(trainer.device.torch_device),
                engine=allocator_bytes(),
                used=device_bytes(trainer.device),
            )
            logger.info("%s", line)

    # ------------------------------------------------------------ endings

    def ending(self, kind: str, **given: object) -> Ending:
        """An ending of a kind in `END`, for a run with its present checkpoints."""
        starts_over = self.prepared.config.run.recover_mode == "disabled"
        return Ending(END[kind], None if starts_over else self.checkpointer.newest, **given)

    def ending_of_stop(self, step: int, reason: str) -> Ending:
        """The ending of a run that was asked to stop after `step` steps."""
        if step == 0:
            return self.ending("stopped before its first step", reason=reason)
        saved = step == self.checkpointer.newest
        return self.ending("stopped" if saved else "stopped unsaved", step=step, reason=reason)

    def ending_of_divergence(self, error: DivergedError) -> Ending:
        """The ending after a divergence; nothing is saved but what is being written."""
        self.checkpointer.finish()
        self.stop.done()
        checkpoint_text = "no checkpoint is from before that"
        try:
            sound = self.checkpointer.sound()[:1] if self.trainer.mesh.rank == 0 else []
        except (OSError, ValueError) as read_error:
            sound = []
            checkpoint_text = f"the checkpoints cannot be looked at: {read_error}"
        for checkpoint in sound:
            checkpoint_text = (
                f"the newest checkpoint from before that is {checkpoint.folder}; "
                "rlmath convert to-hf makes a model of it"
            )
        return self.ending("diverged", step=self.heartbeat.step, error=error, left=checkpoint_text)

    def ending_of_failed_function(self, error: UserFunctionError) -> Ending:
        """The ending after a failure of a user's function; the steps before it are saved."""
        step = self.heartbeat.step
        self.checkpointer.save_to_stop(step - 1)
        return self.ending("function failed", step=step, error=error)


def reward_rule(algorithm: AlgorithmConfig) -> RewardRule | None:
    """The rule for collapsed rewards; None unless the run may go back to a checkpoint."""
    if algorithm.rollback == 0 or algorithm.rollback_reward_drop is None:
        return None
    return RewardRule(algorithm.rollback_reward_drop, algorithm.rollback_reward_steps)


def take_back_files(trainer: Trainer, progress: Progress) -> None:
    """Take back what the discarded steps left in the run's folder.

    A collective."""
    if trainer.mesh.rank == 0:
        take_back(Path(trainer.config.run.output_dir), progress.step)
    dist.barrier()
