"""Hostile completions, verified by real workers under real limits."""

from __future__ import annotations

import os

import pytest

from rlmath.workers.worker_pool import WorkerPool
from tests.answers.attacks import HANG_SOLUTIONS, HANGS, MARKER, QUICK, SOLUTIONS
from tests.programs import wait_for
from tests.workers.test_worker_pool import HALF, children, is_alive, warm

LIMIT_SECONDS = 2.0
WORKERS = 2
HONEST = [(f"\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}", HALF) for n in range(1, 101)]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """(verdicts of the attacks, of the honest answers, marker) of one batch."""
    marker = tmp_path_factory.mktemp("attacks") / "written"
    attacks = [text.replace(MARKER, str(marker)) for text in (*QUICK, *HANGS)]
    before = set(children(os.getpid()))
    with WorkerPool(WORKERS, LIMIT_SECONDS) as pool:
        (fork_server,) = set(children(os.getpid())) - before
        warm(pool)
        pairs = [(text, SOLUTIONS) for text in attacks[: len(QUICK)]]
        pairs += [(text, HANG_SOLUTIONS) for text in attacks[len(QUICK) :]]
        for position, honest in enumerate(HONEST):
            pairs.insert(2 * position, honest)
        futures = [(pair, pool.submit(*pair, "math")) for pair in pairs]
        verdicts = [(pair, future.result(300)) for pair, future in futures]
        family = [fork_server, *children(fork_server)]
    wait_for(lambda: not any(map(is_alive, family)))
    attacked = [verdict for pair, verdict in verdicts if pair[1] is not HALF]
    honest = [verdict for pair, verdict in verdicts if pair[1] is HALF]
    return attacked, honest, marker


def test_no_attack_is_rewarded(batch):
    assert len(batch[0]) == len(QUICK) + len(HANGS) >= 40
    assert not [verdict for verdict in batch[0] if verdict.correct]


def test_no_attack_runs_code(batch):
    assert not batch[2].exists()
    assert not batch[2].parent.joinpath("written ").exists()


def test_what_hangs_times_out_and_the_rest_does_not(batch):
    attacked = batch[0]
    assert [verdict.verdict for verdict in attacked[-len(HANGS) :]] == ["timeout"] * len(HANGS)
    assert not [
        verdict for verdict in attacked[: -len(HANGS)] if verdict.verdict in ("timeout", "error")
    ]


def test_all_others_in_the_batch_come_back_right(batch):
    assert len(batch[1]) == len(HONEST)
    assert all(verdict.correct for verdict in batch[1])
