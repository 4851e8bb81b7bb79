"""Patches the construction of Megatron's optimizers.

Upstream: `DistributedOptimizer` and `Float16OptimizerWithFloat16Params` (megatron-core 0.16.1 to
0.19.2) sort parameters by `param.type() == 'torch.cuda.FloatTensor'` and the like, and refuse all
others. Why: a float32 parameter on the CPU is a 'torch.FloatTensor'. Can go: when Megatron-Core
compares `param.dtype`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def tensor_types_named_as_on_cuda() -> Iterator[None]:
    """Context in which `Tensor.type()` of a CPU tensor is that of the same tensor on a GPU."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        type_name = original(self, *args, **kwargs)
        return (
            type_name.replace("torch.", "torch.cuda.", 1)
            if isinstance(type_name, str)
            else type_name
        )

    torch.Tensor.type = named
    try:
        yield
    finally:
        del torch.Tensor.type  # what it hid is inherited


def with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run while tensors are named as on a GPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with tensor_types_named_as_on_cuda():
            return function(*args, **kwargs)

    return call


def patch() -> None:
    """Let the optimizers take parameters on the CPU."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    DistributedOptimizer.__init__ = with_cuda_type_names(DistributedOptimizer.__init__)
    plain = Float16OptimizerWithFloat16Params
    plain.__init__ = with_cuda_type_names(plain.__init__)
