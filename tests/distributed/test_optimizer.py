"""Weights after several updates against torch's optimizers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.config.schema import OptimizerConfig
from tests.distributed import optimizer_cases, oracle
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.tiny_models import make_samples

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "adam with decay and a large epsilon": OptimizerConfig(
        lr=0.05, weight_decay=0.4, adam_beta1=0.6, adam_beta2=0.83, adam_eps=0.03, clip_grad=0.0
    ),
    "adam with clipped gradients": OptimizerConfig(
        lr=0.05, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.01, clip_grad=0.1
    ),
    "adam whose rate moves": OptimizerConfig(
        lr=0.05,
        min_lr=0.01,
        warmup_steps=1,
        decay="linear",
        weight_decay=0.4,
        adam_beta1=0.7,
        adam_beta2=0.9,
        adam_eps=0.02,
        clip_grad=0.3,
    ),
    "sgd with decay": OptimizerConfig(
        kind="sgd", lr=0.5, weight_decay=0.3, clip_grad=0.0, distributed=False
    ),
    "sgd with clipped gradients": OptimizerConfig(
        kind="sgd", lr=0.5, weight_decay=0.0, clip_grad=0.2, distributed=False
    ),
}
MINIBATCHES = [make_samples(6, seed=seed) for seed in (21, 22, 23)]
RATES = {"adam whose rate moves": [0.025, 0.05, 0.03]}
"""Learning rates of the 3 updates; those of the other optimizers stay constant."""


@pytest.fixture(scope="module")
def updates(
    ranks: RankPool, tied_model: Path
) -> dict[str, tuple[list[dict[str, Tensor]], list[float]]]:
    optimizers = list(OPTIMIZERS.values())
    (outcomes,) = ranks.run(
        1, optimizer_cases.updates, tied_model, optimizers, MINIBATCHES, len(MINIBATCHES)
    )
    return dict(zip(OPTIMIZERS, outcomes, strict=True))


def torch_updates(
    folder: Path, settings: OptimizerConfig, rates: list[float]
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The same updates in plain torch.

    As Megatron has it, matrices decay; biases and norms do not."""
    torch.set_num_threads(1)
    model = oracle.load(folder)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [parameter for parameter in named.values() if parameter.ndim > 1],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameter for parameter in named.values() if parameter.ndim == 1],
            "weight_decay": 0.0,
        },
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=settings.adam_eps)
        if settings.kind == "adam"
        else torch.optim.SGD(groups, lr=1.0)
    )
    weights = []
    norms = []
    for samples, rate in zip(MINIBATCHES, rates, strict=True):
        optimizer.zero_grad()
        oracle.loss(model, samples).backward()
        most = settings.clip_grad or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), most)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        weights.append({name: parameter.detach().clone() for name, parameter in named.items()})
    return weights, norms


def moves(folder: Path, weights: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each update added to the weights."""
    start = {name: parameter.detach() for name, parameter in oracle.load(folder).named_parameters()}
    return [
        {name: after[name] - before[name] for name in start}
        for before, after in zip([start, *weights], weights, strict=False)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_updates_are_those_of_torch(
    tied_model: Path, updates: dict[str, tuple[list[dict[str, Tensor]], list[float]]], name: str
) -> None:
    settings = OPTIMIZERS[name]
    weights, norms = updates[name]
    torch_weights, torch_norms = torch_updates(
        tied_model, settings, RATES.get(name, [settings.lr] * 3)
    )
    assert norms == pytest.approx(torch_norms, rel=1e-4)
    if settings.clip_grad:
        assert min(norms) > 1.2 * settings.clip_grad, "the clip has to be at work"
    for move, torch_move in zip(
        moves(tied_model, weights), moves(tied_model, torch_weights), strict=True
    ):
        assert_close(move, torch_move, 2e-3)
