"""Routes of unfinished completions in a checkpoint, and on the ranks that go on with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from rlmath.algorithms.types import RoutesAt
from rlmath.checkpoint.route_files import read_routes, write_routes
from rlmath.checkpoint.unfinished_groups import route_file
from rlmath.rollout.routes import RouteStore, load_on_all_ranks, load_routes
from tests.planning.test_memory_estimate import QWEN_30B_A3B

SHAPE = replace(QWEN_30B_A3B, num_layers=3, experts_per_token=2, num_experts=8)


def some_routes(tokens: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(8, (tokens, 3, 2), dtype=torch.uint8, generator=draw)


def test_a_file_gives_back_its_routes_in_less_memory_than_they_take(tmp_path: Path) -> None:
    routes = {4: some_routes(1000), 1: some_routes(30, seed=1)}
    path = tmp_path / route_file(2)
    path.write_bytes(write_routes(routes))
    read = read_routes(path, SHAPE)
    assert list(read) == [4, 1]
    assert all(torch.equal(read[number], routes[number]) for number in routes)
    assert path.stat().st_size < 0.6 * 1030 * 6


def test_a_model_with_many_experts_has_two_bytes_for_each(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    routes = torch.tensor([[[0, 511]] * 3], dtype=torch.int16)
    path.write_bytes(write_routes({0: routes}))
    assert torch.equal(read_routes(path, replace(SHAPE, num_experts=512))[0], routes)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (replace(SHAPE, num_layers=4), r"tokens have \[3, 2\] experts; needed: \[4, 2\]"),
        (replace(SHAPE, num_experts=7), "experts are not below 7"),
        (replace(SHAPE, num_experts=512), "there are not 240 bytes of routes"),
    ],
)
def test_routes_of_another_model_are_refused(tmp_path: Path, shape: object, told: str) -> None:
    path = tmp_path / "routes"
    path.write_bytes(write_routes({0: some_routes(20)}))
    with pytest.raises(ValueError, match=told):
        read_routes(path, shape)  # type: ignore[arg-type]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    tensors = load(write_routes({0: some_routes(20)}))
    path.write_bytes(save(tensors | {"routes": tensors["routes"][:-2]}))
    with pytest.raises(ValueError, match="routes is damaged"):
        read_routes(path, SHAPE)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="routes is damaged"):
        read_routes(path, SHAPE)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


HOSTILE_HEADERS = {
    "fewer than none": '{"slices": [[5, -4], [0, 8]], "token": [3, 2]}',
    "infinitely many": '{"slices": [[0, 1e999]], "token": [3, 2]}',
    "more than any memory": f'{{"slices": [[0, {10**30}]], "token": [3, 2]}}',
    "nested": "[" * 100_000,
    "no text": "\udcff",
}


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
def test_a_hostile_file_is_refused_on_all_ranks(tmp_path: Path, one_rank: None, name: str) -> None:
    tensors = load(write_routes({0: some_routes(4)}))
    header = HOSTILE_HEADERS[name].encode(errors="surrogateescape")
    path = tmp_path / route_file(0)
    path.write_bytes(save(tensors | {"header": np.frombuffer(header, np.uint8)}))
    with pytest.raises(ValueError, match=f"rank 0: {route_file(0)} is damaged"):
        load_on_all_ranks(
            RouteStore(0), tmp_path, [RoutesAt(0, 0, tokens=4)], world_size=1, shape=SHAPE
        )


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / route_file(0))
    with pytest.raises(ValueError, match="FIFO"):
        load_routes(RouteStore(0), tmp_path, [RoutesAt(0, 0, tokens=5)], world_size=1, shape=SHAPE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_ranks_goes_on_with_the_routes_of_three(
    tmp_path: Path, world_size: int
) -> None:
    saved = [RouteStore(rank) for rank in range(3)]
    routes = {}
    for number in range(7):
        routes_NLK = some_routes(5 + number, seed=number)
        routes[saved[number % 3].keep(routes_NLK)] = routes_NLK
    dropped = list(routes)[2]
    saved[dropped.rank].drop([dropped])
    del routes[dropped]
    for store in saved:
        (tmp_path / route_file(store.rank)).write_bytes(write_routes(store.held))
    stores = [RouteStore(rank) for rank in range(world_size)]
    stores[0].keep(some_routes(9))
    moved = [load_routes(store, tmp_path, list(routes), world_size, SHAPE) for store in stores]
    assert all(places == moved[0] for places in moved) and list(moved[0]) == list(routes)
    assert {place.rank for place in moved[0].values()} == set(range(min(3, world_size)))
    for place, new_place in moved[0].items():
        assert torch.equal(stores[new_place.rank].get(new_place), routes[place])
    assert sum(store.bytes for store in stores) == sum(tensor.nbytes for tensor in routes.values())


def test_routes_that_a_checkpoint_does_not_have_are_missed(tmp_path: Path) -> None:
    (tmp_path / route_file(0)).write_bytes(write_routes({0: some_routes(5)}))
    with pytest.raises(ValueError, match="does not have RoutesAt"):
        load_routes(RouteStore(0), tmp_path, [RoutesAt(0, 1, tokens=5)], 1, SHAPE)
    with pytest.raises(ValueError, match="does not have RoutesAt"):
        load_routes(RouteStore(0), tmp_path, [RoutesAt(0, 0, tokens=6)], 1, SHAPE)
