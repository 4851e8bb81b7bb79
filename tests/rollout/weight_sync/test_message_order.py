"""What the ranks of a GPU run send each other in a weight sync, in NCCL's order.

NCCL runs the groups of operations of a rank one after the other: a group ends when every operation
in it has met its other end, and a rank whose group waits for one that another rank has behind a
waiting group hangs for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.reshard_plan import plan_sync, rank_rounds
from rlmath.rollout.weight_sync.shard_layouts import training_layout
from rlmath.rollout.weight_sync.transport import Messages
from tests.rollout.weight_sync.oracle import EXPERTS, SMALL

Group = list[tuple[str, int, int]]
""""send" or "receive", the other rank, bytes."""
BUCKET = 600
LAYOUTS = {
    "TP2 x PP2 to engines of one": Mesh(0, 4, 2, 2, 1),
    "TP2 x PP2 x DP2 to engines of four": Mesh(0, 8, 2, 2, 4),
    "two chunks a stage": Mesh(0, 8, 2, 2, 4, virtual_pipeline=2),
    "context": Mesh(0, 16, 2, 2, 2, context=2),
    "experts": Mesh(0, 16, 2, 2, 4, expert=4),
}


class Recorder:
    """A stand-in for `transport.exchange_in_world` that keeps the groups of operations."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def __call__(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[object]:
        group = [("send", rank, bucket.nbytes) for rank, bucket in sends]
        group += [("receive", rank, bucket.nbytes) for rank, bucket in receives]
        if group:
            self.groups.append(group)
        return []


def told(name: str) -> dict[int, list[Group]]:
    """The groups of a sync, by rank, as `WeightTransfer.run` starts and finishes its rounds."""
    mesh = LAYOUTS[name]
    shape = EXPERTS if mesh.expert > 1 else SMALL
    layout = training_layout(shape.num_layers, mesh)
    groups_of_ranks = {}
    for rank in range(mesh.world_size):
        plan = plan_sync(shape, layout, replace(mesh, rank=rank), 2, BUCKET)
        rounds = rank_rounds(plan, rank)
        recorder = Recorder()
        transport = Messages(
            rounds, lambda *_: None, torch.bfloat16, torch.device("meta"), recorder
        )
        transport.start(0)
        for number in range(len(rounds)):
            if number + 1 < len(rounds):
                transport.start(number + 1)
            transport.finish(number)
        groups_of_ranks[rank] = recorder.groups
    return groups_of_ranks


def left_waiting(groups: dict[int, list[Group]]) -> dict[int, Group]:
    """The first group of every rank that never ends."""
    met_numbers: dict[int, set[int]] = {rank: set() for rank in groups}
    positions = dict.fromkeys(groups, 0)
    moved = True
    while moved:
        moved = False
        for rank, rank_groups in groups.items():
            if positions[rank] == len(rank_groups):
                continue
            group = rank_groups[positions[rank]]
            for number, (direction, other, size) in enumerate(group):
                if number in met_numbers[rank] or positions[other] == len(groups[other]):
                    continue
                counterpart = ("receive" if direction == "send" else "send", rank, size)
                peer_group = groups[other][positions[other]]
                if (
                    counterpart in peer_group
                    and peer_group.index(counterpart) not in met_numbers[other]
                ):
                    met_numbers[rank].add(number)
                    met_numbers[other].add(peer_group.index(counterpart))
                    moved = True
            if len(met_numbers[rank]) == len(group):
                positions[rank], met_numbers[rank], moved = positions[rank] + 1, set(), True
    return {
        rank: rank_groups[positions[rank]]
        for rank, rank_groups in groups.items()
        if positions[rank] < len(rank_groups)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_ends_of_every_message_are_told_in_an_order_that_ends(name: str) -> None:
    groups = told(name)
    assert sum(map(len, groups.values())) > 2 * len(groups), "too few rounds to show anything"
    assert left_waiting(groups) == {}


def test_ranks_that_wait_for_each_other_are_found() -> None:
    send, receive = ("send", 1, 8), ("receive", 1, 8)
    back, forth = ("receive", 0, 8), ("send", 0, 8)
    assert left_waiting({0: [[send, receive]], 1: [[forth, back]]}) == {}
    assert left_waiting({0: [[send], [receive]], 1: [[back], [forth]]}) == {}
    assert left_waiting({0: [[send], [receive]], 1: [[forth], [back]]}) == {0: [send], 1: [forth]}
    assert left_waiting({0: [[send]], 1: [[("receive", 0, 4)]]}) == {
        0: [send],
        1: [("receive", 0, 4)],
    }
