import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.algorithms.dynamic_sampling import Selection, SelectionRules, choose_all
from rlmath.algorithms.types import Completion, Prompt, Sample, Score, ScoredGroup
from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import Config, StagesConfig, TeacherConfig, ToolsConfig
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.metrics import UpdateRecord
from rlmath.trainer.policy_update import make_samples
from rlmath.trainer.rollouts import engines
from rlmath.trainer.rollouts.synchronous import StepRollout, selection_rules
from rlmath.workers.user_functions import UserFunctionError
from tests.trainer import test_metrics


def group(prompt_id: str, token: int, rewards: list[float]) -> ScoredGroup:
    """A group whose g-th completion has g + 1 tokens."""
    completions = tuple(
        Completion(g, tuple(range(token, token + g + 1)), (-0.5 - g,) * (g + 1), "", "stop", 0)
        for g in range(len(rewards))
    )
    scores = tuple(Score(reward, reward > 0, "", "string") for reward in rewards)
    return ScoredGroup(Prompt(prompt_id, "?", (token, 1), ("2",), "math"), completions, scores)


GROUPS = [group("q-1", 10, [5.0, -5.0]), group("q-2", 20, [-5.0, 5.0])]


def test_samples_stand_in_the_order_of_prompt_and_sample():
    assert make_samples(GROUPS, [[0.7, -0.7], [-0.6, 0.6]]) == [
        Sample((10, 1), (10,), (-0.5,), 0.7),
        Sample((10, 1), (10, 11), (-1.5, -1.5), -0.7),
        Sample((20, 1), (20,), (-0.5,), -0.6),
        Sample((20, 1), (20, 21), (-1.5, -1.5), 0.6),
    ]


@pytest.mark.parametrize("advantages", [[[1.0] * 2], [[1.0] * 2, [1.0]], [[1.0] * 2] * 3])
def test_advantages_must_fit_the_groups(advantages: list[list[float]]):
    with pytest.raises(ValueError, match="zip"):
        make_samples(GROUPS, advantages)


@pytest.mark.parametrize(("drawn", "step"), [(12, 7), (28, 7), (29, 8), (32, 8)])
def test_other_seeds_begin_with_the_first_step_of_which_nothing_is_drawn(
    drawn: int, step: int
) -> None:
    """Seven steps of 4 draws are done."""
    trainer: Any = SimpleNamespace(
        rollouts=SimpleNamespace(next_draw=drawn), order=SimpleNamespace(prompts_per_step=4)
    )
    assert GrpoTrainer.next_draw_step(trainer, 7) == step


def test_the_calls_that_the_engines_docstring_shows_are_those_that_the_class_takes() -> None:
    calls = re.findall(r"engines\.(connect|generating)\(([^)]*)\)", engines.__doc__ or "")
    assert [name for name, _ in calls] == ["connect", "generating"]
    for name, arguments in calls:
        inspect.signature(getattr(engines.Engines, name)).bind("self", *arguments.split(", "))


def step_metrics(config: Config, number: int = 0, teacher: Any = None) -> dict[str, float]:
    """The metrics of a step from which two of three groups teach, in the length stage `number`."""
    trainer = GrpoTrainer.__new__(GrpoTrainer)
    trainer.config = config
    trainer.rules = selection_rules(config)
    trainer.teacher = teacher
    trainer.peak_flops = None
    step_engines: Any = SimpleNamespace(metrics=lambda: {"sync/sent_gib": 0.5})
    trainer.engines = step_engines
    groups = test_metrics.GROUPS
    selection = Selection(groups, choose_all(groups, SelectionRules()), len(groups))
    rollout = StepRollout(
        selection, [], scores=[], sampled_tokens=40, metrics={"rollout/groups_in_flight": 3.0}
    )
    update = UpdateRecord(
        test_metrics.RESULTS,
        test_metrics.ADVANTAGES,
        reward_kl=None,
        passes=2.0,
        critic_metrics={"critic/loss": 0.25},
        teacher_kl=None if teacher is None else 0.75,
    )
    stage = length_stages(config, 9)[number]
    return trainer.metrics(stage, rollout, update, {"update": 0.5, "rollout": 4.0, "step": 8.0})


def test_a_step_has_the_metrics_of_all_that_it_did() -> None:
    metrics = step_metrics(Config())
    expected = {
        "rollout/groups_in_flight": 3.0,
        "sync/sent_gib": 0.5,
        "critic/loss": 0.25,
        "train/teaching_groups": 2 / 3,
        "task_reward": -10 / 6,
        "train/minibatches": 3.0,
        "seconds/step": 8.0,
        "tokens_per_second/rollout": 40 / 4,
        "tokens_per_second/update": 64 * 2 / 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    families = ("tools/", "stage", "train/teacher_kl", "rollout/max_new_tokens", "mfu/")
    assert [name for name in metrics if name.startswith(families)] == []


def test_metrics_of_tools_of_a_teacher_and_of_length_stages_are_there_where_these_are() -> None:
    """Every group that was kept teaches where a teacher is part of the loss."""
    tools = step_metrics(Config(tools=ToolsConfig(format="fence")))
    assert tools["tools/calls_per_completion"] == 0.0 and "train/teacher_kl" not in tools
    without_teacher = step_metrics(Config(teacher=TeacherConfig(loss="full")))
    assert without_teacher["train/teaching_groups"] == pytest.approx(2 / 3)
    for loss, teaching in (("full", 1.0), ("advantage", 2 / 3)):
        teacher: Any = object()
        taught = step_metrics(
            Config(teacher=TeacherConfig(path="t", loss=loss)),  # type: ignore[arg-type]
            teacher=teacher,
        )
        assert taught["train/teacher_kl"] == 0.75
        assert taught["train/teaching_groups"] == pytest.approx(teaching)
    staged = Config(stages=StagesConfig(steps=[4, 5], max_new_tokens=[16, 32]))
    for number, length in ((0, 16.0), (1, 32.0)):
        metrics = step_metrics(staged, number)
        assert (metrics["stage"], metrics["rollout/max_new_tokens"]) == (number + 1.0, length)


class RecordedEngines(engines.Engines):
    """Engines of which only the beginnings and ends of their phase are known."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int]] = []

    @contextmanager
    def _generating(self, version: int, step: int) -> Iterator[None]:
        self.phases.append(("begin", version, step))
        yield
        self.phases.append(("end", version, step))

    def connect(self, actor: Any, offload: Any) -> None: ...

    def probe(self) -> dict[str, float]:
        return {}

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self, status: int) -> None: ...


def test_engines_leave_their_phase_before_a_function_of_the_users_ends_the_step() -> None:
    recorded_engines = RecordedEngines()
    with recorded_engines.generating(8, 3):
        pass
    with pytest.raises(UserFunctionError, match="it fails"), recorded_engines.generating(9, 4):
        raise UserFunctionError("it fails")
    assert recorded_engines.phases == [
        ("begin", 8, 3),
        ("end", 8, 3),
        ("begin", 9, 4),
        ("end", 9, 4),
    ]
