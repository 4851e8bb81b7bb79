"""A rank of a GPU run on fake tensors, with stand-ins for Transformer Engine's modules.

Fake tensors have shapes and formats, but no memory; bytes are counted. torch's fake process groups
answer every collective at once. What depends on values gets a fixed answer (`answer_for_values`): a
number is 1, a condition False.

Transformer Engine cannot be imported without CUDA. Its modules are replaced by functions that save
for the backward pass what its modules save, as its sources say (transformer-engine 2.20.2,
transformer_engine/pytorch):

    TELayerNormColumnParallelLinear   module/layernorm_linear.py:526: its input, the norm's weight, what the norm
                                      returns before it is gathered (again in the backward pass), 1/rms, the weight
    TEColumn- and TERowParallelLinear module/linear.py:1853: its input, if the weight learns, and the weight
    TEDotProductAttention             attention/dot_product_attention/backends.py:2271: query, key, value, what it
                                      returns, and the softmax's statistics
    TENorm                            its input and weight, 1/rms
    TE...ParallelGroupedLinear        module/grouped_linear.py: its input, if they learn, and the weights
    fused rotation                    attention/rope.py:152: nothing of a token's

So a count checks what the plan makes of that reading, and everything else against the real
Megatron.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers what collectives do to fake tensors
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlmath.models.kernels import KERNEL_DEVICES

# ---------------------------------------------------------------- process groups


def join_fake_group(rank: int, ranks: int, ranks_per_node: int = 8) -> None:
    """Make this process `rank` of `ranks`, the others of which do not exist.

    All groups that are made afterwards are fake, too."""
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
        return real(
            ranks, timeout, "fake", None, **{k: v for k, v in named.items() if k == "group_desc"}
        )

    def all_gather_object(gathered: list[Any], local_object: Any, group: Any = None) -> None:
        gathered[:] = [local_object] * len(gathered)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    for module in (dist, distributed_c10d):
        module.new_group = new_group
        module.all_gather_object = all_gather_object


@contextmanager
def coalesced(*unused: Any, **more: Any) -> Iterator[Any]:
    """Stand-in for torch's manager of collectives that are sent together."""
    yield _Done()


class _Done:
    def wait(self) -> None:
        """Return at once: the collective is done."""


def answer_for_values() -> None:
    """Give fake tensors the values 1, 1.0 and False from now on; `nonzero` finds no element."""

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
    """Bytes of the fake tensors made while it is on: those held now, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_iter(outputs):
            if isinstance(tensor, FakeTensor):
                self._meet(tensor.untyped_storage())
        return outputs

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        earlier_size = self._sizes.get(key)
        if earlier_size is None:
            weakref.finalize(storage, self._forget, key)
        self._sizes[key] = size
        self.held += size - (earlier_size or 0)
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)

    @contextmanager
    def most_beside(self) -> Iterator[list[int]]:
        """Count the most bytes held inside, beside those held at its beginning, into the list."""
        peaks: list[int] = []
        held_before = self.peak = self.held
        yield peaks
        peaks.append(self.peak - held_before)


# ---------------------------------------------------------------- what ranks send


_OPERATIONS = {
    torch.ops.c10d.allreduce_.default: "all_reduce",
    torch.ops.c10d._allgather_base_.default: "all_gather",
    torch.ops.c10d.allgather_.default: "all_gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce_scatter",
    torch.ops.c10d.reduce_scatter_.default: "reduce_scatter",
    torch.ops.c10d.alltoall_base_.default: "all_to_all",
    torch.ops.c10d.alltoall_.default: "all_to_all",
    torch.ops.c10d.broadcast_.default: "broadcast",
}


class Sent(TorchDispatchMode):
    """Number and bytes of what this rank exchanges while it is on, by (group, operation).

    Collectives are seen by themselves; messages between stages come through `between_stages`."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, str] = {}
        """What a group is for, by its name; collectives of others are those of "other"."""
        self.found: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATIONS:
            self._meet(_OPERATIONS[func], args)
        return func(*args, **(kwargs or {}))

    def _meet(self, operation: str, args: Any) -> None:
        """Count a collective by its group, operation and bytes."""
        group = next(
            dist.ProcessGroup.unbox(argument)
            for argument in args
            if isinstance(argument, torch.ScriptObject)
        )
        sizes = [
            sum(tensor.nbytes for tensor in tree_iter(arg) if isinstance(tensor, Tensor))
            for arg in args
        ]
        full_size = max(sizes)  # what is gathered, or not yet scattered
        share = full_size * (group.size() - 1) // group.size()
        self.tell(
            self.groups.get(group.group_name, "other"),
            operation,
            {"all_reduce": 2 * share, "broadcast": full_size}.get(operation, share),
        )

    def tell(self, group: str, operation: str, size: int) -> None:
        total = self.found.setdefault((group, operation), [0, 0])
        total[0] += 1
        total[1] += size

    def between_stages(self, **given: Any) -> dict[str, Any]:
        """Stand-in for Megatron's messages of a pipeline that are not sent together."""
        operations = {
            "send_next": "send hidden states",
            "recv_prev": "receive hidden states",
            "send_prev": "send gradients",
            "recv_next": "receive gradients",
        }
        tensors = {name: given[f"tensor_{name}"] for name in operations}
        for name, tensor in tensors.items():
            if tensor is not None:
                self.tell("pipeline", operations[name], tensor.nbytes)
        return {name: _Done() for name, tensor in tensors.items() if tensor is not None}

    def between_stages_together(self, **given: Any) -> list[Any]:
        """Stand-in for Megatron's messages of a pipeline that are sent together."""
        return list(self.between_stages(**given).values())

    def pop(self) -> dict[tuple[str, str], list[int]]:
        """What was found since the last call."""
        exchanged = self.found
        self.found = {}
        return exchanged


# ---------------------------------------------------------------- stand-ins for Transformer Engine


class _NormLinear(Function):
    """Norm and product; with `sequence` the ranks of the group share the tokens of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
        sequence: bool,
    ) -> Tensor:
        normed = torch.empty_like(x)
        rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, scale, weight, normed, rms)
        ctx.bias = bias
        ctx.group = group
        ctx.sequence = sequence
        return _gathered(normed, group, sequence) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale, weight, normed, _ = ctx.saved_tensors
        everything = _gathered(normed, ctx.group, ctx.sequence)
        grad_normed = _summed(grad @ weight, ctx.group, ctx.sequence)
        grad_weight = _weight_gradient(weight)
        del everything, grad_normed
        grad_bias = None if ctx.bias is None else torch.empty_like(ctx.bias)
        return torch.empty_like(x), torch.empty_like(scale), grad_weight, grad_bias, None, None


def _gathered(x: Tensor, group: Any, sequence: bool) -> Tensor:
    """All tokens of the group."""
    if not sequence:
        return x
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _summed(x: Tensor, group: Any, sequence: bool) -> Tensor:
    """The sum over the group's ranks; with `sequence` only this rank's tokens of it."""
    if group.size() == 1:
        return x
    if not sequence:
        dist.all_reduce(x, group=group)
        return x
    share = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(share, x.contiguous(), group=group)
    return share


dummy_gradients: dict[tuple[int, ...], Tensor] = {}


def dummy_gradient(size: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Stand-in for Transformer Engine's `get_dummy_wgrad`.

    Autograd gets such a tensor where the gradient went to its buffer; there is one for each shape,
    and it stays."""
    size = tuple(size)
    if size not in dummy_gradients:
        dummy_gradients[size] = torch.empty(size, dtype=dtype)
    return dummy_gradients[size]


def fused_kernels() -> SimpleNamespace:
    """Stand-in for apex's module `fused_weight_gradient_mlp_cuda`."""
    return SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda *given: None, wgrad_gemm_accum_fp16=lambda *given: None
    )


def triton_without_kernels() -> None:
    """Replace Triton for fake tensors by kernels that do nothing.

    What imports it from here on allocates as it does with the real ones."""
    triton = ModuleType("triton")
    language = ModuleType("triton.language")
    triton.__spec__ = ModuleSpec("triton", None)
    triton.jit = lambda kernel: defaultdict(lambda: lambda *arguments, **named: None)
    triton.cdiv = lambda number, size: -(-number // size)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.language = language
    language.constexpr = lambda value: value
    sys.modules |= {"triton": triton, "triton.language": language}
    KERNEL_DEVICES.add("cpu")


def _weight_gradient(weight: Tensor) -> Tensor:
    """Fused accumulation: the product goes to the buffer."""
    weight.grad_added_to_main_grad = True
    return dummy_gradient(weight.shape, weight.dtype)


class NormLinear(torch.nn.Module):
    """Stand-in for TELayerNormColumnParallelLinear."""

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **unused: Any
    ) -> None:
        super().__init__()
        tensor = config.tensor_model_parallel_size
        self.layer_norm_weight = _parameter(config, inputs)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.weight = _parameter(config, outputs // tensor, inputs)
        self.bias = _parameter(config, outputs // tensor) if bias else None
        self.sequence = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        group = get_tensor_model_parallel_group()
        return _NormLinear.apply(
            x, self.layer_norm_weight, self.weight, self.bias, group, self.sequence
        ), None


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, sequence: bool
    ) -> Tensor:
        assert not weight.requires_grad, "only where adapters learn, whose norms are apart"
        ctx.save_for_backward(weight)
        ctx.group = group
        ctx.sequence = sequence
        return _gathered(x, group, sequence) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        return _summed(grad @ weight, ctx.group, ctx.sequence), None, None, None, None


class ColumnLinear(torch.nn.Module):
    """Stand-in for TEColumnParallelLinear."""

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **unused: Any
    ) -> None:
        super().__init__()
        tensor = config.tensor_model_parallel_size
        self.weight = _parameter(config, outputs // tensor, inputs)
        self.bias = _parameter(config, outputs // tensor) if bias else None
        self.sequence = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        group = get_tensor_model_parallel_group()
        return _ColumnLinear.apply(x, self.weight, self.bias, group, self.sequence), None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, sequence: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group = group
        ctx.sequence = sequence
        return _summed(x @ weight.t(), group, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, weight = ctx.saved_tensors
        everything = _gathered(grad, ctx.group, ctx.sequence)
        grad_weight = _weight_gradient(weight) if ctx.needs_input_grad[1] else None
        return everything @ weight, grad_weight, None, None


class RowLinear(torch.nn.Module):
    """Stand-in for TERowParallelLinear."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **unused: Any) -> None:
        super().__init__()
        tensor = config.tensor_model_parallel_size
        self.weight = _parameter(config, outputs, inputs // tensor)
        self.sequence = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return _RowLinear.apply(
            x, self.weight, get_tensor_model_parallel_group(), self.sequence
        ), None


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.size = x.shape
        learn = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if learn else None, *weights)
        return x.new_empty((x.shape[0], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, *weights = ctx.saved_tensors
        learn = ctx.needs_input_grad[1]
        return grad.new_empty(ctx.size), *(
            _weight_gradient(weight) if learn else None for weight in weights
        )


class _GroupedLinearModule(torch.nn.Module):
    """The experts of a rank, a weight each."""

    def __init__(self, experts: int, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        for number in range(experts):
            weight = _parameter(config, outputs, inputs)
            weight.allreduce = (
                config.expert_model_parallel_size == 1
            )  # False: Megatron's mark of an expert's
            setattr(self, f"weight{number}", weight)

    def forward(self, x: Tensor, tokens_per_expert: Any) -> tuple[Tensor, None]:
        return _GroupedLinear.apply(x, *self.parameters()), None


class ColumnGroupedLinear(_GroupedLinearModule):
    """Stand-in for TEColumnParallelGroupedLinear."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, config: Any, **unused: Any
    ) -> None:
        super().__init__(experts, inputs, outputs // config.expert_tensor_parallel_size, config)


class RowGroupedLinear(_GroupedLinearModule):
    """Stand-in for TERowParallelGroupedLinear."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, config: Any, **unused: Any
    ) -> None:
        super().__init__(experts, inputs // config.expert_tensor_parallel_size, outputs, config)


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
    """Stand-in for TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = _parameter(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:2], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Attention(torch.nn.Module):
    """Stand-in for TEDotProductAttention."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **unused: Any
    ) -> Tensor:
        return _Attention.apply(query, key, value).flatten(1)


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def rotated(x: Tensor, *unused: Any, **more: Any) -> Tensor:
    """Stand-in for the fused rotation of packed sequences."""
    return _Rotated.apply(x)


def _parameter(config: Any, *size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
