"""What a run works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.config import Config
from rlmath.data.loader import PromptOrder
from rlmath.model_shape import ModelShape
from rlmath.parallel.mesh import Mesh
from rlmath.policy.actor import Actor
from rlmath.policy.executor import Executor
from rlmath.policy.offload import OffloadSets
from rlmath.rollout.collect import Collector
from rlmath.rollout.memory import MemorySwitch
from rlmath.stages import Stage
from rlmath.sync.checked import CheckedSync
from rlmath.telemetry.timers import PhaseTimers
from rlmath.types import Prompt


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, built by `assembly`."""

    config: Config
    stages: Sequence[Stage]
    """At least one; all steps of the run are in them."""
    shape: ModelShape
    mesh: Mesh
    prompts: Sequence[Prompt]
    order: PromptOrder
    actor: Actor
    reference: Executor | None
    offload: OffloadSets
    sync: CheckedSync
    switch: MemorySwitch
    collector: Collector
    timers: PhaseTimers
