"""What the ranks do in the tests of a teacher.

They score samples with it, and report whole gradients and updates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, TeacherConfig
from rlmath.distributed.phase_timers import PhaseTimers
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    microbatches,
    whole_gradients,
    whole_tensors,
)
from tests.distributed.update_cases import StepOutcome
from tests.tiny_models import shape_of


def _build(folder: Path, case: Case, teacher: TeacherConfig) -> tuple[Stage, Any]:
    """The policy, whose settings name the teacher, and the teacher."""
    from rlmath.models.build import build_teacher, loss_settings

    stage = build(folder, case)
    stage.config = replace(stage.config, teacher=teacher)
    stage.actor.learner.settings = loss_settings(stage.config.algorithm, teacher)
    shape = shape_of(Path(teacher.path or ""))
    return stage, build_teacher(stage.config, stage.shape, shape, stage.mesh, stage.device, (1,))


def gradients(
    folder: Path, case: Case, samples: list[Sample], settings: TeacherConfig
) -> dict[str, Tensor] | None:
    """Gradients of one minibatch, from rank 0.

    The teacher is in the advantages or in the loss."""
    from rlmath.trainer.token_advantages import Advantages, add_teacher_advantages

    stage, teacher = _build(folder, replace(case, optimizer="sgd"), settings)
    batches = microbatches(stage, samples)
    states = None
    learner = stage.actor.learner
    learner.forward_backward.zero_grad()
    if settings.loss == "full":
        states = teacher.states(batches)
    else:
        policy = learner.forward_backward.logprobs(batches, teacher.vocab_size)
        batches = add_teacher_advantages(
            Advantages(batches, [[sample.advantage for sample in samples]]),
            policy,
            teacher.logprobs(batches),
            [[len(sample.completion_ids) for sample in samples]],
            coef=settings.coef,
            vocab_size=teacher.vocab_size,
            mesh=stage.mesh,
        ).batches
    learner.forward_backward.run(
        batches,
        partial(learner._loss, old=None, reference=None, on_policy=False, teacher=states),
        forward_only=False,
    )
    tensors = whole_gradients(stage)
    return tensors if stage.mesh.rank == 0 else None


def step(
    folder: Path,
    case: Case,
    groups: list[ScoredGroup],
    algorithm: AlgorithmConfig,
    settings: TeacherConfig,
    offload: bool = False,
) -> tuple[StepOutcome, list[str]] | None:
    """The updates of one step with a teacher, from rank 0.

    Also the sets that are offloaded afterwards."""
    from rlmath.models.build import early_stop, loss_settings
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    stage, teacher = _build(folder, case, settings)
    config = replace(
        stage.config,
        algorithm=algorithm,
        memory=replace(stage.config.memory, offload_teacher=offload),
    )
    stage.actor.learner.settings = loss_settings(algorithm, settings)
    stage.actor.learner.bounds = early_stop(algorithm)
    in_update = settings.loss == "full"
    sets = training_sets(stage.actor, None, config.memory, stage.device, None, teacher, in_update)
    before = whole_tensors(stage)
    updater = PolicyUpdater(
        config, stage.shape, stage.mesh, stage.actor, None, sets, PhaseTimers(), None, teacher
    )
    record = updater.update(groups, 0)
    after = whole_tensors(stage)
    update = {name: after[name] - before[name] for name in after}
    return (StepOutcome(record, update), list(sets.offloaded)) if stage.mesh.rank == 0 else None
