"""The peak FLOP/s of the run's processors: the denominator of model FLOP utilisation (MFU)."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from rlmath.config.gpu_specs import GPUS
from rlmath.config.model_shape import ModelShape
from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.distributed.cpu_matmul import linear
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh

TOKENS = 1024
"""Rows of the measured multiplications."""
MAX_COLUMNS = 8192
"""Wider matrices are no faster, and take memory."""
MIN_SECONDS = 0.05
"""Least seconds for which a multiplication is repeated, so that ranks on one core take turns."""
ROUNDS = 2


def peak_flops(shape: ModelShape, mesh: Mesh, device: Device) -> float | None:
    """FLOP/s of all ranks together; None if they are not known.

    A collective. On CPU they are those of the best float32 multiplication with a rank's share of
    the model's largest matrices, measured while all ranks do it. On GPU they are those in bfloat16
    from the data sheet of this rank's GPU, times the ranks; None for a GPU that is not in
    `GPUS`."""
    if device.kind == "cuda":
        rank_flops = gpu_peak(torch.cuda.get_device_name(device.torch_device))
        return None if rank_flops is None else rank_flops * mesh.world_size
    sizes = {
        (shape.hidden_size, min(MAX_COLUMNS, 2 * shape.ffn_size // mesh.tensor)),
        (min(MAX_COLUMNS, shape.ffn_size // mesh.tensor), shape.hidden_size),
        (shape.hidden_size, min(MAX_COLUMNS, shape.vocab_size // mesh.tensor)),
    }
    dist.barrier()
    fastest = max(_measured_flops(inner, columns) for inner, columns in sorted(sizes))
    return reduce_over_ranks({"flops": fastest}, {})[0]["flops"]


def gpu_peak(name: str) -> float | None:
    """FLOP/s in bfloat16 of a whole GPU with the name that CUDA gives.

    None for GPUs that are not in `GPUS`, such as slower boards of the same chip.

    >>> gpu_peak("NVIDIA H100 80GB HBM3"), gpu_peak("NVIDIA H100 PCIe"), gpu_peak("NVIDIA GeForce RTX 3090")
    (989000000000000.0, None, None)
    """
    words = name.replace("-", " ").split()
    if {"PCIe", "PCIE", "NVL", "MIG"} & set(words):
        return None
    matching_flops = (gpu.flops for kind, gpu in GPUS.items() if kind.partition("-")[0] in words)
    return next(matching_flops, None)


def _measured_flops(inner: int, columns: int) -> float:
    """FLOP/s of [TOKENS, inner] times [inner, columns].

    They are the best of `ROUNDS` means of oneDNN's product, and as many of torch's."""
    left_matrix = torch.ones(TOKENS, inner)
    right_matrix = torch.ones(columns, inner)
    flops = 2.0 * TOKENS * inner * columns
    best = 0.0
    for product in (linear, torch.nn.functional.linear):
        product(left_matrix, right_matrix)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            products = 0
            while (seconds := time.perf_counter() - started) < MIN_SECONDS or products == 0:
                product(left_matrix, right_matrix)
                products += 1
            best = max(best, products * flops / seconds)
    return best
