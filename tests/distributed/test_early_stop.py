"""A minibatch that runs away leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix
from tests.tiny_models import make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(16, seed=4)
SHARED = Case(data=2, optimizer="adam", early_stop_ratio=5.0, max_tokens=64)
ADAPTERS = replace(SHARED, lora="all")
STAGES = Case(tensor=2, pipeline=2, optimizer="adam", early_stop_ratio=5.0, max_tokens=64)


POISONS = [
    ("runaway", "mean importance ratio"),
    ("overflow", "the importance ratio is not finite (inf)"),
    ("nan", "the loss is not finite (nan)"),
    ("inf", "the loss is not finite"),
]
POISONED = [(SHARED, *poison) for poison in POISONS]
IN_MATRIX = [(STAGES, *POISONS[2]), (ADAPTERS, *POISONS[1])]
OTHERS = [(case, *poison) for case in (STAGES, ADAPTERS) for poison in POISONS]


@pytest.mark.parametrize(
    ("case", "poison", "reason"),
    keeping(
        [
            *IN_MATRIX,
            *POISONED,
            *(parameters for parameters in OTHERS if parameters not in IN_MATRIX),
        ],
        *POISONED,
        others=2,
    ),
    ids=str,
)
def test_a_discarded_minibatch_leaves_every_bit_of_the_state(
    ranks: RankPool, untied_model: Path, case: Case, poison: str, reason: str
) -> None:
    for report in ranks.run(case.ranks, policy_cases.discard, untied_model, case, SAMPLES, poison):
        assert report["first"] is None
        assert reason in report["reason"]
        assert report["same"], report["names"]
        assert any(name.startswith("optimizer") for name in report["names"])
        assert report["cleared"] and report["goes_on"]


@matrix
def test_an_overflow_in_float16_halves_the_loss_scale_and_leaves_every_bit_of_the_state(
    ranks: RankPool, untied_model: Path
) -> None:
    """Scaled too much or just enough, the update is the same to the bit.

    Scales are powers of two. The norm of its gradient is that of float32."""
    planted = replace(SHARED, dtype="float16", initial_loss_scale=2.0**30)
    reports = ranks.run(planted.ranks, policy_cases.overflows, untied_model, planted, SAMPLES)
    for report in reports:
        *skipped, last = report["results"]
        scales = [result.loss_scale for result in (*skipped, last)]
        assert skipped and scales == [2.0 ** (30 - number) for number in range(len(scales))]
        assert all(
            result.overflowed and "overflow at loss scale" in result.discarded for result in skipped
        )
        assert not last.overflowed and report["updates"] == 1 and report["same"]
        assert {result.learning_rate for result in report["results"]} == {last.learning_rate}
    right = replace(planted, initial_loss_scale=scales[-1])
    for report, other in zip(
        reports,
        ranks.run(right.ranks, policy_cases.overflows, untied_model, right, SAMPLES),
        strict=True,
    ):
        assert [result.grad_norm for result in other["results"]] == [
            report["results"][-1].grad_norm
        ]
        assert all(
            torch.equal(report["state"][name], other["state"][name]) for name in other["state"]
        )
    plain = ranks.run(SHARED.ranks, policy_cases.overflows, untied_model, SHARED, SAMPLES)[0][
        "results"
    ][0]
    assert last.grad_norm == pytest.approx(plain.grad_norm, rel=0.01)


@matrix
@pytest.mark.parametrize(
    "case",
    [
        Case(data=2, optimizer="adam", max_tokens=64),
        Case(pipeline=2, virtual_pipeline=2, optimizer="adam"),
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_is_found_in_every_chunk(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    for first, *broken, last in ranks.run(
        case.ranks, policy_cases.finds_values_that_are_not_finite, untied_model, case, SAMPLES
    ):
        assert first and last and broken == [False] * (2 * case.virtual_pipeline)
