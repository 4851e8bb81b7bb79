"""The memory of policy, reference, critic and teacher that can be offloaded, and which set owns it.

- "gradients": the flat buffers that Megatron's data parallelism reduces. They are zero between
  steps, so they are freed, and onloaded as zeros.
- "optimizer": the optimizer's state, and the float32 parameters it steps where the model's own are
  bfloat16. Where the model's are float32, the optimizer steps views of them, or themselves: those
  belong to "parameters".
- "parameters": the policy's own; with the distributed optimizer, one flat buffer for each model
  chunk.
- "reference": the reference model's.
- "critic": the critic's parameters and optimizer, and "critic_gradients" its flat buffers.
- "teacher": the teacher's, and "teacher_head" its output layer, where the update needs that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from rlmath.config.schema import MemoryConfig
from rlmath.distributed.device import Device
from rlmath.distributed.tensor_offload import OffloadStats, StorageSet, Tensors
from rlmath.models.build import Actor
from rlmath.models.critic import Critic
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.lora import WithoutAdapters
from rlmath.models.teacher import Teacher

SetName = Literal[
    "gradients",
    "optimizer",
    "parameters",
    "reference",
    "critic",
    "critic_gradients",
    "teacher",
    "teacher_head",
]
RESTING: tuple[SetName, ...] = (
    "reference",
    "critic",
    "critic_gradients",
    "teacher",
    "teacher_head",
)
"""Sets that are on the device only while their model computes."""


class OffloadSets:
    """The sets that the settings offload, by name.

    Other names are accepted and ignored: they stay on the device."""

    def __init__(self, sets: Sequence[StorageSet]) -> None:
        self._sets = {storage_set.name: storage_set for storage_set in sets}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sets)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the sets that are offloaded now, or whose offload or onload failed."""
        return tuple(name for name, storage_set in self._sets.items() if storage_set.offloaded)

    @property
    def nbytes(self) -> dict[str, int]:
        """What each set holds on the device now (bytes)."""
        return {name: storage_set.nbytes for name, storage_set in self._sets.items()}

    @property
    def freed_bytes(self) -> dict[str, int]:
        """What an offload of each set would free of the rank's memory now (bytes)."""
        return {name: storage_set.freed_bytes for name, storage_set in self._sets.items()}

    def offload(self, *names: SetName) -> list[OffloadStats]:
        """Offload the sets, in this order; one of RESTING that is offloaded already is left out."""
        leaving = [
            storage_set
            for storage_set in self._of(names)
            if not (storage_set.name in RESTING and storage_set.offloaded)
        ]
        return [storage_set.offload() for storage_set in leaving]

    def onload(self, *names: SetName) -> list[OffloadStats]:
        return [storage_set.onload() for storage_set in self._of(names)]

    @contextmanager
    def on_device(self, *names: SetName) -> Iterator[list[OffloadStats]]:
        """Keep these sets of RESTING on the device inside; afterwards they are offloaded.

        Gives the statistics of both."""
        stats = self.onload(*(name for name in names if name in self.offloaded))
        try:
            yield stats
        finally:
            stats += self.offload(*names)

    def _of(self, names: Sequence[SetName]) -> list[StorageSet]:
        unknown = set(names) - set(get_args(SetName))
        assert not unknown, f"no such sets: {unknown}"
        return [self._sets[name] for name in names if name in self._sets]


def training_sets(
    actor: Actor,
    reference: ForwardBackward | None,
    settings: MemoryConfig,
    device: Device,
    critic: Critic | None = None,
    teacher: Teacher | None = None,
    teacher_in_update: bool = False,
) -> OffloadSets:
    """The sets that the settings offload, still on the device.

    `reference` is None where KL is not used, and is left where it is the policy without its
    adapters; `critic` and `teacher` are None where there is none; `teacher_in_update` tells whether
    the update needs the teacher's output layer."""

    def parameters(model: Actor | ForwardBackward | Critic | Teacher = actor) -> list[Tensor]:
        return [parameter for chunk in model.chunks for parameter in chunk.parameters()]

    def gradients(model: Actor | Critic = actor) -> list[Tensor]:
        return [parameter.main_grad for parameter in parameters(model) if parameter.requires_grad]

    sets: list[StorageSet] = []

    def add(
        name: SetName,
        is_needed: bool,
        tensors: Tensors,
        keep: bool = True,
        exclude: Tensors = tuple,
    ) -> None:
        if is_needed:
            sets.append(StorageSet(name, tensors, keep=keep, device=device, exclude=exclude))

    add("gradients", settings.offload_gradients, gradients, keep=False)
    in_optimizer = partial(optimizer_tensors, actor.learner.optimizer)
    add(
        "optimizer",
        settings.offload_optimizer,
        in_optimizer,
        exclude=lambda: parameters() + gradients(),
    )
    add("parameters", settings.offload_parameters, parameters)
    if reference is not None and not isinstance(reference, WithoutAdapters):
        add("reference", settings.offload_reference, partial(parameters, reference))
    if critic is not None:

        def critic_tensors() -> list[Tensor]:
            return [*parameters(critic), *optimizer_tensors(critic.learner.optimizer)]

        critic_gradients = partial(gradients, critic)
        add("critic", settings.offload_critic, critic_tensors, exclude=critic_gradients)
        add(
            "critic_gradients",
            settings.offload_critic or settings.offload_gradients,
            critic_gradients,
            keep=False,
        )
    if teacher is not None:
        head = teacher.head_parameters if teacher_in_update else tuple
        add("teacher", settings.offload_teacher, partial(parameters, teacher), exclude=head)
        add("teacher_head", settings.offload_teacher and teacher_in_update, head)
    return OffloadSets(sets)


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The parameters of Megatron's optimizer, and its state so far.

    A chained optimizer has several parts; a part without parameters on this rank holds no torch
    optimizer."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    tensors: list[Tensor] = []
    for inner in (part.optimizer for part in parts if part.optimizer is not None):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [
            value
            for state in inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
    return tensors
