import itertools

import pytest
from megatron.core.parallel_state import RankGenerator

from rlmath.distributed.mesh import Mesh


def meshes(
    world_size: int, tensor: int, pipeline: int, engine_size: int = 1, context: int = 1
) -> list[Mesh]:
    return [
        Mesh(rank, world_size, tensor, pipeline, engine_size, context=context)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    "sizes", list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2))), ids=str
)
def test_ranks_are_placed_as_megatron_places_them(sizes: tuple[int, int, int, int]):
    tensor, context, pipeline, data = sizes
    layout = meshes(tensor * context * pipeline * data, tensor, pipeline, context=context)
    megatron = RankGenerator(
        tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp"
    )
    numbers = {"tp": "tensor_rank", "cp": "context_rank", "dp": "data_rank", "pp": "pipeline_rank"}
    for axis, number in numbers.items():
        for group in megatron.get_ranks(axis):
            assert [getattr(layout[rank], number) for rank in group] == list(range(len(group)))
    assert {mesh.data for mesh in layout} == {data}


@pytest.mark.parametrize(
    ("world_size", "tensor", "pipeline", "context"),
    [(1, 1, 1, 1), (8, 2, 2, 1), (8, 1, 4, 1), (12, 3, 2, 1), (8, 2, 2, 2), (12, 1, 2, 3)],
)
def test_one_rank_of_every_replica_speaks_for_the_loss(
    world_size: int, tensor: int, pipeline: int, context: int
):
    layout = meshes(world_size, tensor, pipeline, context=context)
    speakers = [mesh for mesh in layout if mesh.counts_loss]
    assert sorted(mesh.data_rank for mesh in speakers) == list(range(layout[0].data))
    assert all(mesh.pipeline_rank == pipeline - 1 and mesh.tensor_rank == 0 for mesh in speakers)


@pytest.mark.parametrize("engine_size", [1, 2, 4, 8])
def test_engines_are_neighbouring_ranks_and_the_first_speaks(engine_size: int):
    layout = meshes(8, tensor=2, pipeline=2, engine_size=engine_size)
    assert [mesh.engine_index for mesh in layout] == [rank // engine_size for rank in range(8)]
    assert [mesh.rank for mesh in layout if mesh.is_engine_leader] == list(range(0, 8, engine_size))
    assert {mesh.num_engines for mesh in layout} == {8 // engine_size}


def test_a_mesh_describes_itself():
    assert Mesh(0, 2, 2, 1, engine_size=1).describe() == "TP2 x PP1 x DP1, 2 engines of TP1"
    assert Mesh(0, 8, 2, 2, engine_size=8).describe() == "TP2 x PP2 x DP2, 1 engine of TP8"
    interleaved = Mesh(0, 4, 1, 2, engine_size=4, virtual_pipeline=3)
    assert interleaved.describe() == "TP1 x PP2 x VPP3 x DP2, 1 engine of TP4"
    assert Mesh(0, 8, 2, 2, 8, context=2).describe() == "TP2 x CP2 x PP2 x DP1, 1 engine of TP8"


def test_only_the_interleaved_schedule_needs_a_multiple_of_microbatches():
    assert Mesh(0, 8, 2, 4, engine_size=1).microbatch_multiple == 1
    assert Mesh(0, 8, 2, 4, engine_size=1, virtual_pipeline=2).microbatch_multiple == 4


def test_experts_go_round_the_ranks_of_a_stage():
    # 8 ranks in 2 stages of 4; the experts of a layer are shared by 2, each by one rank alone
    meshes = [Mesh(rank, 8, 2, 2, 1, expert=2) for rank in range(8)]
    assert [mesh.expert_rank for mesh in meshes] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [mesh.expert_tensor_rank for mesh in meshes] == [0] * 8
    assert meshes[0].expert_data == 2
    # the same with two ranks to every expert's matrices: all four of a stage differ
    meshes = [Mesh(rank, 8, 2, 2, 1, expert=2, expert_tensor=2) for rank in range(8)]
    assert [mesh.expert_rank for mesh in meshes] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.expert_tensor_rank for mesh in meshes] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert meshes[0].expert_data == 1
    assert meshes[0].describe() == "TP2 x PP2 x DP2 x EP2 x ETP2, 8 engines of TP1"


def test_engines_may_have_ranks_of_their_own():
    # 4 ranks train, 6 behind them are 3 engines of 2 ranks
    meshes = [Mesh(rank, 4, 2, 1, engine_size=2, engine_ranks=6) for rank in range(4)]
    assert {(mesh.data, mesh.num_engines, mesh.is_engine_leader) for mesh in meshes} == {
        (2, 3, False)
    }
    assert meshes[0].describe() == "TP2 x PP1 x DP2, 3 engines of TP2 on ranks of their own"
    with pytest.raises(AssertionError, match="part of none"):
        _ = meshes[0].engine_index
