"""Metrics by functions of the user's: what a run is told of those that fail, and their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    RunConfig,
    SelectionConfig,
    TelemetryConfig,
)
from rlmath.trainer import step_hooks
from rlmath.trainer.step_hooks import StepHooks

pytestmark = pytest.mark.usefixtures("process_group")

SOURCE = """
import time
from pathlib import Path
from rlmath import hooks

@hooks.metric("fails")
def fails(groups):
    raise ValueError("no such column")

@hooks.metric("lengths")
def lengths(groups):
    return {"most": max(max(group.tokens) for group in groups), "groups": len(groups)}

@hooks.metric("mean")
def mean(groups):
    return sum(sum(group.rewards) for group in groups) / len(groups)

@hooks.selection("long")
def long(group):
    return max(group.tokens) > 2

@hooks.advantage("tokens")
def tokens(rewards, tokens):
    return [[float(10 * n) for n in row] for row in tokens]

@hooks.metric("hangs")
def hangs(groups):
    with Path(__file__).with_name("calls").open("a") as file:
        file.write("x")
    time.sleep(600)
"""
GROUPS = [
    ScoredGroup(
        Prompt("q", "1+1=", (1,), solutions=("2",), task="math", more_json="{}"),
        (
            Completion(
                0, (5,) * tokens, (0.0,) * tokens, text="", finish_reason="stop", policy_version=0
            ),
        ),
        (Score(float(tokens), True, "", "string"),),
    )
    for tokens in (2, 4)
]


def open_hooks(folder: Path, *metrics: str) -> StepHooks:
    """The functions of a run that has one rank."""
    plugin = folder / "own.py"
    plugin.write_text(SOURCE)
    run = RunConfig(plugins=[str(plugin)])
    return StepHooks(Config(run=run, telemetry=TelemetryConfig(metrics=list(metrics))), rank=0)


def test_a_metric_that_fails_is_missing_and_told_once_by_its_name_and_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = open_hooks(tmp_path, "fails", "lengths", "reward=mean")
    reported = [hooks.metrics(GROUPS), hooks.metrics(GROUPS[:1])]
    hooks.close()
    assert reported == [
        {"own/lengths/most": 4.0, "own/lengths/groups": 2.0, "own/reward": 3.0},
        {"own/lengths/most": 2.0, "own/lengths/groups": 1.0, "own/reward": 2.0},
    ]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("The metric 'fails' is missing in this step (logged once): ")
    assert "failed: ValueError: no such column" in warning


def test_a_metric_that_hangs_has_the_time_of_metrics_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may wait for rank 0 meanwhile: no later step waits for it again."""
    monkeypatch.setattr(step_hooks, "METRIC_SECONDS", 0.5)
    calls = tmp_path / "calls"
    calls.touch()
    hooks = open_hooks(tmp_path, "hangs")
    assert [hooks.metrics(GROUPS), hooks.metrics(GROUPS)] == [{}, {}]
    hooks.close()
    assert caplog.text.count("it took more than 0.5 s") == 1
    assert len(calls.read_text()) <= 1


def test_functions_that_select_and_give_advantages_are_asked_each_for_its_own(
    tmp_path: Path,
) -> None:
    """Without one of them the step is as without functions."""
    plugin = tmp_path / "own.py"
    plugin.write_text(SOURCE)
    run = RunConfig(plugins=[str(plugin)])
    selecting = Config(
        run=run, selection=SelectionConfig(dynamic_sampling="long", max_extra_prompts=0)
    )
    hooks = StepHooks(selecting, rank=0)
    assert hooks.keep is not None and hooks.keep(GROUPS) == [False, True]
    assert hooks.advantages([[1.0]], [[2]]) is None
    hooks.close()
    hooks = StepHooks(Config(run=run, algorithm=AlgorithmConfig(advantage="tokens")), rank=0)
    assert hooks.keep is None and hooks.advantages([], []) is None
    assert hooks.advantages([[1.0], [2.0]], [[2], [4]]) == [[20.0], [40.0]]
    hooks.close()
