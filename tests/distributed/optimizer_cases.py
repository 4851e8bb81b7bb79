"""What one rank does in the tests of optimizer, schedule and models as the settings ask for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, Config, OptimizerConfig
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.fault_tolerance.preemption import SIGNALS
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.process import end_with_parent
from rlmath.run.prepared import PreparedRun
from tests.distributed.policy_cases import Case, Stage, settings, whole_tensors
from tests.tiny_models import shape_of

if TYPE_CHECKING:
    from rlmath.trainer.base import Trainer

ALONE = Mesh(0, 1, 1, 1, 1)
STOPS = (1, 7)


def start() -> Device:
    """A process group of one rank, and Megatron's groups on it."""
    from rlmath.models.megatron import start_megatron

    device = open_device("cpu")
    init_process_group(device, 120.0)
    start_megatron(ALONE, device, seed=1, timeout_seconds=120.0)
    return device


def actor_of(config: Config, folder: Path, device: Device, total_updates: int) -> Any:
    from rlmath.models.build import build_actor

    return build_actor(config, shape_of(folder), ALONE, device, total_updates, STOPS)


@dataclass(frozen=True)
class Schedule:
    """An optimizer, and how often a step uses it."""

    optimizer: OptimizerConfig
    steps: int
    n_minibatches: int = 1
    epochs: int = 1


def rates(folder: Path, schedules: Sequence[Schedule], groups: list[ScoredGroup]) -> list[list[float]]:
    """By schedule the learning rate of every update of a run, as its steps report them, and the one that would come
    next."""
    device = start()
    return [_rates(folder, one, groups, device) for one in schedules]


def _rates(folder: Path, schedule: Schedule, groups: list[ScoredGroup], device: Device) -> list[float]:
    from rlmath.data.dataset import most_updates
    from rlmath.models.offload import training_sets
    from rlmath.models.optimizer import learning_rate
    from rlmath.trainer.policy_update import PolicyUpdater

    algorithm = AlgorithmConfig(
        n_minibatches=schedule.n_minibatches, epochs=schedule.epochs, early_stop_ratio=None
    )
    config = replace(settings(folder, Case()), optimizer=schedule.optimizer, algorithm=algorithm)
    actor = actor_of(config, folder, device, most_updates(config, schedule.steps))
    offload = training_sets(actor, None, config.memory, device)
    updater = PolicyUpdater(config, shape_of(folder), ALONE, actor, None, offload, PhaseTimers())
    records = [updater.update(groups, number) for number in range(schedule.steps)]
    found = [result.learning_rate for record in records for result in record.results]
    return [*found, learning_rate(actor.learner.optimizer)]


def learned_with(
    folder: Path, algorithms: Sequence[AlgorithmConfig], groups: list[ScoredGroup]
) -> list[tuple[Any, ...]]:
    """By algorithm, of every minibatch of a step: whether it has log-probs of the policy and of the reference, whether
    it counts as on-policy; and how often the policy and the reference were asked for log-probs."""
    from rlmath.models.build import build_reference
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    device, shape, found = start(), shape_of(folder), []
    for algorithm in algorithms:
        config = replace(settings(folder, Case()), algorithm=algorithm)
        actor = actor_of(config, folder, device, 10)
        reference = build_reference(config, shape, ALONE, device, STOPS) if algorithm.kl_coef else None
        given: list[tuple[bool, bool, bool]] = []
        passes = {"policy": 0, "reference": 0}
        learn = actor.learner.learn

        def learning(
            batches: Any,
            old: Any,
            reference: Any,
            on_policy: bool,
            teacher: Any,
            learn: Any = learn,
            given: Any = given,
        ) -> Any:
            given.append((old is not None, reference is not None, on_policy))
            return learn(batches, old, reference, on_policy, teacher)

        def counted(model: Any, name: str, passes: dict[str, int] = passes) -> None:
            logprobs = model.logprobs

            def counting(batches: Any) -> Any:
                passes[name] += 1
                return logprobs(batches)

            model.logprobs = counting

        actor.learner.learn = learning
        counted(actor.forward_backward, "policy")
        if reference is not None:
            counted(reference, "reference")
        offload = training_sets(actor, reference, config.memory, device)
        updater = PolicyUpdater(config, shape, ALONE, actor, reference, offload, PhaseTimers())
        record = updater.update(groups, 0)
        found.append((given, passes, record.reward_kl is not None))
    return found


def updates(
    folder: Path, optimizers: Sequence[OptimizerConfig], minibatches: list[list[Sample]], total: int
) -> list[tuple[list[dict[str, Tensor]], list[float]]]:
    """By optimizer the weights after each minibatch, by Hugging Face names, and the gradient norms before clipping."""
    from rlmath.data.packing import pack

    device, found = start(), []
    for optimizer in optimizers:
        config = replace(settings(folder, Case()), optimizer=optimizer)
        config = replace(config, rollout=replace(config.rollout, min_new_tokens=0))
        actor = actor_of(config, folder, device, total)
        stage, weights, norms = Stage(actor, ALONE, shape_of(folder), config, device), [], []
        for samples in minibatches:
            result = actor.learner.learn([pack(samples, range(len(samples)), 1)], None, None)
            assert result.discarded is None
            weights.append(whole_tensors(stage))
            norms.append(result.grad_norm)
        found.append((weights, norms))
    return found


def run_here(trainer_class: type[Trainer], prepared: PreparedRun[Any]) -> int:
    """`run_training`; afterwards signals and the bond to the parent are as they were: this process runs other tests,
    too."""
    from rlmath.run.loop import run_training

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return run_training(trainer_class, prepared, None)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        end_with_parent(os.getppid())
