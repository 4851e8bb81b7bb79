"""vLLM's CPU worker, with changes for an engine inside of a training rank.

Its KV cache can be freed, its shared memory leaves no files behind, a norm is one operation, an
adapter few products, the sampler's noise follows from a request's seed and position, and the
experts that tokens are sent to are kept where that is asked for.

vLLM imports it by its name (`worker_cls`), in the process of the training rank. It is a module of
its own because vLLM may be imported only after `engine.prepare_environment`.
"""

# Shape legend: R requests of a step of the engine, T tokens, V vocabulary, L layers, K experts of a
# token in a layer.

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_worker import CPUWorker

from rlmath.data.routes import expert_dtype
from rlmath.rollout.engine_sleep import cache_storages

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED = 4
LEAST_ROWS = 8
"""Rows of a product from which MKL rounds each one alike; it has other kernels for one or two."""
_libc = ctypes.CDLL(None)


class RlmathCPUWorker(CPUWorker):
    """Methods beyond vLLM's own are called through `collective_rpc`."""

    _kv_cache_bytes: list[int] | None = None
    """Size of every storage, once it was released for the first time."""

    def init_device(self) -> None:
        """Do what vLLM does, with our sampler and with our own name for the shared memory.

        The ranks of an engine reduce in that memory. vLLM 0.32 derives its name from the init
        method, which is the same for all external launchers: engines of two runs on one machine
        would share it, and the file of a killed run would stop the next. Our file is removed as
        soon as all ranks have opened it; the mapping stays."""
        external_launcher = self.parallel_config.distributed_executor_backend == "external_launcher"
        if external_launcher:
            name = self.vllm_config.additional_config["engine_name"]
            self.distributed_init_method = f"env:{name}"
        super().init_device()
        if external_launcher:
            get_tp_group().barrier()
            for file in Path("/dev/shm").glob(f"{name}-*"):
                file.unlink(missing_ok=True)
        self.model_runner.sampler.topk_topp_sampler.forward = self._sample
        self.model_runner.sampler.gather_logprobs = gather_without_ranks

    def initialize_from_config(self, *arguments: Any, **keywords: Any) -> None:
        """Do what vLLM does; a KV cache takes memory when it is written to, not at the start."""
        with _ZeroPages():
            super().initialize_from_config(*arguments, **keywords)

    def load_model(self, *arguments: Any, **keywords: Any) -> None:
        """Do what vLLM does, but compute norms with its kernels, and adapters at once.

        Its own choice for norms on CPU is torch, one operation at a time; its kernels for adapters
        copy that of each token."""
        super().load_model(*arguments, **keywords)
        # Every request has the one adapter that there is.
        self.model_runner.set_active_loras = lambda *arguments, **keywords: None
        for module in self.get_model().modules():
            if isinstance(module, BaseLinearLayerWithLoRA):
                apply_adapter_at_once(module)
            if (
                type(module) is RMSNorm
                and module.has_weight
                and module.variance_size_override is None
            ):
                module._forward_method = partial(_rms_norm, module)

    def _sample(
        self,
        logits_RV: torch.Tensor,
        generators: dict[int, torch.Generator],
        top_k_R: torch.Tensor | None,
        top_p_R: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sampled tokens [R], log-probs [R, V] of the distribution that they are drawn from).

        vLLM's own sampler draws from every request's generator."""
        logits_RV = apply_top_k_top_p(logits_RV.float(), top_k_R, top_p_R)
        logprobs_RV = logits_RV.log_softmax(dim=-1)
        tokens_R = torch.ops._C.fused_gumbel_argmax(
            logits_RV, self._noise_seeds(len(logits_RV), generators)
        )
        return tokens_R, logprobs_RV

    def _noise_seeds(self, rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
        """A seed for every request's next token.

        Its own generator, never drawn from, holds a request's seed; a greedy request has none."""
        seeds_R = np.zeros(rows, np.uint64)
        if len(generators) < rows:
            seeds_R = torch.randint(0, 2**62, (rows,)).numpy().astype(np.uint64)
        for row, generator in generators.items():
            seeds_R[row] = generator.initial_seed()
        positions_R = self.model_runner.input_batch.num_tokens_no_spec[:rows]
        return torch.from_numpy(noise_seeds(seeds_R, positions_R))

    def record_routes(self) -> None:
        """Keep the experts of every token that is computed, by its slot of the KV cache.

        So they are there for a prompt that others have computed, in several pieces or again after a
        preemption. Call it once the KV cache is allocated."""
        runners = [module for module in self.get_model().modules() if isinstance(module, MoERunner)]
        router: Any = runners[0].router
        slots = self.model_runner.kv_cache_config.num_blocks * self._block_table.block_size
        # All layers have experts. The last row takes what has no slot, which is number -1.
        self._routes = torch.zeros(
            slots + 1,
            len(runners),
            router.top_k,
            dtype=expert_dtype(router.global_num_experts),
        )
        for runner in runners:
            runner.router.set_capture_fn(partial(self._keep_routes, runner.layer_id))

    @property
    def _block_table(self) -> Any:
        return self.model_runner.input_batch.block_table[0]

    def _keep_routes(self, layer: int, experts_TK: torch.Tensor) -> None:
        slots_T = self._block_table.slot_mapping.gpu[: len(experts_TK)]
        self._routes[slots_T, layer] = experts_TK.to(self._routes.dtype)

    def routes_of(self, name: str, first: int, end: int) -> torch.Tensor:
        """Experts of a request's tokens from `first` to `end`, [T, L, K].

        Call it before the engine's next step, which may give the request's blocks to others."""
        row = self.model_runner.input_batch.req_id_to_index[name]
        table = self._block_table
        positions_T = np.arange(first, end)
        blocks_T = table.get_numpy_array()[row, positions_T // table.block_size]
        slots_T = blocks_T.astype(np.int64) * table.block_size + positions_T % table.block_size
        return self._routes[torch.from_numpy(slots_T)]

    def release_kv_cache(self) -> None:
        storages = cache_storages(self)
        if self._kv_cache_bytes is None:
            self._kv_cache_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def restore_kv_cache(self) -> None:
        """Allocate the KV cache's memory again, filled with zeros.

        Its kernels multiply places that no token was written to by 0, and what was there before
        may be NaN."""
        assert self._kv_cache_bytes is not None, "the KV cache was never released"
        for storage, size in zip(cache_storages(self), self._kv_cache_bytes, strict=True):
            storage.resize_(size)
            fill_with_zero_pages(storage.data_ptr(), size)


def gather_without_ranks(
    logprobs_TV: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """The log-probs of the tokens alone.

    vLLM's own goes over the vocabulary once more for the tokens' ranks, which are 0 here."""
    assert num_logprobs == 0, "the most likely tokens are asked for by nobody"
    rows_T1 = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        rows_T1.int(), logprobs_TV.gather(-1, rows_T1), torch.zeros_like(token_ids)
    )


class _ZeroPages(TorchFunctionMode):
    """Makes `torch.zeros` fill its memory with `fill_with_zero_pages` while it is active."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        if function is not torch.zeros:
            return function(*arguments, **(options or {}))
        zeros = torch.empty(*arguments, **(options or {}))
        fill_with_zero_pages(zeros.data_ptr(), zeros.nbytes)
        return zeros


def fill_with_zero_pages(address: int, size: int) -> None:
    """Zero `size` bytes of private memory.

    Whole pages go back to the kernel until they are touched again."""
    first = min(-(-address // PAGE_BYTES) * PAGE_BYTES, address + size)
    last = max((address + size) // PAGE_BYTES * PAGE_BYTES, first)
    ctypes.memset(address, 0, first - address)
    if last > first and _libc.madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED
    ):
        ctypes.memset(first, 0, last - first)
    ctypes.memset(last, 0, address + size - last)


def _rms_norm(
    norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x, or of x + residual with that sum; it may overwrite both."""
    if x.dim() != 2 or not x.is_contiguous() or x.dtype != norm.weight.dtype:
        return norm.forward_native(x, residual)
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, norm.weight.data, norm.variance_epsilon)
        return x, residual
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, norm.weight.data, norm.variance_epsilon)
    return normed


def apply_adapter_at_once(layer: BaseLinearLayerWithLoRA) -> None:
    """Let a layer add its only adapter as x A^T B^T, to the output of each of its matrices.

    x A^T is one product: the buffers of A become parts of one, one below the other. Few tokens are
    filled up with zeros, so that a token's sum does not depend on how many others there are."""
    all_a = torch.cat([a[0, 0] for a in layer.lora_a_stacked])
    rank = layer.lora_a_stacked[0].shape[2]
    layer.lora_a_stacked = tuple(a[None, None] for a in all_a.split(rank))
    matrices_b = [b[0, 0] for b in layer.lora_b_stacked]

    def apply(x_TK: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        base = layer.base_layer
        output = base.quant_method.apply(base, x_TK, bias)
        tokens = len(output)
        if tokens < LEAST_ROWS:
            missing = (0, 0, 0, LEAST_ROWS - tokens)
            x_TK = torch.nn.functional.pad(x_TK, missing)
            output = torch.nn.functional.pad(output, missing)
        outputs = output.split([len(b) for b in matrices_b], dim=1)
        low = (x_TK @ all_a.t()).split(rank, dim=1)
        for output_part, low_part, b in zip(outputs, low, matrices_b, strict=True):
            output_part.addmm_(low_part, b.t())
        return output[:tokens]

    layer.apply = apply


def noise_seeds(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Seeds of the noise (0 to 2**63 - 1), from each request's seed (uint64) and token position."""
    mixed_R = _mix(_mix(seeds_R) ^ positions_R.astype(np.uint64))
    return (mixed_R >> np.uint64(1)).astype(np.int64)


def _mix(values: Any) -> Any:
    """SplitMix64's steps (Steele, Lea, Flood 2014): every bit of the result depends on all bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
