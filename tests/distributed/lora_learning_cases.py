"""What the ranks do in the tests of LoRA.

They learn by given adapters in some layout, and report them whole by PEFT's names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from tests.distributed.context_cases import gathered_attention
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    by_sample,
    microbatches,
    whole_gradients,
    whole_tensors,
)


@dataclass(frozen=True)
class Learned:
    """Results of three updates, the tensors by PEFT's names."""

    reference: dict[int, list[float]]
    """Log-probs by sample without the adapters; the ranks of the last stage have them."""
    logprobs: dict[int, list[float]]
    """Log-probs with the adapters, before the first update."""
    gradients: dict[str, Tensor]
    """Gradients of the first update; rank 0 has these and the following."""
    norms: list[float]
    adapters: dict[str, Tensor]
    """The adapters after the last update."""
    weights: dict[str, Tensor]
    """The adapters merged before the first update, by Hugging Face names."""


def learned(
    folder: Path, case: Case, adapters: dict[str, Tensor], parts: list[list[Sample]]
) -> Learned:
    """Updates with one minibatch after the other."""
    from rlmath.models.build import build_reference

    stage = build(folder, case)
    set_adapters(stage, adapters)
    weights = whole_tensors(stage)
    batches = [microbatches(stage, part) for part in parts]
    reference = build_reference(
        stage.config, stage.shape, stage.mesh, stage.device, (1,), stage.actor
    )
    passes = [model.logprobs(batches[0]) for model in (reference, stage.actor.forward_backward)]
    reference_logprobs, policy_logprobs = (
        by_sample(batches[0], logprobs) if stage.mesh.is_last_stage else {} for logprobs in passes
    )
    learner = stage.actor.learner
    learner.forward_backward.run(
        batches[0],
        partial(learner._loss, old=None, reference=None, on_policy=False, teacher=None),
        forward_only=False,
    )
    gradients = whole_gradients(stage)
    learner.forward_backward.zero_grad()
    results = [learner.learn(batch, None, None) for batch in batches]
    assert all(result.discarded is None for result in results), results
    norms = [result.grad_norm for result in results]
    after = whole_tensors(stage, adapters_alone=True)
    outcome = Learned(reference_logprobs, policy_logprobs, gradients, norms, after, weights)
    return (
        outcome if stage.mesh.rank == 0 else replace(outcome, gradients={}, adapters={}, weights={})
    )


def learned_in_context(*given: Any) -> Learned:
    with gathered_attention():
        return learned(*given)


def new_adapters(folder: Path, case: Case) -> dict[str, Tensor]:
    return whole_tensors(build(folder, case), adapters_alone=True)


@torch.no_grad()
def set_adapters(stage: Stage, adapters: dict[str, Tensor]) -> None:
    """Each rank takes its part of whole tensors."""
    from rlmath.checkpoint.hf.weight_map import adapter_rules, placed_tensors
    from rlmath.checkpoint.hf.weights import local_parameter, shard, to_canonical

    lora = stage.config.lora
    mesh = stage.mesh
    rules = adapter_rules(stage.shape.architecture, lora.rank, lora.target)
    for placed in placed_tensors(stage.shape, rules):
        parameter = local_parameter(stage.actor.chunks, placed)
        if parameter is not None:
            whole = [adapters[name] for name in placed.hf_names]
            canonical = to_canonical(placed.rule, whole, stage.shape, mesh.tensor)
            parameter.copy_(shard(placed.rule, canonical, mesh.tensor_rank, mesh.tensor))
    stage.actor.learner.optimizer.reload_model_params()
