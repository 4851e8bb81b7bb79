"""What the ranks do in the tests of the architectures.

They bring each model into a layout, let it answer and learn, and write it out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.weights import write_hf_folder
from rlmath.data.packing import MicroBatch
from rlmath.distributed.device import init_process_group, open_device
from tests.distributed.policy_cases import Case, Stage, lay_out, microbatches, whole_gradients


@dataclass(frozen=True)
class Found:
    """What one layout of a model gives, in the terms of transformers."""

    logits: dict[int, Tensor]
    """Logits of every token of a sample, by the sample's index; empty off the last stage."""
    gradients: dict[str, Tensor]


def round_trips(
    folders: list[Path], case: Case, samples: list[Sample], outputs: list[Path]
) -> list[Found]:
    """Logits and gradients of every model in one layout.

    Each model's folder is written out again, unchanged."""
    from megatron.core import parallel_state

    device = open_device("cpu")
    init_process_group(device, 120.0)
    outcomes = []
    for folder, output in zip(folders, outputs, strict=True):
        stage = lay_out(folder, case, device)
        _export(stage, folder, output)
        batches = microbatches(stage, samples)
        outcomes.append(Found(_logits(stage, batches), _gradients(stage, batches)))
        parallel_state.destroy_model_parallel()
    return outcomes


def _export(stage: Stage, folder: Path, output: Path) -> None:
    from rlmath.checkpoint.hf.weights import stream_hf_tensors

    stream = stream_hf_tensors(stage.actor.chunks, stage.shape, stage.mesh)
    write_hf_folder(
        stream, read_metadata_files(folder), output, torch.float32, writes=stage.mesh.rank == 0
    )


def _logits(stage: Stage, batches: list[MicroBatch]) -> dict[int, Tensor]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def whole(index: int, batch: MicroBatch, logits_TV: Tensor) -> dict[int, Tensor]:
        gathered = gather_from_tensor_model_parallel_region(logits_TV)[:, : stage.shape.vocab_size]
        segments = gathered.tensor_split(batch.cu_seqlens_S1[1:].tolist())
        return dict(zip(batch.sample_indices, segments, strict=False))

    with torch.no_grad():
        by_batch = stage.actor.forward_backward.run(batches, whole, forward_only=True)
    return {index: logits for batch_logits in by_batch for index, logits in batch_logits.items()}


def _gradients(stage: Stage, batches: list[MicroBatch]) -> dict[str, Tensor]:
    learner = stage.actor.learner
    learner.forward_backward.zero_grad()
    learner.forward_backward.run(
        batches,
        partial(learner._loss, old=None, reference=None, on_policy=False, teacher=None),
        forward_only=False,
    )
    return whole_gradients(stage)
