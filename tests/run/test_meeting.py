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
def ranks() -> list[Rendezvous]:
    """Four ranks on two nodes."""
    store = dist.HashStore()
    return [
        Rendezvous(RankInfo(rank, 4, rank // 2, rank % 2, 2, f"host{rank // 2}", 100 + rank), store)
        for rank in range(4)
    ]


def errors_of(calls: Sequence[Callable[[], object]]) -> list[str]:
    """The messages of the errors that calls raise beside each other; "" for one that raises none."""

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
    ranks: list[Rendezvous],
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
        lambda rank=rank, known=known: meet(rank, known, SECONDS, data="same", data_makers="own")
        for rank, known in zip(ranks, facts, strict=True)
    ]
    assert errors_of(calls) == [""] * 4
    assert [message for message in caplog.messages if "ranks" in message] == [
        "2 nodes, 4 ranks:",
        f"  host0: ranks 0-1, 127.0.0.1 (lo){told}",
        f"  host1: ranks 2-3, 127.0.0.1 (lo){told}",
    ]


def test_ranks_of_a_single_node_need_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    store = dist.HashStore()
    ranks = [
        Rendezvous(RankInfo(rank, 2, 0, rank, 2, "host0", 100 + rank), store) for rank in range(2)
    ]
    assert errors_of([lambda rank=rank: meet(rank, FACTS, SECONDS) for rank in ranks]) == [""] * 2


def test_all_ranks_learn_how_nodes_and_their_data_differ(ranks: list[Rendezvous]) -> None:
    facts = [FACTS, FACTS, {"torch": "2.12.0"}, FACTS]
    calls = [
        lambda rank=rank, known=known, data=data: meet(
            rank, known, SECONDS, data=data, data_makers="data.format=own.py:form"
        )
        for rank, known, data in zip(ranks, facts, "aaba", strict=True)
    ]
    (error,) = set(errors_of(calls))
    assert error.startswith("ValueError: The nodes differ")
    assert "\n  torch: 2.13.0 on host0; 2.12.0 on host1\n" in error
    assert "rank 2 read other prompts than rank 0" in error
    assert "clocks: data.format=own.py:form" in error


def test_a_mistake_is_told_once_for_the_ranks_of_a_node(ranks: list[Rendezvous]) -> None:
    mistake = ValueError("no folder /models/a")
    calls = [lambda rank=rank: meet_with_mistake(rank, mistake, SECONDS) for rank in ranks[2:]]
    calls += [lambda rank=rank: meet(rank, FACTS, SECONDS) for rank in ranks[:2]]
    (error,) = set(errors_of(calls))
    assert error.startswith("ValueError: on host1 (ranks 2-3): no folder /models/a\n")


def test_a_rank_whose_mistake_nobody_hears_tells_it_and_who_is_missing(
    ranks: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmath.distributed.rendezvous.SLACK_SECONDS", 0.0)
    mistake = ValueError("no folder /models/a")
    with pytest.raises(MissingRanksError, match=r"^no folder /models/a\nThe other ranks could not"):
        meet_with_mistake(ranks[3], mistake, 0.2)


# ---------------------------------------------------------------- the store of the process group


def test_the_store_of_the_process_group_is_that_of_all_ranks(ranks: list[Rendezvous]) -> None:
    config = load_config([], ["run.output_dir=o", "model.path=m", "data.train_path=t"])
    device = open_device("cpu")
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda rank: group_store(rank, config, device), ranks))
    assert all(store is not None for store in stores)
    first, *_, last = [store for store in stores if store is not None]
    first.set("address", "here")
    assert last.get("address") == b"here"
    assert group_store(None, config, device) is None


@pytest.mark.parametrize(
    ("kind", "overrides", "is_refused"),
    [
        ("cuda", ["rollout.ranks=2"], True),
        ("cuda", ["rollout.ranks=2", "rollout.kv_cache_gib=3"], False),
        ("cuda", [], False),
        ("cpu", ["rollout.ranks=2"], False),
    ],
    ids=["measures", "has a size", "no ranks of their own", "no GPU"],
)
def test_only_engines_that_measure_a_gpus_memory_may_not_share_it(
    ranks: list[Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
    kind: DeviceKind,
    overrides: list[str],
    is_refused: bool,
) -> None:
    monkeypatch.setattr(join, "gpu_name", lambda: "GPU-1")
    paths = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    config = load_config([], [*paths, *overrides])
    device = replace(open_device("cpu"), kind=kind)
    errors = errors_of([lambda rank=rank: group_store(rank, config, device) for rank in ranks])
    assert [error.startswith("ValueError: ") for error in errors] == [is_refused] * 4
    assert is_refused or errors == [""] * 4
