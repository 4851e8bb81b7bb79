"""What the ranks do in the tests of a whole step's updates.

Groups go in, new weights and what was reported come out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import AlgorithmConfig
from rlmath.distributed.phase_timers import PhaseTimers
from tests.distributed.policy_cases import Case, Stage, build, whole_tensors
from tests.tiny_models import VOCAB

REFERENCE_FACTOR = 1.05
"""The reference has the model's weights times this."""


@dataclass(frozen=True)
class StepOutcome:
    record: Any
    update: dict[str, Tensor]
    """New weights minus old ones, whole, by Hugging Face names."""


def make_groups(sizes: tuple[int, ...], seed: int = 3) -> list[ScoredGroup]:
    """Groups of these sizes, completions of 2 to 40 tokens, rewards 5 or -5."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB) for _ in range(draw.randint(low, high)))

    groups = []
    for number, size in enumerate(sizes):
        answers = [tokens(2, 40) for _ in range(size)]
        completions = tuple(
            Completion(g, ids, tuple(-draw.uniform(4.0, 5.2) for _ in ids), "", "stop", 0)
            for g, ids in enumerate(answers)
        )
        right = [draw.random() < 0.5 for _ in answers]
        scores = tuple(
            Score(5.0 if is_right else -5.0, is_right, "", "string") for is_right in right
        )
        groups.append(
            ScoredGroup(
                Prompt(f"q{number}", "?", tokens(2, 8), ("1",), "math"), completions, scores
            )
        )
    return groups


def step(
    folder: Path, case: Case, groups: list[ScoredGroup], algorithm: AlgorithmConfig
) -> StepOutcome | None:
    """The updates of one step, from rank 0; with KL the reference differs from the start."""
    return steps(folder, case, [groups], algorithm)[0]


def steps(
    folder: Path,
    case: Case,
    groups_by_step: list[list[ScoredGroup]],
    algorithm: AlgorithmConfig,
    seed: int = 1,
) -> list[StepOutcome | None]:
    """Steps 0, 1, ... one after the other, each on groups of its own."""
    from rlmath.models.build import early_stop, loss_settings
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    stage = build(folder, case)
    stage.actor.learner.settings = loss_settings(algorithm)
    stage.actor.learner.bounds = early_stop(algorithm)
    config = replace(stage.config, algorithm=algorithm, run=replace(stage.config.run, seed=seed))
    reference = _reference(stage) if algorithm.kl_coef else None
    offload = training_sets(stage.actor, reference, config.memory, stage.device)
    updater = PolicyUpdater(
        config, stage.shape, stage.mesh, stage.actor, reference, offload, PhaseTimers()
    )
    outcomes = []
    before = whole_tensors(stage)
    for number, groups in enumerate(groups_by_step):
        record = updater.update(groups, number)
        after = whole_tensors(stage)
        update = {name: after[name] - before[name] for name in after}
        outcomes.append(StepOutcome(record, update) if stage.mesh.rank == 0 else None)
        before = after
    return outcomes


def _reference(stage: Stage) -> Any:
    from rlmath.models.build import build_reference

    reference = build_reference(
        stage.config, stage.shape, stage.mesh, stage.device, (1,), stage.actor
    )
    with torch.no_grad():
        for chunk in reference.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(REFERENCE_FACTOR)
    return reference
