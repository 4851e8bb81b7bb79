"""Samples laid end to end into the tensors of a micro-batch. Pure."""

# Shape legend: T packed tokens, S segments.

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlmath.algorithms.losses import TOKEN_MEAN, Normalisation
from rlmath.algorithms.types import MicroBatch, Sample

PAD_TOKEN = 0
"""Token id of padding; its weight is 0, so that any id of the vocabulary serves."""


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    pad_to_multiple: int,
    normalisation: Normalisation = TOKEN_MEAN,
) -> MicroBatch:
    """The micro-batch of `samples[i] for i in indices`; with no indices, one of weight 0.

    T is filled up to a multiple of `pad_to_multiple` (the tensor-parallel size under sequence parallelism) by a
    segment of padding.

    >>> sample = Sample((7, 8), (9,), (-0.5,), advantage=1.0)
    >>> pack([sample], [0], pad_to_multiple=2).loss_weights_T
    tensor([0., 0., 1., 0.])
    """
    columns = _Columns(normalisation)
    for index in indices:
        columns.add(samples[index], index)
    length = len(columns.tokens)
    columns.add_padding(-length % pad_to_multiple if length else pad_to_multiple)
    return columns.as_microbatch(tuple(indices))


class _Columns:
    """The growing tensors of a micro-batch, as lists."""

    def __init__(self, normalisation: Normalisation) -> None:
        self._normalisation = normalisation
        self.loss_count = 0
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.completion_index: list[int] = []
        self.weights: list[float] = []
        self.advantages: list[float] = []
        self.logprobs: list[float] = []
        self.bounds = [0]

    def add(self, sample: Sample, index: int) -> None:
        n_prompt, n_completion = len(sample.prompt_ids), len(sample.completion_ids)
        assert len(sample.behaviour_logprobs) == n_completion, (
            f"sample {index}: one log-prob per token is needed"
        )
        self.tokens += sample.prompt_ids
        self.tokens += sample.completion_ids
        self.completion_index += [-1] * n_prompt + list(range(n_completion))
        self.weights += [0.0] * n_prompt + [self._normalisation.weight(n_completion)] * n_completion
        self.loss_count += self._normalisation.count(n_completion)
        self.advantages += [0.0] * n_prompt + [sample.advantage] * n_completion
        self.logprobs += [0.0] * n_prompt
        self.logprobs += sample.behaviour_logprobs
        self._end_segment(n_prompt + n_completion)

    def add_padding(self, count: int) -> None:
        if count:
            self.tokens += [PAD_TOKEN] * count
            self.completion_index += [-1] * count
            for column in (self.weights, self.advantages, self.logprobs):
                column += [0.0] * count
            self._end_segment(count)

    def _end_segment(self, length: int) -> None:
        self.positions += range(length)
        self.bounds.append(len(self.tokens))

    def as_microbatch(self, indices: tuple[int, ...]) -> MicroBatch:
        return MicroBatch(
            token_ids_T=torch.tensor(self.tokens, dtype=torch.int64),
            position_ids_T=torch.tensor(self.positions, dtype=torch.int64),
            cu_seqlens_S1=torch.tensor(self.bounds, dtype=torch.int32),
            loss_weights_T=torch.tensor(self.weights, dtype=torch.float32),
            loss_count=self.loss_count,
            advantages_T=torch.tensor(self.advantages, dtype=torch.float32),
            behaviour_logprobs_T=torch.tensor(self.logprobs, dtype=torch.float32),
            completion_index_T=torch.tensor(self.completion_index, dtype=torch.int32),
            max_seqlen=max(end - start for start, end in itertools.pairwise(self.bounds)),
            sample_indices=indices,
        )
