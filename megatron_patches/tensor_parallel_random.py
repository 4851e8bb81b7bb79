"""Patches `megatron.core.tensor_parallel.random._get_cuda_rng_state` and `_set_cuda_rng_state`.

Upstream: megatron-core 0.16.1 to 0.19.2 reads and writes the generator of a CUDA device. Why:
activation recomputation and the tracker that sequence parallelism forks need the state of the
generator that is in use, which on CPU is torch's own. Can go: with `torch_names`.
"""

from __future__ import annotations

import torch


def _get_state(
    device: object = "cpu", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def patch() -> None:
    """Let Megatron's random states be torch's on the CPU."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state
