"""A policy that can no longer be trained, and what a run keeps of the time before.

These signs end a run, alike on all ranks, with the exit status `exit_codes.DIVERGED`, unless it may
go back to a checkpoint from before (`rollback`):

- parameters or optimizer state that are not finite. All ranks look at theirs before each save and
  export, and after a step that discarded a minibatch;
- `run.max_discarded_steps` steps in a row that had minibatches and discarded all of them;
- a last step of which every minibatch was discarded, and log-probs that are not finite after it;
- with `algorithm.rollback_reward_drop`, rewards that have collapsed (`collapse_of`).

No checkpoint is written of weights that are not finite. Those of the steps that discarded
everything are, and count among the newest that stay, but the newest one after which something was
learned stays beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlmath.algorithms.types import Sample
from rlmath.checkpoint.directory import Progress
from rlmath.checkpoint.hf.weights import all_finite
from rlmath.checkpoint.sharded_state import held_by
from rlmath.data.packing import pack
from rlmath.distributed.collectives import first_error
from rlmath.models.learner import MinibatchResult
from rlmath.trainer.base import Trainer

ADVICE = (
    "Lower optimizer.lr, raise optimizer.warmup_steps, or lower optimizer.clip_grad, "
    "algorithm.n_minibatches or "
    "algorithm.epochs, and start a new run.output_dir"
)
NO_STEP = 2**62
"""Later than every step: there are no best rewards."""
MIN_DEVIATIONS = 3.0
"""How many deviations of a single step rewards must have fallen by, too."""
ROUNDING = 1e-9
"""How far means of a reward that never changes may differ, by rounding."""


class DivergedError(Exception):
    """The run ends; raised on all ranks alike.

    The message says why, in one line."""


@dataclass(frozen=True)
class RewardRule:
    """When rewards have collapsed; see `AlgorithmConfig`."""

    drop: float
    steps: int


@dataclass(frozen=True)
class BestRewards:
    """The best of the earlier windows of a run's rewards."""

    mean: float
    end: int
    """Steps done at its end."""
    collapsed: str | None
    """Why the last window's rewards are a collapse; None where they are none."""


def best_rewards(
    rewards: Sequence[float], rule: RewardRule, first_step: int = 0
) -> BestRewards | None:
    """The best window of steps before the last window, and whether the last one is a collapse.

    It is a collapse if its mean is lower than the best one by more than `rule.drop` x (best -
    first), and by more than MIN_DEVIATIONS x the root of the mean of both windows' variances. The
    latest of equally good windows is the best. None if there are fewer than two windows.
    `first_step` steps were done before the first reward.

    >>> best_rewards([0.0, 0.2, 0.8, 1.0, 0.1, 0.1], RewardRule(drop=0.5, steps=2))
    BestRewards(mean=0.9, end=4, collapsed='the mean reward of the last 2 steps is 0.1; up to step 4 it was 0.9')
    """
    size = rule.steps
    if len(rewards) < 2 * size:
        return None
    means = [
        statistics.fmean(rewards[end - size : end]) for end in range(size, len(rewards) - size + 1)
    ]
    best, end = max((mean, end) for end, mean in enumerate(means, start=size))
    last_window = rewards[-size:]
    best_window = rewards[end - size : end]
    mean = statistics.fmean(last_window)
    deviation = math.sqrt(
        (statistics.pvariance(last_window) + statistics.pvariance(best_window)) / 2
    )
    drop = best - mean
    least_drop = max(
        rule.drop * (best - means[0]), MIN_DEVIATIONS * deviation, ROUNDING * max(1.0, abs(best))
    )
    if not drop > least_drop:  # nor where a reward is NaN
        return BestRewards(best, first_step + end, None)
    end += first_step
    reason = (
        f"the mean reward of the last {size} steps is {mean:.4g}; up to step {end} it was "
        f"{best:.4g}"
    )
    return BestRewards(best, end, reason)


class DivergenceCheck:
    """Looks for the signs.

    All ranks call it alike."""

    def __init__(
        self,
        trainer: Trainer,
        max_discarded_steps: int,
        progress: Progress | None,
        rule: RewardRule | None = None,
    ) -> None:
        """`progress` is where a resumed run stands; `rule` None: rewards are not looked at."""
        self._trainer = trainer
        self._max_discarded_steps = max_discarded_steps
        self.rule = rule
        self.begin_at(progress)

    def begin_at(self, progress: Progress | None) -> None:
        """The run continues where it stands at `progress`."""
        looks = progress is not None and self.rule is not None
        self.rewards = list(progress.rewards) if progress is not None and looks else []
        """Mean reward of every step since rewards are looked at."""
        self.good_step = progress.good_step if progress is not None and looks else NO_STEP
        """Steps done at the end of the best of them."""
        self._first_step = 0 if progress is None else progress.step - len(self.rewards)
        self.discarded_steps = 0 if progress is None else progress.discarded_steps
        """Steps up to now in which all minibatches were discarded; steps without any minibatch do
        not count."""
        self.learned_step = 0 if progress is None else progress.learned_step
        """Steps done when a minibatch was last learned from."""

    @property
    def sound_before(self) -> int:
        """The step that `Progress.sound_before` names."""
        return min(self.learned_step, self.good_step + 1)

    def after_step(
        self, step: int, results: Sequence[MinibatchResult], reward: float | None = None
    ) -> None:
        """Look for signs of divergence after a step; DivergedError if the run must end.

        `step` steps are done, `results` are those of the last step's minibatches and `reward` is
        its mean reward. A collective."""
        collapsed = None
        if self.rule is not None and reward is not None:
            self.rewards.append(float(reward))
            best = best_rewards(self.rewards, self.rule, self._first_step)
            if best is not None:
                self.good_step = best.end
                collapsed = best.collapsed
        # An overflow lowers the loss scale: the policy is as it was.
        discarded = [
            result.discarded
            for result in results
            if result.discarded is not None and not result.overflowed
        ]
        if any(result.discarded is None for result in results):
            self.discarded_steps = 0
            self.learned_step = step
        elif discarded:
            self.discarded_steps += 1
        if collapsed is not None:
            raise DivergedError(
                f"{collapsed} (algorithm.rollback_reward_drop is {self.rule and self.rule.drop:g})"
            )
        if not discarded:
            return
        self.raise_if_not_finite()
        if self.discarded_steps >= self._max_discarded_steps:
            raise DivergedError(
                f"every minibatch of {self.discarded_steps} steps in a row was discarded "
                "(run.max_discarded_steps is "
                f"{self._max_discarded_steps}), the last one because {discarded[-1]}"
            )

    def raise_if_broken(self) -> None:
        """DivergedError, on all ranks, if the last step leaves no usable model.

        That is so if nothing was learned from any of the step's minibatches, or if the weights or
        the log-probs of a text are not finite. A collective."""
        if self.discarded_steps > 0:
            steps = f"{self.discarded_steps} steps" if self.discarded_steps > 1 else "step"
            raise DivergedError(
                f"every minibatch of the last {steps} with any was discarded: nothing was learned "
                "any more"
            )
        self.raise_if_not_finite()
        trainer = self._trainer
        mesh = self._trainer.mesh
        tokens = [number % trainer.shape.vocab_size for number in range(9)]
        text = Sample(tokens[:1], tokens[1:], [0.0] * 8, advantage=0.0)
        batch = pack([text], [0], mesh.tensor if trainer.config.parallel.sequence else 1)
        logprobs = trainer.actor.forward_backward.logprobs([batch] * mesh.microbatch_multiple)
        finite = all(bool(tensor.isfinite().all()) for tensor in logprobs)
        if first_error(None if finite else "not finite") is not None:
            raise DivergedError("the model gives log-probs that are not finite")

    def raise_if_not_finite(self) -> None:
        """DivergedError, on all ranks, if parameters or optimizer state of any rank are not finite.

        A collective."""
        broken_model = None
        for model in self._trainer.saved_models():
            with self._trainer.models_on_device([model]):
                if not all_state_finite(model.chunks, model.optimizer):
                    broken_model = f"{model.name or 'policy'} on rank {dist.get_rank()}"
        first_broken_model = first_error(broken_model)
        if first_broken_model is not None:
            raise DivergedError(
                "there are values that are not finite in the parameters, or the optimizer's "
                f"state, of the {first_broken_model}"
            )


@torch.no_grad()
def all_state_finite(chunks: Sequence[Any], optimizer: Any) -> bool:
    """Whether all parameters and the optimizer's state of this rank are finite.

    One pass over the memory, no copy."""
    tensors = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter_state in held_by(optimizer) if optimizer is not None else ():
        tensors += parameter_state.tensors().values()
    return bool(torch.stack([all_finite(tensor) for tensor in tensors]).all())
