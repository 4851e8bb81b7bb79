"""The run's own values in torch's key-value store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlmath.distributed.ranks import RankReport
from rlmath.distributed.run_store import RunStore, record_of


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def test_values_come_back_and_a_key_that_is_not_there_is_not_waited_for(
    server: dist.TCPStore,
) -> None:
    store = RunStore(server, "rlmath/a")
    other_store = RunStore(server, "rlmath/a")
    store.set("status/0", {"step": 3, "text": "\x1b é"})
    assert (
        other_store.get("status/0") == {"step": 3, "text": "\x1b é"}
        and other_store.get("status/1") is None
    )
    assert other_store.get_all(["status/0", "status/1"]) == {
        "status/0": {"step": 3, "text": "\x1b é"}
    }
    assert RunStore(server, "rlmath/b").get("status/0") is None
    assert RunStore(server, "rlmath/a").all_there(["status/0"])
    store.delete("status/0")
    assert other_store.get("status/0") is None


def test_the_first_value_stays(server: dist.TCPStore) -> None:
    store = RunStore(server, "rlmath")
    other_store = RunStore(server, "rlmath")
    assert store.set_first("failure", "of rank 1") == "of rank 1"
    assert other_store.set_first("failure", "of rank 2") == "of rank 1"


def test_numbers_are_given_once_to_many_threads(server: dist.TCPStore) -> None:
    taken: list[int] = []

    def take() -> None:
        store = RunStore(server, "rlmath")
        taken.extend(store.fetch_add("next") for _ in range(70))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(280))


def test_a_record_of_other_code_with_other_fields_is_none() -> None:
    good = {"host": "a", "node": 1, "problem": None, "may_pass": True, "facts": {"torch": "2"}}
    good |= {"address": "", "data": "d", "data_makers": "", "gpu": ""}
    expected = RankReport("a", 1, None, may_pass=True, facts={"torch": "2"}, data="d")
    assert record_of(RankReport, good) == expected
    assert record_of(RankReport, good | {"more": 1}) is None
    assert record_of(RankReport, [good]) is None and record_of(RankReport, None) is None
