"""A rank plans its cell only: cells need nothing of each other and are alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.reshard_plan import cell_of, cells, plan_sync, rank_rounds
from rlmath.rollout.weight_sync.shard_layouts import coordinates, training_layout
from tests.rollout.weight_sync.oracle import EXPERTS, SMALL

BUCKET = 600
MESHES = {
    "two replicas": Mesh(0, 8, 2, 2, 1),
    "engines of two replicas": Mesh(0, 32, 2, 2, 4),
    "nodes of two replicas": Mesh(0, 32, 2, 2, 1),
    "context": Mesh(0, 16, 2, 2, 2, context=2),
    "experts": Mesh(0, 32, 2, 2, 1, expert=4, expert_tensor=2),
}
NODES = {"nodes of two replicas": 4}


def test_cells_by_hand() -> None:
    # Stages of 8 ranks, TP2: with engines of 4 the pattern repeats after 4 ranks, with nodes of 8
    # after 8.
    mesh = Mesh(0, 16, 2, 2, 4)
    assert cells(mesh) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert cells(mesh, ranks_per_node=8) == [tuple(range(16))]
    assert cell_of(replace(mesh, rank=14)) == (4, 5, 6, 7, 12, 13, 14, 15)


def test_where_a_node_spans_a_border_of_stages_all_ranks_are_one_cell() -> None:
    # Stages of 12 ranks on nodes of 8: the second node has ranks of both.
    assert cells(Mesh(0, 24, 4, 2, 4), ranks_per_node=8) == [tuple(range(24))]


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_is_in_one_cell_and_each_has_all_shards(name: str) -> None:
    mesh = MESHES[name]
    rank_cells = cells(MESHES[name], NODES.get(name))
    assert sorted(rank for cell in rank_cells for rank in cell) == list(range(mesh.world_size))
    assert len(rank_cells) > 1
    all_shards = {coordinates(replace(mesh, rank=rank)) for rank in range(mesh.world_size)}
    for cell in rank_cells:
        assert {coordinates(replace(mesh, rank=rank)) for rank in cell} == all_shards
        engines = {rank // mesh.engine_size for rank in cell}
        assert len(cell) == len(engines) * mesh.engine_size


@pytest.mark.parametrize("name", MESHES)
def test_cells_are_alike_and_all_ranks_of_one_make_the_same_plan(name: str) -> None:
    mesh = MESHES[name]
    shape = EXPERTS if name == "experts" else SMALL
    shape_and_layout = (shape, training_layout(4, mesh))
    nodes = NODES.get(name)
    rank_cells = cells(mesh, nodes)
    sizes = set()
    for cell in rank_cells:
        plans = [
            plan_sync(*shape_and_layout, replace(mesh, rank=rank), 4, BUCKET, nodes)
            for rank in (cell[0], cell[-1])
        ]
        assert plans[0] == plans[1] and tuple(plans[0].local) == tuple(plans[0].missing) == cell
        places = {rank: place for place, rank in enumerate(cell)}
        sizes.add(
            tuple((places[c.source], places[c.target], c[2:]) for c in chain(*plans[0].rounds))
        )
    assert len(sizes) == 1


def test_a_rank_plans_no_more_with_more_ranks() -> None:
    planned = []
    peers = []
    for ranks in (16, 32, 64, 128, 256, 512):
        mesh = Mesh(ranks - 1, ranks, 2, 2, 1)
        plan = plan_sync(SMALL, training_layout(4, mesh), mesh, 4, BUCKET, ranks_per_node=8)
        planned.append(
            (sum(map(len, plan.rounds)), sum(map(len, plan.local.values())), len(plan.rounds))
        )
        rounds = rank_rounds(plan, mesh.rank)
        peers.append(
            len(
                {
                    peer
                    for rank_round in rounds
                    for peer in (*rank_round.sends, *rank_round.receives)
                }
            )
        )
    assert len(set(planned)) == len(set(peers)) == 1
    assert planned[0][0] > 0 and 0 < peers[0] < 16


def test_sending_is_shared_where_all_ranks_are_one_cell() -> None:
    """Stages of 60 ranks on nodes of 8.

    The holders of a node come first, and are shared as evenly as the others."""
    mesh = Mesh(0, 120, 2, 2, 2)
    plan = plan_sync(SMALL, training_layout(4, mesh), mesh, 4, BUCKET, ranks_per_node=8)
    assert len(plan.local) == 120
    bytes_sent = [plan.bytes_sent(rank) for rank in range(120)]
    assert sum(bytes_sent) == plan.lower_bound
    assert max(bytes_sent) < 2 * min(bytes_sent)
