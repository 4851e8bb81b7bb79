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
    tokens: list[int] = []
    positions: list[int] = []
    completion_index: list[int] = []
    weights: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    bounds, loss_count = [0], 0
    for index in indices:
        sample = samples[index]
        n_prompt, n_completion = len(sample.prompt_ids), len(sample.completion_ids)
        assert len(sample.behaviour_logprobs) == n_completion, (
            f"sample {index}: one log-prob per token is needed"
        )
        tokens += sample.prompt_ids
        tokens += sample.completion_ids
        positions += range(sample.length)
        completion_index += [-1] * n_prompt + list(range(n_completion))
        weights += [0.0] * n_prompt + [normalisation.weight(n_completion)] * n_completion
        advantages += [0.0] * n_prompt + [sample.advantage] * n_completion
        logprobs += [0.0] * n_prompt
        logprobs += sample.behaviour_logprobs
        loss_count += normalisation.count(n_completion)
        bounds.append(len(tokens))
    padding = -len(tokens) % pad_to_multiple if tokens else pad_to_multiple
    if padding:
        tokens += [PAD_TOKEN] * padding
        positions += range(padding)
        completion_index += [-1] * padding
        for column in (weights, advantages, logprobs):
            column += [0.0] * padding
        bounds.append(len(tokens))
    return MicroBatch(
        token_ids_T=torch.tensor(tokens, dtype=torch.int64),
        position_ids_T=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens_S1=torch.tensor(bounds, dtype=torch.int32),
        loss_weights_T=torch.tensor(weights, dtype=torch.float32),
        loss_count=loss_count,
        advantages_T=torch.tensor(advantages, dtype=torch.float32),
        behaviour_logprobs_T=torch.tensor(logprobs, dtype=torch.float32),
        completion_index_T=torch.tensor(completion_index, dtype=torch.int32),
        max_seqlen=max(end - start for start, end in itertools.pairwise(bounds)),
        sample_indices=tuple(indices),
    )
