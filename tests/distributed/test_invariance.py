"""The same samples give the same gradient and the same update however they are computed.

On every layout, in every split into micro-batches, and in plain torch with transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import invariance_cases, oracle
from tests.distributed.invariance_cases import Outcome, Variant
from tests.distributed.policy_cases import LEARNING_RATE, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.selection import keeping, matrix
from tests.tiny_models import make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(20, seed=9, longest=240) + make_samples(44, seed=10, longest=12)
SPLITS = ("one", "two", "many")
VARIANTS = [
    Variant(split, normalisation) for normalisation in ("token", "sequence") for split in SPLITS
]
OTHER_LOSSES = [
    Variant("many", "sequence", "gspo"),
    Variant("two", "token", "cispo"),
    Variant("two", "token", entropy_coef=0.1),
    Variant("many", "sequence", "gmpo"),
    Variant("two", "token", "sapo"),
    Variant("many", "token", "dppo_tv"),
    Variant("two", "token", "dppo_kl"),
    Variant("two", "sequence", off_policy_mask=0.1),
    Variant("many", "token", kl_ratio="token"),
    Variant("two", "sequence", kl_ratio="sequence"),
]
INTERLEAVED = Case(pipeline=2, virtual_pipeline=2)
LAYOUTS = [
    Case(),
    Case(data=2),
    INTERLEAVED,
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            Case(tensor=2),
            Case(pipeline=2),
            Case(tensor=2, pipeline=2),
            Case(tensor=2, data=2),
            Case(tensor=2, pipeline=2, data=2),
        )
    ),
]


class Dense(dict[Variant, Outcome]):
    """What plain torch makes of a loss, by variant with the split left out.

    It is computed when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, variant: Variant) -> Outcome:
        torch.set_num_threads(1)
        model = oracle.load(self._folder)
        options = {"kind": variant.kind, "normalisation": variant.normalisation}
        options |= {
            "entropy_coef": variant.entropy_coef,
            "off_policy_mask": variant.off_policy_mask,
        }
        options["kl_ratio"] = variant.kl_ratio
        loss = oracle.loss(model, SAMPLES, **options)
        loss.backward()
        gradients = oracle.gradients(model)
        update = {name: -LEARNING_RATE["sgd"] * gradient for name, gradient in gradients.items()}
        self[variant] = Outcome(gradients, update, loss.item(), 1)
        return self[variant]


@pytest.fixture(scope="module")
def dense(untied_model: Path) -> Dense:
    return Dense(untied_model)


def check(ours: list[Outcome], variants: list[Variant], dense: Dense) -> None:
    for variant, outcome in zip(variants, ours, strict=True):
        expected = dense[replace(variant, split="one")]
        assert_close(outcome.gradients, expected.gradients, 1e-5)
        assert_close(outcome.update, expected.update, 1e-5)
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-5)


def test_the_recorded_batch_is_long_and_uneven() -> None:
    lengths = [sample.length for sample in SAMPLES]
    assert len(lengths) >= 64 and max(lengths) > 20 * min(lengths)


@pytest.mark.parametrize("case", keeping(LAYOUTS, Case(data=2), others=0), ids=str)
def test_gradients_and_sgd_updates_do_not_depend_on_layout_and_split(
    ranks: RankPool, untied_model: Path, dense: Dense, case: Case
) -> None:
    outcomes = ranks.run(
        case.ranks, invariance_cases.outcomes, untied_model, case, SAMPLES, VARIANTS
    )[0]
    check(outcomes, VARIANTS, dense)
    unsplit, two, many = (outcome.microbatches for outcome in outcomes[:3])
    assert unsplit == (2 if case.virtual_pipeline > 1 else 1)
    assert two in (2, 3, 4) and many > 6


@matrix
@pytest.mark.parametrize(
    "case", [Case(data=2), pytest.param(INTERLEAVED, marks=pytest.mark.full)], ids=str
)
def test_so_do_those_of_the_other_losses(
    ranks: RankPool, untied_model: Path, dense: Dense, case: Case
) -> None:
    outcomes = ranks.run(
        case.ranks, invariance_cases.outcomes, untied_model, case, SAMPLES, OTHER_LOSSES
    )[0]
    check(outcomes, OTHER_LOSSES, dense)
