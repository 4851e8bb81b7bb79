"""What the run's processors could compute at most: the denominator of model FLOP utilisation
(MFU)."""

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
"""How long a multiplication is repeated at least: ranks that share a core have had their turns."""
ROUNDS = 2


def peak_flops(shape: ModelShape, mesh: Mesh, device: Device) -> float | None:
    """FLOP/s of all ranks together; None where it is not known.

    A collective. On CPU the best float32 multiplication with a rank's share of the model's largest
    matrices, measured while all ranks do it. On GPU what the data sheet says of bfloat16 on this
    rank's GPU, times the ranks; None for another GPU than those of `GPUS`."""
    if device.kind == "cuda":
        mine = gpu_peak(torch.cuda.get_device_name(device.torch_device))
        return None if mine is None else mine * mesh.world_size
    sizes = {
        (shape.hidden_size, min(MAX_COLUMNS, 2 * shape.ffn_size // mesh.tensor)),
        (min(MAX_COLUMNS, shape.ffn_size // mesh.tensor), shape.hidden_size),
        (shape.hidden_size, min(MAX_COLUMNS, shape.vocab_size // mesh.tensor)),
    }
    dist.barrier()
    fastest = max(_measured_flops(*size) for size in sorted(sizes))
    return reduce_over_ranks({"flops": fastest}, {})[0]["flops"]


def gpu_peak(name: str) -> float | None:
    """FLOP/s in bfloat16 of a whole GPU with the name that CUDA gives; None for what `GPUS` does
    not have, such as slower boards of the same chip.

    >>> gpu_peak("NVIDIA H100 80GB HBM3"), gpu_peak("NVIDIA H100 PCIe"), gpu_peak("NVIDIA GeForce RTX 3090")
    (989000000000000.0, None, None)
    """
    words = name.replace("-", " ").split()
    if {"PCIe", "PCIE", "NVL", "MIG"} & set(words):
        return None
    known = (gpu.flops for kind, gpu in GPUS.items() if kind.partition("-")[0] in words)
    return next(known, None)


def _measured_flops(inner: int, columns: int) -> float:
    """FLOP/s of [TOKENS, inner] times [inner, columns]: the best of `ROUNDS` means, of oneDNN's and
    torch's product."""
    left, right = torch.ones(TOKENS, inner), torch.ones(columns, inner)
    flops, best = 2.0 * TOKENS * inner * columns, 0.0
    for product in (linear, torch.nn.functional.linear):
        product(left, right)
        for _ in range(ROUNDS):
            started, done = time.perf_counter(), 0
            while (seconds := time.perf_counter() - started) < MIN_SECONDS or done == 0:
                product(left, right)
                done += 1
            best = max(best, done * flops / seconds)
    return best
