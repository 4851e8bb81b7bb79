"""What the ranks do in the tests of the critic.

They make a step's updates of policy and critic, and checkpoints of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import ScoredGroup
from rlmath.config.schema import AlgorithmConfig, CriticConfig
from rlmath.distributed.phase_timers import PhaseTimers
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    by_sample,
    microbatches,
    whole_tensors,
)
from tests.distributed.update_cases import _reference


@dataclass(frozen=True)
class CriticOutcome:
    """What one step did to both models, from rank 0."""

    record: Any
    policy_update: dict[str, Tensor]
    critic_update: dict[str, Tensor]


def with_critic(
    stage: Stage, critic: CriticConfig, algorithm: AlgorithmConfig
) -> tuple[Stage, Any, Any]:
    """The stage with these settings, its critic, and the critic's shape."""
    from rlmath.checkpoint.hf.run_shapes import read_run_shapes
    from rlmath.models.build import build_critic, early_stop, loss_settings

    stage.actor.learner.settings = loss_settings(algorithm)
    stage.actor.learner.bounds = early_stop(algorithm)
    stage.config = replace(stage.config, algorithm=algorithm, critic=critic)
    shape = read_run_shapes(stage.config, stage.shape).critic
    return (
        stage,
        build_critic(stage.config, shape, stage.mesh, stage.device, total_updates=10),
        shape,
    )


def critic_tensors(stage: Stage, critic: Any, shape: Any) -> dict[str, Tensor]:
    """The critic's parameters as Hugging Face tensors, whole."""
    from rlmath.checkpoint.hf.weights import stream_hf_tensors

    return {
        name: tensor.clone() for name, tensor in stream_hf_tensors(critic.chunks, shape, stage.mesh)
    }


def step(
    folder: Path,
    case: Case,
    groups: list[ScoredGroup],
    critic: CriticConfig,
    algorithm: AlgorithmConfig,
) -> CriticOutcome | None:
    """The updates of one step."""
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    stage, built, shape = with_critic(build(folder, case), critic, algorithm)
    reference = _reference(stage) if algorithm.kl_coef else None
    memory = replace(stage.config.memory, offload_critic=True)
    offload = training_sets(stage.actor, reference, memory, stage.device, built)
    updater = PolicyUpdater(
        stage.config, stage.shape, stage.mesh, stage.actor, reference, offload, PhaseTimers(), built
    )
    offload.offload("critic", "critic_gradients")
    with offload.on_device("critic"):
        before = whole_tensors(stage), critic_tensors(stage, built, shape)
    record = updater.update(groups, 0)
    assert set(offload.offloaded) >= {"critic", "critic_gradients"}
    with offload.on_device("critic"):
        after = whole_tensors(stage), critic_tensors(stage, built, shape)
    changes = [
        {name: new[name] - old[name] for name in new}
        for new, old in zip(after, before, strict=True)
    ]
    return CriticOutcome(record, *changes) if stage.mesh.rank == 0 else None


def values(
    folder: Path, case: Case, samples: list[Any], critic: CriticConfig
) -> dict[int, list[float]]:
    """Values of completion tokens by sample; empty off the last stage."""
    stage, built, _ = with_critic(build(folder, case), critic, AlgorithmConfig(advantage="gae"))
    batches = microbatches(stage, samples)
    predictions = built.learner.values(batches)
    if not stage.mesh.is_last_stage:
        return {}
    for batch, prediction in zip(batches, predictions, strict=True):
        assert len(prediction.ends_S) == batch.n_segments
    return by_sample(batches, [prediction.values_T for prediction in predictions])


def save(
    folder: Path, case: Case, samples: list[Any], critic: CriticConfig, root: Path
) -> dict[str, Tensor]:
    """Two updates of the critic, and a checkpoint of both models.

    Returns the critic's weights after a third update."""
    from rlmath.checkpoint.directory import CRITIC
    from rlmath.checkpoint.manager import CheckpointManager
    from rlmath.checkpoint.retention import Retention
    from rlmath.checkpoint.sharded_state import SavedModel
    from tests.distributed.store_cases import SETTINGS, policy_of, progress

    stage, built, shape = with_critic(build(folder, case), critic, AlgorithmConfig(advantage="gae"))
    for _ in range(2):
        learn(stage, built, samples)
    models = [policy_of(stage), SavedModel(CRITIC, built.chunks, built.learner.optimizer)]
    store = CheckpointManager(root, lambda: models, stage.device, {}, Retention(1, None))
    try:
        current_progress = replace(progress(2, 0, stage.mesh.world_size), critic_updates=2)
        failed = store.start(current_progress, False, SETTINGS)
        assert failed is None, failed
        learn(stage, built, samples)
        saved = store.finish()
        assert not isinstance(saved, str), saved
    finally:
        store.close()
    return critic_tensors(stage, built, shape)


def load(
    folder: Path, case: Case, samples: list[Any], critic: CriticConfig, root: Path
) -> dict[str, Tensor]:
    """The checkpoint in this layout, and the critic's weights after one more update."""
    from rlmath.checkpoint.directory import CRITIC, complete_checkpoints, read_progress
    from rlmath.checkpoint.manager import load_checkpoint
    from rlmath.checkpoint.sharded_state import SavedModel
    from tests.distributed.store_cases import policy_of

    stage, built, shape = with_critic(build(folder, case), critic, AlgorithmConfig(advantage="gae"))
    (checkpoint,), _ = complete_checkpoints(root)
    progress = read_progress(checkpoint.folder)
    assert progress.models == (CRITIC,) and progress.critic_updates == 2
    models = [policy_of(stage), SavedModel(CRITIC, built.chunks, built.learner.optimizer)]
    load_checkpoint(models, stage.device, checkpoint, progress)
    built.learner.restore_schedule(progress.critic_updates)
    learn(stage, built, samples)
    return critic_tensors(stage, built, shape)


def learn(stage: Stage, critic: Any, samples: list[Any]) -> None:
    """One update towards returns of 1."""
    from rlmath.models.critic import ValueTargets

    batches = microbatches(stage, samples)
    targets = [
        ValueTargets(torch.zeros(len(batch.token_ids_T)), torch.ones(len(batch.token_ids_T)))
        for batch in batches
    ]
    assert critic.learner.learn(batches, targets).discarded is None
