"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a frozen Megatron model.

    y = x W^T + scale x A^T B^T        A [rank, columns] random, B [rows, rank] zero at first, scale = alpha / rank

Each Hugging Face matrix has its own A, as in PEFT: where Megatron joins P of them into one (query,
key and value; gate and up), A is [P, rank, columns], and each row of B multiplies with the A of its
matrix. A rank's adapter belongs to its shard of W, so that nothing of the model's width travels
between tensor-parallel ranks, only x A^T:

    rows split (qkv, fc1)        A on all ranks, B split alike; x A^T is copied or, under sequence parallelism, gathered
    columns split (proj, fc2)    A split alike, B on all ranks; x A^T is summed, or reduced and scattered

`checkpoint.hf.weight_map.adapter_rules` has the names and the sharding.
"""

# Shape legend: N tokens of this rank (a share of T with sequence parallelism), T packed tokens of
# one micro-batch, P Hugging Face matrices of the layer, R rank, K columns and M rows of this rank's
# shard of W.

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlmath.checkpoint.hf.lora_merge import merged_weight
from rlmath.checkpoint.hf.weight_map import (
    adapter_rules,
    canonical_shape,
    placed_tensors,
    shard_shape,
)
from rlmath.checkpoint.hf.weights import held_layers, local_parameter, shard
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import LoraConfig
from rlmath.data.packing import MicroBatch
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import ForwardBackward


class Adapter(torch.nn.Module):
    """The adapter of one linear layer, which `attach` adds to what the layer returns."""

    def __init__(
        self,
        shape_A: tuple[int, ...],
        shape_B: tuple[int, ...],
        scale: float,
        splits_columns: bool,
        config: TransformerConfig,
        device: torch.device,
    ) -> None:
        """`shape_A` is [P, R, K], `shape_B` that of this rank's part of B in its canonical form."""
        super().__init__()
        dtype = config.params_dtype
        self.A = torch.nn.Parameter(torch.zeros(shape_A, dtype=dtype, device=device))
        self.B = torch.nn.Parameter(torch.zeros(shape_B, dtype=dtype, device=device))
        self.scale = scale
        self.active = True
        self._splits_columns = splits_columns
        self._sequence_parallel = config.sequence_parallel
        split, whole = (self.A, self.B) if splits_columns else (self.B, self.A)
        split.tensor_model_parallel = True
        # Its gradient is of this rank's tokens: Megatron sums it over the tensor-parallel ranks.
        whole.sequence_parallel = config.sequence_parallel
        self.register_buffer("_rows_of", _rows_of(shape_A[0], shape_B, self.A), persistent=False)

    def forward(self, x_N1K: Tensor, y_N1M: Tensor) -> Tensor:
        """The layer's output `y_N1M` for `x_N1K`, plus the adapter's."""
        low_N1R = self._across_ranks(x_N1K @ self.A.flatten(0, 1).t())
        low_NR = (self.scale * low_N1R).flatten(0, 1)
        return torch.addmm(y_N1M.flatten(0, 1), low_NR, self._wide_B().t()).view_as(y_N1M)

    def _across_ranks(self, low_N1R: Tensor) -> Tensor:
        """x A^T for the tokens that B multiplies, as the module's table has it."""
        if self._splits_columns and self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low_N1R)
        if self._splits_columns:
            return mappings.reduce_from_tensor_model_parallel_region(low_N1R)
        if self._sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(low_N1R)
        return mappings.copy_to_tensor_model_parallel_region(low_N1R)

    def _wide_B(self) -> Tensor:
        """[M, P x R]: every row of B at the columns of its matrix, among zeros."""
        wide = self.B if self._rows_of is None else self.B[..., None, :] * self._rows_of
        return wide.reshape(-1, self.A.shape[0] * self.A.shape[1])

    @torch.no_grad()
    def merged(
        self, weight_MK: Tensor, written: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """W + scale B A of this rank's shard, and how much of it is kept (`merged_weight`)."""
        return merged_weight(
            weight_MK, self._wide_B(), self.A.flatten(0, 1), self.scale, written=written
        )


def _rows_of(parts: int, shape_B: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Mask [..., P, 1] of B: 1 where a row, in its canonical form, belongs to a matrix, else 0.

    None where all rows belong to one matrix. Query heads of a group come before its key and its
    value; gate before up."""
    if parts == 1:
        return None
    if parts == 2:  # [2, F, R]
        return torch.eye(2, dtype=like.dtype, device=like.device)[:, None, :, None]
    heads = torch.tensor(
        [0] * (shape_B[1] - 2) + [1, 2], device=like.device
    )  # [G, heads of a group + 2, D, R]
    return torch.nn.functional.one_hot(heads, 3).to(like.dtype)[:, None, :, None]


def add_adapters(
    chunks: Sequence[Any],
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    lora: LoraConfig,
    seed: int,
) -> None:
    """Freeze bare chunks and give their linear layers adapters.

    A is uniform as in PEFT, and the same on every layout; B is zero."""
    placed = list(placed_tensors(shape, adapter_rules(shape.architecture, lora.rank, lora.target)))
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            # What recomputes layers passes no gradient on where its input needs none.
            chunk.embedding.register_forward_hook(_needs_gradient)
        for a, b in zip(placed[::2], placed[1::2], strict=True):
            if a.layer in held_layers(chunk):
                (name,) = a.rule.megatron
                path = name.format(m=held_layers(chunk).index(a.layer)).removesuffix(".adapter.A")
                attach(
                    chunk.get_submodule(path),
                    Adapter(
                        shard_shape(a.rule, shape, mesh.tensor),
                        shard_shape(b.rule, shape, mesh.tensor),
                        lora.alpha / lora.rank,
                        splits_columns=a.rule.split_axis is not None,
                        config=chunk.config,
                        device=device.torch_device,
                    ),
                )
    for tensor in placed[::2]:
        parameter = local_parameter(chunks, tensor)
        if parameter is not None:
            whole = _initial(
                canonical_shape(tensor.rule, shape, mesh.tensor), tensor.hf_names, seed
            )
            parameter.data.copy_(shard(tensor.rule, whole, mesh.tensor_rank, mesh.tensor))


def attach(linear: torch.nn.Module, adapter: Adapter) -> None:
    """Let a linear layer of Megatron or Transformer Engine add its adapter.

    Such a layer returns (output, bias)."""

    def add(
        module: torch.nn.Module, inputs: tuple[Tensor, ...], returned: tuple[Tensor, Any]
    ) -> Any:
        output, bias = returned
        return (adapter(inputs[0], output), bias) if adapter.active else returned

    linear.adapter = adapter
    linear.register_forward_hook(add)


def _needs_gradient(module: torch.nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


def _initial(shape_A: tuple[int, ...], names: Sequence[str], seed: int) -> Tensor:
    """Kaiming's uniform with a = sqrt(5), which is 1 / sqrt(columns) either way.

    Its seed follows from the names of the tensors."""
    bound = 1 / math.sqrt(shape_A[-1])
    matrices = []
    for name in names:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        matrices.append(torch.empty(shape_A[1:]).uniform_(-bound, bound, generator=generator))
    return torch.stack(matrices)


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    """All adapters of a rank's chunks, bare or wrapped; none of a model without."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter))


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the chunks compute, inside, as the model that the adapters were added to."""
    chunk_adapters = list(adapters(chunks))
    for adapter in chunk_adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in chunk_adapters:
            adapter.active = True


class WithoutAdapters(ForwardBackward):
    """The reference as passes of the policy's own chunks without adapters; it holds no memory."""

    def run(
        self, batches: Sequence[MicroBatch], on_logits: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        with adapters_off(self.chunks):
            return super().run(batches, on_logits, forward_only)
