"""What the ranks do in the tests of offloading.

They learn, let everything leave and come back, and learn again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.config.schema import MemoryConfig
from tests.distributed.policy_cases import Case, Stage, build, microbatches, policy_state

EVERYTHING = MemoryConfig(
    offload_gradients=True, offload_optimizer=True, offload_parameters=True, offload_reference=True
)


def learn_twice(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Tensor]:
    """Parameters, optimizer and schedule after two updates; nothing ever leaves."""
    stage = build(folder, case)
    for _ in range(2):
        stage.actor.learner.learn(microbatches(stage, samples), None, None)
    return on_cpu(state_of(stage))


def learn_around_an_offload(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Any]:
    """The same two updates, with an offload of all sets before, between and after them."""
    return around_an_offload(build(folder, case), samples)


def around_an_offload(stage: Stage, samples: list[Sample]) -> dict[str, Any]:
    from rlmath.models.offload import training_sets

    sets = training_sets(stage.actor, None, EVERYTHING, stage.device)
    batches = microbatches(stage, samples)
    round_trip(sets)
    stage.actor.learner.learn(batches, None, None)

    before = state_of(stage)
    bytes_before = measured(stage)
    dirty = gradients_not_zero(stage)
    offloaded = sets.offload("gradients", "optimizer", "reference", "parameters")
    away = measured(stage)
    back = sets.onload("parameters", "optimizer", "gradients")
    after = state_of(stage)
    bytes_after = measured(stage)

    dirty += gradients_not_zero(stage)
    stage.actor.learner.learn(batches, None, None)
    round_trip(sets)
    return {
        "names": sets.names,
        "here": bytes_before,
        "away": away,
        "again": bytes_after,
        "left": {moved.name: moved.bytes for moved in offloaded},
        "back": {moved.name: moved.bytes for moved in back},
        "seconds": [moved.seconds for moved in (*offloaded, *back)],
        "same": before.keys() == after.keys()
        and all(torch.equal(before[n], after[n]) for n in before),
        "gradients not zero": dirty,
        "state": on_cpu(state_of(stage)),
    }


def round_trip(sets: Any) -> None:
    sets.offload("gradients", "optimizer", "parameters")
    sets.onload("parameters", "optimizer", "gradients")


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def state_of(stage: Stage) -> dict[str, Tensor]:
    """Every tensor of parameters, optimizer and scheduler of this rank.

    Also the tensors that the optimizer steps."""
    stepped = {
        f"stepped {number}": tensor for number, tensor in enumerate(stepped_by_optimizers(stage))
    }
    return policy_state(stage) | {name: tensor.detach().clone() for name, tensor in stepped.items()}


def storage_bytes(stage: Stage, tensors: Iterable[Tensor]) -> int:
    """Bytes of the unique storages of those tensors that are on the device."""
    storages = (
        tensor.untyped_storage() for tensor in tensors if tensor.device == stage.device.torch_device
    )
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def parameters_of(chunks: Iterable[Any]) -> list[Tensor]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def megatrons_optimizers(stage: Stage) -> list[Any]:
    optimizer = stage.actor.learner.optimizer
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def stepped_by_optimizers(stage: Stage) -> list[Tensor]:
    groups = itertools.chain(*(inner.param_groups for inner in megatrons_optimizers(stage)))
    return [parameter for group in groups for parameter in group["params"]]


def measured(stage: Stage) -> dict[str, int]:
    """Bytes on the device of what Megatron and torch hold themselves.

    They are found without the code under test."""
    chunks = stage.actor.forward_backward.chunks
    optimizers = megatrons_optimizers(stage)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    state = [
        value for inner in optimizers for entry in inner.state.values() for value in entry.values()
    ]
    flat = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    return {
        "gradients": storage_bytes(stage, [buffer.grad_data for buffer in buffers]),
        "optimizer": storage_bytes(stage, [value for value in state if isinstance(value, Tensor)]),
        "stepped": storage_bytes(stage, stepped_by_optimizers(stage)),
        "parameters": storage_bytes(stage, parameters_of(stage.actor.chunks) + flat),
    }


def gradients_not_zero(stage: Stage) -> list[str]:
    """Names of gradients that are not all zero.

    They lie in Megatron's buffers, padding included, or beside the parameters."""
    nonzero = []
    for number, chunk in enumerate(stage.actor.forward_backward.chunks):
        nonzero += [
            f"buffer of chunk {number}" for buffer in chunk.buffers if buffer.grad_data.any()
        ]
        nonzero += [
            name
            for name, p in chunk.named_parameters()
            if p.grad is not None or (p.requires_grad and p.main_grad.any())
        ]
    return nonzero


def reference_in_and_out(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Any]:
    """Log-probs of the reference before and after it was away, and what it held meanwhile."""
    from rlmath.models.build import build_reference
    from rlmath.models.offload import training_sets

    stage = build(folder, case)
    reference = build_reference(
        stage.config, stage.shape, stage.mesh, stage.device, (1,), stage.actor
    )
    sets = training_sets(stage.actor, reference, EVERYTHING, stage.device)
    batches = microbatches(stage, samples)
    expected = reference.logprobs(batches)

    def held() -> int:
        return storage_bytes(stage, parameters_of(reference.chunks))

    report: dict[str, Any] = {
        "here": held(),
        "left": [moved.bytes for moved in sets.offload("reference")],
    }
    report["away"] = held()
    moves = []
    logprobs = []
    for _ in range(2):
        with sets.on_device("reference") as moved:
            report["inside"] = held()
            logprobs = reference.logprobs(batches)
        moves.append([(move.name, move.bytes) for move in moved])
        report["passed over"] = sets.offload("reference")
    unchanged = all(
        torch.equal(logprobs_T, expected_T)
        for logprobs_T, expected_T in zip(logprobs, expected, strict=True)
    )
    elements = sum(p.numel() for p in itertools.chain(*(c.parameters() for c in reference.chunks)))
    return report | {"outside": held(), "ways": moves, "same": unchanged, "elements": elements}
