"""What a stranger writes into the run's key-value store is ignored, said once, and never ends anything."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import stat
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rlmath.distributed import signed_store
from rlmath.distributed.ranks import RankInfo, RankReport, RendezvousResult
from rlmath.distributed.rendezvous import MissingRanksError, Rendezvous, open_rendezvous
from rlmath.distributed.signed_store import SignedStore, record_of, remove_start_secret, start_secret
from tests.disks import shrink, small_disk
from tests.distributed.counting_store import add_at_once
from tests.distributed.fault_tolerance.runs import Run, running, told, wait_for
from tests.distributed.stranger import GARBAGE, connect, disturb
from tests.programs import (
    ENVIRONMENT,
    REPOSITORY,
    TRAIN,
    end_family,
    family,
    run,
    small_run,
    torchrun_command,
)
from tools.drill_faults import differences
from tools.drill_run import metric_lines

SECRET = b"only our ranks know it"


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def signed(server: dist.TCPStore, name: str = "rlmath/rollout/0") -> SignedStore:
    return SignedStore(server, name, SECRET)


def test_values_come_back_and_strangers_are_ignored_with_one_warning(
    server: dist.TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = signed(server), signed(server)
    ours.set("a", {"step": 3, "text": "\x1b é"})
    assert other.get("a") == {"step": 3, "text": "\x1b é"} and other.get("b") is None
    for garbage in [*GARBAGE[1:], "\ud800".encode("utf-8", "surrogatepass"), b"\xff" * 100]:
        server.set("rlmath/rollout/0/a", garbage)
        assert other.get("a", foreign="foreign") == "foreign"
        assert other.get("a", foreign="foreign") is None, "it is gone"
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "a value at rlmath/rollout/0/a that no rank of this run has written" in warning
    assert len(warning) < 1000


def test_a_warning_shows_control_characters_as_escapes(
    server: dist.TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    server.set("rlmath/rollout/0/a", "\x1b[2J\x07" + "x" * 5000)
    assert signed(server).get("a") is None
    assert r"5005 bytes: \x1b[2J\x07xxx" in caplog.text and "\x1b" not in caplog.text
    assert len(caplog.text) < 1000


def test_a_value_of_another_key_run_or_secret_is_foreign(server: dist.TCPStore) -> None:
    ours = signed(server)
    ours.set("status/0", 1)
    copied = server.get("rlmath/rollout/0/status/0")
    for key in ("rlmath/rollout/0/status/1", "rlmath/rollout/1/status/0"):
        server.set(key, copied)
    assert ours.get("status/1") is None and signed(server, "rlmath/rollout/1").get("status/0") is None
    assert SignedStore(server, "rlmath/rollout/0", b"").get("status/0") is None
    assert ours.get("status/0") is None, "who cannot verify it has removed it"


def test_the_first_value_of_ours_stays(server: dist.TCPStore) -> None:
    one, two = signed(server), signed(server)
    server.set("rlmath/rollout/0/failure", "not a failure")
    assert one.set_first("failure", "of rank 1") == "of rank 1"
    assert two.set_first("failure", "of rank 2") == "of rank 1"


def test_numbers_are_given_once_to_many_threads(server: dist.TCPStore) -> None:
    taken: list[int] = []

    def take() -> None:
        store = signed(server)
        for count in (3, 1, 1, 2) * 10:
            first = store.fetch_add("next", count)
            taken.extend(range(first, first + count))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(280))


def test_numbers_are_given_once_to_many_engines_at_once() -> None:
    numbers, requests = add_at_once(20)
    assert sorted(numbers) == list(range(20))
    assert 20 <= requests < 20 * 20 / 2, "fewer than if each failed once for every one before it"


def test_a_rank_that_others_are_always_faster_than_gets_a_number_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signed_store, "LONGEST_PAUSE", 0.0)
    inner = dist.HashStore()
    others, others_numbers = SignedStore(inner, "rollout", SECRET), []

    class Overtaken(dist.Store):
        """A real store to which another rank adds just before each of the first requests."""

        def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
            if len(others_numbers) < 2 * signed_store.MOST_ATTEMPTS:
                others_numbers.append(others.fetch_add("next"))
            return inner.compare_set(key, expected, desired)

    before = random.getstate()
    number = SignedStore(Overtaken(), "rollout", SECRET).fetch_add("next")
    assert random.getstate() == before, "the generator is the run's"
    assert [*others_numbers, number] == list(range(2 * signed_store.MOST_ATTEMPTS + 1))


def test_records_need_their_fields_and_types() -> None:
    good = {"host": "a", "node": 1, "problem": None, "may_pass": True, "facts": {"torch": "2"}}
    good |= {"address": "", "data": "d"}
    wanted = RankReport("a", 1, None, may_pass=True, facts={"torch": "2"}, data="d")
    assert record_of(RankReport, good) == wanted
    for wrong in ({"node": True}, {"node": "1"}, {"facts": {"torch": 2}}, {"facts": []}, {"more": 1}):
        assert record_of(RankReport, good | wrong) is None
    assert record_of(RankReport, [good]) is None and record_of(RankReport, {}) is None


def test_the_secret_of_a_start_is_in_a_file_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.delenv("RLMATH_STORE_SECRET", raising=False)
    first = start_secret(several_nodes=False)
    assert len(first) == 32 and start_secret(several_nodes=False) == first
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(OSError, match=r"others may read it.*TMPDIR"):
        start_secret(several_nodes=False)
    assert start_secret(several_nodes=True) == b""
    monkeypatch.setenv("RLMATH_STORE_SECRET", "given")
    assert start_secret(several_nodes=False) == start_secret(several_nodes=True) == b"given"


def test_the_secret_is_read_from_a_full_disk_and_a_rank_that_cannot_have_it_says_so(
    server: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in {**own, "MASTER_PORT": str(server.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RLMATH_STORE_SECRET", raising=False)
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        first = start_secret(several_nodes=False)
        shrink(disk)
        assert start_secret(several_nodes=False) == first and len(first) == 32
        remove_start_secret()
        shrink(disk)
        with pytest.raises(MissingRanksError, match=r"rank 1 on \S+ cannot start.*No space left.*TMPDIR"):
            open_rendezvous(20.0)


def test_ranks_meet_while_a_stranger_writes_over_all_their_values(server: dist.TCPStore) -> None:
    stranger = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20), wait_for_workers=False)
    found: list[object] = []

    def meet(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20), wait_for_workers=False)
        own = RankInfo(rank, 3, 0, rank, 3, "host", 100 + rank)
        rendezvous = Rendezvous(own, store, SECRET)
        for name in ("start", "group"):
            report = RankReport("host", 0, facts={"rank": str(rank)})
            rendezvous.sync(name, report, 60.0, lambda reports: found.append(reports) or RendezvousResult())
        found.append(rendezvous._start)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert disturb(stranger, 0.1, pause=0.3)
    for thread in threads:
        thread.join()
    names = [one for one in found if isinstance(one, str)]
    reports = [one for one in found if isinstance(one, dict)]
    assert len(names) == 3 and len(set(names)) == 1 and len(reports) == 2
    assert all(
        {rank: one[rank].facts for rank in one} == {r: {"rank": str(r)} for r in range(3)} for one in reports
    )


def two_ranks(server: dist.TCPStore) -> list[Rendezvous]:
    """The ranks of a start on one node, each with a connection of its own."""
    return [
        Rendezvous(
            RankInfo(rank, 2, 0, rank, 2, "host", 100 + rank),
            dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20), wait_for_workers=False),
            SECRET,
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("moment", ["before all are here", "before the result"])
def test_what_is_deleted_before_it_was_read_is_written_again(server: dist.TCPStore, moment: str) -> None:
    first, second = two_ranks(server)

    def delete_all() -> None:
        for key in server.list_keys():
            server.delete_key(key)

    def check(reports: object) -> RendezvousResult:
        delete_all()
        return RendezvousResult()

    waits = threading.Thread(
        target=second.sync, args=("start", RankReport("host", 0), 60.0, lambda _: RendezvousResult())
    )
    waits.start()
    report = f"rlmath/rendezvous/{first._start}/start/1"
    wait_for(lambda: server.check([report]))
    if moment == "before all are here":
        delete_all()
        first.sync("start", RankReport("host", 0), 5.0, lambda _: RendezvousResult())
    else:
        first.sync("start", RankReport("host", 0), 5.0, check)
    waits.join(10.0)
    assert not waits.is_alive() and second._start == first._start


def test_a_result_that_was_not_read_in_time_is_written_again_at_the_next_meeting(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.READ_SECONDS", 0.0)
    first, second = two_ranks(server)

    def meet_twice(rendezvous: Rendezvous) -> None:
        for name in ("start", "group"):
            rendezvous.sync(name, RankReport("host", 0), 20.0, lambda _: RendezvousResult())
            if rendezvous is first and name == "start":
                for key in server.list_keys():
                    server.delete_key(key)

    ranks = [threading.Thread(target=meet_twice, args=(one,), daemon=True) for one in (second, first)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(15.0)
    assert not any(rank.is_alive() for rank in ranks)


def test_a_rank_that_comes_late_to_the_ranks_store_needs_nothing_that_a_stranger_can_delete(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.READ_SECONDS", 0.5)
    first, second = two_ranks(server)
    waits = threading.Thread(
        target=second.sync, args=("start", RankReport("host", 0), 20.0, lambda _: RendezvousResult())
    )
    waits.start()
    first.sync("start", RankReport("host", 0), 20.0, lambda _: RendezvousResult())
    waits.join(20.0)
    served = first.group_store(5.0)
    for key in server.list_keys():
        server.delete_key(key)
    second.group_store(5.0).set("key", "there")
    assert served.get("key") == b"there"


def stranger_at(run: Run, seconds: float) -> subprocess.CompletedProcess[str]:
    port = psutil.Process(run.pid(0)).environ()["MASTER_PORT"]
    command = [sys.executable, "-m", "tests.distributed.stranger", "127.0.0.1", port, str(seconds)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.distributed
def test_a_stranger_does_not_end_a_run_and_a_rank_that_dies_then_is_found(tmp_path: Path) -> None:
    settings = ("heartbeat_timeout_seconds=10", "hang_timeout_seconds=10")
    with running(tmp_path / "run", "walk", *settings) as run:
        before = run.step()
        wrote = stranger_at(run, 14.0)
        assert run.launcher.poll() is None and wrote.stdout != "ended\n", run.console()
        assert int(wrote.stdout) > 100, wrote.stderr
        wait_for(lambda: run.step() > before + 20)
        console = run.console()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", console)
        assert 1 <= console.count("that no rank of this run has written") <= 2, console
        victim = run.pid(1)
        os.kill(victim, 9)
        assert run.ends_within(40.0) != 0
        assert told(rf"rank 1 on \S+ \(pid {victim}\), step \d+, in \S.* has died", run.console())


@pytest.mark.distributed
def test_a_rank_that_dies_while_a_stranger_writes_over_its_status_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk", "heartbeat_timeout_seconds=30") as run:
        run.step()
        store = connect("127.0.0.1", int(psutil.Process(run.pid(0)).environ()["MASTER_PORT"]))

        def write_over() -> None:
            with contextlib.suppress(RuntimeError):  # the store ends with the run
                while True:
                    for key in store.list_keys():
                        if key.endswith("status/1"):
                            store.set(key, "0")
                    time.sleep(0.01)

        time.sleep(3.0)  # the ranks have seen each other
        threading.Thread(target=write_over, daemon=True).start()
        time.sleep(1.5)
        victim = run.pid(1)
        os.kill(victim, 9)
        assert run.ends_within(40.0) != 0
        assert told(rf"rank 1 on \S+ \(pid {victim}\), step \d+, in \S.* has died", run.console())


def environment_of_rank(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if "train_grpo.py" in " ".join(process.cmdline()) else {}
    except psutil.Error:
        return {}


def port_of_ranks(store: dist.Store) -> int | None:
    """Where rank 0 of a single node serves a store of its own: the stranger reads what stands in the open."""
    for key in store.list_keys():
        if key.endswith("/result") and (found := re.search(rb'"ranks_port": ?(\d+)', store.get(key))):
            return int(found[1])
    return None


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_with_a_stranger_at_its_store_ends_with_the_metrics_of_one_without(
    arithmetic: Path, tmp_path: Path
) -> None:
    """From before the ranks meet to the end, over the start, the heartbeats and every rollout."""

    def command(name: str) -> list[str]:
        overrides = (*small_run(arithmetic, tmp_path / name), "run.total_steps=6", "run.seed=3")
        return torchrun_command(2, *TRAIN, *overrides, "reward.function=tests.reward_by_hash:reward")

    run(*command("in-peace"))
    console = (tmp_path / "console.txt").open("w+")
    disturbed = subprocess.Popen(
        [sys.executable, *command("disturbed")],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=console,
        stderr=console,
    )
    try:
        ports: list[str] = []
        while not ports:
            assert disturbed.poll() is None
            found = map(environment_of_rank, family(disturbed.pid))
            ports = [one["MASTER_PORT"] for one in found if one.get("RANK") == "0"]
            time.sleep(0.05)
        stores, written = [connect("127.0.0.1", int(ports[0]))], []
        with contextlib.suppress(RuntimeError):  # a store ends with its process
            while disturbed.poll() is None:
                if len(stores) == 1 and (port := port_of_ranks(stores[0])):
                    stores.append(connect("127.0.0.1", port))
                # One pass at a time until the port is found: nobody writes it again once the ranks have read it.
                for store in stores:
                    written += disturb(store, 0.2 if len(stores) > 1 else 0.01, len(written), pause=0.05)
        status = disturbed.wait(60)
    finally:
        end_family(disturbed)
    console.seek(0)
    text = console.read()
    assert status == 0 and len(written) > 100 and any("/rollout/" in key for key in written), text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    peace, rows = (
        [json.loads(line) for line in metric_lines(tmp_path / name)] for name in ("in-peace", "disturbed")
    )
    assert len(peace) == 6 and differences(peace, rows) == []
