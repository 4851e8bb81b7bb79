"""How a training program starts and ends on a rank: mistakes are told before anything is started, errors end it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rlmath import garbage
from rlmath.config import Config, RunConfig
from rlmath.guard.exit_status import FAILURE, MISTAKE, clear_exit_status, write_exit_status
from rlmath.guard.launcher import under_torchrun
from rlmath.guard.verdict import first_line
from rlmath.node_checks import facts_of, meet, meet_with_mistake
from rlmath.parallel.device import environment_rank
from rlmath.parallel.meeting import Meeting, NotAllHere, open_meeting
from rlmath.parent_death import end_with_parent
from rlmath.prepared import Prepared
from rlmath.recovery import find_recovery
from rlmath.run_folder import sole_user
from rlmath.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

OTHERS_WAIT_SECONDS = 10.0


def start(
    load: Callable[[], Config],
    prepare: Callable[[Config], Prepared],
    train: Callable[[Prepared, Meeting | None], int],
) -> int:
    """Load the settings, check them, take the run's folder, meet the other ranks, train: one of
    `rlmath.guard.exit_status`.

    `load` and `prepare` raise ValueError for all that can be known to be wrong before the start; `train` is called only
    then, and where it fails, this process ends at once. The meeting is None where there is one rank.
    """
    setup_logging(environment_rank())
    config, meeting = None, None
    with ExitStack() as stack:
        try:
            meeting = open_meeting(RunConfig.start_timeout_seconds)
            try:
                config = load()
                prepared = prepare(config)
                if environment_rank() == 0:
                    prepared = _take_folder(prepared, stack)
            except (ValueError, OSError) as error:
                if meeting is not None and meeting.place.several_nodes:
                    _tell_all_nodes(meeting, error, _patience(config))
                raise
            if meeting is not None:
                meet(meeting, facts_of(prepared), _patience(config))
        except (ValueError, NotAllHere) as error:
            status = MISTAKE if isinstance(error, ValueError) else FAILURE
            tell_mistake(error)
            stack.close()
            if config is not None:
                leave_word(config.run.output_dir, status, str(error))
            return status
        return _train(prepared, meeting, train)


def _tell_all_nodes(meeting: Meeting, mistake: ValueError | OSError, seconds: float) -> None:
    try:
        meet_with_mistake(meeting, mistake, seconds)
    except NotAllHere as lost:
        raise NotAllHere(f"{mistake}\nThe other ranks could not be told: {lost}") from mistake


def _patience(config: Config | None) -> float:
    return RunConfig.start_timeout_seconds if config is None else config.run.start_timeout_seconds


def _take_folder(prepared: Prepared, stack: ExitStack) -> Prepared:
    """For rank 0: keep other runs out of the folder, and look again at what an earlier one may just have left there."""
    config = prepared.config
    stack.enter_context(sole_user(config.run.output_dir))
    clear_exit_status(config.run.output_dir)
    recovery = find_recovery(config, prepared.origin, prepared.inputs.total_steps)
    return replace(prepared, recovery=recovery)


def leave_word(output_dir: str | Path | None, status: int, message: str) -> None:
    """Rank 0 tells whoever looks at the folder's exit status the first line of a message; not in a folder that is not
    there (None: not known), nor in one where another program is at work."""
    if environment_rank() != 0 or output_dir is None:
        return
    with suppress(ValueError, OSError):
        if Path(output_dir).is_dir():
            with sole_user(output_dir):
                write_exit_status(output_dir, status, message.partition("\n")[0])


def _train(
    prepared: Prepared, meeting: Meeting | None, train: Callable[[Prepared, Meeting | None], int]
) -> int:
    """The run; after an error this process ends at once."""
    if under_torchrun():
        # Without torchrun a rank would wait long for its peers. Once they have met, the heart watches over it.
        end_with_parent(os.getppid())
    try:
        status = train(prepared, meeting)
        garbage.leave()
        return status
    except BaseException as error:
        if meeting is not None:
            meeting.tell_failure(first_line(error))
        end_broken()


def tell_mistake(error: Exception) -> None:
    """The first rank of each node speaks first: its launcher ends the others as soon as one has ended. What only
    another rank sees is told after the wait."""
    if os.environ.get("LOCAL_RANK", str(environment_rank())) != "0":
        time.sleep(OTHERS_WAIT_SECONDS)
    logger.error("%s", error)


def end_broken() -> NoReturn:
    """Call it where an error is handled: tell it, and end this process at once. Threads and process groups of a broken
    program may wait for peers that wait for us."""
    logger.exception("What rank %d on %s failed with:", environment_rank(), socket.gethostname())
    logging.shutdown()
    os._exit(FAILURE)
