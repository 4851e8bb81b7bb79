"""What trainers tell engines on ranks of their own, and what these report.

Also what a checkpoint has of what they sample."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlmath.algorithms.partial_rollouts import UnfinishedGroup
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    Score,
    ScoredCompletion,
    Segment,
    ToolCall,
)
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StagesConfig,
    ToolsConfig,
)
from rlmath.data.dataset import load_inputs
from rlmath.data.order import Rollback, seed_after
from rlmath.distributed.bridge import Bridge, Mailbox
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.collector import CollectGroups, Rollout
from rlmath.rollout.engine_messages import (
    Admit,
    Continue,
    GroupDone,
    Snapshot,
    TakeSnapshot,
    WeightsTaken,
)
from rlmath.rollout.sampling import RolloutSeed, SamplingSettings, request_seed, training_sampling
from rlmath.trainer.rollouts.asynchronous import (
    AsynchronousRollouts,
    EngineConnection,
    EngineReport,
    engine_report_metrics,
)
from rlmath.trainer.rollouts.synchronous import PartialRollouts, StepRollout
from tests.tiny_models import shape_of


def report(
    seconds: float, busy: float, tokens: int, latency: float, **changes: Any
) -> EngineReport:
    weights_taken = WeightsTaken(
        version=3,
        learned_at=100.0,
        transfer_seconds=0.5,
        seconds=seconds,
        busy_seconds=busy,
        waiting_seconds=0.25,
        new_tokens=tokens,
        interrupted=2,
        prefilled_again_tokens=10,
        running=6.0,
        queued_scores=1,
    )
    return EngineReport(replace(weights_taken, **changes), latency)


def test_rates_are_over_time_and_not_over_reports() -> None:
    """One of two engines has reported twice, over times that differ."""
    reports = [
        report(1.0, 0.5, 100, 0.2),
        report(9.0, 8.5, 4500, 0.4, interrupted=5, running=9.0, queued_scores=4),
        report(
            10.0, 9.0, 5400, 0.9, prefilled_again_tokens=70, transfer_seconds=2.0, queued_scores=7
        ),
    ]
    assert engine_report_metrics(reports, engines=2) == pytest.approx(
        {
            "tokens_per_second/rollout": 1000.0,
            "rollout/engine_busy_share": 0.9,
            "rollout/sequences_running": 7.0,
            "rollout/interrupted_sequences": 9.0,
            "rollout/prefilled_again_tokens": 90.0,
            "rollout/scores_waiting": 4.0,
            "sync/latency_s": 0.5,
            "sync/latency_s_max": 0.9,
            "sync/transfer_s": 1.0,
        }
    )


def test_without_a_report_there_are_no_metrics() -> None:
    assert engine_report_metrics([], engines=2) == {}


# ---------------------------------------------------------------- messages and checkpoints

PER_STEP = 3
GROUP = 2
STALENESS = 1


@pytest.fixture
def ends(process_group: None) -> Iterator[tuple[Mailbox, Mailbox]]:
    """The mailboxes of a trainer and of an engine, over a bridge of the two.

    The trainer's process group is there."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        bridges = list(threads.map(lambda rank: Bridge(store, rank, 2, 1, 60.0), range(2)))
        boxes = Mailbox(bridges[0], [1]), Mailbox(bridges[1], [0])
        yield boxes
        list(threads.map(Mailbox.close, boxes))


def done(draw: int, step: int, lost: Collection[int] = ()) -> GroupDone:
    """A group that an engine has sampled with the weights of a step.

    Its completions have one token more than the number of its draw; some have lost their calls."""
    tokens = (5,) * (draw + 1)
    logprobs = (-0.5,) * (draw + 1)
    completions = [
        Completion(g, tokens, logprobs, "", "stop", 2 * step, (Segment(draw + 1, 2 * step, step),))
        for g in range(GROUP)
    ]
    for g in lost:
        call = ToolCall("1", "its sandbox was killed\n", "lost", position=0)
        completions[g] = replace(completions[g], finish_reason="lost", calls=(call,))
    samples = tuple(
        ScoredCompletion(completion, Score(float(g), bool(g), "", "string"))
        for g, completion in enumerate(completions)
    )
    return GroupDone(draw, samples)


class Engine:
    """The engine's end: what it was sent, one message after the other."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._messages = deque[Any]()

    def send(self, *messages: object) -> None:
        for message in messages:
            self._box.send(0, message)

    def next(self) -> Any:
        while not self._messages:
            self._messages += [envelope.message for envelope in self._box.receive(0.05)]
        return self._messages.popleft()


def asynchronous(
    tmp_path: Path, model: Path, connection: EngineConnection, **sections: Any
) -> AsynchronousRollouts:
    rows = [{"question": f"{n}+1", "answer": n + 1, "id": f"q{n}"} for n in range(20)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        run=RunConfig(seed=7),
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            train_path=str(file), template="raw", prompts_per_step=PER_STEP, shuffle=False
        ),
        stages=StagesConfig(steps=[1, 4], max_new_tokens=[40, 50]),
        rollout=RolloutConfig(
            ranks=1, group_size=GROUP, max_staleness=STALENESS, max_new_tokens=60
        ),
        **sections,
    )
    shape = shape_of(model)
    inputs = load_inputs(config, shape)
    assert inputs.total_steps == 5
    shapes = read_run_shapes(config, shape).with_total_steps(config, inputs.total_steps)
    return AsynchronousRollouts(config, inputs, connection, shapes=shapes)


def test_a_group_that_is_carried_keeps_the_seed_of_the_step_that_drew_it(
    tmp_path: Path, tied_model: Path
) -> None:
    """The run went back to step 1, and has other seeds from step 2 on.

    Draws 3 to 5 are of step 1."""
    unused: Any = None
    asynchronous_rollouts = asynchronous(tmp_path, tied_model, unused)
    partial_rollouts = PartialRollouts(
        asynchronous_rollouts._config,
        asynchronous_rollouts._inputs,
        unused,
        shapes=asynchronous_rollouts._shapes,
    )
    asynchronous_rollouts._inputs.order.roll_back([Rollback(1, 1, 2)])
    partial_rollouts.curriculum.begin(2)
    for draw, seed, step in ((5, 7, 1), (6, seed_after(7, 1), 2)):
        group = UnfinishedGroup(draw, step, (NOTHING_SAMPLED,) * GROUP)
        (row,) = partial_rollouts._rows(
            group, training_sampling(asynchronous_rollouts._config.rollout), 9, first=4
        )
        expected = [((4, g), request_seed(seed, step, f"q{draw}", g)) for g in range(GROUP)]
        assert [(work.request.key, work.request.seed) for work in row] == expected


def drawn(files: dict[str, bytes]) -> dict[int, list[tuple[int, int]]]:
    """Tokens and steps of the last segment of every sample in a checkpoint, by draw.

    The step is -1 where there is no segment."""
    unfinished = read_unfinished(files[UNFINISHED], GROUP, 101, lambda *_: "")
    return {
        group.draw: [
            (len(part.token_ids), *(s.step for s in part.segments[-1:])) for part in group.parts
        ]
        for group in unfinished.groups
    }


def test_a_checkpoint_has_what_is_done_what_waits_and_what_is_sampled(
    tmp_path: Path, tied_model: Path, ends: tuple[Mailbox, Mailbox]
) -> None:
    """Step 2 takes the draws 3 to 5 and leaves 6, which is done.

    Meanwhile 8 becomes done, and 7 is being sampled."""
    trainer = ends[0]
    engine = Engine(ends[1])
    connection = EngineConnection(Mesh(0, 1, 1, 1, 1, engine_ranks=1), trainer, lambda: None)
    rollouts = asynchronous(tmp_path, tied_model, connection)
    stages = length_stages(rollouts._config, 5)

    def sample(draws: list[int], step: int) -> None:
        engine.send(*(done(draw, step) for draw in draws))

    assert drawn(rollouts.files()) == {}, "nothing has begun: no engine is asked"
    sample([1, 2, 0], 0)
    first = rollouts.step(0, stages[0])
    rollouts.commit()
    assert [engine.next(), engine.next()] == [Continue([], 0), Admit(0, 3, 0)]
    assert [scored.prompt.prompt_id for scored in first.selection.learned] == ["q0", "q1", "q2"]
    assert first.sampled_tokens == GROUP * (1 + 2 + 3)
    sample([4, 5, 3, 6], 1)
    second = rollouts.step(1, stages[1])
    rollouts.commit()
    assert engine.next() == Admit(0, 3 + PER_STEP * (STALENESS + 1), 1), (
        "of the second length stage"
    )
    assert [scored.prompt.prompt_id for scored in second.selection.learned] == ["q3", "q4", "q5"]
    part = PartialCompletion((5,) * 9, (-0.5,) * 9, (Segment(9, 2, 1),))
    sample([8], 1)

    def answer() -> None:
        assert engine.next() == TakeSnapshot()
        engine.send(Snapshot({7: (part, PartialCompletion())}))

    thread = threading.Thread(target=answer)
    thread.start()
    files = rollouts.files()
    thread.join()
    assert drawn(files) == {6: [(7, 1)] * 2, 7: [(9, 1), (0,)], 8: [(9, 1)] * 2}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    connection = EngineConnection(Mesh(0, 1, 1, 1, 1, engine_ranks=1), trainer, lambda: None)
    resumed = asynchronous(tmp_path, tied_model, connection)
    resumed.resume(folder, 2, reward_changed=False)
    assert resumed.next_draw == 9
    sample([7, 9], 2)
    third = resumed.step(2, stages[1])
    assert [scored.prompt.prompt_id for scored in third.selection.learned] == ["q6", "q7", "q8"]
    unfinished = engine.next()
    assert (
        [unfinished_group.draw for unfinished_group in unfinished.groups],
        unfinished.length_stage,
    ) == ([7], 1)
    assert engine.next() == Admit(9, 12, 1)


def test_what_is_asked_of_the_engines_for_validation_is_what_they_are_sent(
    ends: tuple[Mailbox, Mailbox],
) -> None:
    trainer = ends[0]
    engine = Engine(ends[1])
    connection = EngineConnection(Mesh(0, 1, 1, 1, 1, engine_ranks=1), trainer, lambda: None)
    request = CollectGroups(
        [], SamplingSettings(2, 0.5, 0.9, 3, 7), RolloutSeed(8, -1), "validation own", True
    )
    expected = Rollout([], [])
    engine.send(done(4, 0))
    engine.send(expected)
    assert connection.collect(request) == expected and engine.next() == request
    assert connection.groups() == [done(4, 0)], "what came meanwhile is kept"


def connected(trainer: Mailbox) -> EngineConnection:
    """The trainers' side of one engine; one rank trains."""
    return EngineConnection(Mesh(0, 1, 1, 1, 1, engine_ranks=1), trainer, lambda: None)


def complete(engine: Engine, connection: EngineConnection, draws: list[int], step: int) -> None:
    """Let the engine complete these draws, and wait until the trainer has all of them."""
    sampled = Rollout([], [])
    engine.send(*(done(draw, step) for draw in draws), sampled)
    request = CollectGroups(
        [], SamplingSettings(1, 1.0, 1.0, 0, 1), RolloutSeed(8, -1), "validation"
    )
    assert connection.collect(request) == sampled


def learned_draws(rollout: StepRollout) -> list[str]:
    return [scored.prompt.prompt_id for scored in rollout.selection.learned]


def test_a_step_waits_for_the_group_that_would_become_too_old_and_tells_it(
    tmp_path: Path, tied_model: Path, ends: tuple[Mailbox, Mailbox]
) -> None:
    """Step 2 has 7 to 9, and waits for draw 5, which it may not leave to step 3."""
    engine = Engine(ends[1])
    connection = connected(ends[0])
    rollouts = asynchronous(tmp_path, tied_model, connection)
    stages = length_stages(rollouts._config, 5)
    complete(engine, connection, [0, 1, 2], step=0)
    first = rollouts.step(0, stages[0])
    rollouts.commit()
    complete(engine, connection, [3, 4, 6, 7, 8], step=1)
    second = rollouts.step(1, stages[1])
    rollouts.commit()
    assert learned_draws(second) == ["q3", "q4", "q6"]
    complete(engine, connection, [9], step=2)
    engine.send(done(5, 1))
    third = rollouts.step(2, stages[1])
    assert learned_draws(third) == ["q5", "q7", "q8"]
    figures = {
        name: [rollout.metrics[f"rollout/{name}"] for rollout in (first, second, third)]
        for name in (
            "groups_admitted",
            "groups_complete",
            "groups_in_flight",
            "staleness_waits",
            "staleness",
        )
    }
    assert figures == {
        "groups_admitted": [3.0, 6.0, 3.0],
        "groups_complete": [0.0, 2.0, 1.0],
        "groups_in_flight": [0.0, 3.0, 3.0],
        "staleness_waits": [0.0, 0.0, 1.0],
        "staleness": [0.0, 0.0, 1.0],
    }


def test_the_last_step_leaves_nothing_in_flight_and_tells_of_no_group_that_is_lost(
    tmp_path: Path,
    tied_model: Path,
    ends: tuple[Mailbox, Mailbox],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(ends[1])
    connection = connected(ends[0])
    rollouts = asynchronous(tmp_path, tied_model, connection)
    stages = length_stages(rollouts._config, 5)
    in_flight = []
    for step in range(5):
        draws = [*range(PER_STEP * step, PER_STEP * (step + 1))]
        complete(engine, connection, draws, step)
        rollout = rollouts.step(step, stages[min(step, 1)])
        rollouts.commit()
        assert learned_draws(rollout) == [f"q{draw}" for draw in draws]
        in_flight.append(rollout.metrics["rollout/groups_in_flight"])
    assert in_flight == [0.0, 3.0, 3.0, 3.0, 0.0]
    assert "not learned from" not in caplog.text


def test_a_step_that_fails_after_its_groups_leaves_those_in_flight_as_before(
    tmp_path: Path, tied_model: Path, ends: tuple[Mailbox, Mailbox]
) -> None:
    """A checkpoint made then would have draws twice that a later step admits again."""
    engine = Engine(ends[1])
    connection = connected(ends[0])
    rollouts = asynchronous(tmp_path, tied_model, connection)
    stages = length_stages(rollouts._config, 5)
    complete(engine, connection, [0, 1, 2], step=0)
    rollouts.step(0, stages[0])
    rollouts.commit()
    complete(engine, connection, [3, 4, 6], step=1)
    rollouts.step(1, stages[1])
    rollouts.commit()

    def saved() -> dict[int, list[tuple[int, int]]]:
        with ThreadPoolExecutor(1) as threads:
            engine.send(Snapshot({5: (PartialCompletion(),) * GROUP}))
            return threads.submit(lambda: drawn(rollouts.files())).result()

    before = saved()
    assert before.keys() == {5, 7, 8}
    complete(engine, connection, [5, 7, 8], step=2)
    rollouts.step(2, stages[1])
    assert saved().keys() == before.keys() and rollouts.next_draw == 9


@pytest.mark.parametrize(("arrived", "told"), [([0, 1, 2, 4], "4"), ([0, 1, 1, 2], "0, 1, 2")])
def test_a_group_that_no_engine_should_have_sampled_ends_the_run(
    tmp_path: Path,
    tied_model: Path,
    ends: tuple[Mailbox, Mailbox],
    arrived: list[int],
    told: str,
) -> None:
    """The first stage has the draws 0 to 2, each of which is sampled once."""
    engine = Engine(ends[1])
    connection = connected(ends[0])
    rollouts = asynchronous(tmp_path, tied_model, connection)
    complete(engine, connection, arrived, step=0)
    with pytest.raises(RuntimeError, match=rf"engines sampled draws \[{told}\] twice"):
        rollouts.step(0, length_stages(rollouts._config, 5)[0])


def test_lost_completions_leave_their_groups_and_many_end_the_run(
    tmp_path: Path,
    tied_model: Path,
    ends: tuple[Mailbox, Mailbox],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two of six are told; five of six are too many."""
    engine = Engine(ends[1])
    connection = connected(ends[0])
    rollouts = asynchronous(tmp_path, tied_model, connection)
    stages = length_stages(rollouts._config, 5)
    engine.send(done(0, 0, lost=[1]), done(1, 0, lost=[0]), done(2, 0))
    first = rollouts.step(0, stages[0])
    rollouts.commit()
    assert "2 of 2 completions with calls are lost" in caplog.text
    assert "its sandbox was killed" in caplog.text and "They leave their groups" in caplog.text
    assert [score.reward for score in first.scores] == [0.0, 1.0, 0.0, 1.0]
    assert [list(chosen.samples) for chosen in first.selection.chosen] == [[0], [1], [0, 1]]
    engine.send(done(3, 1, lost=[0, 1]), done(4, 1, lost=[0, 1]), done(5, 1, lost=[0]))
    with pytest.raises(RuntimeError, match="5 of 5 completions with calls are lost"):
        rollouts.step(1, stages[1])


@pytest.mark.parametrize("has_tools", [False, True])
def test_with_tools_a_step_tells_how_long_its_engines_only_waited_for_calls(
    tmp_path: Path, tied_model: Path, ends: tuple[Mailbox, Mailbox], has_tools: bool
) -> None:
    engine = Engine(ends[1])
    tools = ToolsConfig(format="fence" if has_tools else None)
    rollouts = asynchronous(tmp_path, tied_model, connected(ends[0]), tools=tools)
    reports = [report(1.0, 0.5, 100, 0.2), report(4.0, 0.5, 100, 0.2, waiting_seconds=1.75)]
    engine.send(reports[0].taken, reports[1].taken, done(0, 0), done(1, 0), done(2, 0))
    metrics = rollouts.step(0, length_stages(rollouts._config, 5)[0]).metrics
    assert metrics.get("tools/wait_share") == (0.4 if has_tools else None)
