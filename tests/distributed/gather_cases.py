"""What ranks of a test do with collectives of plain objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.distributed.device import init_process_group, open_device


def metrics_beside_tensors(device_kind: str) -> tuple[list[str], Any]:
    """Which backend reduces tensors of the device, and which those of the host.

    Also a sum and a largest value of metrics."""
    device = open_device(device_kind)
    init_process_group(device, 60)
    places = (device.torch_device, torch.device("cpu"))
    backends = [dist.group.WORLD._get_backend(place).name() for place in places]
    return backends, reduce_over_ranks({"third": 1 / 3}, {"largest": 1e-300})
