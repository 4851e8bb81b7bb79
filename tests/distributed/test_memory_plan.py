"""The memory plan against measured bytes of tensor storages, on CPU: every part, and every phase's sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.memory_plan_cases import (
    Layout,
    make_model,
    measure_critic,
    measure_engine,
    measure_teacher,
    measure_training,
)
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix

pytestmark = pytest.mark.distributed

PASS = ("activations", "logits", "working")
RESIDENT = ("parameters", "gradients", "optimizer", "gather_buffer")


def within_a_tenth(measured: float) -> Any:
    return pytest.approx(measured, rel=0.1)


def adam(**layout: Any) -> Case:
    return Case(optimizer="adam", max_tokens=2048, **layout)


FULL = pytest.mark.full
LAYOUTS = [
    pytest.param(Layout(adam(tensor=2, sequence=True, kl_coef=0.1)), marks=matrix),
    Layout(adam(pipeline=2, first_stage_layers=1), microbatches=2),
    pytest.param(Layout(adam()), marks=FULL),
    pytest.param(Layout(Case(optimizer="sgd", max_tokens=2048)), marks=FULL),
    pytest.param(Layout(adam(tensor=2)), marks=FULL),
    pytest.param(Layout(adam(data=2)), marks=FULL),
    pytest.param(Layout(adam(pipeline=2), microbatches=4), marks=FULL),
    pytest.param(Layout(adam(tensor=2, pipeline=2), microbatches=4), marks=FULL),
    pytest.param(Layout(adam(pipeline=2, virtual_pipeline=2), microbatches=4), marks=FULL),
    pytest.param(Layout(adam(), sequence_tokens=2048), marks=FULL),
    pytest.param(Layout(adam(), "selective"), marks=FULL),
    pytest.param(Layout(adam(), "full", "uniform", 1), marks=FULL),
    pytest.param(Layout(adam(), "full", "uniform", 2), marks=FULL),
    pytest.param(Layout(adam(), "full", "block", 2), marks=FULL),
    pytest.param(Layout(adam(pipeline=2), "full", "uniform", 1, microbatches=4), marks=FULL),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, untied_model: Path) -> dict[bool, Path]:
    """By whether the embeddings are tied."""
    place = tmp_path_factory.mktemp("plan")
    return {tied: make_model(place / f"tied_{tied}", untied_model, tied) for tied in (False, True)}


@matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_holds_what_is_planned(ranks: RankPool, models: dict[bool, Path], layout: Layout):
    for report in ranks.run(layout.case.ranks, measure_training, models[False], layout):
        check_training(report)


@pytest.mark.full
@pytest.mark.parametrize(
    "granularity", [pytest.param(None, marks=matrix), pytest.param("selective", marks=FULL)]
)
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=FULL)])
def test_norms_of_query_and_key_are_planned(
    ranks: RankPool, tmp_path: Path, untied_model: Path, tensor: int, granularity: str | None
):
    folder = make_model(tmp_path / "qwen3", untied_model, False, "Qwen3ForCausalLM")
    for report in ranks.run(tensor, measure_training, folder, Layout(adam(tensor=tensor), granularity)):
        check_training(report)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(adam(pipeline=2), marks=matrix), pytest.param(adam(), marks=FULL)], ids=str
)
def test_a_tied_embedding_is_planned_where_it_is_held(ranks: RankPool, models: dict[bool, Path], case: Case):
    for report in ranks.run(case.ranks, measure_training, models[True], Layout(case, microbatches=2)):
        check_training(report)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(adam(tensor=2, sequence=True)), marks=matrix),
        pytest.param(Layout(adam(pipeline=2), microbatches=4), marks=FULL),
        pytest.param(Layout(adam(data=2)), marks=FULL),
        pytest.param(Layout(adam(), "full", "uniform", 1), marks=FULL),
    ],
    ids=str,
)
def test_a_critic_holds_what_is_planned(ranks: RankPool, models: dict[bool, Path], layout: Layout):
    for report in ranks.run(layout.case.ranks, measure_critic, models[False], layout):
        measured, planned = report["measured"], report["planned"]
        for part in ("critic_parameters", "critic_gradients", "critic_optimizer"):
            assert planned[part] == within_a_tenth(measured[part]), part
        assert sum(planned.get(part, 0) for part in PASS) == within_a_tenth(measured["pass"])
        assert "critic_gradients" not in report["update"]  # freed when the critic has learned


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        pytest.param(Layout(adam(tensor=2, sequence=True)), "full", marks=matrix),
        pytest.param(Layout(adam(pipeline=2), microbatches=2), "full", marks=matrix),
        pytest.param(Layout(adam()), "full", marks=FULL),
        pytest.param(Layout(adam(tensor=2)), "advantage", marks=FULL),
        pytest.param(Layout(adam(pipeline=2), microbatches=2), "advantage", marks=FULL),
    ],
    ids=str,
)
def test_a_teacher_and_what_the_update_holds_for_it_are_planned(
    ranks: RankPool, models: dict[bool, Path], tmp_path: Path, layout: Layout, loss: str
):
    """A teacher with twice the policy's layers and a tied output layer."""
    teacher = make_model(tmp_path / "teacher", models[False], tied=True, layers=8)
    for report in ranks.run(layout.case.ranks, measure_teacher, models[False], teacher, layout, loss):
        measured, phases = report["measured"], report["phases"]
        held = phases["teacher"]
        assert held["teacher"] + held.get("teacher_head", 0) == within_a_tenth(measured["teacher"])
        assert sum(held.get(part, 0) for part in PASS) == within_a_tenth(measured["teacher_pass"])
        update = phases["update"]
        assert sum(update.get(part, 0) for part in PASS) == within_a_tenth(measured["update_pass"])


@pytest.mark.full
@pytest.mark.parametrize(("tied", "engine_size"), [(False, 1), (False, 2), (True, 2)])
def test_an_engine_holds_what_is_planned(
    ranks: RankPool, models: dict[bool, Path], tied: bool, engine_size: int
):
    for report in ranks.run(engine_size, measure_engine, models[tied], engine_size, 0.1):
        measured, planned = report["measured"], report["planned"]
        for part, size in measured.items():
            assert planned[part] == within_a_tenth(size), part


@pytest.mark.full
def test_training_and_engine_together_are_the_phase_of_generation(ranks: RankPool, models: dict[bool, Path]):
    training = ranks.run(1, measure_training, models[False], Layout(adam()))[0]
    engine = ranks.run(1, measure_engine, models[False], 1, 0.5)[0]["measured"]
    stays = training["measured"]["parameters"] + training["measured"]["optimizer"]
    # The settings' own cache has half a GiB, and gradients are given up.
    planned = training["phases"]["generate"]
    assert "gradients" not in planned
    assert sum(planned.values()) == within_a_tenth(stays + sum(engine.values()))


def check_training(report: dict[str, Any]) -> None:
    measured, phases = report["measured"], report["phases"]
    update, logprobs = phases["update"], phases["logprobs"]
    for part in (*RESIDENT, "reference", "activations"):
        if measured.get(part):
            assert update[part] == within_a_tenth(measured[part]), part
        elif part in RESIDENT:
            assert part not in update or update[part] < 1000
    assert sum(update.get(part, 0) for part in PASS) == within_a_tenth(measured["update_pass"])
    assert sum(logprobs.get(part, 0) for part in PASS) == within_a_tenth(measured["logprobs_pass"])
    resident = sum(measured.get(part, 0) for part in (*RESIDENT, "reference"))
    assert sum(update.values()) == within_a_tenth(resident + measured["update_pass"])
    assert sum(logprobs.values()) == within_a_tenth(resident + measured["logprobs_pass"])
