"""The switch between the engine's two lives: generating, and asleep while training uses the memory.

The order of a step is: wake weights -> sync -> wake KV cache -> generate -> sleep. On GPU vLLM's own sleep mode frees
weights and KV cache. On CPU vLLM has none: `cpu_worker` gives the KV cache's memory back to the system; the weights
stay.
"""

from __future__ import annotations

from typing import Any


def forget_prefixes(llm: Any) -> None:
    """Empty vLLM's prefix cache, whose entries belong to the weights they were computed with."""
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM still holds blocks of its KV cache: prefixes of old weights would be used again"
        )


class MemorySwitch:
    """Puts one engine to sleep and wakes it, in the one right order; anything else is an error."""

    def __init__(self, llm: Any, device_kind: str) -> None:
        self._llm = llm
        self._on_cpu = device_kind == "cpu"
        self._state = "awake"

    @property
    def state(self) -> str:
        """ "awake", "weights" (weights are there, the KV cache is not) or "asleep"."""
        return self._state

    def _need(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"the engine is {self._state!r}; to {action} it must be {state!r}")

    def sleep(self) -> None:
        """Give up the KV cache, and on GPU the weights, which the next sync replaces anyway."""
        self._need("awake", "sleep")
        forget_prefixes(self._llm)
        if self._on_cpu:
            self._llm.collective_rpc("release_kv_cache")
        else:
            self._llm.sleep(level=2)
        self._state = "asleep"

    def wake_weights(self) -> None:
        """Take memory for the weights; their values are undefined until a sync."""
        self._need("asleep", "wake its weights")
        if not self._on_cpu:
            self._llm.wake_up(tags=["weights"])
        self._state = "weights"

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache; the engine can generate then."""
        self._need("weights", "wake its KV cache")
        if self._on_cpu:
            self._llm.collective_rpc("restore_kv_cache")
        else:
            self._llm.wake_up(tags=["kv_cache"])
        self._state = "awake"
