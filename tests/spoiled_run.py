"""A training program whose weights break on the last rank after step 3.

Its arguments are `--program sft` or `grpo`; `--spoil nan` (a NaN in one of them) or `scale` (all so
large that no loss is finite); `--times N`: the first N times that step 3 is made; and `--kill`:
every rank is killed when a rollback is recorded and nothing else in the run's folder is changed
yet."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import torch

from rlmath.config.load import load_config
from rlmath.planning.checks import used_keys
from rlmath.run.command_line import read_command_line
from rlmath.run.loop import run_training
from rlmath.run.startup import Program, prepare_grpo, prepare_sft, start

SPOILED_STEP = 3


def taken(name: str) -> str:
    """The value of an option, which is taken off the command line."""
    index = sys.argv.index(name)
    value = sys.argv[index + 1]
    del sys.argv[index : index + 2]
    return value


def spoiled_program() -> Program:
    if program == "sft":
        from rlmath.trainer.sft import SftTrainer as Base
    else:
        from rlmath.trainer.grpo import GrpoTrainer as Base
    if kill:
        from rlmath.run import loop

        loop.take_back_files = lambda *given: os.kill(os.getpid(), signal.SIGKILL)

    class Spoiled(Base):
        spoiled = 0

        def step(self, number: int):
            record = super().step(number)
            if number + 1 == SPOILED_STEP and self.spoiled < times:
                self.spoiled += 1
                chunks = self.actor.chunks
                parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
                if self.mesh.rank == self.mesh.world_size - 1:
                    with torch.no_grad():
                        if spoil == "nan":
                            parameters[-1].view(-1)[0] = float("nan")
                        for parameter in parameters if spoil == "scale" else []:
                            parameter.fill_(1e30)
            return record

    return partial(run_training, Spoiled)


if __name__ == "__main__":
    program, spoil, times = taken("--program"), taken("--spoil"), int(taken("--times"))
    kill = "--kill" in sys.argv
    if kill:
        sys.argv.remove("--kill")
    prepare = prepare_sft if program == "sft" else prepare_grpo
    command_line = read_command_line(__doc__, None, used_keys() if program == "sft" else None)
    sys.exit(
        start(
            lambda: load_config(command_line.config, command_line.overrides),
            prepare,
            spoiled_program,
        )
    )
