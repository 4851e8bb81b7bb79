"""What ranks on two nodes report when they meet, and what they learn of each other.

Ranks are threads at one key-value store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from rlmath.config.load import load_config
from rlmath.distributed.device import open_device
from rlmath.distributed.device_kind import DeviceKind
from rlmath.distributed.ranks import RankInfo
from rlmath.distributed.rendezvous import MissingRanksError, Rendezvous
from rlmath.run import join
from rlmath.run.join import group_store
from rlmath.run.nodes import meet, meet_with_mistake

SECONDS = 60.0
FACTS = {"torch": "2.13.0"}


@pytest.fixture(autouse=True)
def first_node_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node is this machine, and ranks that have ended are not waited for long."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("rlmath.distributed.rendezvous.READ_SECONDS", 0.5)


@pytest.fixture
def meetings() -> list[Rendezvous]:
    """Four ranks on two nodes."""
    store = dist.HashStore()
    return [
        Rendezvous(
            RankInfo(
                rank,
                4,
                rank // 2,
                local_rank=rank % 2,
                ranks_per_node=2,
                host=f"host{rank // 2}",
                pid=100 + rank,
            ),
            store,
        )
        for rank in range(4)
    ]


def errors_of(calls: Sequence[Callable[[], object]]) -> list[str]:
    """The errors of calls that run at the same time; "" for a call without one."""

    def error_of(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(error_of, calls))


@pytest.mark.parametrize(("chosen", "told"), [(None, ""), ("lo", ""), ("eth7", ", gloo over eth7")])
def test_nodes_that_are_alike_are_told_with_their_addresses(
    meetings: list[Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chosen: str | None,
    told: str,
) -> None:
    """What other ranks than a node's first know of it is not compared."""
    caplog.set_level(logging.INFO)
    if chosen is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    facts = [FACTS, {"torch": "another"}, FACTS, {}]
    calls = [
        lambda meeting=meeting, known=known: meet(
            meeting, known, SECONDS, data="same", data_makers="own"
        )
        for meeting, known in zip(meetings, facts, strict=True)
    ]
    assert errors_of(calls) == [""] * 4
    lines = [record for record in caplog.records if record.name == "rlmath.run.nodes"]
    assert [record.getMessage() for record in lines] == [
        "2 nodes, 4 ranks:",
        f"  host0: ranks 0-1, 127.0.0.1 (lo){told}",
        f"  host1: ranks 2-3, 127.0.0.1 (lo){told}",
    ]


def test_ranks_of_a_single_node_need_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    store = dist.HashStore()
    meetings = [
        Rendezvous(
            RankInfo(rank, 2, 0, local_rank=rank, ranks_per_node=2, host="host0", pid=100 + rank),
            store,
        )
        for rank in range(2)
    ]
    calls = [lambda meeting=meeting: meet(meeting, FACTS, SECONDS) for meeting in meetings]
    assert errors_of(calls) == [""] * 2


def test_all_ranks_learn_how_nodes_and_their_data_differ(meetings: list[Rendezvous]) -> None:
    facts = [FACTS, FACTS, {"torch": "2.12.0"}, FACTS]
    calls = [
        lambda meeting=meeting, known=known, data=data: meet(
            meeting, known, SECONDS, data=data, data_makers="data.format=own.py:form"
        )
        for meeting, known, data in zip(meetings, facts, "aaba", strict=True)
    ]
    (error,) = set(errors_of(calls))
    assert error.startswith("ValueError: The nodes differ")
    assert "\n  torch: 2.13.0 on host0; 2.12.0 on host1\n" in error
    assert "rank 2 read other prompts than rank 0" in error
    assert "clocks: data.format=own.py:form" in error


def test_a_rank_whose_mistake_nobody_hears_tells_it_and_who_is_missing(
    meetings: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.SLACK_SECONDS", 0.0)
    mistake = ValueError("no folder /models/a")
    with pytest.raises(MissingRanksError, match=r"^no folder /models/a\nThe other ranks could not"):
        meet_with_mistake(meetings[3], mistake, 0.2)


# ---------------------------------------------------------------- the store of the process group


def test_the_store_of_the_process_group_is_that_of_all_ranks(meetings: list[Rendezvous]) -> None:
    config = load_config([], ["run.output_dir=o", "model.path=m", "data.train_path=t"])
    device = open_device("cpu")
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda meeting: group_store(meeting, config, device), meetings))
    assert all(store is not None for store in stores)
    first, *_, last = [store for store in stores if store is not None]
    first.set("address", "here")
    assert last.get("address") == b"here"
    assert group_store(None, config, device) is None


@pytest.mark.parametrize(
    ("kind", "overrides", "refusal"),
    [
        ("cuda", ["rollout.ranks=2"], "ValueError"),
        ("cuda", ["rollout.ranks=2", "rollout.kv_cache_gib=3"], ""),
        ("cuda", [], ""),
        ("cpu", ["rollout.ranks=2"], ""),
    ],
    ids=["measures", "has a size", "no ranks of their own", "no GPU"],
)
def test_only_engines_that_measure_a_gpus_memory_may_not_share_it(
    meetings: list[Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
    kind: DeviceKind,
    overrides: list[str],
    refusal: str,
) -> None:
    monkeypatch.setattr(join, "gpu_name", lambda: "GPU-1")
    paths = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    config = load_config([], [*paths, *overrides])
    device = replace(open_device("cpu"), kind=kind)
    calls = [lambda meeting=meeting: group_store(meeting, config, device) for meeting in meetings]
    errors = errors_of(calls)
    assert [error.partition(":")[0] for error in errors] == [refusal] * 4
