"""What ranks of a test do with collectives of plain objects."""

from __future__ import annotations

import os
from array import array
from typing import Any

import torch
import torch.distributed as dist

from rlmath.distributed.collectives import (
    all_gather_objects,
    broadcast_from_rank_zero,
    gather_to_rank_zero,
    max_over_ranks,
    reduce_over_ranks,
)
from rlmath.distributed.device import init_process_group, open_device


def gather_of_every_kind() -> list[Any]:
    """Objects of like and of very unlike size."""
    init_process_group(open_device("cpu"), 60)
    rank = dist.get_rank()
    large = array("f", [0.1 * rank] * 5000) if rank == 1 else None
    return [
        all_gather_objects(rank),
        all_gather_objects({"rank": rank, "text": "é" * rank}),
        all_gather_objects(large),
    ]


def metrics_beside_tensors(device_kind: str) -> tuple[list[str], Any]:
    """Which backend reduces tensors of the device, and of the host; and a sum and a largest value of metrics."""
    device = open_device(device_kind)
    init_process_group(device, 60)
    places = (device.torch_device, torch.device("cpu"))
    backends = [dist.group.WORLD._get_backend(place).name() for place in places]
    return backends, reduce_over_ranks({"third": 1 / 3}, {"largest": 1e-300})


def collectives_of_ranks_that_connect_when_needed() -> list[Any]:
    """Over groups of gloo's that connect no two ranks before they talk."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        init_process_group(open_device("cpu"), 60)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        pair = dist.new_group([0, ranks - 1])
        count = torch.ones(1)
        if rank in (0, ranks - 1):
            dist.all_reduce(count, group=pair)
        arrived = torch.empty(1)
        works = [
            dist.isend(torch.tensor([float(rank)]), (rank + 1) % ranks),
            dist.irecv(arrived, (rank - 1) % ranks),
        ]
        for work in works:
            work.wait()
        dist.barrier()
        return [
            all_gather_objects(rank),
            broadcast_from_rank_zero(rank),
            gather_to_rank_zero(rank),
            max_over_ranks({"rank": rank}),
            count.item(),
            arrived.item(),
        ]
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]
