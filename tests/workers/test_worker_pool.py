"""The pool with real workers.

Equal questions are asked once, so hanging ones differ."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlmath.answers.verifier import Verdict
from rlmath.workers import worker as worker_module
from rlmath.workers.worker_pool import WorkerPool
from tests.answers.attacks import boxed, hanging
from tests.programs import wait_for


def hang(number: int = 0) -> str:
    return boxed(hanging(number))


HANG = hang()
HALF = ("\\boxed{\\frac{1}{2}+0}", "\\int_0^1 3x^2 dx")
"""The second is there so that math-verify is asked."""


def children(parent: int) -> list[int]:
    """Process ids of the live direct children.

    A process that is only waiting to be reaped does not count."""
    return [child.pid for child in psutil.Process(parent).children() if is_alive(child.pid)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def lone_pool(timeout_seconds: float) -> Iterator[tuple[WorkerPool, int]]:
    """A pool of one worker, and its fork server's process id."""
    before = set(children(os.getpid()))
    with WorkerPool(workers=1, timeout_seconds=timeout_seconds) as single:
        (fork_server,) = set(children(os.getpid())) - before
        yield single, fork_server


@pytest.fixture(scope="module")
def single():
    with lone_pool(timeout_seconds=60.0) as pool_and_fork_server:
        yield pool_and_fork_server


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(workers=2, timeout_seconds=1.0) as shared:
        warm(shared)
        yield shared


def warm(pool: WorkerPool) -> None:
    """Wait until both workers have imported the verifier and verified a wrong answer.

    The first of these takes most of a second; on a busy machine it alone may take a limit."""
    texts = ("\\boxed{0.71}", "\\boxed{0.72}")

    def verified() -> bool:
        futures = [pool.submit(text, HALF, "math") for text in texts]
        return all(future.result(60).verdict == "symbolic" for future in futures)

    wait_for(verified)


def test_cheap_answers_are_there_at_once(pool):
    future = pool.submit("\\boxed{5}", ("6",), "math")
    assert future.done()
    assert future.result() == Verdict(False, "5", "number")
    assert pool.submit("nothing", ("6",), "math").result() == Verdict(False, "", "no_answer")


def test_the_rest_is_decided_by_a_worker(pool):
    assert pool.submit("\\boxed{ 0.5 }", HALF, "math").result(60) == Verdict(
        True, "0.5", "symbolic"
    )
    assert pool.submit("\\boxed{0.6}", HALF, "math").result(60) == Verdict(False, "0.6", "symbolic")


def test_strange_characters_reach_the_worker(pool):
    text = "\u221a\u202e(\u0663)"
    verdict = pool.submit(f"\\boxed{{{text}}}", HALF, "math").result(60)
    assert (verdict.correct, verdict.extracted, verdict.verdict) == (False, text, "symbolic")
    assert pool.submit("\\boxed{\x00\ud800}", HALF, "math").result() == Verdict(
        False, "\x00\ud800", "string"
    )


def test_a_stuck_check_times_out_and_delays_nobody_else(pool):
    finished = []
    stuck = pool.submit(HANG, HALF, "math")
    stuck.add_done_callback(lambda _: finished.append("stuck"))
    other_checks = [
        pool.submit(f"\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}", HALF, "math") for n in range(1, 31)
    ]
    for other in other_checks:
        other.add_done_callback(lambda _: finished.append("other"))
    assert all(
        other.result(60) == Verdict(True, other.result().extracted, "symbolic")
        for other in other_checks
    )
    assert stuck.result(60) == Verdict(False, HANG[7:-1], "timeout")
    assert pool.submit(HANG, HALF, "math") is not stuck, "a check that failed is not kept"
    assert finished.count("other") == 30
    assert finished[-1] == "stuck"


def test_a_crashed_worker_costs_its_own_answer_only(single):
    pool, fork_server = single
    crashed = pool.submit(HANG, HALF, "math")
    waiting = pool.submit("\\boxed{0.5}", HALF, "math")
    wait_for(crashed.running)
    os.kill(children(fork_server)[0], signal.SIGSEGV)
    assert crashed.result(60) == Verdict(False, HANG[7:-1], "error")
    assert waiting.result(60).correct


def test_a_dead_idle_worker_is_replaced(single):
    pool, fork_server = single
    assert pool.submit("\\boxed{0.5}", HALF, "math").result(60).correct
    (worker,) = children(fork_server)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: children(fork_server) not in ([], [worker]))
    assert pool.submit("\\boxed{0.5}", HALF, "math").result(60).correct


def test_workers_have_a_memory_limit_and_no_core_files(single):
    pool, fork_server = single
    assert (
        not pool.submit("\\boxed{0.67}", HALF, "math").result(60).correct
    )  # not known yet: a worker is ready
    limits = Path(f"/proc/{children(fork_server)[0]}/limits").read_text().splitlines()
    values = {line[:26].strip(): line[26:].split()[0] for line in limits}
    assert values["Max address space"] == str(2 * 2**30)
    assert values["Max core file size"] == "0"
    assert values["Max file size"] == "0"


def test_equal_questions_are_asked_once(pool):
    first, second = (pool.submit("\\boxed{\\frac{3}{6}}", HALF, "math") for _ in range(2))
    assert first is second
    assert first.result(60).correct
    assert pool.submit("\\boxed{\\frac{3}{6}}", HALF, "math") is first


def test_an_answer_to_another_question_is_another_check(pool):
    apples = "How many apples?"
    pears = "How many pears?"
    first, second = (
        pool.submit("\\boxed{3 apples}", ("3",), "math", question) for question in (apples, pears)
    )
    assert first.result(60).correct and not second.result(60).correct
    assert pool.submit("\\boxed{3 apples}", ("3",), "math", apples) is first
    hostile = pool.submit(
        "\\boxed{3 apples}", ("3",), "math", "\ud800\0 apples " + "x" * 10_000_000
    )
    assert hostile.result(60).correct


def test_an_answer_that_waited_longer_than_its_limit_is_judged():
    progress = []
    with WorkerPool(workers=1, timeout_seconds=0.5) as pool:
        checks = [pool.submit(hang(n), HALF, "math") for n in range(2)]
        checks.append(pool.submit("\\boxed{\\frac{4}{8}}", HALF, "math"))
        results = pool.results(checks, lambda: progress.append(1))
    assert [result.verdict for result in results] == ["timeout"] * 2 + ["symbolic"]
    assert results[-1].correct and results[-1].queue_seconds > 0.5
    assert len(progress) > 1


def test_a_check_that_gets_no_processor_is_not_late():
    """It takes longer than its limit by the clock, and no time on its processor."""
    with lone_pool(timeout_seconds=1.0) as (pool, server):
        assert pool.submit("\\boxed{0.61}", HALF, "math").result(60).verdict == "symbolic"
        (worker,) = children(server)
        os.kill(worker, signal.SIGSTOP)
        check = pool.submit("\\boxed{0.62}", HALF, "math")
        wait_for(check.running)
        time.sleep(1.5)
        assert not check.done()
        os.kill(worker, signal.SIGCONT)
        assert check.result(60).verdict == "symbolic"


def test_a_check_that_never_gets_a_processor_ends(monkeypatch):
    with lone_pool(timeout_seconds=2.0) as (pool, server):
        assert pool.submit("\\boxed{0.61}", HALF, "math").result(60).verdict == "symbolic"
        os.kill(children(server)[0], signal.SIGSTOP)
        monkeypatch.setattr(worker_module, "WALL_FACTOR", 0.2)
        assert pool.submit("\\boxed{0.62}", HALF, "math").result(60).verdict == "timeout"


def test_closing_ends_every_process_and_cancels_what_waits():
    with lone_pool(timeout_seconds=60.0) as (pool, fork_server):
        futures = [pool.submit(hang(n), HALF, "math") for n in range(3)]
        wait_for(futures[0].running)
        family = [fork_server, *children(fork_server)]
    with pytest.raises(RuntimeError, match="closed"):
        futures[0].result(0)
    assert futures[1].cancelled()
    assert futures[2].cancelled()
    wait_for(lambda: not any(map(is_alive, family)))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("\\boxed{0.5}", HALF, "math")


def test_a_fork_server_that_is_killed_is_an_error_in_words():
    with lone_pool(timeout_seconds=60.0) as (pool, fork_server):
        running = pool.submit(HANG, HALF, "math")
        waiting = pool.submit("\\boxed{0.5}", HALF, "math")
        wait_for(running.running)
        family = [fork_server, *children(fork_server)]
        os.kill(fork_server, signal.SIGKILL)
        for future in (running, waiting):
            with pytest.raises(
                RuntimeError, match=r"dead \(process \d+ has ended, ended by signal 9"
            ):
                future.result(60)
        wait_for(lambda: not any(map(is_alive, family)))
        with pytest.raises(RuntimeError, match="dead"):
            pool.submit("\\boxed{0.5}", HALF, "math")
        assert pool.submit("\\boxed{5}", ("5",), "math").result().correct


def test_many_solutions_are_compared_in_a_worker_under_its_limit(pool):
    wrong_solutions = tuple(f"\\frac{{{n}}}{{7}} + {n}" for n in range(1, 1000))
    right = [
        pool.submit(f"\\boxed{{{answer}}}", (*wrong_solutions, "1/2"), "math")
        for answer in ("0.5", "1/2", "2/4")
    ]
    assert [future.result(60).correct for future in right] == [True, True, True]
    many_solutions = tuple(f"\\sqrt{{{n}}}+x" for n in range(200_000))
    assert pool.submit("\\boxed{0.7}", many_solutions, "math").result(60).verdict == "timeout"


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"reward\.workers is 0"):
        WorkerPool(workers=0, timeout_seconds=5.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"reward\.timeout_seconds"):
            WorkerPool(workers=1, timeout_seconds=seconds)
