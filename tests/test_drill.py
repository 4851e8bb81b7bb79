"""Runs that are disturbed and started again end as if nothing had been; tools/drill_faults.py is the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run
from tests.selection import matrix
from tools.drill_faults import QUICK, Outcome, differences, ending_problems, lost_too_much
from tools.drill_kinds import KINDS

ROW = {"step": 1.0, "train/grad_norm": 0.5, "task_reward": 0.1, "seconds/step": 2.0}


def drill(output: Path, timeout: float, *arguments: str) -> list[dict]:
    """The outcomes of a drill that found nothing wrong."""
    done = run("tools/drill_faults.py", "--output", str(output), *arguments, timeout=timeout)
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.distributed
@matrix
def test_six_disturbances_in_a_row(tmp_path: Path) -> None:
    outcomes = drill(tmp_path / "drill", 580.0, "--quick", "--seed", "1")
    assert [one["kind"] for one in outcomes] == list(QUICK)
    assert all(one["status"] in KINDS[one["kind"]].statuses for one in outcomes)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(5400)
def test_thirty_disturbances_of_every_kind_on_two_layouts(tmp_path: Path) -> None:
    outcomes = drill(tmp_path / "drill", 5300.0, "--kills", "30", "--seed", "2")
    assert len(outcomes) == 30 and {one["kind"] for one in outcomes} == set(KINDS)
    assert {one["layout"] for one in outcomes} == {"tp2-dp1", "tp1-dp2"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{**ROW, "seconds/step": 9.0}], []),
        ([{**ROW, "task_reward": 0.1 + 1e-9}], ["step 1.0: task_reward"]),
        ([ROW, ROW], ["the steps are [1, 1], in peace [1]"]),
        ([], ["the steps are [], in peace [1]"]),
    ],
)
def test_the_drill_sees_numbers_that_differ(rows: list[dict[str, float]], told: list[str]) -> None:
    found = differences([ROW], rows)
    assert len(found) == len(told)
    assert all(one.startswith(start) for one, start in zip(found, told, strict=True))


def test_a_drill_in_which_nothing_is_learned_proves_nothing() -> None:
    idle = {**ROW, "train/grad_norm": 0.0}
    assert differences([idle], [idle]) == ["nothing was learned in peace: equal metrics would say nothing"]


def test_the_drill_sees_lost_steps_and_leftovers(tmp_path: Path) -> None:
    def outcome(kind: str, lost: int) -> Outcome:
        return Outcome("tp1-dp2", kind, 7, "", KINDS[kind].statuses[0], "", 1.0, 20.0, lost)

    assert lost_too_much([outcome("kill", 2), outcome("sigterm", 0)]) == []
    assert len(lost_too_much([outcome("kill", 5), outcome("sigterm", 1), outcome("kill", -1)])) == 3
    (tmp_path / "checkpoints" / "step-000003.partial").mkdir(parents=True)
    left, unfinished = ending_problems(tmp_path)
    assert left == "checkpoints/step-000003.partial was left" and "did not finish" in unfinished
