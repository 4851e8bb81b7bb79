"""The modules of Triton kernels, where a device has them."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

KERNEL_DEVICES = {"cuda"}
"""Kinds of device with kernels of ours, if Triton is installed, as it is with torch for CUDA."""


@cache
def triton_kernels(module: str, kind: str) -> ModuleType | None:
    """`rlmath.models.<module>` for tensors on this kind of device; None: torch's operations.

    The module needs Triton."""
    if kind not in KERNEL_DEVICES or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"rlmath.models.{module}")
