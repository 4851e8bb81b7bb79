"""What the ranks do in the tests of faults at the edges of a completion with calls."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlmath.algorithms.types import Completion
from rlmath.config.schema import ToolsConfig
from rlmath.rollout.sampling import Key
from tests.distributed.tool_cases import ScriptedEngine
from tests.disturbed_sandboxes import (
    EDGES,
    KilledSandboxes,
    LosingSandboxes,
    open_light_sandboxes,
)
from tests.programs import wait_for

SAMPLES = 4
CALL_TOKENS = 6
"""Tokens of a call, and of a slice at whose end a call is out."""
SLICES = {"whole": None, "in slices": CALL_TOKENS}
"""Most tokens of a slice."""
LOST = (0, 1)
"""The key of the completion that is lost."""


@dataclass(frozen=True)
class Disturbed:
    """What an engine samples while processes of its sandboxes are killed at an edge."""

    completions: dict[Key, Completion]
    has_killed: bool
    more_descriptors: int
    """Open descriptors of the rank's process, beyond those of before."""


@dataclass(frozen=True)
class Faults:
    """What an engine samples without a fault, and with one, by how it is sliced."""

    undisturbed: dict[Key, Completion]
    disturbed: dict[tuple[str, str], Disturbed]
    """Keys are an edge and a name of SLICES."""
    losing: dict[str, dict[Key, Completion]]
    """What is sampled where every attempt at the calls of a completion fails."""


def faults(folder: Path) -> Faults:
    """All that an engine of one rank samples."""
    engine = ScriptedEngine(folder, engine_size=1)
    undisturbed = engine.sample(SAMPLES)
    disturbed = {
        (edge, name): _disturbed(engine, edge, slice_tokens)
        for edge in EDGES
        for name, slice_tokens in SLICES.items()
    }

    def open_losing(settings: ToolsConfig) -> LosingSandboxes:
        return LosingSandboxes(open_light_sandboxes(settings), f"{LOST[0]}/{LOST[1]}")

    losing = {
        name: engine.sample(SAMPLES, open_losing, slice_tokens=slice_tokens)
        for name, slice_tokens in SLICES.items()
    }
    engine.engine.close()
    return Faults(undisturbed, disturbed, losing)


def _disturbed(engine: ScriptedEngine, edge: str, slice_tokens: int | None) -> Disturbed:
    """What is sampled with processes killed at an edge, once all of them have ended."""
    opened: list[KilledSandboxes] = []

    def open_killed(settings: ToolsConfig) -> KilledSandboxes:
        opened.append(KilledSandboxes(open_light_sandboxes(settings), edge))
        return opened[-1]

    descriptors = len(os.listdir("/proc/self/fd"))
    completions = engine.sample(SAMPLES, open_killed, slice_tokens=slice_tokens)
    (sandboxes,) = opened
    wait_for(lambda: not sandboxes.left(), 20.0)
    more_descriptors = len(os.listdir("/proc/self/fd")) - descriptors
    return Disturbed(completions, sandboxes.has_killed, more_descriptors)
