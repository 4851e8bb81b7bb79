"""A pool of processes that stand in for torchrun's ranks, shared by all distributed tests.

Importing torch, Megatron and vLLM costs seconds per process, so the processes stay; every `run`
gives them a fresh process group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch.multiprocessing as mp

from rlmath.distributed.process import end_with_parent, freeze_live_objects
from tests.programs import free_port

MANY_THREADS = 100
"""Threads of a process of the pool; each group of gloo's has three."""


def _serve(connection: Connection, rank: int, parent: int) -> None:
    end_with_parent(parent)
    gc.disable()  # for the first task, which imports: the collector would take a third of that time
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", RANK=str(rank), LOCAL_RANK=str(rank))
    while True:
        task = connection.recv()
        if task is None:
            return
        try:
            connection.send((True, _run_task(rank, *task)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _run_task(
    rank: int, world_size: int, port: int, module: str, name: str, args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update(sizes, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function = getattr(importlib.import_module(module), name)
    try:
        return function(*args)
    finally:
        with contextlib.suppress(ImportError):
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not gc.isenabled():
            freeze_live_objects()
        _end_threads_of_old_groups()


def _end_threads_of_old_groups() -> None:
    """Collect the garbage that keeps process groups alive.

    A process group ends its threads when nothing refers to it, and models that did are freed as
    garbage only. vLLM takes what there is out of the collector's sight when an engine starts."""
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.unfreeze()
        gc.collect()


class RankPool:
    """A pool of up to `size` processes.

    `run` calls a module-level function on the first `world_size` of them."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            connection, worker_end = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(worker_end, len(self._workers), os.getpid()), daemon=True
            )
            process.start()
            worker_end.close()
            self._workers.append((process, connection))

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0
    ) -> list[Any]:
        """Results of `function(*args)` by rank.

        A rank that fails or hangs fails the test with its traceback."""
        self._grow(world_size)
        port = free_port()
        workers = self._workers[:world_size]
        for _, connection in workers:
            connection.send((world_size, port, function.__module__, function.__name__, args))
        results: dict[int, Any] = {}
        while len(results) < world_size:
            open_ = [c for i, (_, c) in enumerate(workers) if i not in results]
            ready = wait(open_, timeout)
            if not ready:
                self._fail(
                    f"ranks {sorted(set(range(world_size)) - set(results))} gave no result in "
                    f"{timeout} s"
                )
            for rank, (_, connection) in enumerate(workers):
                if connection in ready:
                    results[rank] = self._receive(rank, connection)
        return [results[rank] for rank in range(world_size)]

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            ok, value = connection.recv()
        except EOFError:
            self._fail(f"rank {rank} died")
        if not ok:
            self._fail(f"rank {rank} failed:\n{value}")
        return value

    def _fail(self, message: str) -> None:
        self.close()
        raise AssertionError(message)

    def close(self) -> None:
        """End all processes, and those that they have started."""
        started = [child for process, _ in self._workers for child in _descendants(process.pid)]
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                # psutil looks at the start time, too: an id that was given again is safe
                child.kill()
        psutil.wait_procs(started, timeout=10)
        self._workers.clear()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
