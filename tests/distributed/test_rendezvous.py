"""Ranks as threads at a real key-value store.

The tests ask who is missing, who found a mistake, and what an earlier start left.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from rlmath.distributed.ranks import RankInfo, RankReport, RendezvousResult, hosts_text, ranks_text
from rlmath.distributed.rendezvous import MissingRanksError, Rendezvous, open_rendezvous
from rlmath.run.nodes import meet_with_mistake
from tests.programs import wait_for

RANKS_PER_NODE = 2
SECONDS = 3600.0
"""Longer than a test may take: who waits for all of it fails."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that outlives starts, as torchrun's does."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


@pytest.fixture(autouse=True)
def ranks_that_have_ended_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.READ_SECONDS", 0.5)


def place_of(rank: int, world_size: int) -> RankInfo:
    node, local_rank = divmod(rank, RANKS_PER_NODE)
    return RankInfo(rank, world_size, node, local_rank, RANKS_PER_NODE, f"host{node}", 100 + rank)


def sign_in(port: int, rank: int, world_size: int = 4) -> Rendezvous:
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20), wait_for_workers=False)
    return Rendezvous(place_of(rank, world_size), store)


def come(
    rendezvous: Rendezvous,
    seconds: float = SECONDS,
    call: str = "start",
    problem: str | None = None,
) -> None:
    place = rendezvous.rank_info
    word = RankReport(place.host, place.node, problem)
    rendezvous.sync(
        call, word, seconds, lambda reports: RendezvousResult(judged(reports), is_mistake=True)
    )


def judged(said: dict[int, RankReport]) -> str | None:
    hosts = [said[rank].host for rank in sorted(said)]
    return (
        None if hosts == ["host0", "host0", "host1", "host1"][: len(hosts)] else f"wrong: {hosts}"
    )


def outcomes(*calls: Callable[[], None]) -> list[BaseException | None]:
    """What each call, in a thread of its own, raised."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_all_come_and_what_they_said_is_judged(port: int) -> None:
    meetings = [sign_in(port, rank) for rank in range(4)]
    assert outcomes(*(lambda meeting=meeting: come(meeting) for meeting in meetings)) == [None] * 4
    meetings[0].group_store(5.0).set("key", "of this start")
    assert meetings[3].group_store(5.0).get("key") == b"of this start"


def test_missing_ranks_are_named_with_their_hosts_on_all_ranks(port: int) -> None:
    """Rank 2 has signed in and hangs.

    Rank 3 of the same node, and the third node, never started."""
    meetings = [sign_in(port, rank, 6) for rank in range(3)]
    errors = outcomes(*(lambda meeting=meeting: come(meeting, 1.0) for meeting in meetings[:2]))
    assert [type(error) for error in errors] == [MissingRanksError] * 2
    message = (
        "2 of 6 ranks are at the start after 1 s (run.start_timeout_seconds). Missing: rank 2 "
        "on host1 (started, "
    )
    message += (
        "not here yet), rank 3 on host1 (never started), ranks 4-5 of the node with number 2 "
        "(never started)."
    )
    assert all(str(error).startswith(message) for error in errors), errors


def test_rank_0_that_never_comes_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.SLACK_SECONDS", 0.0)
    sign_in(port, 0)
    (error,) = outcomes(lambda: come(sign_in(port, 3), 1.0))
    assert isinstance(error, MissingRanksError)
    assert "rank 3 on host1 waited 1 s at the start for rank 0 on host0 (pid 100)" in str(error)


def test_a_mistake_of_one_node_is_told_with_its_host_by_all(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings = [sign_in(port, rank) for rank in range(4)]
    mistake = ValueError("no folder /models/a")
    errors = outcomes(
        *(lambda meeting=meeting: come(meeting) for meeting in meetings[:2]),
        *(
            lambda meeting=meeting: meet_with_mistake(meeting, mistake, SECONDS)
            for meeting in meetings[2:]
        ),
    )
    assert {str(error) for error in errors} == {
        "on host1 (ranks 2-3): no folder /models/a\n2 of the 4 ranks that are here found "
        "something wrong."
    }
    assert all(isinstance(error, ValueError) for error in errors)


def test_a_mistake_of_all_is_told_as_it_stands_and_does_not_wait_for_a_rank_that_hangs(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.PROBLEM_SECONDS", 1.0)
    meetings = [sign_in(port, rank) for rank in range(4)]
    errors = outcomes(
        *(
            lambda meeting=meeting: come(meeting, problem="run.seed is -1")
            for meeting in meetings[:3]
        )
    )
    assert {str(error) for error in errors} == {"run.seed is -1"}


def test_a_rank_that_fails_between_two_calls_is_told_at_the_second(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.PROBLEM_SECONDS", 1.0)
    meetings = [sign_in(port, rank, 2) for rank in range(2)]
    assert outcomes(*(lambda meeting=meeting: come(meeting) for meeting in meetings)) == [None] * 2
    meetings[1].report_failure("OSError: no GPU")
    (error,) = outcomes(lambda: come(meetings[0], call="group"))
    assert (
        isinstance(error, MissingRanksError)
        and str(error) == "rank 1 on host0 failed: OSError: no GPU"
    )


def test_what_an_earlier_start_left_is_never_taken_for_this_one(port: int) -> None:
    """The store stays when torchrun starts the ranks again.

    Rank 1 did come, in the start before."""
    earlier = [sign_in(port, rank, 2) for rank in range(2)]
    assert outcomes(*(lambda meeting=meeting: come(meeting) for meeting in earlier)) == [None] * 2
    earlier[0].group_store(5.0).set("address", "of a process that is gone")
    restarted = sign_in(port, 0, 2)
    (error,) = outcomes(lambda: come(restarted, 1.0))
    assert isinstance(error, MissingRanksError) and "1 of 2 ranks" in str(error)
    third = [sign_in(port, rank, 2) for rank in (1, 0)]
    assert outcomes(*(lambda meeting=meeting: come(meeting) for meeting in third)) == [None] * 2
    stores = [meeting.group_store(5.0) for meeting in reversed(third)]  # rank 0 serves it
    assert not any(store.check(["address"]) for store in stores)


def test_the_store_of_ranks_on_one_node_outlives_the_launchers_and_is_for_this_node_only() -> None:
    program = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as launcher:
        port = int(launcher.stdout.readline())
        meetings = [sign_in(port, rank, 2) for rank in range(2)]
        before = set(listening())
        assert (
            outcomes(*(lambda meeting=meeting: come(meeting) for meeting in meetings)) == [None] * 2
        )
        first, second = (meeting.group_store(5.0) for meeting in meetings)
        assert [address.partition(":")[0] for address in set(listening()) - before] == ["127.0.0.1"]
        launcher.kill()
        launcher.wait()
        assert all(
            outcomes(lambda meeting=meeting: come(meeting, 1.0, "later"))[0] is not None
            for meeting in meetings
        )
    second.set("key", "there")
    assert first.get("key") == b"there" and second.add("count", 2) == 2


def listening() -> list[str]:
    connections = psutil.Process().net_connections("tcp")
    return [
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def test_a_store_that_is_lost_is_told(port: int) -> None:
    rendezvous = sign_in(port, 1, 2)

    class Lost:
        """What torch's store does when its server has ended."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            def fail(*_: object) -> None:
                raise dist.DistNetworkError("Broken pipe\nmore")

            return fail

    rendezvous._store = Lost()  # type: ignore[assignment]
    (error,) = outcomes(lambda: come(rendezvous))
    assert isinstance(error, MissingRanksError) and str(error).endswith("Broken pipe"), error
    assert "lost the run's key-value store" in str(error)


def test_a_port_that_another_program_uses_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        place = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(MissingRanksError, match=f"at port {port}; does another program use it"):
            open_rendezvous(3600.0)  # longer than a test may take


def test_a_run_of_another_name_on_the_same_port_is_not_met(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [sign_in(port, rank, 2) for rank in range(2)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    renamed = sign_in(port, 0, 2)
    errors = outcomes(
        *(lambda meeting=meeting: come(meeting) for meeting in other), lambda: come(renamed, 1.0)
    )
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], MissingRanksError)
    assert "Missing: rank 1 on host0 (never started)" in str(errors[2])


def test_no_rank_ends_with_an_error_before_the_others_have_read_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank to end makes its launcher end the store; rank 3 is slow to look."""
    monkeypatch.setattr("rlmath.distributed.rendezvous.READ_SECONDS", SECONDS)
    meetings = [sign_in(port, rank) for rank in range(4)]
    ended: list[int] = []

    def attend(rank: int) -> None:
        try:
            come(meetings[rank], problem="no folder" if rank == 1 else None)
        finally:
            ended.append(rank)

    others_have_read = [f"{meetings[0]._start}/start/read/{rank}" for rank in range(3)]
    outcome = meetings[3]._outcome

    def slow(at: str) -> object:
        wait_for(lambda: meetings[3]._store.all_there(others_have_read))
        assert ended == []
        return outcome(at)

    monkeypatch.setattr(meetings[3], "_outcome", slow)
    errors = outcomes(*(lambda rank=rank: attend(rank) for rank in range(4)))
    assert all(isinstance(error, ValueError) for error in errors), errors


def test_many_ranks_and_hosts_are_named_shortly() -> None:
    assert ranks_text(range(128)) == "ranks 0-127"
    assert ranks_text([5, 0, 1, 9]) == "ranks 0-1, 5, 9"
    assert hosts_text([f"n{i}" for i in range(16)]).endswith("n7 and 8 more")
