"""The order of a step's parts, and what each is handed; the parts are stand-ins that tell of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.algorithms.dynamic_sampling import Chosen, Selection
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    PartialCompletion,
    RoutesAt,
    ScoredGroup,
)
from rlmath.checkpoint.directory import CRITIC_CONFIG
from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    RewardConfig,
    RunConfig,
    SelectionConfig,
    StagesConfig,
    TeacherConfig,
)
from rlmath.data.prompt_curriculum import HISTORY
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.rewards.reward_manager import FailedSteps, RewardFunctionError
from rlmath.rollout.work_queue import EngineUsage
from rlmath.telemetry.reporter import StepRecord, ValidationResult
from rlmath.trainer import grpo
from rlmath.trainer.base import Interrupted
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.metrics import UpdateRecord
from rlmath.trainer.policy_update import PolicyTrainer
from rlmath.trainer.rollouts.synchronous import StepRollout, selection_rules
from tests.trainer import test_metrics
from tests.trainer.test_models_of_a_run import PROGRESS

STEPS = 9
GROUPS = test_metrics.GROUPS
SELECTION = Selection(GROUPS, [Chosen((1,)), Chosen((), dropped="right"), Chosen((0, 1))], 2)
UPDATE = UpdateRecord(test_metrics.RESULTS, [[-1.0], [0.5, -1.5]], None, passes=2.0)
MEASURED = ValidationResult(3, {"validation/accuracy": 0.5})
STAGED = Config(stages=StagesConfig(steps=[4, 5], max_new_tokens=[16, 32]))


class Routes:
    """The routes of a step, until they are cleared."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def keep_only(self, places: Iterable[RoutesAt]) -> None:
        self.events.append(list(places))


class Parts:
    """The parts of a run, which write down what happens to them."""

    phase = "wait_for_groups"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.generates = False
        self.stopped_by: str | None = None
        self.routes: Any = None
        self.parts_in_flight: list[PartialCompletion] = []
        self.next_draw = 0
        self.update_record = UPDATE

    @contextmanager
    def generating(self, version: int, step: int) -> Iterator[None]:
        self.events.append(("generate", version, step))
        self.generates = True
        yield
        self.generates = False

    def probe(self) -> dict[str, float]:
        assert self.generates
        return {"sync/probe": 0.25}

    def validate(self, step: int) -> ValidationResult | None:
        assert self.generates
        self.events.append(("validate", step))
        return MEASURED

    def due(self, step: int) -> bool:
        return step == STEPS

    def step(self, number: int, stage: Any) -> StepRollout:
        assert self.generates
        self.events.append(("roll out", number, stage.number))
        scores = [score for group in GROUPS for score in group.scores]
        return StepRollout(
            SELECTION,
            rounds=[[EngineUsage(1.0, 4, 1, fill=0.5)]],
            scores=scores,
            sampled_tokens=40,
            metrics={"rollout/rounds": 2.0},
        )

    def keep_if_best(self, measured: ValidationResult | None) -> None:
        assert not self.generates
        self.events.append(("keep", measured))

    def advantages(
        self, rewards_PG: list[list[float]], tokens_PG: list[list[int]]
    ) -> list[list[float]]:
        self.events.append(("advantages", rewards_PG, tokens_PG))
        return [[3.0], [4.0, 5.0]]

    def commit(self) -> dict[str, float]:
        self.events.append(("commit",))
        return {"prompts/solved": 0.125}

    def before_update(self, *record: Any, own_advantages: Any, routes: Any) -> None:
        self.events.append(("record", *record, own_advantages, routes))

    def after_update(self, update: UpdateRecord) -> None:
        self.events.append(("recorded", update is self.update_record))

    def update(
        self, groups: Sequence[ScoredGroup], number: int, own_advantages: Any, routes: Any
    ) -> UpdateRecord:
        assert not self.generates
        self.events.append(("update", groups, number, own_advantages, routes))
        return self.update_record

    def metrics(self, groups: Any = None) -> dict[str, float]:
        """Metrics of the engines, and of the user's functions."""
        return {"sync/sent_gib": 0.5} if groups is None else {"own/groups": float(len(groups))}

    def resume(self, *place: Any) -> None:
        self.events.append(("resume", *place))

    def files(self) -> dict[str, bytes]:
        return {"state": b"1"}

    def rank_files(self) -> dict[str, bytes]:
        return {"routes": b"3"}


def trainer(config: Config, parts: Parts, rank: int = 0) -> GrpoTrainer:
    run = object.__new__(GrpoTrainer)
    any_parts: Any = parts
    any_actor: Any = SimpleNamespace(learner=SimpleNamespace(updates=7))
    run.config = config
    run.shapes = SimpleNamespace(length_stages=length_stages(config, STEPS))  # type: ignore[assignment]
    run.mesh = Mesh(rank, 2, 1, pipeline=1, engine_size=1)
    run.timers = PhaseTimers()
    run.total_steps = STEPS
    run.entered_length_stage = None
    run.actor = any_actor
    run.engines = run.validator = run.rollouts = run.hooks = run.recorder = any_parts
    run.updaters = [any_parts if number == 1 else None for number in range(2)]  # type: ignore[misc]
    run.failed_steps = FailedSteps(1.0)
    run.rules = selection_rules(config)
    run.critic = run.reference = run.teacher = None
    run.peak_flops = None
    run.reward_fingerprint = "f"
    return run


def finished_step(record: StepRecord | Interrupted) -> StepRecord:
    assert isinstance(record, StepRecord)
    return record


def test_a_step_goes_from_the_weights_to_the_update_in_its_order() -> None:
    """Step 5 is of the second length stage, and has the seconds of its own phases alone."""
    parts = Parts()
    run = trainer(STAGED, parts)
    with run.timers.phase("an earlier step's"):
        pass
    record = finished_step(run.step(5))
    rewards_PG = [[-5.0], [5.0, -5.0]]
    own_advantages = [[3.0], [4.0, 5.0]]
    assert parts.events == [
        ("generate", 7, 5),
        ("validate", 5),
        ("roll out", 5, 1),
        ("keep", MEASURED),
        ("advantages", rewards_PG, [[4], [10, 10]]),
        ("commit",),
        ("record", 5, 1, SELECTION, own_advantages, None),
        ("update", SELECTION.learned, 5, own_advantages, None),
        ("recorded", True),
    ]
    assert record.groups == GROUPS and record.validation is MEASURED
    assert record.advantages == [[0.0, -1.0], [0.0, 0.0], [0.5, -1.5]]
    assert record.results == test_metrics.RESULTS
    expected = {
        "sync/probe": 0.25,
        "prompts/solved": 0.125,
        "own/groups": 3.0,
        "rollout/rounds": 2.0,
        "rollout/batch_fill": 0.5,
        "sync/sent_gib": 0.5,
        "n_seqs": 6.0,
    }
    assert {name: record.metrics[name] for name in expected} == expected
    phases = {f"seconds/{name}" for name in ("probe", "wait_for_groups", "capture", "step")}
    assert {name for name in record.metrics if name.startswith("seconds/")} == phases


def test_a_run_that_is_asked_to_stop_while_it_validates_makes_no_step() -> None:
    parts = Parts()
    parts.stopped_by = "SIGTERM"
    assert trainer(STAGED, parts).step(5) == Interrupted("SIGTERM")
    assert parts.events == [("generate", 7, 5), ("validate", 5)]


def test_routes_stay_that_are_learned_from_and_then_those_that_are_in_flight() -> None:
    """What a skipped update has not fetched is forgotten as well."""
    parts = Parts()
    parts.routes = routes = Routes()
    in_flight = RoutesAt(0, 3, tokens=2)
    parts.parts_in_flight = [replace(NOTHING_SAMPLED, routes_at=(in_flight,))]
    trainer(STAGED, parts).step(5)
    assert parts.events[-2][-1] is routes
    assert routes.events == [[in_flight], [in_flight]]


def test_functions_that_fail_on_all_completions_end_the_run_and_the_verifier_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = [replace(test_metrics.BROKEN, extracted="ValueError")] * 6
    monkeypatch.setattr(
        Parts,
        "step",
        lambda self, number, stage: StepRollout(SELECTION, [], scores=broken, sampled_tokens=40),
    )
    trainer(STAGED, Parts()).step(5)
    by_function = replace(STAGED, reward=RewardConfig(function="own:reward"))
    with pytest.raises(RewardFunctionError):
        trainer(by_function, Parts()).step(5)


def test_what_selection_drops_is_told_where_it_drops_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert not any(
        name.startswith("selection/")
        for name in finished_step(trainer(STAGED, Parts()).step(5)).metrics
    )
    assert "step 6: " not in caplog.text
    selecting = replace(STAGED, selection=SelectionConfig(dynamic_sampling="reward"))
    record = finished_step(trainer(selecting, Parts()).step(5))
    assert record.metrics["selection/dropped/right"] == 1.0
    assert f"step 6: {SELECTION.line()}" in caplog.text


def test_a_length_stage_is_told_as_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = trainer(STAGED, Parts())
    assert [run.enter_length_stage(number).number for number in range(3, 7)] == [0, 1, 1, 1]
    lines = [stage.line(2) for stage in length_stages(STAGED, STEPS)]
    told = [record for record in caplog.records if record.getMessage() in lines]
    assert [record.getMessage() for record in told] == lines
    plain = trainer(Config(), Parts())
    caplog.clear()
    plain.enter_length_stage(0)
    assert not caplog.records


def test_a_step_moves_the_reference_and_the_weight_of_the_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is moved as the step ends, so by the number of steps done."""
    moves: list[int] = []
    monkeypatch.setattr(GrpoTrainer, "move_reference", lambda self, steps: moves.append(steps))
    monkeypatch.setattr(
        GrpoTrainer, "control_entropy", lambda self, update: {"train/entropy_coef": 0.75}
    )
    record = finished_step(trainer(STAGED, Parts()).step(5))
    assert moves == [6] and record.metrics["train/entropy_coef"] == 0.75


@pytest.mark.parametrize("with_rewards", [False, True])
def test_a_function_gives_advantages_where_rewards_are_learned_from(with_rewards: bool) -> None:
    teacher = TeacherConfig(path="t", loss="advantage", with_rewards=with_rewards)
    config = replace(STAGED, teacher=teacher)
    run = trainer(config, Parts())
    run.teacher = object()  # type: ignore[assignment]
    assert (run.own_advantages(GROUPS) is not None) is with_rewards
    run.teacher = None
    assert run.own_advantages(GROUPS) is not None


def test_a_step_in_which_the_critic_learned_alone_has_its_results() -> None:
    parts = Parts()
    critic_results = [test_metrics.CRITIC_RESULT]
    parts.update_record = replace(
        UPDATE,
        results=[],
        critic_results=critic_results,
        routing={"pairs": 4.0, "tokens": 2.0, "differing_pairs": 1.0, "differing_tokens": 1.0},
    )
    record = finished_step(trainer(STAGED, parts).step(5))
    assert record.results == critic_results
    assert record.metrics["routing/differing_choices"] == 0.25


def test_the_last_validation_is_of_the_weights_after_all_steps() -> None:
    parts = Parts()
    assert trainer(STAGED, parts).validate_at_end() is MEASURED
    assert parts.events == [("generate", 7, STEPS), ("validate", STEPS), ("keep", MEASURED)]
    parts.events.clear()
    run = trainer(STAGED, parts)
    run.total_steps = STEPS + 1
    assert run.validate_at_end() is None and parts.events == []


def test_rank_zero_has_the_files_of_a_checkpoint_and_each_rank_its_own() -> None:
    run = trainer(STAGED, Parts())
    assert run.checkpoint_files() == {"state": b"1", "routes": b"3"}
    run.critic = object()  # type: ignore[assignment]
    run.critic_config = b"2"
    assert run.checkpoint_files() == {"state": b"1", "routes": b"3", CRITIC_CONFIG: b"2"}
    assert trainer(STAGED, Parts(), rank=1).checkpoint_files() == {"routes": b"3"}


@pytest.mark.parametrize(("fingerprint", "changed"), [("", False), ("f", False), ("e", True)])
def test_rollouts_go_on_from_a_checkpoint_and_know_of_another_reward(
    tmp_path: Path, fingerprint: str, changed: bool
) -> None:
    parts = Parts()
    progress = replace(PROGRESS, step=3, reward_fingerprint=fingerprint)
    trainer(STAGED, parts).resume(tmp_path, progress)
    assert parts.events == [("resume", tmp_path, 3, changed)]


def test_a_run_ends_with_the_history_of_its_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    curriculum = SimpleNamespace(
        lines=lambda: ["2 prompts are solved"], file=lambda: b"rows", summary=lambda: {"solved": 2}
    )
    config = replace(STAGED, run=RunConfig(output_dir=str(tmp_path)))
    for rank in (1, 0):
        parts = Parts()
        parts.curriculum = curriculum  # type: ignore[attr-defined]
        run = trainer(config, parts, rank)
        assert not (tmp_path / HISTORY).exists()
        assert run.at_end() == {"history": {"solved": 2}}
        assert ("2 prompts are solved" in caplog.text) is (rank == 0)
    assert (tmp_path / HISTORY).read_bytes() == b"rows"


def test_a_trainer_is_made_of_engines_before_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines measure the memory that is free, and get the weights of the models."""
    entered: list[Any] = []
    parts = Parts()
    parts.rollouts = parts  # type: ignore[attr-defined]
    keep: Any = object()
    any_hooks: Any = SimpleNamespace(keep=keep)

    def init(self: Any, context: Any) -> None:
        self.config = context.config
        self.timers = PhaseTimers()
        self.actor = self.offload = None

    def open_engines(context: Any, timers: PhaseTimers, keep: Any) -> Parts:
        entered.append(("engines", keep))
        return parts

    def build_models(self: Any, context: Any) -> None:
        self.actor = "actor"
        self.offload = "sets"

    def connect(actor: Any, offload: Any) -> None:
        entered.append((actor, offload))

    parts.connect = connect  # type: ignore[attr-defined]
    monkeypatch.setattr(PolicyTrainer, "__init__", init)
    monkeypatch.setattr(GrpoTrainer, "build_models", build_models)
    monkeypatch.setattr(grpo, "open_engines", open_engines)
    monkeypatch.setattr(grpo, "StepHooks", lambda config, rank: any_hooks)
    context: Any = SimpleNamespace(
        config=replace(STAGED, algorithm=AlgorithmConfig()),
        inputs="inputs",
        mesh=Mesh(0, 1, 1, pipeline=1, engine_size=1),
        reward_fingerprint="f",
        on_phase=entered.append,
        validation=("file",),
    )
    run = GrpoTrainer(context)
    assert entered == ["build engine", ("engines", keep), "build model", ("actor", "sets")]
    assert (run.rollouts, run.validation_files) == (parts, ("file",))
