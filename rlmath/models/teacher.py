"""The teacher: a frozen model that scores what the policy sampled.

It has the policy's tokenizer and layout, and may have any other shape. Its embedding and output
layer are given as many rows as the policy's, so that a tensor-parallel rank has the same tokens of
both: rows that only the teacher's files have are left out, and rows that they do not have are 0 and
masked (`Teacher.vocab_size`).

For a loss on the whole vocabulary the teacher's logits are never kept. Its last hidden states are,
in the host's memory, and its output layer is applied to them inside the loss, a block of rows at a
time (`logprobs.TeacherRows`).
"""

# Shape legend: T packed tokens of one micro-batch, V vocabulary shard, H hidden units.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from rlmath.data.packing import MicroBatch
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.logprobs import TeacherRows


@dataclass(frozen=True)
class Teacher:
    forward_backward: ForwardBackward
    """Passes of the teacher; `vocab_size` counts the tokens that teacher and policy both know."""

    @property
    def chunks(self) -> list[Any]:
        return self.forward_backward.chunks

    @property
    def vocab_size(self) -> int:
        return self.forward_backward.vocab_size

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The teacher's log-probs of every micro-batch's tokens, over the tokens that both know."""
        return self.forward_backward.logprobs(batches)

    def states(self, batches: Sequence[MicroBatch]) -> TeacherStates:
        """The states that give the teacher's distributions of the micro-batches.

        A collective."""
        return TeacherStates(self, tuple(self.forward_backward.hidden_states(batches)))

    @property
    def head_VH(self) -> Tensor:
        """This rank's rows of the output layer; on the last pipeline stage."""
        last = self.chunks[-1]
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        return last.output_layer.weight

    def head_parameters(self) -> list[Tensor]:
        """What the update needs of the teacher; none off the last pipeline stage."""
        return [self.head_VH] if self.forward_backward.mesh.is_last_stage else []


@dataclass(frozen=True)
class TeacherStates:
    """The teacher's last hidden states of some micro-batches."""

    teacher: Teacher
    hidden: tuple[Tensor, ...]
    """Hidden states of each micro-batch, by `ForwardBackward.hidden_states`."""

    def __getitem__(self, microbatches: slice) -> TeacherStates:
        return TeacherStates(self.teacher, self.hidden[microbatches])

    def rows(self, index: int) -> TeacherRows:
        """The teacher's distributions of a micro-batch's rows.

        On the last stage; under sequence parallelism a collective of the tensor-parallel ranks."""
        teacher = self.teacher
        head_VH = teacher.head_VH
        hidden = self.hidden[index].to(head_VH.device).view(-1, head_VH.shape[1])
        if teacher.chunks[-1].config.sequence_parallel:
            hidden = _gather_over_tensor_ranks(hidden)
        return TeacherRows(hidden, head_VH.detach(), teacher.vocab_size)


@torch.no_grad()
def _gather_over_tensor_ranks(hidden: Tensor) -> Tensor:
    return tensor_parallel.gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
