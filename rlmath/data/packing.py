"""Samples laid end to end into the tensors of a micro-batch.

Pure."""

# Shape legend: T packed tokens of one micro-batch, S segments (samples) packed into it.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from rlmath.algorithms.losses import TOKEN_MEAN, Normalisation
from rlmath.algorithms.types import Sample

PAD_TOKEN = 0
"""Token id of padding; its weight is 0, so that any id of the vocabulary serves."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples laid end to end, and per token what the loss needs.

    Position t carries what belongs to the prediction of the token AT t, which the model makes at
    t-1: with prompt (a, b) and completion (c, d), `loss_weights_T` is (0, 0, 1, 1). A micro-batch
    that only fills up a rank's count has no sampled token and weight 0 everywhere.

    Two masks say which tokens count. `sampled_T` decides every length, count, mean, quantile and
    the denominator of the loss; `learned_T`, a part of it, decides the gradient alone.
    """

    token_ids_T: torch.Tensor
    """int64."""
    position_ids_T: torch.Tensor
    """int64, starting at 0 in every segment."""
    cu_seqlens_S1: torch.Tensor
    """int32, S+1 cumulative segment lengths from 0 to T."""
    sampled_T: torch.Tensor
    """bool, whether the model produced the token (supervised training: whether it is to); False on
    prompt and padding tokens and on what others wrote inside of a completion."""
    learned_T: torch.Tensor
    """bool, whether the token has weight in the gradient; True on sampled tokens only."""
    loss_weights_T: torch.Tensor
    """float32, of the sampled tokens, else 0."""
    loss_count: int
    """The amount that these samples add to the denominator of the loss: their sampled tokens, or
    their number."""
    advantages_T: torch.Tensor
    """float32, of the sampled tokens, else 0."""
    behaviour_logprobs_T: torch.Tensor
    """float32, of the sampled tokens, else 0."""
    completion_index_T: torch.Tensor
    """int32, position in the completion from 0, which the engine's minimum of new tokens is about;
    -1 on prompt and padding tokens. Which tokens count is for the two masks to say."""
    max_seqlen: int
    bounds: tuple[int, ...]
    """`cu_seqlens_S1` on the host."""
    sample_indices: tuple[int, ...]
    """Indices of these segments' samples in the step's list; padding segments have none."""
    lag_T: torch.Tensor | None = None
    """int64, `Sample.lag` of completion tokens, else 0; None: not asked for."""
    penalty_T: torch.Tensor | None = None
    """float32, weight of abs(log policy - log proximal) in the loss; None: nowhere."""
    experts_TLK: torch.Tensor | None = None
    """Experts of every token in each layer of this rank, which the policy replays (`data.routes`);
    of this rank's tokens alone where its own pass has recorded them. None: it routes by itself."""
    is_routed_T: torch.Tensor | None = None
    """bool, whether a token has experts; None where `experts_TLK` is."""

    def to(self, device: torch.device) -> MicroBatch:
        """A copy with its tensors on a device.

        A GPU takes them from pinned memory while the host goes on."""
        if device.type == "cpu":
            return self
        attributes = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved = {
            name: attribute.pin_memory().to(device, non_blocking=True)
            for name, attribute in attributes
            if isinstance(attribute, torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def sample_tokens(self) -> int:
        """Tokens of samples; those of padding stand behind them."""
        return self.bounds[len(self.sample_indices)]

    @property
    def n_segments(self) -> int:
        """S: samples, and a segment of padding where there is one."""
        return len(self.cu_seqlens_S1) - 1

    @property
    def segments_T(self) -> torch.Tensor:
        """The segment of every token, int64."""
        # With the size given, the host need not wait for a GPU.
        lengths_S = self.cu_seqlens_S1.diff().long()
        tokens = len(self.token_ids_T)
        return torch.repeat_interleave(lengths_S, output_size=tokens)


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    pad_to_multiple: int,
    normalisation: Normalisation = TOKEN_MEAN,
) -> MicroBatch:
    """The micro-batch of `samples[i] for i in indices`, of weight 0 without any.

    A segment of padding fills T up to a multiple of `pad_to_multiple` (the tensor-parallel size
    under sequence parallelism).

    >>> sample = Sample((7, 8), (9,), (-0.5,), advantage=1.0)
    >>> pack([sample], [0], pad_to_multiple=2).loss_weights_T
    tensor([0., 0., 1., 0.])
    """
    tokens: list[int] = []
    positions: list[int] = []
    completion_index: list[int] = []
    sampled: list[bool] = []
    learned: list[bool] = []
    weights: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    lags: list[int] = []
    bounds = [0]
    loss_count = 0
    for index in indices:
        sample = samples[index]
        n_prompt = len(sample.prompt_ids)
        n_completion = len(sample.completion_ids)
        assert len(sample.behaviour_logprobs) == n_completion, (
            f"sample {index}: one log-prob per token is needed"
        )
        sampled_here = [True] * n_completion if sample.sampled is None else list(sample.sampled)
        learned_here = sampled_here if sample.learned is None else list(sample.learned)
        assert len(sampled_here) == len(learned_here) == n_completion, (
            f"sample {index}: masks need one value per token, {n_completion}; got "
            f"{len(sampled_here)} of sampled and "
            f"{len(learned_here)} of learned"
        )
        n_sampled = sum(sampled_here)
        tokens += sample.prompt_ids
        tokens += sample.completion_ids
        positions += range(sample.length)
        completion_index += [-1] * n_prompt + list(range(n_completion))
        sampled += [False] * n_prompt + sampled_here
        learned += [False] * n_prompt + learned_here
        weights += [0.0] * n_prompt + [normalisation.weight(n_sampled)] * n_completion
        advantages += [0.0] * n_prompt + [sample.advantage] * n_completion
        lags += [0] * n_prompt + list(sample.lag or [0] * n_completion)
        logprobs += [0.0] * n_prompt
        logprobs += sample.behaviour_logprobs
        loss_count += normalisation.count(n_sampled)
        bounds.append(len(tokens))
    padding = -len(tokens) % pad_to_multiple if tokens else pad_to_multiple
    if padding:
        tokens += [PAD_TOKEN] * padding
        positions += range(padding)
        completion_index += [-1] * padding
        for mask in (sampled, learned):
            mask += [False] * padding
        for column in (weights, advantages, logprobs):
            column += [0.0] * padding
        lags += [0] * padding
        bounds.append(len(tokens))
    sampled_T = torch.tensor(sampled, dtype=torch.bool)

    def of_sampled(column: list[float]) -> torch.Tensor:
        return torch.where(sampled_T, torch.tensor(column, dtype=torch.float32), 0.0)

    return MicroBatch(
        token_ids_T=torch.tensor(tokens, dtype=torch.int64),
        position_ids_T=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens_S1=torch.tensor(bounds, dtype=torch.int32),
        sampled_T=sampled_T,
        learned_T=sampled_T & torch.tensor(learned, dtype=torch.bool),
        loss_weights_T=of_sampled(weights),
        loss_count=loss_count,
        advantages_T=of_sampled(advantages),
        behaviour_logprobs_T=of_sampled(logprobs),
        completion_index_T=torch.tensor(completion_index, dtype=torch.int32),
        max_seqlen=max(end - start for start, end in itertools.pairwise(bounds)),
        bounds=tuple(bounds),
        sample_indices=tuple(indices),
        lag_T=torch.tensor(lags) if any(samples[index].lag for index in indices) else None,
    )
