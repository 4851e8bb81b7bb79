"""What the ranks do in the tests of supervised training: sequences in, the curve of losses out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from rlmath.config.schema import Config, DataConfig, SftConfig
from rlmath.data.order import PromptOrder
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from tests.distributed.policy_cases import Case, settings
from tests.tiny_models import make_samples, shape_of

SEED = 4
PER_STEP = 6
BETAS = (0.9, 0.95)


def make_sequences(count: int, seed: int) -> list[WrittenSequence]:
    """Sequences, every second of which has tokens that are not learned, as outputs of tools are."""
    sequences = []
    for number, sample in enumerate(make_samples(count, seed)):
        learned = tuple(index % 5 not in (1, 2) for index in range(len(sample.completion_ids)))
        sequences.append(
            WrittenSequence(
                sample.prompt_ids, sample.completion_ids, learned if number % 2 else None
            )
        )
    return sequences


def order_of(sequences: Sequence[WrittenSequence]) -> PromptOrder:
    return PromptOrder(len(sequences), PER_STEP, SEED, shuffle=True)


def _config(folder: Path, case: Case) -> Config:
    config = settings(folder, case)
    optimizer = replace(config.optimizer, adam_beta1=BETAS[0], adam_beta2=BETAS[1])
    data = DataConfig(prompts_per_step=PER_STEP)
    return replace(config, optimizer=optimizer, data=data, sft=SftConfig(eval_every_steps=2))


def curve(
    folder: Path,
    case: Case,
    sequences: list[WrittenSequence],
    held_out: list[WrittenSequence],
    steps: int,
) -> list[dict[str, float]]:
    """The metrics before training and of every step."""
    from rlmath.checkpoint.hf.run_shapes import read_run_shapes
    from rlmath.data.dataset import SftInputs
    from rlmath.run.prepared import PreparedRun
    from rlmath.run.recovery.resume import Origin
    from rlmath.trainer.sft import SftTrainer

    device = open_device("cpu")
    init_process_group(device, 120.0)
    sizes = (case.tensor, case.pipeline)
    mesh = Mesh(
        dist.get_rank(), dist.get_world_size(), *sizes, 1, virtual_pipeline=case.virtual_pipeline
    )
    inputs = SftInputs(sequences, held_out, order_of(sequences), steps, (), (), (1,))
    origin = Origin(model="", data="")
    config = _config(folder, case)
    shapes = read_run_shapes(config, shape_of(folder), "sft")
    prepared = PreparedRun(config, shapes, inputs, origin, recovery=None)
    trainer = SftTrainer(prepared.on_rank(mesh, device))
    return [trainer.evaluate(), *(trainer.step(number).metrics for number in range(steps))]
