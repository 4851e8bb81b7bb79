"""A rank of a GPU run on fake tensors: process groups, byte counts, and stand-ins for Transformer Engine's modules.

Fake tensors have shapes and formats, and no memory; torch's fake process groups answer every collective at once. What
depends on values gets a fixed answer (`answer_for_values`): a number is 1, a condition False.

Transformer Engine cannot be imported without CUDA. Its modules are replaced by functions that save for the backward
pass what its modules save, as its sources say (transformer-engine 2.20.2, transformer_engine/pytorch):

    TELayerNormColumnParallelLinear   module/layernorm_linear.py:526: its input, the norm's weight, what the norm
                                      returns before it is gathered, 1/rms, the weight
    TERowParallelLinear               module/linear.py:1853: its input and the weight
    TEDotProductAttention             attention/dot_product_attention/backends.py:2271: query, key, value, what it
                                      returns, and the softmax's statistics
    TENorm                            its input and weight, 1/rms
    fused rotation                    attention/rope.py:152: nothing of a token's

So a count checks what the plan makes of that reading, and everything else against the real Megatron.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers what collectives do to fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# ---------------------------------------------------------------- process groups


def join_fake_group(rank: int, ranks: int, ranks_per_node: int = 8) -> None:
    """This process is `rank` of so many that do not exist; all groups that are made afterwards are fake, too."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(min(ranks, ranks_per_node)),
    }
    real = dist.new_group

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *more: Any, **named: Any
    ) -> Any:
        return real(ranks, timeout, "fake", None, **{k: v for k, v in named.items() if k == "group_desc"})

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    for module in (dist, distributed_c10d):
        module.new_group, module.all_gather_object = new_group, all_gather_object


@contextmanager
def coalesced(*unused: Any, **more: Any) -> Iterator[Any]:
    """For torch's manager of collectives that are sent together."""
    yield _Done()


class _Done:
    def wait(self) -> None:
        """It is."""


def answer_for_values() -> None:
    """From now on fake tensors have the values 1, 1.0 and False; none of their elements is found to differ from 0."""

    def listed(tensor: Tensor, size: tuple[int, ...]) -> Any:
        return [listed(tensor, size[1:]) for _ in range(size[0])] if size else one(tensor)

    def one(tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    answers: dict[str, Callable[[Tensor], Any]] = {
        "tolist": lambda tensor: listed(tensor, tuple(tensor.shape)),
        "item": one,
        "__float__": lambda tensor: 1.0,
        "__int__": lambda tensor: 1,
        "__bool__": lambda tensor: False,
        "nonzero": lambda tensor: tensor.new_zeros((0, tensor.dim()), dtype=torch.int64),
    }
    for name, answer in answers.items():
        for kind in (Tensor, FakeTensor):
            if kind is Tensor or name in kind.__dict__:
                setattr(kind, name, _for_fake(getattr(kind, name), answer))


def _for_fake(real: Callable[..., Any], answer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
        return answer(self) if isinstance(self, FakeTensor) else real(self, *arguments, **named)

    return method


# ---------------------------------------------------------------- bytes


class FakeBytes(TorchDispatchMode):
    """Bytes of the storages of fake tensors that are made while it is on: those alive now, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key)
        self._sizes[key] = size
        self.held += size - (known or 0)
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)

    @contextmanager
    def most_beside(self) -> Iterator[list[int]]:
        """The list gets the most bytes that were held inside, beside those at its beginning."""
        found: list[int] = []
        before = self.peak = self.held
        yield found
        found.append(self.peak - before)


# ---------------------------------------------------------------- stand-ins for Transformer Engine


class _NormLinear(Function):
    """Norm and product; `gathered` ranks share the tokens of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, gathered: int
    ) -> Tensor:
        normed, rms = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, scale, weight, normed, rms)
        ctx.bias, ctx.gathered = bias, gathered
        return _all_tokens(normed, gathered) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, weight, normed, _ = ctx.saved_tensors
        everything = _all_tokens(normed, ctx.gathered)
        grad_normed = grad @ weight
        grad_weight = _weight_gradient(weight)
        del everything, grad_normed
        grad_bias = None if ctx.bias is None else torch.empty_like(ctx.bias)
        return torch.empty_like(x), torch.empty_like(scale), grad_weight, grad_bias, None


def _all_tokens(x: Tensor, ranks: int) -> Tensor:
    return x if ranks == 1 else x.new_empty((x.shape[0] * ranks, *x.shape[1:]))


dummy_gradients: dict[tuple[int, ...], Tensor] = {}


def dummy_gradient(size: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """As Transformer Engine's `get_dummy_wgrad`: what autograd gets where the gradient went to its buffer, one tensor
    for each shape, that stays."""
    size = tuple(size)
    if size not in dummy_gradients:
        dummy_gradients[size] = torch.empty(size, dtype=dtype)
    return dummy_gradients[size]


def fused_kernels() -> SimpleNamespace:
    """For apex's module `fused_weight_gradient_mlp_cuda`."""
    return SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda *given: None, wgrad_gemm_accum_fp16=lambda *given: None
    )


def _weight_gradient(weight: Tensor) -> Tensor:
    """Fused accumulation: the product goes to the buffer."""
    weight.grad_added_to_main_grad = True
    return dummy_gradient(weight.shape, weight.dtype)


class NormLinear(torch.nn.Module):
    """For TELayerNormColumnParallelLinear."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **unused: Any) -> None:
        super().__init__()
        tensor = config.tensor_model_parallel_size
        self.layer_norm_weight = _parameter(config, inputs)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.weight = _parameter(config, outputs // tensor, inputs)
        self.bias = _parameter(config, outputs // tensor) if bias else None
        self.gathered = tensor if config.sequence_parallel else 1

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return _NormLinear.apply(x, self.layer_norm_weight, self.weight, self.bias, self.gathered), None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scattered: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scattered = scattered
        out = x @ weight.t()
        return out if scattered == 1 else out.new_empty((out.shape[0] // scattered, *out.shape[1:]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, weight = ctx.saved_tensors
        everything = _all_tokens(grad, ctx.scattered)
        return everything @ weight, _weight_gradient(weight), None


class RowLinear(torch.nn.Module):
    """For TERowParallelLinear."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **unused: Any) -> None:
        super().__init__()
        tensor = config.tensor_model_parallel_size
        self.weight = _parameter(config, outputs, inputs // tensor)
        self.scattered = tensor if config.sequence_parallel else 1

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return _RowLinear.apply(x, self.weight, self.scattered), None


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(scale)


class Norm(torch.nn.Module):
    """For TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = _parameter(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Attention(torch.nn.Module):
    """For TEDotProductAttention."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **unused: Any) -> Tensor:
        return _Attention.apply(query, key, value).flatten(1)


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def rotated(x: Tensor, *unused: Any, **more: Any) -> Tensor:
    """For the fused rotation of packed sequences."""
    return _Rotated.apply(x)


def _parameter(config: Any, *size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*size, dtype=config.params_dtype))
