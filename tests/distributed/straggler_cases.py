"""What the ranks of tests/distributed/fault_tolerance/test_stragglers.py do."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler

import torch.distributed as dist

from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.fault_tolerance.stragglers import RECENT_STEPS, StragglerDetector
from rlmath.distributed.mesh import Mesh


def steps_with_a_slow_last_rank(
    slow_seconds: float, answer: float
) -> tuple[list[str], list[dict[str, float]]]:
    """What a rank logs, and its metrics of every step, twice as many as it takes to be sure."""
    init_process_group(open_device("cpu"), 60)
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    detector = StragglerDetector(Mesh(rank, ranks, 1, 1, 1))
    is_last = rank == ranks - 1
    heard = BufferingHandler(capacity=1000)
    logger = logging.getLogger("rlmath.distributed.fault_tolerance.stragglers")
    logger.addHandler(heard)
    metrics = [
        detector.after_step(slow_seconds if is_last else 1.0, answer if is_last else 0.001)
        for _ in range(2 * RECENT_STEPS)
    ]
    logger.removeHandler(heard)
    return [record.getMessage() for record in heard.buffer], metrics
