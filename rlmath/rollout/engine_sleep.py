"""An engine's own part of the switch: asleep, with weights, awake. On GPU it is vLLM's sleep mode, at the level that
drops weights instead of keeping them on the host; on CPU, where vLLM has none, our worker and `EngineWeights` do it.

What remains of a sleeping engine on CPU: its process state and the buffers of vLLM's scheduler and sampler, no weights
and no KV cache.
"""

from __future__ import annotations

from typing import Any

import torch

from rlmath.rollout.engine_weights import EngineWeights


class EngineMemory:
    """Puts one engine to sleep and wakes it, in the one right order; anything else is an error."""

    def __init__(self, llm: Any, weights: EngineWeights, device_kind: str) -> None:
        self._llm = llm
        self._weights = weights
        self._on_cpu = device_kind == "cpu"
        self._state = "awake"
        self.kv_cache_bytes: int = llm.collective_rpc(_cache_bytes)[0]
        """Size of this rank's KV cache (bytes)."""

    @property
    def state(self) -> str:
        """ "awake", "weights" (there is memory for weights, the KV cache has none) or "asleep"; "waking" if taking
        memory for weights failed half-way."""
        return self._state

    def _need(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"the engine is {self._state!r}; to {action} it must be {state!r}")

    def sleep(self) -> None:
        """Give up the KV cache, and the weights, which the next sync replaces anyway."""
        self._need("awake", "sleep")
        forget_prefixes(self._llm)
        if self._on_cpu:
            self._llm.collective_rpc("release_kv_cache")
            self._weights.release()
        else:
            self._llm.sleep(level=2)
        self._state = "asleep"

    def wake_weights(self) -> None:
        """Take memory for the weights; their values are undefined until a sync."""
        self._need("asleep", "wake its weights")
        self._state = "waking"
        if self._on_cpu:
            self._weights.restore()
        else:
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

    def collapse(self) -> None:
        """Back to sleep from wherever a failure left the engine. Requests that it still has are given up.

        Neither of vLLM's calls minds what is asleep already, so that a KV cache that found no memory is no hindrance.
        """
        if self._state == "awake":
            abandon_requests(self._llm)
            self.sleep()
        elif self._state != "asleep" and self._on_cpu:
            self._llm.collective_rpc("release_kv_cache")
            self._weights.release()
        elif self._state == "weights":
            self._llm.sleep(level=2)
        elif self._state == "waking":
            # Sleep would first save the model's buffers, which may have no memory now.
            self._llm.collective_rpc("discard", args=(("weights", "kv_cache"),))
        self._state = "asleep"


def forget_prefixes(llm: Any) -> None:
    """Empty vLLM's prefix cache, whose entries belong to the weights they were computed with."""
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM still holds blocks of its KV cache: prefixes of old weights would be used again"
        )


def abandon_requests(llm: Any) -> None:
    """End whatever the engine is still working on."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


def cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """The memory of a vLLM worker's KV cache; layers may share it."""
    caches: list[Any] = list(worker.model_runner.kv_caches)
    tensors = [t for cache in caches for t in (cache if isinstance(cache, (list, tuple)) else [cache])]
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _cache_bytes(worker: Any) -> int:
    return sum(storage.nbytes() for storage in cache_storages(worker))
