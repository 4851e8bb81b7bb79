"""launch/train_sft.py with weights that break on rank 1 after step 3: `--spoil nan` puts a NaN into one of them,
`--spoil scale` makes all of them so large that no loss is finite."""

from __future__ import annotations

import sys
from functools import partial

import torch

from rlmath.config.load import load_config
from rlmath.planning.checks import used_keys
from rlmath.run.command_line import read_command_line
from rlmath.run.loop import run_training
from rlmath.run.startup import prepare_sft, start
from rlmath.telemetry.reporter import StepRecord
from rlmath.trainer.sft import SftTrainer

SPOILED_STEP = 3


class SpoiledTrainer(SftTrainer):
    def step(self, number: int) -> StepRecord:
        record = super().step(number)
        if number + 1 == SPOILED_STEP and self.mesh.rank == 1:
            parameters = [one for chunk in self.actor.chunks for one in chunk.parameters()]
            with torch.no_grad():
                if spoil == "nan":
                    parameters[-1].view(-1)[0] = float("nan")
                for parameter in parameters if spoil == "scale" else []:
                    parameter.fill_(1e30)
        return record


if __name__ == "__main__":
    at = sys.argv.index("--spoil")
    spoil = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    given = read_command_line(__doc__, None, used_keys())
    program = partial(run_training, SpoiledTrainer)
    sys.exit(start(lambda: load_config(given.config, given.overrides), prepare_sft, lambda: program))
