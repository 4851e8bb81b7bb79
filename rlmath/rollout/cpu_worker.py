"""vLLM's CPU worker, with a KV cache that can be given back and shared memory that outlives nothing.

vLLM loads it by its name (`worker_cls`), in the process of the training rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from rlmath.rollout.engine import IDENT_VARIABLE


class SleepingCpuWorker(CPUWorker):
    """Methods beyond vLLM's own are called through `collective_rpc`."""

    def init_device(self) -> None:
        """As vLLM's, with names of its own for the shared memory in which the ranks of an engine reduce.

        vLLM 0.32 derives the name from the init method, which is the same for all external launchers: engines of two
        runs on one machine would meet in it, and what a killed run left would stop the next. Ours is removed as soon
        as all ranks have opened it; the mapping stays.
        """
        ident = os.environ[IDENT_VARIABLE]
        self.distributed_init_method = f"env:{ident}"
        super().init_device()
        get_tp_group().barrier()
        for file in Path("/dev/shm").glob(f"{ident}-*"):
            file.unlink(missing_ok=True)

    def _cache_storages(self) -> list[torch.UntypedStorage]:
        caches: list[Any] = list(self.model_runner.kv_caches)
        tensors = [t for cache in caches for t in (cache if isinstance(cache, (list, tuple)) else [cache])]
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())

    def release_kv_cache(self) -> int:
        """Give the KV cache's memory back to the system and say how much it was (bytes)."""
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
