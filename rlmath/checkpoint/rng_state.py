"""The random states of a rank, as tensors: torch's, Megatron's, numpy's and Python's generators."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from rlmath.distributed.device import Device

_MEGATRON = "megatron."


def random_states(device: Device) -> dict[str, Tensor]:
    """By generator, in one dimension, on the CPU."""
    version, words, gauss = random.getstate()
    assert version == 3, f"Python's generator has a state of version {version}"
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    assert name == "MT19937", name
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy": torch.from_numpy(keys.astype("int64")),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.kind == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {_MEGATRON + key: state for key, state in tracked.items()}


def random_rows(states: Mapping[str, Tensor]) -> list[ShardedTensor]:
    """Each rank's random states, a row of one table for each generator."""
    place = (0, dist.get_rank(), dist.get_world_size())
    return [
        ShardedTensor.from_rank_offsets(f"random.{name}", state.unsqueeze(0), place)
        for name, state in states.items()
    ]


def restore_random_states(states: Mapping[str, Tensor], device: Device) -> None:
    """The inverse of `random_states`."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"]
    words = tuple(int(word) for word in states["python"])
    random.setstate((3, words, None if gauss.isnan().item() else float(gauss)))
    position, has_gauss = states["numpy_position"].tolist()
    keys = states["numpy"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, position, has_gauss, float(states["numpy_gauss"])))
    if device.kind == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device.torch_device)
    tracked = {
        key.removeprefix(_MEGATRON): state for key, state in states.items() if key.startswith(_MEGATRON)
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([float("nan") if value is None else value], dtype=torch.float64)
