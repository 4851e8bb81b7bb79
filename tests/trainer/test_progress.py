"""The progress of a step's learners goes into a checkpoint and comes back, each one's own."""

from __future__ import annotations

from pathlib import Path

import torch

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.losses import LossSettings
from rlmath.checkpoint.directory import Progress, read_progress, write_progress
from rlmath.config.schema import Config, OptimizerConfig
from rlmath.models.critic import Critic, CriticLearner
from rlmath.models.learner import Actor, GrpoLearner
from rlmath.models.optimizer import LossScale, build_scheduler, learning_rate
from rlmath.trainer.grpo import GrpoTrainer
from rlmath.trainer.policy_update import PolicyTrainer


def trainer(policy_scale: LossScale, critic_scale: LossScale) -> GrpoTrainer:
    """A trainer without models: it holds the schedules alone.

    The rate falls by a tenth with every update."""
    settings = OptimizerConfig(lr=1.0, warmup_steps=0, decay="linear", min_lr=0.0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = build_scheduler(settings, optimizer, total_updates=10)
    policy = GrpoLearner(
        None, optimizer, scheduler, LossSettings(), EarlyStop(), loss_scale=policy_scale
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = build_scheduler(settings, optimizer, total_updates=10)
    critic = CriticLearner(None, optimizer, scheduler, clip=None, loss_scale=critic_scale)
    grpo_trainer = object.__new__(GrpoTrainer)
    grpo_trainer.config = Config()
    grpo_trainer.actor = Actor(policy, [])
    grpo_trainer.critic = Critic(critic, [])
    grpo_trainer.reference = None
    return grpo_trainer


def test_the_critic_goes_on_with_its_own_loss_scale_and_schedule(tmp_path: Path) -> None:
    """The scales of policy and critic differ in float16.

    Each halves where its own gradients overflow."""
    before = trainer(LossScale(64.0, 100, clean_updates=7), LossScale(8.0, 100, clean_updates=3))
    before.actor.learner.restore_schedule(5)
    before.critic.learner.restore_schedule(2)
    progress = before.complete_progress(Progress(1, 0, 4, 5, 1, "TP1", 1, (), (), "m", "d", {}))
    write_progress(tmp_path, progress)
    after = trainer(LossScale(1024.0, 100), LossScale(1024.0, 100))
    PolicyTrainer.resume(after, tmp_path, read_progress(tmp_path))
    assert after.critic.learner.loss_scale == LossScale(8.0, 100, clean_updates=3)
    assert after.critic.learner.updates == 2
    assert round(learning_rate(after.critic.learner.optimizer), 6) == 0.8
    assert after.actor.learner.loss_scale == LossScale(1024.0, 100), (
        "the run's life cycle restores the policy"
    )
