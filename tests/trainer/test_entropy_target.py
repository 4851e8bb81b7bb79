"""The weight of the entropy, from minibatch to minibatch and over a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.entropy import EntropyControl
from rlmath.algorithms.losses import LossSettings
from rlmath.checkpoint.directory import Progress, read_progress, write_progress
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.models.learner import Actor, GrpoLearner, MinibatchResult
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.metrics import UpdateRecord
from rlmath.trainer.policy_update import PolicyTrainer


def trainer() -> GrpoTrainer:
    """A trainer without models: it holds the weight alone."""
    grpo_trainer = object.__new__(GrpoTrainer)
    grpo_trainer.config = Config(algorithm=AlgorithmConfig(entropy_target=0.2, entropy_delta=0.005))
    grpo_trainer.actor = Actor(
        GrpoLearner(None, None, None, LossSettings(entropy_coef=0.01), EarlyStop()), []
    )
    grpo_trainer.entropy = EntropyControl(0.01, 0.01)
    grpo_trainer.critic = None
    grpo_trainer.reference = None
    return grpo_trainer


def update(*entropies: float) -> UpdateRecord:
    """An update of minibatches of 10, 11, ... tokens with these mean entropies."""
    sums = [
        {"entropy": entropy * (10 + i), "tokens": 10.0 + i} for i, entropy in enumerate(entropies)
    ]
    return UpdateRecord(
        [MinibatchResult(minibatch_sums, {}, 1.0, 0.1, None) for minibatch_sums in sums], [], None
    )


def test_it_follows_the_mean_over_tokens_and_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    run = trainer()
    assert run.control_entropy(update(0.29, 0.1)) == {
        "train/entropy_coef": 0.01
    }  # 4 / 21 is below 0.2
    assert run.actor.learner.settings.entropy_coef == pytest.approx(0.015)
    assert run.control_entropy(update(0.3)) == {"train/entropy_coef": pytest.approx(0.015)}
    assert run.actor.learner.settings.entropy_coef == 0.0 and run.entropy.coef == pytest.approx(
        0.01
    )
    discarded_minibatch = MinibatchResult(
        {"entropy": math.nan, "tokens": 9.0}, {}, 1.0, 0.1, "the loss is not finite"
    )
    # A step without an update tells nothing.
    run.control_entropy(UpdateRecord([discarded_minibatch], [], None))
    state = run.complete_progress(Progress(1, 0, 4, 2, 1, "TP1", 1, (), (), "m", "d", {}))
    assert state.entropy == (pytest.approx(0.01), 0.0)
    write_progress(tmp_path, state)
    later = trainer()
    PolicyTrainer.resume(later, tmp_path, read_progress(tmp_path))
    assert later.entropy == run.entropy and later.actor.learner.settings.entropy_coef == 0.0
