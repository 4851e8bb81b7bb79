"""The memory plan against measured bytes of tensor storages, on CPU.

Every part is compared, and every phase's sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.memory_plan_cases import Layout, make_model, measure_training
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
    Layout(adam(lora="attention")),
    Layout(adam(pipeline=2, first_stage_layers=1), microbatches=2),
    pytest.param(Layout(Case(data=2, optimizer="sgd", max_tokens=2048)), marks=FULL),
    pytest.param(Layout(adam(data=2)), marks=FULL),
    pytest.param(Layout(adam(lora="all")), marks=FULL),
    pytest.param(Layout(adam(pipeline=2, virtual_pipeline=2), microbatches=4), marks=FULL),
    pytest.param(Layout(adam(), sequence_tokens=2048), marks=FULL),
    pytest.param(Layout(adam(), "selective"), marks=FULL),
    pytest.param(Layout(adam(), "full", "uniform", 2), marks=FULL),
    pytest.param(Layout(adam(), "full", "block", 2), marks=FULL),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, untied_model: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("plan") / "model", untied_model)


@matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_holds_what_is_planned(ranks: RankPool, model: Path, layout: Layout):
    for report in ranks.run(layout.case.ranks, measure_training, model, layout):
        check_training(report)


def check_training(report: dict[str, Any]) -> None:
    measured = report["measured"]
    phases = report["phases"]
    update = phases["update"]
    logprobs = phases["logprobs"]
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
