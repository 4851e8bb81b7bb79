"""LoRA adapters in vLLM's own layers, beside the model's weights.

    adapter_arguments -> LLM -> hold_adapter: an adapter of zeros, written in place by each sync
    folder_arguments  -> LLM -> load_adapter: that of a folder, for evaluations

vLLM wraps each adapted linear layer in one that has, for each of the matrices that its weight
joins, a buffer for A and one for B; B is multiplied by alpha / rank. There is one adapter, and every
request names it (`adapter_request`).
"""

# Shape legend: R rank of the adapter, S rank of vLLM's buffers, K columns of a layer's weight and M
# rows of one of its matrices.

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.checkpoint.hf.headers import ADAPTER_FILE, read_header
from rlmath.checkpoint.hf.weight_map import buffer_rank
from rlmath.config.files import read_json_object
from rlmath.config.run_files import ADAPTER_CONFIG

_NAME = "policy"
_NUMBER = 1
"""The adapter's number in vLLM, which counts from 1."""


def adapter_arguments(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """vLLM's arguments for the adapters whose buffers are among an engine's parameters.

    `shapes` are rows and columns by vLLM's names (`shard_layouts.engine_shapes`)."""
    ranks = {rows for name, (rows, _) in shapes.items() if ".lora_a_" in name}
    if not ranks:
        return {}
    (rank,) = ranks
    return _arguments(rank, {name.split(".")[-3] for name in shapes if ".lora_a_" in name})


def folder_arguments(folder: Path) -> dict[str, Any]:
    """vLLM's arguments for the adapters of a PEFT folder."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    names = read_header(folder / ADAPTER_FILE)
    return _arguments(config["r"], {name.split(".")[-3] for name in names})


def _arguments(rank: int, modules: Collection[str]) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": buffer_rank(rank),
        "lora_target_modules": sorted(modules),
    }


def adapter_request(llm: Any) -> Any:
    """What a request to this vLLM `LLM` names as its adapter; None where there is none."""
    if llm.llm_engine.vllm_config.lora_config is None:
        return None
    return _request(Path(_NAME))


def _request(folder: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, str(folder))


def hold_adapter(llm: Any) -> None:
    """Give the layers of a vLLM `LLM` an adapter of zeros, whose buffers stay where they are."""
    llm.collective_rpc(_hold_adapter)


def _hold_adapter(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(_request(Path(_NAME)), rank=manager.lora_config.max_lora_rank)
    layers = manager._adapter_manager
    layers.activate_adapter(_NUMBER)
    layers.pin_adapter(_NUMBER)
    layers.get_adapter(_NUMBER).loras.clear()  # the layers have copies


def load_adapter(llm: Any, folder: Path) -> None:
    """Load the adapters of a PEFT folder into a vLLM `LLM` that has `folder_arguments`."""
    llm.llm_engine.add_lora(_request(folder))
    llm.llm_engine.pin_lora(_NUMBER)


def forget_batch(worker: Any) -> None:
    """Let vLLM tell its kernels for adapters, if it has any, again which tokens have one.

    They read it from memory that a sleep drops with the weights."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:
        manager._adapter_manager._last_mapping = None


def adapter_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every buffer of a model of vLLM's, by its layer, matrix and number: A [S, K] and B [M, S].

    The names are those of `shard_layouts.engine_blocks`."""
    return {
        f"{path}.{matrix}.{number}": buffer[0, 0]
        for path, module in model.named_modules()
        for matrix in ("lora_a_stacked", "lora_b_stacked")
        for number, buffer in enumerate(getattr(module, matrix, ()))
    }
