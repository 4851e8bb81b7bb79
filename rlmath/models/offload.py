"""What of the policy and its reference can leave the device, and who owns which memory.

- "gradients": the flat buffers that Megatron's data parallelism reduces. They are zero between steps, so they are given
  up and come back as zeros.
- "optimizer": the optimizer's state, and the float32 parameters it steps where the model's own are bfloat16. Where the
  model's are float32, the optimizer steps views of them, or themselves: those belong to "parameters".
- "parameters": the policy's own; with the distributed optimizer, one flat buffer for each model chunk.
- "reference": the reference model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from rlmath.config.schema import MemoryConfig
from rlmath.distributed.device import Device
from rlmath.distributed.tensor_offload import OffloadStats, StorageSet
from rlmath.models.build import Actor
from rlmath.models.forward_backward import ForwardBackward

SetName = Literal["gradients", "optimizer", "parameters", "reference"]


class OffloadSets:
    """The sets that the settings offload, by name. What they do not offload stays on the device: its name may be
    given everywhere, and nothing happens."""

    def __init__(self, sets: Sequence[StorageSet]) -> None:
        self._sets = {one.name: one for one in sets}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all sets that are offloaded."""
        return tuple(self._sets)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Of those that are away now, or that failed to leave or to come back."""
        return tuple(name for name, one in self._sets.items() if one.offloaded)

    @property
    def nbytes(self) -> dict[str, int]:
        """What each set holds on the device now (bytes)."""
        return {name: one.nbytes for name, one in self._sets.items()}

    @property
    def freed_bytes(self) -> dict[str, int]:
        """What each set frees of the rank's memory when it leaves now (bytes)."""
        return {name: one.freed_bytes for name, one in self._sets.items()}

    def offload(self, *names: SetName) -> list[OffloadStats]:
        """Let the sets leave, in this order. A reference that `reference_on_device` has sent away stays away."""
        leaving = [one for one in self._of(names) if not (one.name == "reference" and one.offloaded)]
        return [one.offload() for one in leaving]

    def onload(self, *names: SetName) -> list[OffloadStats]:
        """Let the sets come back, in this order."""
        return [one.onload() for one in self._of(names)]

    @contextmanager
    def reference_on_device(self) -> Iterator[list[OffloadStats]]:
        """The reference is on the device inside, and away afterwards. The list has its way here and, once outside,
        its way back."""
        moved = self.onload("reference") if "reference" in self.offloaded else []
        try:
            yield moved
        finally:
            moved += self.offload("reference")

    def _of(self, names: Sequence[SetName]) -> list[StorageSet]:
        unknown = set(names) - {"gradients", "optimizer", "parameters", "reference"}
        assert not unknown, f"no such sets: {unknown}"
        return [self._sets[name] for name in names if name in self._sets]


def training_sets(
    actor: Actor, reference: ForwardBackward | None, settings: MemoryConfig, device: Device
) -> OffloadSets:
    """The sets that the settings ask for; all are on the device still. `reference` is None where KL is not used."""

    def parameters() -> list[Tensor]:
        return [parameter for chunk in actor.chunks for parameter in chunk.parameters()]

    def gradients() -> list[Tensor]:
        return [parameter.main_grad for parameter in parameters()]

    def optimizer() -> list[Tensor]:
        return optimizer_tensors(actor.learner.optimizer)

    def belongs_to_others() -> list[Tensor]:
        return parameters() + gradients()

    def reference_parameters() -> list[Tensor]:
        return [parameter for chunk in reference.chunks for parameter in chunk.parameters()]

    sets = []
    if settings.offload_gradients:
        sets.append(StorageSet("gradients", gradients, False, device))
    if settings.offload_optimizer:
        sets.append(StorageSet("optimizer", optimizer, True, device, exclude=belongs_to_others))
    if settings.offload_parameters:
        sets.append(StorageSet("parameters", parameters, True, device))
    if settings.offload_reference and reference is not None:
        sets.append(StorageSet("reference", reference_parameters, True, device))
    return OffloadSets(sets)


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """What Megatron's optimizer steps, and its state so far. A chained one has several parts; a part without
    parameters on this rank has no optimizer of torch's inside."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found: list[Tensor] = []
    for inner in (part.optimizer for part in parts if part.optimizer is not None):
        found += [parameter for group in inner.param_groups for parameter in group["params"]]
        found += [
            value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
    return found
