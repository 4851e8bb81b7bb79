"""What the demo trains with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.cli.demo import ALGORITHMS, parse, training_words
from rlmath.config.load import load_config, make_parser
from rlmath.rewards.schemes import raw_reward, reward_scale

OTHER_REWARDS = {"simplerl": (1.0, -0.5), "critic": (1.0, -1.0)}
"""Of objectives whose paper pays for a box, too, and of a critic, whose values begin at 0."""


@pytest.mark.parametrize("name", sorted(path.stem for path in ALGORITHMS.glob("*.yaml")))
def test_the_demo_pays_every_objective_alike_so_that_published_curves_can_be_made_again(
    name: str, tmp_path: Path
):
    given = make_parser("").parse_intermixed_args(training_words(tmp_path, parse(["--algorithm", name])))
    reward = load_config(given.config, given.overrides).reward
    paid = tuple(raw_reward(reward, right, True) * reward_scale(reward, True) for right in (True, False))
    assert paid == OTHER_REWARDS.get(name, (5.0, -5.0))
