"""vLLM's CPU worker, with a KV cache that can be freed and shared memory that leaves no files behind.

vLLM imports it by its name (`worker_cls`), in the process of the training rank. It is a module of its own because vLLM
may be imported only after `engine.prepare_environment`.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from rlmath.rollout.engine import IDENT_VARIABLE
from rlmath.rollout.engine_sleep import cache_storages


class SleepingCpuWorker(CPUWorker):
    """Methods beyond vLLM's own are called through `collective_rpc`."""

    _kv_cache_bytes: list[int] | None = None
    """Of every storage, once it was released for the first time."""

    def init_device(self) -> None:
        """As vLLM's, with names of its own for the shared memory in which the ranks of an engine reduce.

        vLLM 0.32 derives the name from the init method, which is the same for all external launchers: engines of two
        runs on one machine would share it, and the file of a killed run would stop the next. Ours is removed as soon
        as all ranks have opened it; the mapping stays.
        """
        ident = os.environ[IDENT_VARIABLE]
        self.distributed_init_method = f"env:{ident}"
        super().init_device()
        get_tp_group().barrier()
        for file in Path("/dev/shm").glob(f"{ident}-*"):
            file.unlink(missing_ok=True)

    def release_kv_cache(self) -> None:
        """Free the KV cache's memory."""
        storages = cache_storages(self)
        if self._kv_cache_bytes is None:
            self._kv_cache_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def restore_kv_cache(self) -> None:
        """Allocate the KV cache's memory again; its contents are lost."""
        assert self._kv_cache_bytes is not None, "the KV cache was never released"
        for storage, size in zip(cache_storages(self), self._kv_cache_bytes, strict=True):
            storage.resize_(size)
