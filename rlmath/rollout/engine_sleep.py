"""Sleep and wake-up of one engine: "awake" -> "asleep" -> "weights" -> "awake".

On GPU it is vLLM's sleep mode, at the level that drops weights instead of keeping them on the host;
on CPU, where vLLM has none, our worker (`cpu_worker`) and `EngineWeights` do it. A sleeping engine
on CPU keeps its process state and the buffers of vLLM's scheduler and sampler, no weights and no KV
cache.

Weights that do not learn, since adapters do, may stay where they are (`keeps_weights`): the engine
then gives up its KV cache alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlmath.rollout.engine_adapters import forget_batch
from rlmath.rollout.engine_weights import EngineWeights


class EngineMemory:
    """Puts one engine to sleep and wakes it.

    RuntimeError in any other order than the module's."""

    def __init__(
        self, llm: Any, weights: EngineWeights, device_kind: str, keeps_weights: bool = False
    ) -> None:
        self._llm = llm
        self._weights = weights
        self._on_cpu = device_kind == "cpu"
        self.keeps_weights = keeps_weights
        self.state = "awake"
        """The engine's state.

        "awake", "weights" (memory for weights, none for the KV cache) or "asleep"; "waking" where
        allocating memory for weights failed half-way."""
        self.kv_cache_bytes: int = llm.collective_rpc(
            lambda worker: sum(storage.nbytes() for storage in cache_storages(worker))
        )[0]
        """Size of this rank's KV cache (bytes)."""

    @property
    def waking_bytes(self) -> int:
        """Memory that this rank's weights take when they wake (bytes).

        0 where they stay. On GPU it is all of vLLM's allocator but the KV cache, which is cut into
        pieces of 2 and 20 MiB."""
        if self.keeps_weights:
            return 0
        return self._weights.bytes if self._on_cpu else allocator_bytes() - self.kv_cache_bytes

    def _require(self, state: str, action: str) -> None:
        if self.state != state:
            raise RuntimeError(f"the engine is {self.state!r}; to {action} it must be {state!r}")

    def sleep(self) -> None:
        """Free the KV cache, and the weights unless they stay; the next sync replaces them."""
        self._require("awake", "sleep")
        reset_prefix_cache(self._llm)
        if self._on_cpu:
            self._release_on_cpu()
        elif self.keeps_weights:
            executor = self._llm.llm_engine.engine_core.engine_core.model_executor
            executor.discard(("kv_cache",))
        else:
            self._llm.sleep(level=2)
        self.state = "asleep"

    def _release_on_cpu(self) -> None:
        self._llm.collective_rpc("release_kv_cache")
        if not self.keeps_weights:
            self._weights.release()

    def wake_weights(self) -> None:
        """Allocate memory for the weights; their values are undefined until a sync."""
        self._require("asleep", "wake its weights")
        self.state = "waking"
        if not self.keeps_weights:
            self._restore_weights()
        self.state = "weights"

    def _restore_weights(self) -> None:
        if self._on_cpu:
            self._weights.restore()
            return
        self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc(forget_batch)

    def wake_kv_cache(self) -> None:
        """Allocate memory for the KV cache; the engine can generate then."""
        self._require("weights", "wake its KV cache")
        if self._on_cpu:
            self._llm.collective_rpc("restore_kv_cache")
        else:
            self._llm.wake_up(tags=["kv_cache"])
        self.state = "awake"

    def force_sleep(self) -> None:
        """Back to sleep from any state in which a failure left the engine.

        Requests that it still has are aborted. vLLM's calls accept what is asleep already, for
        example a KV cache that found no memory."""
        if self.state == "awake":
            abort_requests(self._llm)
            self.sleep()
        elif self.state != "asleep" and self._on_cpu:
            self._release_on_cpu()
        elif self.state == "weights" and not self.keeps_weights:
            self._llm.sleep(level=2)
        elif self.state != "asleep":
            # Sleep would first save the model's buffers, which may have no memory now.
            tags = ("kv_cache",) if self.keeps_weights else ("weights", "kv_cache")
            self._llm.collective_rpc("discard", args=(tags,))
        self.state = "asleep"


def allocator_bytes() -> int:
    """What vLLM's allocator holds on this GPU, or gave back in sleep (bytes); 0 without an engine.

    It holds weights and KV cache."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    return 0 if allocator is None else allocator.get_current_usage()


def reset_prefix_cache(llm: Any) -> None:
    """Empty vLLM's prefix cache: its entries are valid for the weights that computed them."""
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM still holds blocks of its KV cache: prefixes of old weights would be used again"
        )


def abort_requests(llm: Any) -> None:
    """Abort all requests that the engine still has."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    core = engine.engine_core
    core.abort_requests(list(core.engine_core.scheduler.requests))  # those of `RunningCompletions`


def cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """The memory of a vLLM worker's KV cache; layers may share it."""
    caches: list[Any] = list(worker.model_runner.kv_caches)
    tensors = [
        tensor
        for cache in caches
        for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])
    ]
    return list(
        {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()
    )
