"""The kind of device that a run has, by its settings and this machine.

Without torch there is no GPU to run on.

Plans are made where torch is not installed, so this module imports it only where it is asked for a
GPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
NumberFormat = Literal["float32", "bfloat16", "float16"]
"""Number formats by the names that torch has for them."""
FORMAT_BYTES: dict[NumberFormat, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

CUDA_DEFAULTS = {
    # Megatron orders communication and computation by it; CUDA reads it when the device is first
    # used.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # NCCL says why it fails, and nothing else (NCCL's user guide, environment variables).
    "NCCL_DEBUG": "WARN",
    # NCCL's buffers stay out of the address space that engines free and allocate again: it held
    # more memory with it (NVIDIA/nccl issue 1234) and weight syncs hung; verl and SkyRL (pull
    # request 1629) set the same. NVLS needs it.
    "NCCL_CUMEM_ENABLE": "0",
}
"""Environment of a rank on GPU where the user has not set it; docs/clusters.md lists them."""


def cuda_is_available() -> bool:
    """Whether torch finds a CUDA device; False where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def resolve_kind(requested: str) -> DeviceKind:
    """ "cpu" or "cuda" for what `run.device` says."""
    if requested == "auto":
        return "cuda" if cuda_is_available() else "cpu"
    return "cuda" if requested == "cuda" else "cpu"


def number_format(dtype: NumberFormat | Literal["auto"], kind: DeviceKind) -> NumberFormat:
    """The format of parameters for what `policy.dtype` says."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if kind == "cuda" else "float32"


def set_cuda_defaults() -> None:
    """Set `CUDA_DEFAULTS` unless the user has set other values.

    Call it before anything starts CUDA in this process."""
    for name, value in CUDA_DEFAULTS.items():
        os.environ.setdefault(name, value)


def gpu_count(device: str) -> int:
    """GPUs that a program with this setting of its device uses; 0: it runs on the CPU."""
    import torch

    return torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
