"""The switch of a device's memory between training and generation.

    # offload -> wake weights -> sync -> offload parameters -> wake KV cache
    with switch.generating(version, step):
        ...  # generate
    # sleep -> restore

After any failure inside, the engine is put to sleep and the training side is onloaded, as far as
the device permits: the run can save the policy and stop. After that the switch is `broken` and
refuses to generate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.device import Device, device_bytes, release_cached
from rlmath.distributed.memory import is_scarce
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.ranks import local_world_size
from rlmath.distributed.tensor_offload import OffloadStats
from rlmath.models.offload import RESTING, OffloadSets, SetName
from rlmath.rollout.engine import Engine
from rlmath.rollout.memory_monitor import MemoryMonitor

logger = logging.getLogger(__name__)

CPU_COMPARES_EVERY = 16
"""Number of cycles on CPU of which one releases what is cached, to be compared.

All cycles do where the host's memory is scarce."""


class MemorySwitch:
    """Owns the order of the phases.

    Each is timed, measured and compared with what was planned (`planned_phases`)."""

    def __init__(
        self,
        engine: Engine,
        training: OffloadSets,
        sync: Callable[[int], None],
        monitor: MemoryMonitor,
        timers: PhaseTimers,
        device: Device,
        kept_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`sync(step)` writes the policy's weights into the engine's; `engine` is asleep.

        `kept_bytes` are what this rank keeps of the samples for training (bytes of the device's
        memory): they are planned by no phase, and count in none."""
        self._engine = engine
        self._training = training
        self._sync = sync
        self._monitor = monitor
        self._timers = timers
        self._device = device
        self._kept_bytes = kept_bytes
        self.broken = False
        """Whether a cycle has failed: `generating` raises RuntimeError then."""
        self._releases = True
        self._offloaded: list[OffloadStats] = []
        self._onloaded: list[OffloadStats] = []

    @contextmanager
    def generating(self, version: int, step: int) -> Iterator[None]:
        """Let the engine generate for step `step` (from 0) with weights of that version.

        A collective."""
        if self.broken:
            raise RuntimeError(
                "generation failed before; this switch is broken. Save what is needed, and stop "
                "the run"
            )
        try:
            self._to_generation(version, step)
            yield
            self._release()
            # No comparison with earlier steps: on CPU the KV cache takes memory up to where it was
            # ever filled.
            self._monitor.observe("generate", self._held_bytes(), against_earlier=False)
            with self._phase("sleep"):
                self._engine.memory.sleep()
            with self._phase("restore"):
                self._onloaded = self._training.onload(*self._to_onload())
        except BaseException:
            self.broken = True
            # Logged first: allocating memory can wait for a device that waits for a peer.
            logger.exception(
                "A step failed; putting the engine to sleep and onloading the training side"
            )
            # Each action is tried even where others failed, and failures are logged.
            self._try("put the engine to sleep", self._engine.memory.force_sleep)
            for name in self._to_onload():
                self._try(f"onload the {name}", partial(self._training.onload, name))
            raise
        self._monitor.end_cycle(all_gather_objects)

    def metrics(self) -> dict[str, float]:
        """What this rank held after each phase of the last cycle (GiB), and what was offloaded.

        Each offloaded set has its size (GiB) and how long offload and onload took together
        (seconds)."""
        metrics = {
            f"memory/after_{phase}_gib": held_bytes / 2**30
            for phase, held_bytes in self._monitor.held.items()
        }
        for moved in self._offloaded:
            metrics[f"memory/offloaded/{moved.name}_gib"] = moved.bytes / 2**30
            metrics[f"seconds/offload/{moved.name}"] = moved.seconds
        for moved in self._onloaded:
            metrics[f"seconds/offload/{moved.name}"] += moved.seconds
        return metrics

    def _to_generation(self, version: int, step: int) -> None:
        """Offload the training side, wake the engine and sync its weights, phase by phase."""
        self._monitor.start_cycle()
        weights = self._engine.memory.waking_bytes
        kv_cache = self._engine.memory.kv_cache_bytes
        engine_bytes = (weights + kv_cache) * (local_world_size() or 1)
        self._releases = (
            self._device.kind == "cuda" or self._monitor.compares or is_scarce(engine_bytes)
        )
        self._release()
        planned = planned_phases(self._training.freed_bytes, weights, kv_cache)
        self._monitor.expect(self._held_bytes(), planned)
        with self._phase("offload"):
            self._offloaded = self._training.offload("gradients", "optimizer", *RESTING)
        with self._phase("wake"):
            self._engine.memory.wake_weights()
        with self._phase("sync"):
            self._sync(step)
            self._engine.set_weight_version(version)
        with self._phase("wake_kv_cache"):
            self._offloaded += self._training.offload("parameters")
            self._release()
            self._engine.memory.wake_kv_cache()

    def _to_onload(self) -> list[SetName]:
        """The offloaded sets that training needs; RESTING ones are onloaded when they compute."""
        names: tuple[SetName, ...] = ("parameters", "optimizer", "gradients")
        return [name for name in names if name in self._training.offloaded]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._timers.phase(name):
            yield
            self._release()
        self._monitor.observe(name, self._held_bytes())

    def _held_bytes(self) -> int:
        return device_bytes(self._device) - self._kept_bytes()

    def _release(self) -> None:
        """Return what allocators have cached to the system, in the cycles `_to_generation` chose.

        On CPU the next phases would use it again, and the kernel takes a tenth of an update and
        more to clear the memory that it gives."""
        if self._releases:
            release_cached(self._device)

    def _try(self, action: str, act: Callable[[], Any]) -> None:
        try:
            release_cached(self._device)
            act()
        except Exception:
            logger.exception("After a failure, could not %s", action)


def planned_phases(training: Mapping[str, int], weights: int, kv_cache: int) -> dict[str, int]:
    """What a rank holds after each phase on top of what it holds between steps (bytes).

    `training` is what each part of the training side frees when it is offloaded, `weights` and
    `kv_cache` are the engine's.

    >>> planned_phases({"gradients": 40, "parameters": 20}, weights=20, kv_cache=60)["wake_kv_cache"]
    20
    """
    parameters = training.get("parameters", 0)
    without = parameters - sum(training.values())
    return {
        "offload": without,
        "wake": without + weights,
        "sync": without + weights,
        "wake_kv_cache": without - parameters + weights + kv_cache,
        "generate": without - parameters + weights + kv_cache,
        "sleep": without - parameters,
        "restore": 0,
    }
