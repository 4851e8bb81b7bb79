import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.algorithms.types import Completion, Prompt, Sample, Score, ScoredGroup
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.policy_update import make_samples
from rlmath.trainer.rollouts import engines


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
