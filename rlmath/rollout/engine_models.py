"""Models that vLLM 0.32 lacks in whole or in part, made of those that it has.

They are registered before an engine is built.

- SmolLM3 is a Llama, some of whose layers do not rotate. vLLM would take transformers' own layers,
  which are slower and whose parameters have other names.
- A Qwen whose layers have windows in turns: vLLM's have one window in all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from rlmath.config.model_shape import ModelShape


def register_models(shape: ModelShape) -> None:
    """Tell vLLM of the class for a model of this shape, where it needs one of these."""
    registry = ModelRegistry
    if shape.architecture == "SmolLM3ForCausalLM":
        registry.register_model(shape.architecture, SmolLM3ForCausalLM)
    elif shape.full_attention_layers:
        registry.register_model(shape.architecture, _IN_TURNS[shape.architecture])


class _NoRotation(torch.nn.Module):
    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A Llama of whose layers those with 0 in "no_rope_layers" do not rotate."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer, rotates in zip(self.model.layers, self.config.no_rope_layers, strict=True):
            if not rotates:
                layer.self_attn.rotary_emb = _NoRotation()


class _WindowsInTurns:
    """What a Qwen of vLLM's gets before it: windows in the layers that "layer_types" says."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        config.max_window_layers = config.num_hidden_layers  # asserted where layers differ
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == "sliding_attention":
                _set_window(layer.self_attn, config.sliding_window, vllm_config)


def _set_window(attention: Any, window: int, vllm_config: Any) -> None:
    """Replace vLLM's attention, registered under the layer's name, by one with a window."""
    plain = attention.attn
    del vllm_config.compilation_config.static_forward_context[plain.layer_name]
    attention.attn = Attention(
        attention.num_heads,
        attention.head_dim,
        attention.scaling,
        num_kv_heads=attention.num_kv_heads,
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        per_layer_sliding_window=window,
        prefix=plain.layer_name,
    )


class _Qwen2InTurns(_WindowsInTurns, Qwen2ForCausalLM):
    pass


class _Qwen3InTurns(_WindowsInTurns, Qwen3ForCausalLM):
    pass


_IN_TURNS = {"Qwen2ForCausalLM": _Qwen2InTurns, "Qwen3ForCausalLM": _Qwen3InTurns}
