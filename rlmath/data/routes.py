"""Routes: the experts that tokens were sent to, as they are laid out for a micro-batch.

A token's route is that of the forward pass that read it, by which the next token was sampled. The
last token of a completion was read by none: it has no route, and neither has padding.

Pure."""

# Shape legend: T packed tokens of one micro-batch, N tokens of one sample that have a route, L
# layers of this rank, K experts of a token in a layer.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from rlmath.algorithms.types import Completion, PartialCompletion, RoutesAt, Sample
from rlmath.config.model_shape import expert_number_bytes
from rlmath.data.packing import MicroBatch


def expert_dtype(num_experts: int) -> torch.dtype:
    """The integers that number so many experts.

    >>> expert_dtype(128), expert_dtype(512)
    (torch.uint8, torch.int16)
    """
    return {1: torch.uint8, 2: torch.int16}[expert_number_bytes(num_experts)]


def places_of(completions: Iterable[PartialCompletion | Completion]) -> list[RoutesAt]:
    """The places of the routes of these completions, in order."""
    return [place for completion in completions for place in completion.routes_at]


def routes_needed(batches: Sequence[MicroBatch], samples: Sequence[Sample]) -> list[RoutesAt]:
    """The places of the routes of these micro-batches' samples, which all have some."""
    places: list[RoutesAt] = []
    for index in (index for batch in batches for index in batch.sample_indices):
        assert samples[index].routes_at, f"sample {index} has no routes"
        places += samples[index].routes_at
    return places


def with_routes(
    batch: MicroBatch, samples: Sequence[Sample], routes: dict[RoutesAt, torch.Tensor]
) -> MicroBatch:
    """The micro-batch with the routes of its samples' slices; other tokens route by themselves.

    They are popped from `routes`, so that there are not two copies of all. Without samples nothing
    is replayed."""
    tokens = len(batch.token_ids_T)
    experts_TLK = None
    is_routed_T = torch.zeros(tokens, dtype=torch.bool)
    for index, start in zip(batch.sample_indices, batch.bounds, strict=False):
        sample = samples[index]
        routes_NLK = torch.cat([routes.pop(place) for place in sample.routes_at])
        assert len(routes_NLK) == sample.length - 1, (
            f"sample {index}: {sample.length} tokens need {sample.length - 1} routes; got "
            f"{len(routes_NLK)}"
        )
        if experts_TLK is None:
            experts_TLK = routes_NLK.new_zeros(tokens, *routes_NLK.shape[1:])
        end = start + len(routes_NLK)
        experts_TLK[start:end] = routes_NLK
        is_routed_T[start:end] = True
    if experts_TLK is None:
        return batch
    return replace(batch, experts_TLK=experts_TLK, is_routed_T=is_routed_T)
