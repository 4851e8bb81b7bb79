"""Patches the name `torch` inside every loaded `megatron.core.*` module.

Upstream: megatron-core 0.16.1 to 0.19.2 says `device="cuda"`, `torch.cuda.current_device()` and
`torch.cuda.synchronize()` unconditionally, in dozens of functions.
Why: on CPU those calls raise. The proxy maps them to the CPU and hands everything else to torch.
Can go: when Megatron-Core asks its configuration, or an accelerator interface, for the device.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def _names_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


class _Proxy(types.ModuleType):
    """A module that answers some names itself and hands all others to another module."""

    def __init__(self, target: types.ModuleType, replacements: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(replacements)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _cpu_torch() -> types.ModuleType:
    """A stand-in for torch whose CUDA functions and factories work on CPU."""
    cuda = _Proxy(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            # 0.19 asks for it before every gradient reduction and uses it only after CUDA graphs.
            "current_stream": lambda *args, **kwargs: None,
            "synchronize": lambda *args, **kwargs: None,
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
        },
    )
    return _Proxy(
        torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    )


def patch_loaded_modules() -> None:
    """Give every `megatron.core` module loaded so far the CPU's torch."""
    proxy = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy
