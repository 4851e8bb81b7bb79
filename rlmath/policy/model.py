"""Megatron-Core models of a Hugging Face model's shape: the actor (with gradients) and the reference (without)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_patches
from rlmath.checkpoint.hf_tables import padded_vocab
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.attention import PackedRotaryEmbedding
from rlmath.policy.layer_spec import layer_spec, uses_local_layers


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation in Megatron's words; all None recomputes nothing."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None


def start_megatron(mesh: Mesh, device: Device, seed: int, timeout_seconds: float) -> None:
    """Patch Megatron where the device needs it and lay out its process groups. Needs `init_process_group` before.

    Megatron counts the timeout of its groups in whole minutes; it is rounded up.
    """
    megatron_patches.apply(device.kind)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    placed = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    expected = (mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank)
    assert placed == expected, f"Megatron placed this rank at {placed}, the mesh at {expected}"


def transformer_config(
    shape: ModelShape, mesh: Mesh, device: Device, sequence_parallel: bool, recompute: Recompute
) -> TransformerConfig:
    """Megatron's description of the model and of how it is computed."""
    is_cpu = device.kind == "cpu"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.attention_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=device.params_dtype,
        pipeline_dtype=device.params_dtype,
        bf16=device.params_dtype == torch.bfloat16,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        sequence_parallel=sequence_parallel and mesh.tensor > 1,
        # Packs differ in length, so every pipeline message says its shape; Megatron asks for the dispatcher.
        variable_seq_lengths=mesh.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        use_cpu_initialization=is_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=not uses_local_layers(device.kind),
        recompute_granularity=recompute.granularity,
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers,
    )


def build_model(shape: ModelShape, mesh: Mesh, device: Device, config: TransformerConfig) -> GPTModel:
    """This rank's shard of the model, on its device; the weights are still to be loaded."""
    local_layers = uses_local_layers(device.kind)
    model = GPTModel(
        config,
        layer_spec(config, local_layers),
        vocab_size=padded_vocab(shape.vocab_size, mesh.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.pipeline_rank == 0,
        post_process=mesh.is_last_stage,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=True,
    )
    if local_layers:
        model.rotary_pos_emb = PackedRotaryEmbedding(
            kv_channels=shape.head_dim,
            rotary_percent=1.0,
            rotary_base=shape.rope_theta,
            use_cpu_initialization=device.kind == "cpu",
        )
    return model.to(device.torch_device)


def wrap_for_training(
    model: GPTModel, config: TransformerConfig, distributed_optimizer: bool
) -> DistributedDataParallel:
    """The model with one flat gradient buffer, reduced over the data-parallel ranks once per minibatch."""
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
            grad_reduce_in_fp32=True,
        ),
        model,
    )
    wrapped.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped
