"""A supervised run in which something happens at a step.

    tests/disturbed_run.py --event stop --at 3 --config configs/demo_sft.yaml ...

An `event`, or several, is one of
- stop: SIGTERM arrives in the step;
- stopped start: SIGTERM has arrived before the first step of this start;
- interrupt: the step is not made, as the run was asked to stop while it validated;
- function, error: a function of the user's, or anything else, fails in the step;
- resume: a function of the user's fails on the checkpoint;
- disk: after the step, checkpoints/ and models/ are files: what was in them is gone, and nothing
  can be written there;
- validation: the weights after the last step are validated, and the program adds to the summary.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlmath.checkpoint.directory import Progress
from rlmath.config.load import load_config
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.planning.checks import used_keys
from rlmath.run.command_line import read_command_line
from rlmath.run.startup import Program, prepare_sft, start
from rlmath.telemetry.reporter import StepRecord, ValidationResult
from rlmath.workers.user_functions import UserFunctionError

ACCURACY = 0.625
"""What `validation` measures."""


class StoppedAtTheStart(StopRequest):
    """A request that comes at once, as by a SIGTERM that arrives while the models are built."""

    def install(self) -> None:
        super().install()
        self.request("SIGTERM")


def disturbed_program(events: Sequence[str], disturbed_step: int) -> Program:
    """The program in which the events happen in a step, counted from 1."""
    from rlmath.run import loop
    from rlmath.trainer.base import Export, Interrupted
    from rlmath.trainer.sft import SftTrainer

    if "stopped start" in events:
        loop.StopRequest = StoppedAtTheStart

    class DisturbedTrainer(SftTrainer):
        def begin(
            self, steps_done: int, export: Export, asked_to_stop: Callable[[], str | None]
        ) -> None:
            super().begin(steps_done, export, asked_to_stop)
            self.asked_to_stop = asked_to_stop

        def step(self, number: int) -> StepRecord | Interrupted:
            if number + 1 != disturbed_step:
                return super().step(number)
            if "interrupt" in events:
                return Interrupted("SIGUSR1")
            if "function" in events:
                raise UserFunctionError("the reward function is broken")
            if "error" in events:
                raise RuntimeError("something is broken")
            record = super().step(number)
            if "disk" in events:
                put_files_in_the_way(Path(self.config.run.output_dir))
            if "stop" in events:
                os.kill(os.getpid(), signal.SIGTERM)
                while self.asked_to_stop() is None:
                    time.sleep(0.01)
            return record

        def resume(self, folder: Path, progress: Progress) -> None:
            super().resume(folder, progress)
            if "resume" in events:
                raise UserFunctionError("the advantage function refuses the checkpoint")

        def validate_at_end(self) -> ValidationResult | None:
            if "validation" not in events:
                return None
            return ValidationResult(self.total_steps, {"validation/accuracy": ACCURACY})

        def at_end(self) -> dict[str, Any]:
            return {"added": "by the program"} if "validation" in events else {}

        def write_last_step(self, reason: str) -> None:
            print(f"The last step is kept: {reason}", file=sys.stderr)

    return partial(loop.run_training, DisturbedTrainer)


def put_files_in_the_way(output_dir: Path) -> None:
    """Make checkpoints/ and models/ files, in which nothing can be written."""
    for name in ("checkpoints", "models"):
        shutil.rmtree(output_dir / name, ignore_errors=True)
        (output_dir / name).touch()


def main(arguments: Sequence[str]) -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--event", action="append", default=[])
    parser.add_argument("--at", type=int, default=0)
    options, words = parser.parse_known_args(arguments)
    command_line = read_command_line(__doc__ or "", words, used_keys())
    return start(
        partial(load_config, command_line.config, command_line.overrides),
        prepare_sft,
        partial(disturbed_program, options.event, options.at),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
