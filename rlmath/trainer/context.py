"""What a training program is made of on one rank, in one record.

Importing it loads neither Megatron nor vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs, SftInputs, ValidationFile
from rlmath.distributed.bridge import Bridge
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh

if TYPE_CHECKING:
    from rlmath.rewards.reward_manager import RewardWorkers

InputsT = TypeVar("InputsT", Inputs, SftInputs)


@dataclass(frozen=True)
class RankContext(Generic[InputsT]):
    """What a training program is made of on one rank."""

    config: Config
    shapes: RunShapes
    inputs: InputsT
    mesh: Mesh
    device: Device
    validation: tuple[ValidationFile, ...] = ()
    reward_fingerprint: str = ""
    """What the files and settings of reward functions amount to; "" where there are none."""
    workers: RewardWorkers | None = None
    """What `Trainer.open_workers` gave."""
    bridge: Bridge | None = None
    """Leads to engines on ranks of their own; None where they are in the training ranks."""
    on_phase: Callable[[str], None] = lambda name: None
    """Called with the name of every phase that this rank enters."""
    on_progress: Callable[[], None] = lambda: None
    """Called for every micro-batch and every step of an engine."""
