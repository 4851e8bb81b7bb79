"""The switch between the engine's two lives: generating, and asleep while training uses the memory.

The order of a step is: wake weights -> sync -> wake KV cache -> generate -> sleep. On GPU vLLM's own sleep mode frees
weights and KV cache. On CPU vLLM has none: the worker extension below gives the KV cache's memory back to the
system; the weights stay.
"""

from __future__ import annotations

from typing import Any


class CpuCacheSwitch:
    """Extension of vLLM's CPU worker (`worker_extension_cls`): its methods are called through `collective_rpc`."""

    model_runner: Any

    def _cache_storages(self) -> list[Any]:
        storages = {}
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage
        return list(storages.values())

    def release_kv_cache(self) -> int:
        """Free the KV cache's memory and say how much it was (bytes)."""
        storages = self._cache_storages()
        self._kv_cache_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(self._kv_cache_bytes)

    def restore_kv_cache(self) -> int:
        """Take the KV cache's memory again; its contents are gone. Returns bytes."""
        for storage, size in zip(self._cache_storages(), self._kv_cache_bytes, strict=True):
            storage.resize_(size)
        return sum(self._kv_cache_bytes)


CPU_WORKER_EXTENSION = f"{__name__}.{CpuCacheSwitch.__name__}"


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

    def _move(self, needed: str, target: str) -> None:
        if self._state != needed:
            raise RuntimeError(f"the engine is {self._state!r}; going to {target!r} needs it {needed!r}")
        self._state = target

    def sleep(self) -> None:
        """Give up the KV cache, and on GPU the weights, which the next sync replaces anyway."""
        self._move("awake", "asleep")
        self._llm.reset_prefix_cache()
        if self._on_cpu:
            self._llm.collective_rpc("release_kv_cache")
        else:
            self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Take memory for the weights; their values are undefined until a sync."""
        self._move("asleep", "weights")
        if not self._on_cpu:
            self._llm.wake_up(tags=["weights"])

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache; the engine can generate then."""
        self._move("weights", "awake")
        if self._on_cpu:
            self._llm.collective_rpc("restore_kv_cache")
        else:
            self._llm.wake_up(tags=["kv_cache"])
