"""What leaves the device comes back bit by bit, on every layout, and learning does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import offload_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix
from tests.tiny_models import VOCAB, make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(16, seed=4)
LAYER = (128 + 2 * 64) * (128 + 1) + 128 * 128 + 3 * 192 * 128 + 2 * 128
"""Elements of a layer of `make_model_folder`: projections to queries, keys and values with their
biases, the one back, three matrices of the feed-forward network, two norms."""
UNTIED = 2 * VOCAB * 128 + 4 * LAYER + 128

LAYOUTS = [
    Case(),
    Case(data=2, optimizer="adam", max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, optimizer="adam", max_tokens=64),
    Case(tensor=2, pipeline=2, optimizer="adam", max_tokens=64),
]
FIRST = (LAYOUTS[1], "tied_model")
IN_MATRIX = [(LAYOUTS[0], "untied_model"), (LAYOUTS[2], "tied_model")]
EVERY = [(case, folder) for case in LAYOUTS for folder in ("untied_model", "tied_model")]


@pytest.mark.parametrize(
    ("case", "folder"),
    keeping(
        [
            *IN_MATRIX,
            FIRST,
            *(parameters for parameters in EVERY if parameters not in (FIRST, *IN_MATRIX)),
        ],
        FIRST,
        others=2,
    ),
    ids=str,
)
def test_learning_goes_on_bit_by_bit_as_if_nothing_had_left(
    ranks: RankPool, request: pytest.FixtureRequest, case: Case, folder: str
) -> None:
    model = request.getfixturevalue(folder)
    expected = ranks.run(case.ranks, offload_cases.learn_twice, model, case, SAMPLES)
    reports = ranks.run(case.ranks, offload_cases.learn_around_an_offload, model, case, SAMPLES)
    for report, state in zip(reports, expected, strict=True):
        assert report["names"] == ("gradients", "optimizer", "parameters")
        assert set(report["away"].values()) == {0}, report["away"]
        assert report["again"] == report["here"]
        assert report["same"]
        assert report["gradients not zero"] == []
        assert report["state"].keys() == state.keys()
        assert all(torch.equal(report["state"][name], state[name]) for name in state)
        assert report["left"] == report["back"]
        assert all(seconds > 0 for seconds in report["seconds"])
        assert report["left"] == {name: report["here"][name] for name in report["names"]}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "distributed"), [("adam", True), ("sgd", False)])
def test_float32_copies_of_bfloat16_parameters_leave_with_the_optimizer(
    ranks: RankPool, untied_model: Path, kind: str, distributed: bool
) -> None:
    case = Case(optimizer=kind, dtype="bfloat16", distributed=distributed)
    (report,) = ranks.run(1, offload_cases.learn_around_an_offload, untied_model, case, SAMPLES)
    moments = 2 if kind == "adam" else 0
    counters = sum(name.endswith(".step") for name in report["state"])
    assert report["left"] == {
        "gradients": 4 * UNTIED,
        "optimizer": 4 * UNTIED * (1 + moments) + 4 * counters,
        "parameters": 2 * UNTIED,
    }
    assert report["left"] == report["back"]
    assert set(report["away"].values()) == {0} and report["again"] == report["here"]
    assert report["same"] and report["gradients not zero"] == []


@matrix
@pytest.mark.parametrize(
    "case", [pytest.param(LAYOUTS[0], marks=pytest.mark.full), LAYOUTS[2]], ids=str
)
def test_the_reference_is_here_only_while_it_computes(
    ranks: RankPool, tied_model: Path, case: Case
) -> None:
    for report in ranks.run(
        case.ranks, offload_cases.reference_in_and_out, tied_model, case, SAMPLES
    ):
        size = 4 * report["elements"]
        assert report["here"] == report["inside"] == size
        assert report["left"] == [size] and report["passed over"] == []
        assert report["away"] == report["outside"] == 0
        assert report["ways"] == [[("reference", size)] * 2] * 2
        assert report["same"]
