"""What the ranks do in the invariance tests.

They learn from one recorded batch in many splits, with several losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlmath.algorithms.importance_sampling import CorrectionLevel
from rlmath.algorithms.losses import LossSettings, Normalisation, NormalisationKind
from rlmath.algorithms.types import Sample
from rlmath.config.objectives import LossKind, ObjectiveSettings
from rlmath.data.micro_batches import plan_minibatches
from rlmath.data.packing import MicroBatch, pack
from tests.distributed.policy_cases import Case, Stage, build, whole_gradients, whole_tensors


@dataclass(frozen=True)
class Variant:
    """A split into micro-batches, and a loss."""

    split: str = "one"
    """"one" micro-batch a rank, "two", or "many"."""
    normalisation: NormalisationKind = "token"
    kind: LossKind = "clip"
    entropy_coef: float = 0.0
    off_policy_mask: float | None = None
    kl_ratio: CorrectionLevel | None = None
    """How the KL to the policy that sampled is weighed; None: there is none."""

    def max_tokens(self, samples: list[Sample], data_size: int) -> int:
        total = sum(sample.length for sample in samples)
        longest = max(sample.length for sample in samples)
        return {"one": total, "two": -(-total * 6 // (10 * data_size)), "many": longest + 20}[
            self.split
        ]


@dataclass(frozen=True)
class Outcome:
    """Results of one variant, whole, by Hugging Face names."""

    gradients: dict[str, Tensor]
    update: dict[str, Tensor]
    """New weights minus old ones."""
    loss: float
    microbatches: int
    """Number of micro-batches of every data-parallel rank, those of weight 0 included."""


def outcomes(
    folder: Path, case: Case, samples: list[Sample], variants: list[Variant]
) -> list[Outcome]:
    """Gradients of every variant, and one optimizer step from the same weights; from rank 0.

    The optimizer is the case's. Adam keeps its state from one variant to the next: give it one
    variant. Its gradients are left out, since a rank has only its share of them."""
    stage = build(folder, case)
    measured = []
    for variant in variants:
        batches = _microbatches(stage, samples, variant)
        stage.actor.learner.settings = LossSettings(
            ObjectiveSettings(variant.kind),
            kl_coef=0.1,
            kl_ratio=variant.kl_ratio,
            entropy_coef=variant.entropy_coef,
            off_policy_mask=variant.off_policy_mask,
        )
        reference = [batch.behaviour_logprobs_T for batch in batches] if variant.kl_ratio else None
        gradients = _gradients(stage, batches, reference) if case.optimizer == "sgd" else {}
        with _weights_kept(stage):
            before = whole_tensors(stage)
            result = stage.actor.learner.learn(batches, None, reference)
            after = whole_tensors(stage)
        assert result.discarded is None, result.discarded
        update = {name: after[name] - before[name] for name in after}
        loss = result.sums["loss"] / result.sums["denominator"]
        measured.append(Outcome(gradients, update, loss, len(batches)))
    return measured if stage.mesh.rank == 0 else []


def _microbatches(stage: Stage, samples: list[Sample], variant: Variant) -> list[MicroBatch]:
    mesh = stage.mesh
    (plan,) = plan_minibatches(
        [sample.length for sample in samples],
        1,
        mesh.data,
        variant.max_tokens(samples, mesh.data),
        seed=3,
        count_multiple=mesh.microbatch_multiple,
    )
    normalisation = Normalisation(variant.normalisation, constant=256)
    indices_by_microbatch = plan.microbatches_by_rank[mesh.data_rank]
    return [pack(samples, indices, 1, normalisation) for indices in indices_by_microbatch]


def _gradients(
    stage: Stage, batches: list[MicroBatch], reference: list[Tensor] | None
) -> dict[str, Tensor]:
    learner = stage.actor.learner
    learner.forward_backward.run(
        batches,
        partial(learner._loss, old=None, reference=reference, on_policy=False, teacher=None),
        forward_only=False,
    )
    gradients = whole_gradients(stage)
    learner.forward_backward.zero_grad()
    return gradients


@contextmanager
def _weights_kept(stage: Stage) -> Iterator[None]:
    parameters = [parameter for chunk in stage.actor.chunks for parameter in chunk.parameters()]
    copies = [parameter.detach().clone() for parameter in parameters]
    yield
    with torch.no_grad():
        for parameter, old in zip(parameters, copies, strict=True):
            parameter.copy_(old)
