"""How a training program starts and ends on a rank.

    rendezvous -> settings -> checks -> inputs -> run folder -> all nodes compared ->
    `loop.run_training` -> exit status

A user's mistake is reported before Megatron and vLLM are loaded and before any process group or
engine starts: nothing that is imported here loads them. Every rank checks settings and files by
itself; then the nodes are compared, and all ranks end with the same error where they differ.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from rlmath.checkpoint.hf.peft import other_base_warnings
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.checkpoint.save_schedule import output_bytes
from rlmath.config.hub import HubFailedError
from rlmath.config.length_curriculum import (
    fewer_steps_warnings,
    late_steps_warnings,
    length_stage_lines,
)
from rlmath.config.schema import Config, Kind, RunConfig
from rlmath.data import dataset
from rlmath.distributed import process
from rlmath.distributed.device import prepare_imports
from rlmath.distributed.device_kind import resolve_kind
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.failure import (
    PeerFailedError,
    first_line,
    may_be_caused_by_peer,
)
from rlmath.distributed.fault_tolerance.preemption import end_at_interrupt, under_torchrun
from rlmath.distributed.process import end_with_parent
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.distributed.rendezvous import MissingRanksError, Rendezvous, open_rendezvous
from rlmath.planning.checks import check_config, only_used
from rlmath.planning.memory_estimate import mesh_of, training_ranks
from rlmath.planning.memory_fit import start_up_lines
from rlmath.planning.model_checks import routing_warnings
from rlmath.planning.parallelism import roles
from rlmath.planning.reward_checks import hook_lines
from rlmath.planning.setting_warnings import config_warnings
from rlmath.run.command_line import log_mistake, record_exit, set_up_rank_logging
from rlmath.run.nodes import data_makers, facts_of, meet, meet_with_mistake
from rlmath.run.prepare import read_inputs, tokenizer_problem, try_data
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.hub_inputs import SharedMistakeError, fetch_inputs
from rlmath.run.recovery.resume import find_recovery
from rlmath.run.run_dir import check_output_folder, sole_user
from rlmath.telemetry.console import close_bars
from rlmath.telemetry.events import event

logger = logging.getLogger(__name__)

Program = Callable[["PreparedRun[Any]", Rendezvous | None], int]
"""A rank's work once all have met, which returns its exit status.

`rendezvous` is None if there is one rank."""

# ---------------------------------------------------------------- what is known before the start


def prepare_grpo(config: Config) -> PreparedRun[dataset.Inputs]:
    """ValueError for all that can be known to be wrong before a GRPO run starts."""
    return _prepare(config, "grpo")


def prepare_sft(config: Config) -> PreparedRun[dataset.SftInputs]:
    """ValueError for all that can be known to be wrong before a supervised run starts."""
    return _prepare(config, "sft")


def _prepare(settings: Config, kind: Kind) -> PreparedRun[Any]:
    """Check the settings, read the data and compile what the run logs at its start."""
    world_size = environment_world_size()
    is_first = environment_rank() == 0
    config, unused = only_used(settings) if kind == "sft" else (settings, [])
    shapes = check_config(config, world_size, kind)
    shape = shapes.policy
    if (problem := tokenizer_problem(config)) is not None:
        raise ValueError(
            f"{problem}; a run needs it (rlmath install cpu, or gpu, installs transformers)."
        )
    run_data = read_inputs(config, shape, kind)
    inputs = run_data.inputs
    mesh = mesh_of(config.parallel, config.rollout, world_size, rank=0)
    recovery = find_recovery(config, run_data.origin, inputs.total_steps)
    check_output_folder(
        config.run.output_dir, config, output_bytes(config, shapes), resumes=recovery is not None
    )
    data = try_data(config, shape, run_data, checks_data=is_first, calls_functions=is_first)
    lines = (
        *config_warnings(config, unused, parameter_count(shape)),
        *(routing_warnings(config.policy, shape) if kind == "grpo" else ()),
        *data.lines,
        *hook_lines(config, kind),
        *length_stage_lines(config),
        f"Layout: {mesh.describe() if kind == 'grpo' else mesh.training_layout}",
        *([f"  {roles_text}"] if (roles_text := roles(world_size, config.rollout.ranks)) else ()),
        *start_up_lines(config, shapes, world_size, kind=kind),
    )
    warnings = (
        *data.warnings,
        *other_base_warnings(config.model.adapter_path, config.model.path),
        *fewer_steps_warnings(config, inputs.order.steps_per_epoch),
        *late_steps_warnings(config, inputs.total_steps),
    )
    return PreparedRun(
        config,
        shapes.with_total_steps(config, inputs.total_steps),
        inputs=inputs,
        origin=data.origin,
        recovery=recovery,
        lines=lines,
        validation=data.validation,
        warnings=warnings,
    )


def start(
    load: Callable[[], Config],
    prepare: Callable[[Config], PreparedRun[Any]],
    load_program: Callable[[], Program],
) -> int:
    """Run a training program on this rank; its exit status, one of `fault_tolerance.exit_codes`.

    `load` and `prepare` raise ValueError for all that can be known to be wrong before the start.
    `load_program` imports the program, and Megatron with it; it is called only when all ranks have
    met. An error after that ends this process at once."""
    set_up_rank_logging()
    end_at_interrupt(environment_rank())
    logger.info("Starting: reading settings, model and data ...", extra=event("start"))
    rank = StartingRank()
    with ExitStack() as stack:
        try:
            prepared = rank.get_ready(load, prepare, stack)
            rank.meet_others(prepared)
        except (ValueError, MissingRanksError, HubFailedError) as error:
            log_mistake(error)
            stack.close()
            status = exit_codes.MISTAKE if isinstance(error, ValueError) else exit_codes.FAILURE
            if rank.config is not None:
                record_exit(rank.config.run.output_dir, status, str(error))
            return status
        try:
            program = import_program(prepared.config, load_program)
            status = program(prepared, rank.rendezvous)
            process.skip_collection_at_exit()
            return status
        except BaseException as error:
            if rank.rendezvous is not None:
                rank.rendezvous.report_failure(first_line(error))
            end_broken()


class StartingRank:
    """This rank until all have met, with what the handling of a failure needs."""

    config: Config | None = None
    rendezvous: Rendezvous | None = None
    """None where there is one rank."""
    start_timeout = RunConfig.start_timeout_seconds

    def get_ready(
        self,
        load: Callable[[], Config],
        prepare: Callable[[Config], PreparedRun[Any]],
        stack: ExitStack,
    ) -> PreparedRun[Any]:
        """Read and check this rank's inputs; rank 0 takes the run's folder until `stack` ends.

        ValueError and OSError for what is wrong with them, on several nodes with what the other
        nodes found."""
        self.rendezvous = open_rendezvous(self.start_timeout)
        try:
            self.config = load()
            self.start_timeout = self.config.run.start_timeout_seconds
            self.config = fetch_inputs(self.config, self.rendezvous)
            prepared = prepare(self.config)
            return _take_folder(prepared, stack) if environment_rank() == 0 else prepared
        except (ValueError, OSError) as error:
            several = self.rendezvous is not None and self.rendezvous.rank_info.several_nodes
            if (
                self.rendezvous is not None
                and several
                and not isinstance(error, SharedMistakeError)
            ):
                meet_with_mistake(self.rendezvous, error, self.start_timeout)
            raise

    def meet_others(self, prepared: PreparedRun[Any]) -> None:
        """Wait for all ranks; their nodes, and the data that they read, are compared."""
        if self.rendezvous is not None:
            meet(
                self.rendezvous,
                facts_of(prepared),
                self.start_timeout,
                data=prepared.data_read,
                data_makers=data_makers(prepared.config),
            )


def import_program(config: Config, load_program: Callable[[], Program]) -> Program:
    """The program that this rank runs, with Megatron loaded."""
    if under_torchrun():
        # Without torchrun a rank would wait long for its peers. Once they have met, the heartbeat
        # watches it.
        end_with_parent(os.getppid())
    logger.info("Starting: importing Megatron ...")
    prepare_imports(resolve_kind(config.run.device))
    # Megatron imports W&B, which takes seconds and makes folders that stay when this process is
    # killed.
    with process.without_module("wandb"):
        from rlmath.run.engine_rank import run_engine_rank

        program = load_program()
    trainers = training_ranks(environment_world_size(), config.rollout.ranks)
    return program if environment_rank() < trainers else run_engine_rank


def _take_folder(prepared: PreparedRun[Any], stack: ExitStack) -> PreparedRun[Any]:
    """Keep other runs out of the folder, on rank 0.

    The recovery is determined anew, as an earlier run may just have left something there."""
    config = prepared.config
    stack.enter_context(sole_user(config.run.output_dir))
    exit_codes.reserve_exit_status(config.run.output_dir)
    recovery = find_recovery(config, prepared.origin, prepared.inputs.total_steps)
    return replace(prepared, recovery=recovery)


def end_broken() -> NoReturn:
    """Log the error that is being handled, and end this process at once.

    Threads may wait for peers that wait for this rank. An error that follows from the end of
    another rank, which the heartbeat has named, goes into the log file alone."""
    close_bars()
    error = sys.exc_info()[1]
    caused_by_peer = isinstance(error, PeerFailedError)
    level = logging.DEBUG if caused_by_peer else logging.ERROR
    logger.log(
        level, "Rank %d on %s failed:", environment_rank(), socket.gethostname(), exc_info=True
    )
    if error is not None and not caused_by_peer and not may_be_caused_by_peer(error):
        exit_codes.report_to_torchrun(f"{first_line(error)} (its traceback is above)")
    logging.shutdown()
    os._exit(exit_codes.FAILURE)
