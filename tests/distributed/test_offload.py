"""What leaves the device comes back bit by bit, on every layout, and learning does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlmath.config.schema import MemoryConfig
from tests.distributed import offload_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix
from tests.tiny_models import VOCAB, make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(16, seed=4)
LAYER = (128 + 2 * 64) * (128 + 1) + 128 * 128 + 3 * 192 * 128 + 2 * 128
"""Elements of a layer of `make_model_folder`: projections to queries, keys and values with their biases, the one back,
three matrices of the feed-forward network, two norms."""
TIED = VOCAB * 128 + 4 * LAYER + 128
UNTIED = TIED + VOCAB * 128

LAYOUTS = [
    Case(),
    Case(data=2, optimizer="adam", max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, optimizer="adam", max_tokens=64),
    pytest.param(Case(tensor=2, pipeline=2, optimizer="adam", max_tokens=64), marks=pytest.mark.full),
]


@pytest.mark.parametrize("folder", keeping(["untied_model", "tied_model"], "tied_model"))
@pytest.mark.parametrize("case", keeping(LAYOUTS, LAYOUTS[1], others=2), ids=str)
def test_learning_goes_on_bit_by_bit_as_if_nothing_had_left(
    ranks: RankPool, request: pytest.FixtureRequest, case: Case, folder: str
) -> None:
    model = request.getfixturevalue(folder)
    wanted = ranks.run(case.ranks, offload_cases.learn_twice, model, case, SAMPLES)
    reports = ranks.run(case.ranks, offload_cases.learn_around_an_offload, model, case, SAMPLES)
    for report, state in zip(reports, wanted, strict=True):
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
@pytest.mark.parametrize(("folder", "elements"), [("untied_model", UNTIED), ("tied_model", TIED)])
def test_one_rank_with_sgd_moves_four_bytes_for_each_parameter_and_has_no_state(
    ranks: RankPool, request: pytest.FixtureRequest, folder: str, elements: int
) -> None:
    model = request.getfixturevalue(folder)
    (report,) = ranks.run(1, offload_cases.learn_around_an_offload, model, Case(), SAMPLES)
    assert report["left"] == {"gradients": 4 * elements, "optimizer": 0, "parameters": 4 * elements}


@pytest.mark.full
def test_data_parallel_ranks_share_the_state_of_adam(ranks: RankPool, untied_model: Path) -> None:
    """Each holds all parameters and gradients, in padded buffers, and half of the two moments, beside the number of
    steps (4 bytes) of every parameter it has a part of."""
    case = Case(data=2, optimizer="adam")
    reports = ranks.run(2, offload_cases.learn_around_an_offload, untied_model, case, SAMPLES)
    for report in reports:
        assert report["parameters"] == UNTIED <= report["buffers"]
        assert report["left"]["parameters"] == report["left"]["gradients"] == 4 * report["buffers"]
    counters = sum(name.endswith(".step") for report in reports for name in report["state"])
    assert sum(report["left"]["optimizer"] for report in reports) == 2 * 4 * UNTIED + 4 * counters


@pytest.mark.full
@pytest.mark.parametrize(("kind", "distributed"), [("adam", True), ("adam", False), ("sgd", False)])
def test_float32_copies_of_bfloat16_parameters_leave_with_the_optimizer(
    ranks: RankPool, untied_model: Path, kind: str, distributed: bool
) -> None:
    case = Case(optimizer=kind, bfloat16=True, distributed=distributed)
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
    "case", [Case(), Case(pipeline=2, virtual_pipeline=2, optimizer="adam", max_tokens=64)], ids=str
)
def test_the_reference_is_here_only_while_it_computes(ranks: RankPool, tied_model: Path, case: Case) -> None:
    arguments = (tied_model, case, SAMPLES, True)
    for report in ranks.run(case.ranks, offload_cases.reference_in_and_out, *arguments):
        size = 4 * report["elements"]
        assert report["here"] == report["inside"] == size
        assert report["left"] == [size] and report["passed over"] == []
        assert report["away"] == report["outside"] == 0
        assert report["ways"] == [[("reference", size)] * 2] * 2
        assert report["same"]


@pytest.mark.full
def test_a_reference_that_is_not_offloaded_stays(ranks: RankPool, untied_model: Path) -> None:
    arguments = (untied_model, Case(), SAMPLES, False)
    (report,) = ranks.run(1, offload_cases.reference_in_and_out, *arguments)
    assert report["here"] == report["away"] == report["outside"] == 4 * UNTIED
    assert report["left"] == [] and report["ways"] == [[], []]
    assert report["same"]


@pytest.mark.full
def test_the_reference_leaves_after_an_error_too(ranks: RankPool, untied_model: Path) -> None:
    (away,) = ranks.run(1, offload_cases.reference_after_an_error, untied_model, Case())
    assert away == ("reference",)


@pytest.mark.full
def test_by_default_only_the_gradients_leave(ranks: RankPool, untied_model: Path) -> None:
    ((names, held),) = ranks.run(1, offload_cases.sets_of, untied_model, Case(), MemoryConfig())
    assert names == ("gradients",)
    assert held["gradients"] == 0 and held["parameters"] == 4 * UNTIED


@pytest.mark.full
def test_what_the_optimizer_steps_stays_where_it_belongs_to_the_parameters(
    ranks: RankPool, untied_model: Path
) -> None:
    settings = MemoryConfig(offload_gradients=False, offload_optimizer=True)
    case = Case(data=2, optimizer="adam")
    for names, held in ranks.run(2, offload_cases.sets_of, untied_model, case, settings):
        assert names == ("optimizer",)
        assert held["parameters"] == held["gradients"] == held["stepped"] >= 4 * UNTIED


@pytest.mark.full
def test_parameters_that_cannot_leave_cost_nothing(ranks: RankPool, untied_model: Path) -> None:
    arguments = (untied_model, Case(), SAMPLES)
    (report,) = ranks.run(1, offload_cases.give_up_on_one_parameter, *arguments)
    assert "not resizable" in report["error"]
    assert report["away"] == ("gradients", "optimizer", "parameters")
    assert report["some had left"]
    assert report["same"] and report["away at the end"] == ()
