"""What of a step is written, when, and by whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmath.algorithms.dynamic_sampling import Chosen, Selection
from rlmath.algorithms.types import PartialCompletion, Prompt, Score, ScoredGroup
from rlmath.checkpoint.capture import CapturedMinibatch, folder_of, read_capture, route_folder
from rlmath.checkpoint.directory import file_entry
from rlmath.checkpoint.unfinished_groups import route_file
from rlmath.config.load import config_as_yaml
from rlmath.config.schema import Config, RunConfig
from rlmath.data.order import PromptOrder, Rollback
from rlmath.distributed.mesh import Mesh
from rlmath.models.learner import MinibatchResult
from rlmath.rollout.routes import RouteStore
from rlmath.trainer import recorder
from rlmath.trainer.metrics import UpdateRecord
from rlmath.trainer.recorder import StepRecorder

COMPLETIONS = tuple(
    PartialCompletion().extended((7,) * tokens, (-0.5,) * tokens, policy_version=3, step=2)
    for tokens in (2, 3)
)
GROUP = ScoredGroup(
    Prompt("q", "?", (5,), solutions=("2",), task="math"),
    tuple(part.finished(g, "", "stop") for g, part in enumerate(COMPLETIONS)),
    (Score(1.0, True, "2", "string"), Score(0.0, False, "", "no_answer")),
)
SELECTION = Selection([GROUP], [Chosen((1,))], 1)
LEARNED = MinibatchResult(
    {"loss": 1.0}, {"mismatch_max": 2.0}, 0.5, learning_rate=0.25, discarded=None
)
DISCARDED = MinibatchResult({"loss": 3.0}, {}, 4.0, learning_rate=0.125, discarded="the ratio is 6")
UPDATE = UpdateRecord([LEARNED], [[0.5]], None, critic_results=[DISCARDED])


class Policy:
    """A policy of one tensor, which an update changes."""

    def __init__(self) -> None:
        self.weight = torch.ones(2)


def trainer(folder: Path, policy: Policy, rank: int = 0) -> Any:
    order = PromptOrder(8, 2, seed=7, shuffle=False)
    rollbacks = (Rollback(1, 1, 2),)
    order.roll_back(rollbacks)
    return SimpleNamespace(
        config=Config(run=RunConfig(output_dir=str(folder))),
        total_steps=9,
        order=order,
        rollbacks=rollbacks,
        mesh=Mesh(rank, 2, 1, pipeline=1, engine_size=1),
        actor=SimpleNamespace(chunks=policy),
        shape=None,
    )


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(policy: Policy, shape: Any, mesh: Mesh) -> Any:
        yield "weight", policy.weight

    monkeypatch.setattr(recorder, "stream_hf_tensors", stream)


def make_step(
    step_recorder: StepRecorder, policy: Policy, number: int, update: UpdateRecord = UPDATE
) -> None:
    step_recorder.before_update(number, 1, SELECTION, own_advantages=[[3.0]])
    policy.weight = policy.weight + 1
    step_recorder.after_update(update)


def test_a_step_that_is_set_is_written_with_the_weights_before_and_after(tmp_path: Path) -> None:
    policy = Policy()
    run = trainer(tmp_path, policy)
    step_recorder = StepRecorder(run, [3, 4])
    for number in range(5):
        make_step(step_recorder, policy, number)
    step_recorder.write("a failure")
    folders = [folder_of(tmp_path, number) for number in range(5)]
    assert [folder.exists() for folder in folders] == [False, False, True, True, True]
    third, fourth, last = (read_capture(folder) for folder in folders[2:])
    assert (third.step, third.reason, third.length_stage) == (2, "telemetry.capture_steps", 1)
    assert (third.total_steps, third.rollbacks, third.world_size) == (9, 1, 2)
    assert (third.layout, third.sampling_seed) == (run.mesh.training_layout, run.order.seed_at(2))
    assert third.settings_yaml == config_as_yaml(run.config) and "torch" in third.versions
    assert [group.scores for group in third.groups] == [GROUP.scores]
    assert third.chosen == [(1,)]
    assert third.own_advantages == [[3.0]]
    assert third.update is not None and fourth.update is not None and last.update is not None
    assert third.update.minibatches == [
        CapturedMinibatch(
            {"grad_norm": 0.5, "learning_rate": 0.25, "loss": 1.0, "mismatch_max": 2.0}, None
        )
    ]
    assert third.update.critic_minibatches == [
        CapturedMinibatch({"grad_norm": 4.0, "learning_rate": 0.125, "loss": 3.0}, "the ratio is 6")
    ]
    assert third.update.advantages == [[0.5]]
    digests = [third.weights_before, third.update.weights_after, fourth.update.weights_after]
    assert fourth.weights_before == digests[1]
    assert None not in digests and len(set(digests)) == 3
    assert (last.reason, last.weights_before, last.update.weights_after) == (
        "a failure",
        None,
        None,
    )


def test_the_last_step_is_written_once_also_before_its_update_has_ended(tmp_path: Path) -> None:
    policy = Policy()
    step_recorder = StepRecorder(trainer(tmp_path, policy), [1])
    step_recorder.write("before any step")
    assert not any(tmp_path.iterdir())
    make_step(step_recorder, policy, 0)
    step_recorder.write("a failure")
    assert read_capture(folder_of(tmp_path, 0)).reason == "telemetry.capture_steps"
    step_recorder.before_update(1, 0, SELECTION, own_advantages=None)
    step_recorder.write("a failure")
    step_recorder.write("another")
    capture = read_capture(folder_of(tmp_path, 1))
    assert (capture.reason, capture.update, capture.own_advantages) == ("a failure", None, None)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def routed_selection(store: RouteStore) -> Selection:
    """SELECTION with routes of what it learns from in the store."""
    first, second = GROUP.completions
    place = store.keep(torch.zeros(len(second.token_ids), 3, 2, dtype=torch.uint8))
    completions = (first, replace(second, routes_at=(place,)))
    return Selection([replace(GROUP, completions=completions)], [Chosen((1,))], 1)


def test_a_rank_writes_its_routes_before_the_update_and_the_capture_has_them(
    tmp_path: Path, one_rank: None
) -> None:
    store = RouteStore(0)
    step_recorder = StepRecorder(trainer(tmp_path, Policy()), [1])
    step_recorder.before_update(0, 1, routed_selection(store), own_advantages=None, routes=store)
    written = file_entry(route_folder(tmp_path, 0) / route_file(0))
    step_recorder.after_update(UPDATE)
    folder = folder_of(tmp_path, 0)
    assert file_entry(folder / route_file(0)) == written
    capture = read_capture(folder)
    assert capture.has_routes and capture.route_files == {route_file(0): written.sha256}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_routes_that_the_disk_refuses_are_a_warning_and_the_capture_has_none(
    tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    (route_folder(tmp_path, 0) / route_file(0)).mkdir(parents=True)
    store = RouteStore(0)
    step_recorder = StepRecorder(trainer(tmp_path, Policy()), [1])
    step_recorder.before_update(0, 1, routed_selection(store), own_advantages=None, routes=store)
    assert "The routes of step 1 could not be written: rank 0: IsADirectoryError" in caplog.text
    step_recorder.after_update(UPDATE)
    folder = folder_of(tmp_path, 0)
    capture = read_capture(folder)
    assert capture.update is not None and not capture.has_routes
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_another_rank_has_written_of_the_step_stays_and_an_earlier_starts_does_not(
    tmp_path: Path,
) -> None:
    earlier = StepRecorder(trainer(tmp_path, Policy()), [])
    make_step(earlier, Policy(), 0)
    earlier.write("an earlier start")
    capture_file = folder_of(tmp_path, 0) / "capture.json"
    step_recorder = StepRecorder(trainer(tmp_path, Policy(), rank=1), [])
    step_recorder.before_update(0, 0, SELECTION, own_advantages=None)
    began = capture_file.stat().st_mtime
    os.utime(capture_file, (began - 100, began - 100))
    step_recorder.write("a failure")
    assert read_capture(folder_of(tmp_path, 0)).reason == "a failure"
    other = StepRecorder(trainer(tmp_path, Policy()), [])
    other.before_update(0, 0, SELECTION, own_advantages=None)
    os.utime(capture_file, (began + 100, began + 100))
    other.write("another rank's")
    assert read_capture(folder_of(tmp_path, 0)).reason == "a failure"


def test_rank_zero_alone_writes_the_steps_that_are_set(tmp_path: Path) -> None:
    policy = Policy()
    step_recorder = StepRecorder(trainer(tmp_path, policy, rank=1), [1])
    make_step(step_recorder, policy, 0)
    step_recorder.write("a failure")
    assert not any(tmp_path.iterdir()), "rank 0 has written it"


def test_a_disk_that_refuses_costs_the_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*place: Any) -> None:
        raise OSError("No space left on device")

    policy = Policy()
    step_recorder = StepRecorder(trainer(tmp_path, policy), [])
    make_step(step_recorder, policy, 4, replace(UPDATE, results=[DISCARDED]))
    with monkeypatch.context() as full:
        full.setattr(recorder, "write_capture", refuse)
        step_recorder.write("a failure")
    assert "The records of step 5 could not be written" in caplog.text
    step_recorder.write("a failure")
    update = read_capture(folder_of(tmp_path, 4)).update
    assert update is not None and update.minibatches[0].discarded == "the ratio is 6"
