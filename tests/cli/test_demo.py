"""What the demo trains with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.cli.demo import ALGORITHMS, fill_layout, parse, training_words
from rlmath.config.load import load_config, make_parser
from rlmath.rewards.schemes import raw_reward, reward_scale

OTHER_REWARDS = {"simplerl": (1.0, -0.5), "critic": (1.0, -1.0)}
"""Rewards of a right and a wrong answer where they are not those of every other objective.

The papers of some objectives pay for a box, too; the values of a critic begin at 0."""


@pytest.mark.parametrize("name", sorted(path.stem for path in ALGORITHMS.glob("*.yaml")))
def test_the_demo_pays_every_objective_alike_so_that_published_curves_can_be_made_again(
    name: str, tmp_path: Path
):
    demo = parse(["--algorithm", name])
    fill_layout(demo, gpus=0)
    arguments = make_parser("").parse_intermixed_args(training_words(tmp_path, demo))
    reward = load_config(arguments.config, arguments.overrides).reward
    paid = tuple(
        raw_reward(reward, right, True) * reward_scale(reward, True) for right in (True, False)
    )
    assert paid == OTHER_REWARDS.get(name, (5.0, -5.0))


def test_settings_of_the_command_line_are_those_of_the_training(tmp_path: Path) -> None:
    """The demo with experts replays its engine's, unless they say otherwise."""
    replays = []
    for words in ((), ("policy.routing_replay=none", "validation.every_steps=5")):
        demo = parse(["--algorithm", "experts", "--seed", "3", *words])
        fill_layout(demo, gpus=0)
        arguments = make_parser("").parse_intermixed_args(training_words(tmp_path, demo))
        config = load_config(arguments.config, arguments.overrides)
        assert (config.run.seed, config.policy.dtype) == (3, "bfloat16")
        replays.append((config.policy.routing_replay, config.validation.every_steps))
    assert replays == [("engine", 1000), ("none", 5)]


@pytest.mark.parametrize(
    ("words", "gpus", "layout"),
    [
        ((), 0, (2, 2)),
        ((), 1, (1, 1)),
        ((), 8, (2, 2)),
        (("--ranks", "1"), 0, (1, 1)),
        (("--ranks", "4"), 8, (4, 2)),
        (("--tensor-parallel", "1"), 0, (2, 1)),
        (("--ranks", "2", "--oversubscribe"), 1, (2, 2)),
    ],
)
def test_ranks_that_are_not_given_fit_the_machine(
    words: tuple[str, ...], gpus: int, layout: tuple[int, int]
) -> None:
    demo = parse(words)
    fill_layout(demo, gpus)
    assert (demo.ranks, demo.tensor_parallel) == layout


@pytest.mark.parametrize(
    ("words", "gpus", "told"),
    [
        (("--ranks", "2"), 1, "2 ranks on 1 GPU: every rank takes a GPU of its own"),
        (("--tensor-parallel", "2"), 1, "--ranks is 1; needed: a multiple of TP x PP = 2 x 1"),
        (("--ranks", "0"), 0, "--ranks is 0; needed: a multiple"),
        (("--ranks", "3"), 0, "--ranks is 3; needed: a multiple of TP x PP = 2 x 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    words: tuple[str, ...], gpus: int, told: str
) -> None:
    with pytest.raises(ValueError) as error:
        fill_layout(parse(words), gpus)
    assert told in str(error.value)
