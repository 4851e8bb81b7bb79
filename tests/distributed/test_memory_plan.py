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
    Layout(adam(tensor=2, sequence=True, kl_coef=0.1)),
    Layout(adam(pipeline=2, first_stage_layers=1), microbatches=2),
    pytest.param(Layout(Case(data=2, optimizer="sgd", max_tokens=2048)), marks=FULL),
    pytest.param(Layout(adam(data=2)), marks=FULL),
    pytest.param(Layout(adam(pipeline=2, virtual_pipeline=2), microbatches=4), marks=FULL),
    pytest.param(Layout(adam(), sequence_tokens=2048), marks=FULL),
    pytest.param(Layout(adam(), "selective"), marks=FULL),
    pytest.param(Layout(adam(), "full", "uniform", 2), marks=FULL),
    pytest.param(Layout(adam(), "full", "block", 2), marks=FULL),
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
    "layout",
    [
        Layout(adam(tensor=2, sequence=True)),
        Layout(adam(pipeline=2), microbatches=4),
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
        (Layout(adam(tensor=2, sequence=True)), "full"),
        (Layout(adam(pipeline=2), microbatches=2), "advantage"),
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
