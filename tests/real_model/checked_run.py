"""launch/train_grpo.py with a comparison of log-probs at every step.

The engines' log-probs of the sampled tokens are compared with those that transformers finds, in
float64, on the model as it is exported before the step, in float32: one line of `compared.jsonl` in
the run's folder for each step."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from rlmath.algorithms.types import ScoredGroup
from rlmath.config.load import load_config
from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.run.command_line import read_command_line
from rlmath.run.loop import run_training
from rlmath.run.startup import Program, prepare_grpo, start

SHARE = 4
"""One of so many groups is compared."""
FLOAT32_EXPORT = "save.export_dtype=float32"
"""Rounded to the bfloat16 of the model that the run began with, an export is not what sampled."""


def differences(model: torch.nn.Module, group: ScoredGroup) -> torch.Tensor:
    """Between the log-probs of the group's sampled tokens by the engine and by `model`.

    In nats, absolute; outputs of tools are not sampled."""
    prompt = group.prompt.token_ids
    rows = [torch.tensor([*prompt, *completion.token_ids]) for completion in group.completions]
    with torch.no_grad():  # what is padded comes behind all that is looked at
        logprobs = (
            model(pad_sequence(rows, batch_first=True))
            .logits[:, len(prompt) - 1 : -1]
            .log_softmax(-1)
        )
    differences_of_completions = []
    for row, completion in zip(logprobs, group.completions, strict=True):
        ids = torch.tensor(completion.token_ids)
        is_sampled = torch.tensor(completion.sampled or [True] * len(ids))
        differences_of_tokens = row[: len(ids)].gather(1, ids[:, None])[:, 0] - torch.tensor(
            completion.logprobs
        )
        differences_of_completions.append(differences_of_tokens[is_sampled])
    return torch.cat(differences_of_completions).abs()


def checked_program() -> Program:
    from transformers import AutoModelForCausalLM

    from rlmath.trainer.grpo import GrpoTrainer

    class Checked(GrpoTrainer):
        def begin(self, steps_done, export, asked_to_stop) -> None:
            super().begin(steps_done, export, asked_to_stop)
            self.export = export

        def step(self, number: int):
            folder = Path(self.config.run.output_dir)
            self.export(folder / "compared")
            torch.distributed.barrier()
            model = AutoModelForCausalLM.from_pretrained(folder / "compared", dtype=torch.float64)
            record = super().step(number)
            rank_groups = record.groups[self.mesh.rank * SHARE :: self.mesh.world_size * SHARE]
            differences_T = torch.cat([differences(model, group) for group in rank_groups])
            sums = {"sum": float(differences_T.sum()), "tokens": float(len(differences_T))}
            sums, largest = reduce_over_ranks(sums, {"most": float(differences_T.max())})
            row = {"step": number + 1, "mean": sums["sum"] / sums["tokens"]} | largest
            if self.mesh.rank == 0:
                with (folder / "compared.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
            return record

    return partial(run_training, Checked)


if __name__ == "__main__":
    command_line = read_command_line(__doc__, None)
    sys.exit(
        start(
            lambda: load_config(command_line.config, [*command_line.overrides, FLOAT32_EXPORT]),
            prepare_grpo,
            checked_program,
        )
    )
