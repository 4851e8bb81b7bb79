"""A run that can be started: its settings, model and data before any process group or engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.config.schema import Config
from rlmath.data.dataset import ValidationFile
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.run.recovery.resume import Origin, Recovery, data_fingerprint
from rlmath.trainer.context import InputsT, RankContext


@dataclass(frozen=True)
class PreparedRun(Generic[InputsT]):
    """A run that can be started, as far as files and settings show."""

    config: Config
    shapes: RunShapes
    inputs: InputsT
    origin: Origin
    recovery: Recovery | None
    """Checkpoints to resume from, as far as manifests show."""
    lines: tuple[str, ...] = ()
    """Lines for the console."""
    validation: tuple[ValidationFile, ...] = ()
    warnings: tuple[str, ...] = ()
    """Irregularities of the data, and a reward function that took too long on them; on rank 0."""

    @property
    def data_read(self) -> str:
        """Fingerprint of all data that this rank has read."""
        prompts = [prompt for file in self.validation for prompt in file.prompts]
        return f"{self.origin.data} {data_fingerprint(prompts)}"

    def on_rank(self, mesh: Mesh, device: Device, **more: Any) -> RankContext[InputsT]:
        """The context of this rank's part of the run; `more` are further fields of the record."""
        return RankContext(
            self.config,
            self.shapes,
            inputs=self.inputs,
            mesh=mesh,
            device=device,
            validation=self.validation,
            reward_fingerprint=self.origin.reward,
            **more,
        )
