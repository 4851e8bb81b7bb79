"""How a run can end: one table of exit statuses and of what is said.

ending = Ending(END["stopped"], saved=7, step=7, reason="SIGTERM")
status = conclude(ending, config, stop, rank)           # alike on all ranks
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from rlmath.config.schema import Config
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.run.divergence import ADVICE
from rlmath.telemetry.events import event

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndingKind:
    """One row of the table; `{step}` and the like are what an `Ending` gives."""

    status: int
    """One of `exit_codes`."""
    message: str
    """First line of the exit status; on the console "The run" and `verb` stand before it."""
    verb: str = "has"
    advice: str = ""
    """Follows on the console."""
    level: int = logging.ERROR


END = {
    "finished": EndingKind(exit_codes.FINISHED, "all {steps} steps are done"),
    "stopped before its first step": EndingKind(
        exit_codes.SAVED_AND_STOPPED,
        "stopped by {reason} before the end of its first step: nothing was saved, and {again}",
        verb="was",
        level=logging.WARNING,
    ),
    "stopped": EndingKind(
        exit_codes.SAVED_AND_STOPPED,
        "stopped by {reason} after step {step}, which is saved: {again}",
        verb="was",
        level=logging.WARNING,
    ),
    "stopped unsaved": EndingKind(
        exit_codes.FAILURE,
        "stopped by {reason} after step {step}, which could not be saved: {again}",
        verb="was",
        level=logging.WARNING,
    ),
    "diverged": EndingKind(
        exit_codes.DIVERGED,
        "diverged in step {step}: {error}; {left}; {again}, and would diverge again",
        advice=f". {ADVICE}",
    ),
    "model not written": EndingKind(
        exit_codes.FAILURE,
        "made all {steps} steps, and its model cannot be written: {error}. Make room: {again}, "
        "and writes it",
    ),
    "cannot resume": EndingKind(
        exit_codes.MISTAKE,
        "cannot go on from its checkpoint: {error}",
        verb="",
        advice=f"\nCorrect the function: {exit_codes.AGAIN} then resumes",
    ),
    "function failed": EndingKind(
        exit_codes.MISTAKE,
        "ended in step {step}, of which nothing was learned: {error}",
        advice="\nCorrect the function: {again}",
    ),
}


class Ending:
    def __init__(self, kind: EndingKind, saved: int | None = None, **given: object) -> None:
        """`saved` steps are done in the newest checkpoint."""
        self.kind = kind
        given["again"] = exit_codes.again_text(saved)
        self.message = kind.message.format(**given)
        self.line = " ".join(
            filter(None, ["The run", kind.verb, self.message])
        ) + kind.advice.format(**given)
        step = given.get("step")
        self.step = step if isinstance(step, int) else None

    @property
    def status(self) -> int:
        return self.kind.status


def conclude(ending: Ending, config: Config, stop: StopRequest, rank: int) -> int:
    """Nothing is left to save: log how the run ends and write its exit status, which is returned.

    A collective."""
    stop.done()
    if rank == 0:
        if ending.status != exit_codes.FINISHED:  # the reporter has told that
            logger.log(ending.kind.level, "%s", ending.line, extra=event("end", ending.step))
        exit_codes.write_exit_status(
            config.run.output_dir, ending.status, ending.message.partition("\n")[0]
        )
    dist.barrier()
    return ending.status
