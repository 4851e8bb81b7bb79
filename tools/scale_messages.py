"""What a message costs here: real processes, gloo and torch's key-value store on one machine."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmath.distributed.collectives import all_gather_objects
from tools.scale_rollout import CountingStore, Figures

SMALL, LARGE = 8, 2**20
"""Bytes of a rank."""
REQUESTS = 300


def message_costs(ranks: int, repeats: int) -> Figures:
    """Seconds of collectives and store requests with so many processes, medians on rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    rest = [context.Process(target=_rank, args=(rank, ranks, port, repeats, queue)) for rank in range(ranks)]
    for process in rest:
        process.start()
    for process in rest:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a process of the measurement ended with {process.exitcode}")
    return queue.get()


def _rank(rank: int, ranks: int, port: int, repeats: int, queue: mp.SimpleQueue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = Figures()
    for name, size in (("small", SMALL), ("large", LARGE)):
        mine, everyone = torch.zeros(size, dtype=torch.uint8), torch.zeros(size * ranks, dtype=torch.uint8)
        found[f"gather_{name}_seconds"] = _median(
            repeats, lambda a=everyone, b=mine: dist.all_gather_single(a, b)
        )
        found[f"sum_{name}_seconds"] = _median(repeats, lambda a=mine: dist.all_reduce(a))
    found["gather_objects_seconds"] = _median(repeats, lambda: all_gather_objects(None))
    store = dist.distributed_c10d._get_default_store()
    found["store_request_seconds"] = _median(5, lambda: _ask(store)) / REQUESTS
    if rank == 0:
        queue.put(found)
    dist.barrier()


def _ask(store: dist.Store) -> None:
    for _ in range(REQUESTS):
        store.add("counter", 1)


def _median(repeats: int, act: Callable[[], object]) -> float:
    taken = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def gloo_start(ranks: int, connect_all: bool) -> Figures:
    """What a gloo group of so many ranks asks of the run's store until it stands; threads are its ranks."""
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0" if connect_all else "1"
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(ranks)]
    groups = []

    def join(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(stores[rank], rank, ranks, timedelta(seconds=60)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.environ.pop("TORCH_GLOO_LAZY_INIT")
    if before is not None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = before
    assert len(groups) == ranks
    return {
        "gloo_start_requests": sum(store.total for store in stores),
        "gloo_start_bytes": sum(store.bytes for store in stores),
    }
