"""Advantages of a critic's values, whose mean and deviation are taken over all tokens of the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmath.config.schema import CriticConfig
from rlmath.data.packing import pack
from rlmath.distributed.mesh import Mesh
from rlmath.models.critic import TokenValues
from rlmath.trainer.critic import CriticUpdater
from rlmath.trainer.policy_update import make_samples
from tests.trainer.test_grpo import group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_advantages_are_the_rewards_less_the_values_over_the_deviation_of_all_tokens(alone: None) -> None:
    """Gamma and lambda are 1: a token's advantage is its completion's reward less the token's value."""
    groups = [group("q-1", 10, [5.0, -5.0, 1.0]), group("q-2", 20, [-3.0, 8.0])]
    rewards = [one.rewards for one in groups]
    batch = pack(make_samples(groups, [[0.0] * 3, [0.0] * 2]), range(5), pad_to_multiple=4)
    counted_T = batch.completion_index_T >= 0
    values_T = torch.linspace(-2.0, 3.0, len(counted_T))
    values = TokenValues(values_T, torch.zeros(batch.n_segments))
    critic: Any = SimpleNamespace(learner=SimpleNamespace(values=lambda batches: [values]))
    settings = CriticConfig(gamma=1.0, policy_lambda=1.0, policy_length_alpha=None, value_lambda=1.0)
    updater = CriticUpdater(critic, settings, 0.125, None, Mesh(0, 1, 1, 1, 1))
    found = updater.estimate([batch], groups, rewards, None, None)
    of_tokens = [reward for row in rewards for g, reward in enumerate(row) for _ in range(g + 1)]
    raw_N = torch.tensor(of_tokens).double() - values_T[counted_T].double()
    wanted_N = (raw_N - raw_N.mean()) / (raw_N.std(correction=0) + 0.125)
    torch.testing.assert_close(found.batches[0].advantages_T[counted_T].double(), wanted_N)
    assert not found.batches[0].advantages_T[~counted_T].any()
    torch.testing.assert_close(found.targets[0].returns_T[counted_T], torch.tensor(of_tokens))
    assert found.advantages[0][1] == pytest.approx(float(wanted_N[1:3].mean()))
