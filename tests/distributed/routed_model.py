"""A mixture of experts by transformers whose routers are told the experts of each token.

It is the oracle of routing replay: a dense formula in float64, without packing and sharding."""

# Shape legend: N tokens of a sequence that have a route, T all its tokens, L layers, K experts of a
# token in a layer.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample

Ids = tuple[int, ...]


class RoutedModel:
    """Called as the model is, with the ids of one sequence [1, T].

    Tokens take the experts that `routes` has for their sequence, [N, L, K]; others choose."""

    def __init__(self, folder: Path, routes: Mapping[Ids, Tensor] | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        self._routes = routes or {}
        self._told: Tensor | None = None
        self.chosen: list[Tensor] = []
        """Experts that each layer would have chosen in the last call, [T, K]."""
        for layer, block in enumerate(self.model.model.layers):
            block.mlp.gate.forward = self._router(layer, block.mlp.gate)

    def __call__(self, ids_1T: Tensor) -> Any:
        self.chosen.clear()
        self._told = self._routes.get(tuple(ids_1T[0].tolist()))
        return self.model(ids_1T)

    def routes_of(self, ids: Sequence[int]) -> Tensor:
        """The experts of all tokens but the last, [N, L, K], chosen by the model.

        They are in order of their numbers, which is none that a router has."""
        with torch.no_grad():
            self(torch.tensor([list(ids)]))
        return torch.stack(self.chosen, dim=1)[:-1].sort(-1)[0].to(torch.uint8)

    def _router(self, layer: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.t()
            experts = logits.topk(gate.top_k).indices
            self.chosen.append(experts)
            if self._told is not None:
                told = self._told[:, layer].long()
                experts = torch.cat([told, experts[len(told) :]])
            weights = logits.softmax(-1).gather(1, experts)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        return forward


def ids_of(sample: Sample) -> Ids:
    return (*sample.prompt_ids, *sample.completion_ids)
