"""What a launch script knows before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rlmath.config import Config
from rlmath.model_shape import ModelShape
from rlmath.recovery import Origin, Recovery
from rlmath.validation_files import ValidationFile


class RunInputs(Protocol):
    """What a run reads before it starts."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...


InputsT = TypeVar("InputsT", bound=RunInputs)


@dataclass(frozen=True)
class Prepared(Generic[InputsT]):
    """A run that can be started, as far as files and settings tell."""

    config: Config
    shape: ModelShape
    inputs: InputsT
    origin: Origin
    recovery: Recovery | None
    """What there is to go on from, as far as manifests tell."""
    validation: tuple[ValidationFile, ...] = ()
    """What the run is validated on."""
