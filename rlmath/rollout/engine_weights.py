"""vLLM's parameters as matrices that a weight sync writes.

    begin -> matrix(name), written by copies, then complete(name), for every parameter -> end

LoRA adapters that an engine holds beside its weights are written alike, and alone where the weights
stay as they are, without `begin`.

On CPU vLLM keeps matrices packed for its kernels: what is written is then a scratch matrix, which
`complete` hands to vLLM for packing. Experts of a layer are in two parameters, all gate and up
projections in one and all down projections in the other; on CPU an expert's feed-forward units are
padded with zeros to a number that the grouped kernel takes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlmath.rollout.engine_adapters import adapter_buffers


def holds_packed_experts(module: torch.nn.Module) -> bool:
    """Whether a module of vLLM's packs experts, as on CPU; for Triton it does not.

    RuntimeError for another layout."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if kernel is None:
        return False
    experts = kernel.fused_experts
    if hasattr(experts, "isa"):
        return not getattr(experts, "_use_zentorch", False)
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if getattr(backend, "name", None) != "TRITON":
        raise RuntimeError(
            f"vLLM lays experts out for {backend}; their weights can be written as Triton's "
            "kernel takes them only. "
            "Please report this"
        )
    return False


def pack_experts(module: Any, attribute: str, matrix: Tensor) -> None:
    """Pack the experts of a matrix into `w13_weight` or `w2_weight` of a layer of vLLM.

    In the matrix they lie one below the other."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts = module.quant_method.moe_kernel.fused_experts
    parameter = getattr(module, attribute)
    plain = matrix.view(parameter.shape[0], -1, matrix.shape[1])
    parameter.data.copy_(
        cpu_prepack_moe_weight(_padded(plain, attribute, parameter.shape), experts.isa)
    )


def _padded(plain: Tensor, attribute: str, size: torch.Size) -> Tensor:
    """The experts with as many feed-forward units as the packed parameter.

    The zeros stand behind gate and behind up."""
    if plain.shape == size:
        return plain
    filled = plain.new_zeros(size)
    if attribute == "w13_weight":
        halves = zip(filled.chunk(2, dim=1), plain.chunk(2, dim=1), strict=True)
        for target, half in halves:
            target[:, : half.shape[1]] = half
    else:
        filled[:, :, : plain.shape[2]] = plain
    return filled


_WRAPPED = ".base_layer"
"""Part of the name of a layer that vLLM has wrapped in one with an adapter."""
PACKED = "cpu_linear"
"""Attribute under which a module of vLLM's CPU backend keeps its packed matrix."""


class EngineWeights:
    """The parameters of one rank's model, and the buffers of its adapters."""

    def __init__(self, model: torch.nn.Module, shapes: Mapping[str, tuple[int, int]]) -> None:
        """`shapes` are the rows and columns of every parameter by vLLM's name.

        A vector is a matrix of one column. Those of adapters' buffers are without padding."""
        self._buffers = adapter_buffers(model)
        self._adapters = {
            name: buffer[: shapes[name][0], : shapes[name][1]]
            for name, buffer in self._buffers.items()
            if name in shapes
        }
        self._shapes = {name: size for name, size in shapes.items() if name not in self._adapters}
        self._owners = {name: _owner(model, name) for name in self._shapes}
        self._users = {
            name: _packing_users(model, owner, attribute)
            for name, (owner, attribute) in self._owners.items()
        }
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._experts = {
            name: owner for name, (owner, _) in self._owners.items() if holds_packed_experts(owner)
        }
        self._unpacked: dict[str, Tensor] = {}
        """Experts that are being written, by parameter."""
        self._check(model)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._packing_seconds = 0.0

    def _check(self, model: torch.nn.Module) -> None:
        """Require that the shapes are those of all of the model's parameters and buffers."""
        parameters = {name.replace(_WRAPPED, "") for name, _ in model.named_parameters()}
        unknown = (parameters | self._buffers.keys()) - self._shapes.keys() - self._adapters.keys()
        if unknown:
            raise RuntimeError(
                f"vLLM's model has parameters that no weight is planned for: {sorted(unknown)[:8]}"
            )
        for name, shape in self._shapes.items():
            parameter = self._parameter(name)
            if (
                name not in self._experts
                and parameter.numel()
                and parameter.numel() != shape[0] * shape[1]
            ):
                raise RuntimeError(
                    f"vLLM's {name} has shape {tuple(parameter.shape)}; planned are {shape[0]} "
                    f"rows of {shape[1]}"
                )

    def _parameter(self, name: str) -> Tensor:
        module, attribute = self._owners[name]
        return getattr(module, attribute)

    def begin(self, planned_rows: Mapping[str, int]) -> None:
        """Call it before the first write of a sync of all weights.

        Rows that nothing is planned for are padding, and zero, as is that of adapters."""
        for buffer in self._buffers.values():
            buffer.zero_()
        for name, (rows, _) in self._shapes.items():
            planned = planned_rows.get(name, 0)
            if planned < rows:
                self.matrix(name)[planned:].zero_()
            if planned == 0:
                self.complete(name)

    def matrix(self, name: str) -> Tensor:
        """The memory of a parameter, [rows, columns], to be written before it is `complete`."""
        if name in self._adapters:
            return self._adapters[name]
        shape = self._shapes[name]
        parameter = self._parameter(name)
        if name in self._experts:
            if name not in self._unpacked:
                self._unpacked[name] = self._take_scratch(shape)
            return self._unpacked[name]
        if parameter.numel() == 0:
            parameter = torch.nn.Parameter(self._take_scratch(shape), requires_grad=False)
            setattr(*self._owners[name], parameter)
        return parameter.data.view(shape)

    def _take_scratch(self, shape: tuple[int, int]) -> Tensor:
        if shape not in self._scratch:
            self._scratch[shape] = torch.empty(shape, dtype=self.dtype)
        return self._scratch.pop(shape)

    def complete(self, name: str) -> None:
        """Hand a parameter to vLLM, all of which is written."""
        if name in self._adapters:
            return
        started = time.perf_counter()
        matrix = self.matrix(name)
        for module in self._users[name]:
            module.quant_method.process_weights_after_loading(module)
        if name in self._experts:
            pack_experts(*self._owners[name], self._unpacked.pop(name))
        if name in self._experts or self._parameter(name).numel() == 0:
            self._scratch[self._shapes[name]] = matrix
        self._packing_seconds += time.perf_counter() - started

    def end(self) -> float:
        """Call it after the last write of a sync; the seconds that vLLM spent packing matrices."""
        self._scratch.clear()
        self._unpacked.clear()
        packing_seconds = self._packing_seconds
        self._packing_seconds = 0.0
        return packing_seconds

    @property
    def bytes(self) -> int:
        """Size of the weights while they are on the device (bytes).

        Packed copies and adapters are included."""
        weights = sum(
            size * (self._stays(name) + len(self._users[name])) for name, size in self._sizes()
        )
        return weights + sum(buffer.nbytes for buffer in self._buffers.values())

    def _sizes(self) -> list[tuple[str, int]]:
        plain = {name: rows * cols for name, (rows, cols) in self._shapes.items()}
        packed = {name: self._parameter(name).numel() for name in self._experts}
        return [(name, size * self.dtype.itemsize) for name, size in (plain | packed).items()]

    def _stays(self, name: str) -> bool:
        """Whether the parameter itself is kept beside what was packed from it."""
        return self._parameter(name).numel() > 0

    def release(self) -> None:
        """Free all weights, for engines that vLLM cannot put to sleep.

        Their values are lost."""
        self.end()
        for name in self._shapes:
            for module in self._users[name]:
                setattr(module, PACKED, None)
            if self._stays(name):
                self._parameter(name).untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate memory for what is not packed; values are undefined until a sync."""
        for name, size in self._sizes():
            if self._stays(name):
                self._parameter(name).untyped_storage().resize_(size)


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has a parameter, and the parameter's name there.

    A layer with an adapter is wrapped."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return getattr(module, "base_layer", module), attribute


def _packing_users(model: torch.nn.Module, owner: torch.nn.Module, attribute: str) -> list[Any]:
    """Modules that multiply by a parameter and keep it packed.

    An embedding that is not the output layer only looks rows up: vLLM packs it, too, and that copy
    is dropped here."""
    if attribute != "weight":
        return []
    sharing = [
        module
        for module in model.modules()
        if PACKED in vars(module) and (module is owner or module.weight is owner.weight)
    ]
    users = [module for module in sharing if not _only_looks_up(module)]
    for module in sharing:
        if _only_looks_up(module):
            setattr(module, PACKED, None)
    return users


def _only_looks_up(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
