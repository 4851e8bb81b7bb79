"""The layers the policy is made of: Transformer Engine's where installed, else Megatron's with our own norm and
attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from rlmath.policy.attention import PackedAttention


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm whose weight Megatron knows to be shared under sequence parallelism.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism; its gradients only need to be summed over the
    tensor-parallel ranks, which the attribute asks for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def uses_local_layers(device_kind: str) -> bool:
    """True where the layers are Megatron's own: on CPU, and on GPUs without Transformer Engine."""
    return device_kind == "cpu" or not HAVE_TE


def layer_spec(
    config: TransformerConfig, local_layers: bool, chunk: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """What `GPTModel` builds its decoder from; `chunk` is the model chunk's number where a stage has several."""
    if not local_layers:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=RMSNorm
    )
