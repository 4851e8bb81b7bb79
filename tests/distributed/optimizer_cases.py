"""What one rank does in the tests of the optimizer, and a whole run of one rank in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.config.schema import Config, OptimizerConfig
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.fault_tolerance.preemption import SIGNALS
from rlmath.distributed.mesh import Mesh
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


def updates(
    folder: Path, optimizers: Sequence[OptimizerConfig], minibatches: list[list[Sample]], total: int
) -> list[tuple[list[dict[str, Tensor]], list[float]]]:
    """Weights after each minibatch, and gradient norms before clipping, for each optimizer.

    The weights have Hugging Face names."""
    from rlmath.data.packing import pack

    device = start()
    outcomes = []
    for optimizer in optimizers:
        config = replace(settings(folder, Case()), optimizer=optimizer)
        config = replace(config, rollout=replace(config.rollout, min_new_tokens=0))
        actor = actor_of(config, folder, device, total)
        stage = Stage(actor, ALONE, shape_of(folder), config, device)
        weights = []
        norms = []
        for samples in minibatches:
            result = actor.learner.learn([pack(samples, range(len(samples)), 1)], None, None)
            assert result.discarded is None
            weights.append(whole_tensors(stage))
            norms.append(result.grad_norm)
        outcomes.append((weights, norms))
    return outcomes


def run_here(trainer_class: type[Trainer], prepared: PreparedRun[Any]) -> int:
    """Call `run_training`, then restore signals and the bond to the parent.

    This process runs other tests, too."""
    from rlmath.run.loop import run_training

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return run_training(trainer_class, prepared, None)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        end_with_parent(os.getppid())
