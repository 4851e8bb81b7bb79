"""What a launch script knows before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.config import Config
from rlmath.inputs import Inputs
from rlmath.model_shape import ModelShape
from rlmath.recovery import Origin, Recovery


@dataclass(frozen=True)
class Prepared:
    """A run that can be started, as far as files and settings tell."""

    config: Config
    shape: ModelShape
    inputs: Inputs
    origin: Origin
    recovery: Recovery | None
    """What there is to go on from, as far as manifests tell."""
