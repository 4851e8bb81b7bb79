"""A store that counts what it is asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist


class CountingStore(dist.Store):
    """Passes requests on to another store, and counts them and their bytes."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner
        self.requests = 0
        self.bytes = 0

    def _count(self, *parts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, parts))

    def set(self, key: str, value: str | bytes) -> None:
        self._count(key, value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._count(key, value)
        return value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._inner.compare_set(key, expected, desired)  # type: ignore[arg-type]
        self._count(key, expected, desired, found)
        return found

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count(*keys)
        self._inner.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._inner.multi_get(keys)
        self._count(*keys, *values)
        return values


def gloo_start(ranks: int, connect_all: bool) -> tuple[int, int]:
    """Requests and bytes that a gloo group of so many ranks asks of the store until it stands. Ranks are threads."""
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(ranks)]

    def join(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(stores[rank], rank, ranks, timedelta(seconds=60))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as threads:
        patch.setenv("TORCH_GLOO_LAZY_INIT", "0" if connect_all else "1")
        groups = list(threads.map(join, range(ranks)))
    assert len(groups) == ranks
    return sum(store.requests for store in stores), sum(store.bytes for store in stores)
