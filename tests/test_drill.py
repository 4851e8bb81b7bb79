"""Runs that are disturbed and started again end as if nothing had happened.

tools/drill_faults.py is the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.programs import run
from tools.drill_faults import (
    CHAINS,
    QUICK,
    Outcome,
    differences,
    ending_problems,
    lost_too_much,
    model_differences,
)
from tools.drill_kinds import KINDS

ROW = {"step": 1.0, "train/grad_norm": 0.5, "task_reward": 0.1, "seconds/step": 2.0}


def drill(output: Path, timeout: float, *arguments: str) -> list[dict]:
    """The outcomes of a drill that found nothing wrong."""
    process = run("tools/drill_faults.py", "--output", str(output), *arguments, timeout=timeout)
    print(process.stdout)
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.mark.distributed
@pytest.mark.full
def test_six_disturbances_in_a_row(tmp_path: Path) -> None:
    outcomes = drill(tmp_path / "drill", 580.0, "--quick", "--seed", "1")
    assert [outcome["kind"] for outcome in outcomes] == list(QUICK)
    assert all(outcome["status"] in KINDS[outcome["kind"]].statuses for outcome in outcomes)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(9000)
def test_a_hundred_disturbances_of_every_kind(tmp_path: Path) -> None:
    outcomes = drill(tmp_path / "drill", 8900.0, "--kills", "100", "--seed", "2")
    assert len(outcomes) == 100 and {outcome["kind"] for outcome in outcomes} == set(KINDS)
    assert {outcome["chain"] for outcome in outcomes} == set(CHAINS)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{**ROW, "seconds/step": 9.0}], []),
        ([{**ROW, "task_reward": 0.1 + 1e-9}], ["step 1.0: task_reward"]),
        ([ROW, ROW], ["the steps are [1, 1], of the undisturbed run [1]"]),
        ([], ["the steps are [], of the undisturbed run [1]"]),
    ],
)
def test_the_drill_sees_numbers_that_differ(rows: list[dict[str, float]], told: list[str]) -> None:
    messages = differences([ROW], rows)
    assert len(messages) == len(told)
    assert all(message.startswith(start) for message, start in zip(messages, told, strict=True))


def test_the_drill_sees_a_tensor_that_differs_in_one_bit(tmp_path: Path) -> None:
    undisturbed_tensors = {"a": torch.ones(3), "b": torch.tensor([float("nan"), 0.0])}
    other_tensors = {"a": torch.ones(3), "b": torch.tensor([float("nan"), -0.0])}
    for name, tensors in (
        ("undisturbed", undisturbed_tensors),
        ("same", undisturbed_tensors),
        ("other", other_tensors),
        ("less", {"a": torch.ones(3)}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert model_differences(tmp_path / "undisturbed", tmp_path / "same") == []
    assert model_differences(tmp_path / "undisturbed", tmp_path / "other") == [
        "the tensor b differs"
    ]
    assert model_differences(tmp_path / "undisturbed", tmp_path / "less") == [
        "the tensor b differs"
    ]
    assert len(model_differences(tmp_path / "none", tmp_path / "same")) == 1


def test_the_drill_sees_lost_steps_and_leftovers(tmp_path: Path) -> None:
    def outcome(kind: str, lost: int) -> Outcome:
        return Outcome("tp1", kind, 7, "", KINDS[kind].statuses[0], "", 1.0, 20.0, lost)

    assert lost_too_much([outcome("kill", 2), outcome("sigterm", 0)]) == []
    assert len(lost_too_much([outcome("kill", 7), outcome("sigterm", 1), outcome("kill", -1)])) == 3
    (tmp_path / "checkpoints" / "step-000003.partial").mkdir(parents=True)
    leftover, unfinished = ending_problems(tmp_path)
    assert leftover == "checkpoints/step-000003.partial was left" and "did not finish" in unfinished
