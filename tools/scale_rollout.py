"""What a rollout of N engines asks of the run's store, and the records that every rank then gathers."""

from __future__ import annotations

import pickle
import random
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from threading import Barrier

import torch.distributed as dist

from rlmath.algorithms.types import Completion, Score
from rlmath.distributed.collectives import gathered_bytes
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.rollout.sampling import Load, Request, RequestResult
from rlmath.rollout.work_queue import WorkQueue
from tools.bench_packing import PROMPT_MEAN, draw_lengths

LIMIT, GROUP, VOCAB = 28_672, 16, 152_064
SEED = 1

Figures = dict[str, float]


@cache
def lengths(samples: int) -> list[int]:
    """Tokens of every sample, prompt and completion, as in `bench_packing`."""
    return draw_lengths(LIMIT, samples, SEED)


class CountingStore(dist.Store):
    """A store that counts what it is asked for, and the bytes of it."""

    def __init__(self, inner: dist.Store | None = None) -> None:
        super().__init__()
        self._inner = inner or dist.HashStore()
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def _count(self, kind: str, *parts: str | bytes) -> None:
        self.requests[kind] += 1
        self.bytes += sum(map(len, parts))

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", key, value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._count("get", key, value)
        return value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._inner.compare_set(key, expected, desired)  # type: ignore[arg-type]
        self._count("compare_set", key, expected, desired, found)
        return found

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, b"8 bytes.")
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait", *keys)
        self._inner.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._inner.multi_get(keys)
        self._count("multi_get", *keys, *values)
        return values

    def delete_key(self, key: str) -> bool:
        self._count("delete", key)
        return self._inner.delete_key(key)

    @property
    def total(self) -> int:
        return sum(self.requests.values())


@dataclass(frozen=True)
class Drawn:
    """What a rollout asks of the store, and which engine samples which sample."""

    requests: int
    store_bytes: int
    tokens: list[int]
    """By engine: completion tokens that it samples."""


TOKENS_A_STEP = 512
"""An engine's step stands for so many tokens of every sequence."""


def draw_rollout(engines: int, samples: int) -> Drawn:
    """Engines of one rank draw their work, all at one pace, each with room for an even share of the samples."""
    all_lengths = lengths(samples)
    rows = [
        [
            Request((p, g), (), 0, 0, max(1, all_lengths[p * GROUP + g] - int(PROMPT_MEAN)))
            for g in range(GROUP)
        ]
        for p in range(samples // GROUP)
    ]
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(engines)]
    places = max(1, samples // engines)
    work_queue = [
        WorkQueue(RunStore(store, "rollout/0"), rows, Mesh(e, engines, 1, 1, 1), places)
        for e, store in enumerate(stores)
    ]
    tokens = _play(work_queue)
    for one in work_queue:
        one.close()
    assert inner.num_keys() == 0
    requests = [store.total for store in stores]
    return Drawn(sum(requests), sum(store.bytes for store in stores), tokens)


def _play(work_queue: Sequence[WorkQueue]) -> list[int]:
    """Completion tokens by engine, when all have sampled to the end."""
    tokens = [0] * len(work_queue)
    in_flight: list[dict[tuple[int, int], int]] = [{} for _ in work_queue]
    running = list(range(len(work_queue)))
    while running:
        for engine in running:
            mine = in_flight[engine]
            mine |= {one.key: one.max_new_tokens for one in work_queue[engine].pop(Load(len(mine), 0))}
            for key in list(mine):
                step = min(TOKENS_A_STEP, mine[key])
                tokens[engine] += step
                mine[key] -= step
                if mine[key] == 0:
                    del mine[key]
                    work_queue[engine].finished(RequestResult(key, (), (), "stop"))
        running = [engine for engine in running if in_flight[engine]]
    return tokens


def add_at_once(clients: int) -> tuple[list[int], list[int]]:
    """(the numbers that so many engines get of one counter, to which all add at the same moment, and the requests of
    each) over connections of their own to a real store; each engine is a thread."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready = Barrier(clients)

    def add(store: CountingStore) -> int:
        ready.wait()
        return RunStore(store, "rollout/0").fetch_add("others")

    stores = [
        CountingStore(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)) for _ in range(clients)
    ]
    with ThreadPoolExecutor(clients) as engines:
        numbers = list(engines.map(add, stores))
    return numbers, [store.total for store in stores]


def records(drawn: Drawn, samples: int, ranks_per_engine: int) -> Figures:
    """The records that a rollout gathers on every rank, by the engines' real shares; the first rank of an engine has
    them, and of `ranks_per_engine` engines of one rank that `drawn` has, one is made."""
    per_token, per_sample = record_bytes()
    tokens = [
        sum(drawn.tokens[start : start + ranks_per_engine])
        for start in range(0, len(drawn.tokens), ranks_per_engine)
    ]
    shares = [
        round(per_token * mine + per_sample * samples * mine / sum(drawn.tokens)) + 4 for mine in tokens
    ]
    nothing = [len(pickle.dumps(None))] * (ranks_per_engine - 1)
    sizes = [size for share in shares for size in (share, *nothing)]
    _, sent = gathered_bytes(sizes)
    return {
        "records_bytes": sum(sizes),
        "records_bytes_sent": sent,
        "records_bytes_filled_up": len(sizes) * max(sizes),
    }


@cache
def record_bytes(compact: bool = True) -> tuple[float, float]:
    """(bytes per token, bytes per sample) of a pickled record: what is measured of short and long completions. Not
    `compact`: with Python's own numbers in tuples."""
    sizes = [len(pickle.dumps(make_records(tokens, 64, compact))) / 64 for tokens in (1000, 3000)]
    per_token = (sizes[1] - sizes[0]) / 2000
    return per_token, sizes[0] - 1000 * per_token


def record_seconds() -> dict[str, tuple[float, float]]:
    """By what is done: seconds per token, and those with Python's own numbers in tuples."""
    tokens, count = 2000, 64
    found: dict[str, list[float]] = {"pickle": [], "unpickle": []}
    for compact in (True, False):
        made, taken = make_records(tokens, count, compact), {"pickle": [], "unpickle": []}
        for _ in range(5):
            started = time.perf_counter()
            content = pickle.dumps(made)
            taken["pickle"].append(time.perf_counter() - started)
            started = time.perf_counter()
            pickle.loads(content)
            taken["unpickle"].append(time.perf_counter() - started)
        for action, seconds in taken.items():
            found[action].append(statistics.median(seconds) / (tokens * count))
    return {action: (ours, tuples) for action, (ours, tuples) in found.items()}


def make_records(tokens: int, count: int, compact: bool = True) -> dict:
    """What an engine reports of `count` completions of so many tokens, with four characters a token."""
    draw = random.Random(SEED)

    def one(index: int) -> Completion:
        ids = array("i", (draw.randrange(VOCAB) for _ in range(tokens)))
        logprobs = array("f", (-draw.expovariate(3.0) for _ in range(tokens)))
        text = "".join(f"{draw.randrange(10_000):04}" for _ in range(tokens))
        if compact:
            return Completion(index, ids, logprobs, text, "stop", 1)
        return Completion(index, tuple(ids), tuple(logprobs), text, "stop", 1)

    return {(index, 0): (one(index), Score(5.0, True, "132", "number", True)) for index in range(count)}
