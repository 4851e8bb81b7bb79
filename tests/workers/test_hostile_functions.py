"""Reward functions that damage what they run in.

Each spoils its own answer, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmath.workers.fork_server import MAX_PROCESSES
from rlmath.workers.worker_pool import WorkerPool
from tests.programs import wait_for
from tests.workers.test_worker_pool import children

NAP = f"599.{os.getpid()}1"
"""Seconds that the functions' children sleep, by which those of this session are found."""

MARK = "RLMATH_TEST_HOSTILE"
"""Environment variable of the pools of these tests and all that descends from them."""

SOURCE = f"""
import os, signal, subprocess, sys, time

def reward(completion, solutions, row):
    name, _, text = completion.partition(" ")
    if name in globals():
        globals()[name](text)
    return float(len(completion)), {{"pid": os.getpid()}}

def write_everywhere(content):
    for fd in range(256):
        try:
            os.write(fd, content)
        except OSError:
            pass

def garbage(text):
    write_everywhere(b"what is this?\\n" * 100)

def huge_length(text):
    write_everywhere(b"\\x7f\\xff\\xff\\xff" + b"x" * 1000)

def wrong_number(text):
    reply = b'{{"id": 1, "reward": 9.0, "metrics": [], "failure": null, "message": ""}}'
    write_everywhere(len(reply).to_bytes(4) + reply)

def close_all(text):
    os.closerange(0, 256)

def kill_parent(text):
    os.kill(os.getppid(), 9)
    time.sleep(60)

def kill_group(text):
    os.killpg(0, 9)

def nap():
    return subprocess.Popen(["sleep", "{NAP}"])

def eight(text):
    for _ in range(8):
        nap()

def daemon(text):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "{NAP}"])
        os._exit(0)
    os.wait()

def late_subprocess(text):
    try:
        subprocess.run("sleep {NAP} & sleep {NAP}", shell=True, timeout=0.2)
    except subprocess.TimeoutExpired:
        pass

def hang_with_children(text):
    eight("")
    time.sleep(1000)

def terminate(text):
    child = nap()
    child.terminate()
    assert child.wait(10) == -signal.SIGTERM

def hold(text):
    code = "import time; held = bytearray(b'x') * (150 * 2**20); time.sleep(60)"
    for child in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]:
        child.wait()

def bomb(text):
    worker = os.getpid()
    for _ in range(8):  # 256 processes, which end by themselves
        if os.fork() == 0 and text:
            os.setsid()
    time.sleep(20)
    if os.getpid() != worker:
        os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """The current folder, with hostile_rewards.py in it.

    What is started from now on carries MARK."""
    place = tmp_path_factory.mktemp("hostile")
    (place / "hostile_rewards.py").write_text(SOURCE)
    before = os.getcwd()
    os.chdir(place)
    os.environ[MARK] = NAP
    yield place
    del os.environ[MARK]
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(folder) -> Iterator[WorkerPool]:
    """A pool of one worker, so that every answer follows another in it."""
    with WorkerPool(1, 30.0, function="hostile_rewards:reward") as shared:
        yield shared


def ask(pool: WorkerPool, *completions: str) -> list:
    futures = [pool.call(completion, [], {}) for completion in completions]
    return [future.result(120) for future in futures]


def naps() -> list[int]:
    """The functions' children that run."""
    return those_with("cmdline", NAP)


def those_with(file: str, text: str) -> list[int]:
    """The processes whose file in /proc has this between two zero bytes.

    The files of processes that have ended are empty."""
    process_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / file).read_bytes().split(b"\0"):
                    process_ids.append(int(entry.name))
    return process_ids


def failures_among_others(said: list, hostile: int) -> list:
    return [
        answer
        for index, answer in enumerate(said)
        if index != hostile and answer.failure is not None
    ]


@pytest.mark.parametrize(
    "name", ["garbage", "huge_length", "wrong_number", "close_all", "kill_group"]
)
def test_who_breaks_the_channel_breaks_its_own_answer_only(pool, name):
    servers = children(os.getpid())
    answers = ask(pool, "one", "three", f"{name} now", "eleven", "fourteen")
    assert children(os.getpid()) == servers
    assert answers[2].failure == "error"
    assert answers[2].message
    assert [answer.reward for answer in answers[:2] + answers[3:]] == [3.0, 5.0, 6.0, 8.0]


@pytest.mark.parametrize("name", ["eight", "daemon", "late_subprocess"])
def test_processes_end_with_the_answer_that_started_them(pool, name):
    answers = ask(pool, f"{name} now", "seven")
    assert [answer.failure for answer in answers] == [None, None]
    wait_for(lambda: not naps())


def test_what_the_module_starts_lives_as_long_as_the_pool(folder):
    helper = f"import os, subprocess\nhelper = subprocess.Popen(['sleep', '{NAP}'])\n"
    (folder / "helped.py").write_text(
        f"{helper}def reward(text, *_):\n    return 1.0, {{'helper': helper.pid, 'worker': "
        f"os.getpid()}}\n"
    )
    with WorkerPool(1, 30.0, function="helped:reward") as pool:
        first = dict(ask(pool, "x")[0].metrics)
        os.kill(
            int(first["worker"]), signal.SIGKILL
        )  # after which the fork server looks for what is left over
        metrics = dict(
            ask(pool, "x", "x")[1].metrics
        )  # the first may have gone to the one that was killed
        assert metrics["worker"] != first["worker"] and len(naps()) == 1
    assert not naps()


def test_a_child_can_be_terminated(pool):
    assert ask(pool, "terminate now")[0].failure is None


def test_processes_end_with_the_time_limit_and_with_the_pool(folder):
    with WorkerPool(1, 1.5, function="hostile_rewards:reward") as pool:
        assert ask(pool, "hang_with_children now")[0].failure == "timeout"
        wait_for(lambda: not naps())
        future = pool.call("hang_with_children now", [], {})
        wait_for(lambda: len(naps()) == 8)
    assert not naps()
    assert future.exception(10)


def test_processes_end_with_a_trainer_that_is_killed(folder):
    code = (
        "import sys; from rlmath.workers.worker_pool import WorkerPool\n"
        "pool = WorkerPool(1, 60.0, function='hostile_rewards:reward')\n"
        "pool.call('hang_with_children now', [], {}); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, start_new_session=True
    ) as parent:
        wait_for(lambda: len(naps()) == 8)
        os.killpg(parent.pid, signal.SIGKILL)
    wait_for(lambda: not naps())


def test_the_memory_limit_is_that_of_all_processes_together(folder):
    with WorkerPool(1, 30.0, memory_bytes=400 * 2**20, function="hostile_rewards:reward") as pool:
        answers = ask(pool, "three", "hold now", "seven")
    assert "together held more memory" in answers[1].message
    assert not failures_among_others(answers, 1)


@pytest.mark.parametrize("sessions", ["", "apart"])
def test_a_fork_bomb_ends_with_its_answer(pool, sessions):
    ask(pool, "three")
    before = len(those_with("environ", f"{MARK}={NAP}"))
    answers = ask(pool, "three", f"bomb {sessions}", "seven")
    assert f"more than {MAX_PROCESSES} processes" in answers[1].message
    assert not failures_among_others(answers, 1)
    wait_for(lambda: len(those_with("environ", f"{MARK}={NAP}")) <= before)
