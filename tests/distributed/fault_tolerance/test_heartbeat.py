"""A rank that dies, fails, falls silent or hangs ends the others soon, with the cause."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rlmath.config.schema import RunConfig
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from tests.distributed.fault_tolerance.runs import running, told
from tests.programs import wait_for
from tests.selection import matrix

END_SECONDS = 120.0

pytestmark = pytest.mark.distributed


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk") as run:
        victim = run.pid(1)
        os.kill(victim, signal.SIGKILL)
        assert run.ends_within(END_SECONDS) != 0
        assert told(
            rf"rank 1 on \S+ \(pid {victim}\), step \d+, in \S.* has died", run.console()
        ), run.console()
        ends = rf"PeerFailedError: rank 1 on \S+ \(pid {victim}\), .* has died"
        assert told(ends, run.console()), "the error of rank 0 that follows from it names it, too"
        assert run.status().status == FAILURE
        assert "rank 1" in run.status().message
        assert run.saved_steps() == [], (
            "torchrun's SIGTERM to the others is no reason to save without a peer"
        )


@matrix
def test_a_raising_rank_tells_its_reason_and_phase(tmp_path: Path) -> None:
    with running(tmp_path / "run", "raise") as run:
        assert run.ends_within(END_SECONDS) != 0
        reason = (
            r"rank 1 on \S+ \(pid \d+\), step 3, in rollout for \d+ s failed: LookupError: "
            r"no such prompt"
        )
        assert told(r"rank 0 on \S+ ends: " + reason, run.console()), run.console()
        assert "more of it" not in run.status().message and "LookupError" in run.status().message


@pytest.mark.full
def test_a_frozen_rank_is_found_silent(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk", "heartbeat_timeout_seconds=5", ranks=3) as run:
        os.kill(run.pid(2), signal.SIGSTOP)
        wait_for(lambda: "has given no sign of life" in run.console(), END_SECONDS)
        assert told(
            r"rank 2 has given no sign of life for \d+ s .*; its last heartbeat: rank 2 on",
            run.console(),
        )
        os.kill(run.pid(2), signal.SIGCONT)
        assert run.ends_within(END_SECONDS) != 0


def test_a_hang_is_told_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path / "run", "hang", "hang_timeout_seconds=5") as run:
        assert run.ends_within(END_SECONDS) != 0
        stacks = [(run.folder / "stacks" / f"rank-0000{rank}.txt").read_text() for rank in (0, 1)]
        assert "all_reduce" in stacks[0] and "waits_for_ever" not in stacks[0]
        assert "waits_for_ever" in stacks[1]
        console = run.console()
        assert told(r"rank 0 on .*, in update for \d+ s: all_reduce .*\n", console), console
        assert told(r"rank 1 on .*, in rollout for \d+ s: waits_for_ever .*<- BEHIND", console), (
            console
        )
        report = console[console.index("Root Cause") :]
        assert "no rank has made progress for" in report, (
            "torchrun's report, its last lines, has the cause"
        )
        assert run.status().status == FAILURE


@matrix
def test_a_lost_store_is_told(tmp_path: Path) -> None:
    """The launcher stands for a node that is gone: its ranks are frozen, not told to end."""
    with running(tmp_path / "run", "walk", "heartbeat_timeout_seconds=5") as run:
        os.kill(run.launcher.pid, signal.SIGSTOP)
        wait_for(
            lambda: told(r"key-value store of the run at \S+:\d+ is lost", run.console()),
            END_SECONDS,
        )
        wait_for(lambda: not any(alive(run.pid(rank)) for rank in (0, 1)), END_SECONDS)
        os.kill(run.launcher.pid, signal.SIGCONT)
        assert run.ends_within(END_SECONDS) != 0


@pytest.fixture
def lonely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Heartbeat, dist.TCPStore]]:
    """Rank 0 of two, and the store; the test writes the other rank's values.

    Its threads do not run."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    settings = RunConfig(output_dir=str(tmp_path))
    folder = str(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Heartbeat(settings, 0, 2, folder, StopRequest(60.0, folder, 0)), server
    finally:
        dist.destroy_process_group()


def test_a_neighbour_without_beats_and_ranks_without_progress_are_counted_silent(
    lonely: tuple[Heartbeat, dist.TCPStore],
) -> None:
    heartbeat, _ = lonely
    neighbour = replace(heartbeat._status(), rank=1)
    for count in (1, 2):
        heartbeat._store.set("status/1", asdict(replace(neighbour, beats=count)))
        heartbeat._store.set("progress", [1, count])
        heartbeat._exchange(1.0)
        assert heartbeat._silence[1] == heartbeat._still == 0.0
    for turn in (1, 2):
        heartbeat._exchange(1.0)
        assert heartbeat._silence[1] == heartbeat._still == turn
    heartbeat._store.set("status/1", asdict(replace(neighbour, left=True)))
    heartbeat._exchange(1.0)
    assert heartbeat._silence[1] == 2.0, "who has left is not missed"


def test_a_rank_that_left_and_ended_since_its_status_was_read_has_not_died(
    lonely: tuple[Heartbeat, dist.TCPStore],
) -> None:
    heartbeat, _ = lonely
    process = subprocess.Popen(["true"])
    status = replace(heartbeat._status(), rank=1, pid=process.pid, process_start="long ago")
    process.wait()
    heartbeat._store.set("status/1", asdict(status))
    assert heartbeat._has_died(status)
    heartbeat._store.set("status/1", asdict(replace(status, left=True)))
    assert not heartbeat._has_died(status)


def test_a_request_of_another_rank_reaches_rank_zero_which_tells_at_its_end_that_all_is_saved(
    lonely: tuple[Heartbeat, dist.TCPStore], tmp_path: Path
) -> None:
    sent: list[object] = []
    stops = [StopRequest(60.0, str(tmp_path), rank) for rank in (0, 1)]
    first, second = (
        Heartbeat(lonely[0]._settings, rank, 2, str(tmp_path), stops[rank], broadcast)
        for rank, broadcast in enumerate(
            (lambda message: sent.append(message) or message, lambda message: sent.pop(0))
        )
    )
    stops[1].request("SIGTERM")
    for heartbeat in (second, first, second):
        heartbeat._exchange(1.0)
    assert stops[0].requested == "SIGTERM" and not stops[1].is_done
    with first:
        wait_for(lambda: first._beats == 2)
        stops[0].done()  # and ends before its next beat
    second._exchange(1.0)
    assert stops[1].is_done


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
