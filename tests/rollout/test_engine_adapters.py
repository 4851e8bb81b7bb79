"""What vLLM is opened with where an engine holds adapters beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from rlmath.config.schema import LoraConfig
from rlmath.rollout.engine_adapters import (
    adapter_arguments,
    adapter_buffers,
    adapter_request,
    folder_arguments,
    forget_batch,
)
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters, engine_shapes
from tests.rollout.weight_sync.oracle import SMALL

LAYERS = {
    "attention": ["o_proj", "qkv_proj"],
    "mlp": ["down_proj", "gate_up_proj"],
    "all": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
}


@pytest.mark.parametrize("target", LAYERS)
def test_an_engine_is_opened_for_the_adapters_whose_buffers_it_has(
    target: Literal["attention", "mlp", "all"],
) -> None:
    """Buffers have ranks of vLLM's own: 9 is filled up to 16."""
    adapters = engine_adapters(SMALL, LoraConfig(rank=9, target=target))
    assert adapter_arguments(engine_shapes(SMALL, 1, adapters=adapters)) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": LAYERS[target],
    }


def test_without_adapters_nothing_of_them_is_asked_for() -> None:
    merged = engine_adapters(SMALL, LoraConfig(rank=9, engine="merged"))
    assert adapter_arguments(engine_shapes(SMALL, 1, adapters=merged)) == {}
    config = SimpleNamespace(lora_config=None)
    assert adapter_request(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))) is None
    forget_batch(SimpleNamespace(model_runner=SimpleNamespace()))


def test_a_folder_of_adapters_says_what_it_adapts(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{n}.self_attn.{x}_proj" for n in (0, 1) for x in "vq"]
    tensors = {
        f"{name}.lora_{matrix}.weight": torch.zeros(3, 3) for name in names for matrix in "AB"
    }
    save_file(tensors, str(tmp_path / "adapter_model.safetensors"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 40}))
    arguments = folder_arguments(tmp_path)
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"]
    assert arguments["max_lora_rank"] == 8


def test_buffers_are_named_by_layer_matrix_and_number() -> None:
    """They are views: what is written into them is what the layer computes with."""
    model = torch.nn.Module()
    model.qkv_proj = layer = torch.nn.Module()
    layer.lora_a_stacked = tuple(torch.full((1, 1, 2, 3), float(n)) for n in range(2))
    layer.lora_b_stacked = (torch.full((1, 1, 4, 2), 5.0),)
    buffers = adapter_buffers(model)
    assert {
        name: (tuple(buffer.shape), float(buffer[0, 0])) for name, buffer in buffers.items()
    } == {
        "qkv_proj.lora_a_stacked.0": ((2, 3), 0.0),
        "qkv_proj.lora_a_stacked.1": ((2, 3), 1.0),
        "qkv_proj.lora_b_stacked.0": ((4, 2), 5.0),
    }
    buffers["qkv_proj.lora_b_stacked.0"].fill_(6.0)
    assert (layer.lora_b_stacked[0] == 6.0).all()
