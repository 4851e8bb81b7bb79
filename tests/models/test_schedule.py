"""Learning rates of every update against tables and formulas written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlmath.config.schema import OptimizerConfig
from rlmath.models.optimizer import build_scheduler, learning_rate

LR = 0.012
LEAST = 0.002


def cosine(part: float) -> float:
    return LEAST + (LR - LEAST) * (1 + math.cos(math.pi * part)) / 2


@pytest.mark.parametrize(
    ("decay", "warmup", "total", "rates"),
    [
        ("constant", 0, 3, [LR] * 4),
        ("constant", 3, 6, [0.003, 0.006, 0.009, 0.012, 0.012, 0.012, 0.012]),
        ("linear", 0, 5, [0.012, 0.010, 0.008, 0.006, 0.004, 0.002]),
        ("linear", 2, 7, [0.004, 0.008, 0.012, 0.010, 0.008, 0.006, 0.004, 0.002]),
        ("cosine", 1, 5, [0.006, *(cosine(part / 4) for part in range(5))]),
    ],
)
def test_the_learning_rate_of_every_update_and_of_the_next(
    decay: str, warmup: int, total: int, rates: list[float]
) -> None:
    settings = OptimizerConfig(lr=LR, min_lr=LEAST, decay=decay, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(settings, optimizer, total)
    learning_rates = []
    for _ in range(total + 1):
        learning_rates.append(learning_rate(optimizer))
        scheduler.step(increment=1)
    assert learning_rates == pytest.approx(rates, rel=1e-9)
