"""Hostile completions, verified by real workers under real limits."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from rlmath.workers.worker_pool import MEMORY_BYTES, VerifierPool
from tests.answers.attacks import HANG_SOLUTIONS, HANGS, MARKER, QUICK, SOLUTIONS
from tests.workers.test_worker_pool import HALF, children, hang, is_alive, wait_until, warm

LIMIT_SECONDS = 2.0
WORKERS = 2
HONEST = [(f"\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}", HALF) for n in range(1, 101)]


class MemoryWatch(threading.Thread):
    """The largest address space and resident size of the workers, as the kernel reports them (bytes)."""

    def __init__(self, fork_server: int) -> None:
        super().__init__(daemon=True)
        self.fork_server = fork_server
        self.largest_space = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.02):
            for pid in children(self.fork_server):
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
                except OSError:
                    continue
                self.largest_space = max(self.largest_space, pages * os.sysconf("SC_PAGE_SIZE"))


def cpu_seconds_of_children() -> float:
    """Of all that have ended, with theirs. Unlike the clock it does not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """(verdicts of the attacks, of the honest answers, largest address space, marker) of one batch."""
    marker = tmp_path_factory.mktemp("attacks") / "written"
    attacks = [text.replace(MARKER, str(marker)) for text in (*QUICK, *HANGS)]
    before = set(children(os.getpid()))
    with VerifierPool(WORKERS, LIMIT_SECONDS) as pool:
        (fork_server,) = set(children(os.getpid())) - before
        warm(pool)
        watch = MemoryWatch(fork_server)
        watch.start()
        asked = [(text, SOLUTIONS) for text in attacks[: len(QUICK)]]
        asked += [(text, HANG_SOLUTIONS) for text in attacks[len(QUICK) :]]
        for position, honest in enumerate(HONEST):
            asked.insert(2 * position, honest)
        futures = [(pair, pool.submit(*pair, "math")) for pair in asked]
        verdicts = [(pair, future.result(300)) for pair, future in futures]
        watch.stop.set()
        family = [fork_server, *children(fork_server)]
    wait_until(lambda: not any(map(is_alive, family)))
    attacked = [verdict for pair, verdict in verdicts if pair[1] is not HALF]
    honest = [verdict for pair, verdict in verdicts if pair[1] is HALF]
    return attacked, honest, watch.largest_space, marker


def test_no_attack_is_rewarded(batch):
    assert len(batch[0]) == len(QUICK) + len(HANGS) >= 40
    assert not [verdict for verdict in batch[0] if verdict.correct]


def test_no_attack_runs_code(batch):
    assert not batch[3].exists()
    assert not batch[3].parent.joinpath("written ").exists()


def test_what_hangs_times_out_and_the_rest_does_not(batch):
    attacked = batch[0]
    assert [verdict.verdict for verdict in attacked[-len(HANGS) :]] == ["timeout"] * len(HANGS)
    assert not [verdict for verdict in attacked[: -len(HANGS)] if verdict.verdict in ("timeout", "error")]


def test_all_others_in_the_batch_come_back_right(batch):
    assert len(batch[1]) == len(HONEST)
    assert all(verdict.correct for verdict in batch[1])


def test_memory_stays_under_the_limit(batch):
    assert 0 < batch[2] <= MEMORY_BYTES


@pytest.mark.full
def test_one_percent_of_hanging_answers_costs_its_limits_and_leaves_nobody():
    hangs, workers, limit = 100, 2, 1.0
    texts = [hang(n) for n in range(hangs)]
    honest = [f"\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}" for n in range(1, 9901)]
    asked = [
        text for n, text in enumerate(honest) for text in ([texts[n // 99], text] if n % 99 == 0 else [text])
    ]
    before = set(children(os.getpid()))
    spent_before = cpu_seconds_of_children()
    with VerifierPool(workers, limit) as pool:
        futures = [(text, pool.submit(text, HALF, "math")) for text in asked]
        verdicts = [(text, future.result(600)) for text, future in futures]
    spent = cpu_seconds_of_children() - spent_before
    assert len(verdicts) == 10_000
    assert sum(verdict.verdict == "timeout" for _, verdict in verdicts) == hangs
    assert all(verdict.correct for text, verdict in verdicts if "int" not in text)
    assert hangs * limit <= spent <= 1.1 * hangs * limit + 30
    wait_until(lambda: set(children(os.getpid())) == before)
