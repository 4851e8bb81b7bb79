"""Megatron: process groups, configuration of its GPT model, and the model's chunks on this rank.

    start_megatron -> transformer_config -> build_chunks (layer_spec) -> wrap_for_training

The layers are Transformer Engine's, or Megatron's local ones with our norm and attention
(`Device.local_layers`). Weights come from `checkpoint.hf`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_patches
from rlmath.checkpoint.hf import weight_map
from rlmath.checkpoint.hf.weight_map import padded_vocab, placed_tensors
from rlmath.checkpoint.hf.weights import local_parameter
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import ParallelConfig
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models.attention import SelfAttention
from rlmath.models.critic import ValueHead
from rlmath.models.local_layers import LocalLayer, RMSNorm, swiglu
from rlmath.models.output_layer import float32_logits
from rlmath.models.rotary import Rotary, rotary_frequencies


def layer_spec(
    config: TransformerConfig, local_layers: bool, chunk: int | None, separate_norms: bool = False
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec from which `GPTModel` builds its decoder.

    `chunk` is the model chunk's number where a stage has several. With `separate_norms` Transformer
    Engine's linear layers have no norm in them: their input is what an adapter gets."""
    if not local_layers:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        return _with_separate_norms(layer) if separate_norms else layer
    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    layer.module, layer.submodules.self_attention.module = LocalLayer, SelfAttention
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = IdentityOp  # a part of ours
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=RMSNorm
    )


def _with_separate_norms(layer: ModuleSpec) -> ModuleSpec:
    """A layer of Transformer Engine whose norms are modules of their own."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    parts = layer.submodules
    parts.input_layernorm = TENorm
    parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    # A function with the modules given, since megatron-core 0.19; before, a spec of them. Experts
    # have their own.
    mlp = (
        parts.mlp.keywords["submodules"] if isinstance(parts.mlp, partial) else parts.mlp.submodules
    )
    if hasattr(mlp, "linear_fc1"):
        parts.pre_mlp_layernorm = TENorm
        mlp.linear_fc1 = TEColumnParallelLinear
    return layer


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation in Megatron's words; all None recomputes nothing."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None


def selective_modules(shape: ModelShape, local_layers: bool) -> list[str]:
    """The modules that "selective" recomputes.

    Transformer Engine's attention keeps no scores, so that there the MLP is the most memory for the
    least work; our attention keeps its inputs laid out by segment."""
    if local_layers:
        return ["core_attn"]
    return ["moe"] if shape.num_experts else ["mlp"]


def start_megatron(mesh: Mesh, device: Device, seed: int, timeout_seconds: float) -> None:
    """Patch Megatron where the device needs it and lay out its process groups.

    Their timeout is rounded up to minutes. Call `init_process_group` before."""
    megatron_patches.apply(device.kind)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=_virtual_size(mesh),
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    placed = {
        "tensor": (parallel_state.get_tensor_model_parallel_rank(), mesh.tensor_rank),
        "context": (parallel_state.get_context_parallel_rank(), mesh.context_rank),
        "data": (parallel_state.get_data_parallel_rank(), mesh.data_rank),
        "pipeline": (parallel_state.get_pipeline_model_parallel_rank(), mesh.pipeline_rank),
        "expert": (parallel_state.get_expert_model_parallel_rank(), mesh.expert_rank),
        "expert tensor": (
            parallel_state.get_expert_tensor_parallel_rank(),
            mesh.expert_tensor_rank,
        ),
    }
    assert all(megatron_rank == mesh_rank for megatron_rank, mesh_rank in placed.values()), (
        f"(Megatron's, the mesh's) ranks: {placed}"
    )


def stop_megatron() -> None:
    """Undo `start_megatron`; another layout may follow over the same ranks."""
    parallel_state.destroy_model_parallel()


def _virtual_size(mesh: Mesh) -> int | None:
    """Megatron's value for one model chunk per stage is None."""
    return mesh.virtual_pipeline if mesh.virtual_pipeline > 1 else None


def transformer_config(
    shape: ModelShape, mesh: Mesh, device: Device, parallel: ParallelConfig, recompute: Recompute
) -> TransformerConfig:
    """Megatron's description of the model and of how it is computed."""
    is_cpu = device.kind == "cpu"
    local_layers = device.local_layers
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
        qk_layernorm=shape.qk_norm,
        softmax_scale=_softmax_scale(shape, local_layers),
        **_layer_kinds(shape),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=device.params_dtype,
        pipeline_dtype=device.params_dtype,
        bf16=device.params_dtype == torch.bfloat16,
        fp16=device.params_dtype == torch.float16,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        **_stage_layout(mesh, parallel),
        sequence_parallel=parallel.sequence and mesh.tensor > 1,
        **_expert_layout(shape, mesh, device),
        # Packs differ in length; `ForwardBackward` knows the shapes of all messages, so that none
        # is sent.
        variable_seq_lengths=mesh.pipeline > 1,
        calculate_per_token_loss=True,
        use_cpu_initialization=is_cpu,
        perform_initialization=False,
        # Gradients of weights are added to their float32 buffers by the products
        # (`megatron_patches.multi_tensor`).
        gradient_accumulation_fusion=not is_cpu,
        # SwiGLU in one function: of local layers `_build_chunk` sets ours, beside Transformer
        # Engine it is Megatron's.
        use_te_activation_func=local_layers,
        bias_activation_fusion=not local_layers,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=not local_layers,
        recompute_granularity=recompute.granularity,
        recompute_modules=selective_modules(shape, local_layers),
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers,
    )


def _softmax_scale(shape: ModelShape, local_layers: bool) -> float | None:
    """The factor by which Transformer Engine multiplies query times key; None: the usual one.

    Where all of a head is rotated, a factor of both is one of their product. Our attention has the
    factor in its cosines and sines."""
    if local_layers or shape.rotary_magnitude == 1.0:
        return None
    assert shape.rotary_dim is None, "refused by `planning.parallelism`"
    return shape.rotary_magnitude**2 * shape.head_dim**-0.5


def _layer_kinds(shape: ModelShape) -> dict[str, Any]:
    """The layers that have a window, and those that do not rotate.

    Transformer Engine's attention and ours read them."""
    kinds: dict[str, Any] = {}
    if shape.sliding_window is not None:  # Megatron counts the tokens before a query
        layers = range(shape.num_layers)
        kinds["window_size"] = (shape.sliding_window - 1, 0)
        kinds["window_attn_skip_freq"] = [
            int(layer not in shape.full_attention_layers) for layer in layers
        ]
    if shape.no_rope_layers:
        kinds["no_rope_freq"] = [
            int(layer in shape.no_rope_layers) for layer in range(shape.num_layers)
        ]
    return kinds


def _stage_layout(mesh: Mesh, parallel: ParallelConfig) -> dict[str, Any]:
    """How layers are split over stages and chunks, and how the stages communicate."""
    virtual = _virtual_size(mesh)
    # Of two stages the first determines both; with chunks, Megatron would divide by the stages
    # between first and last.
    last_is_rest = mesh.pipeline == 2 and parallel.first_stage_layers is not None
    return {
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": None if last_is_rest else parallel.last_stage_layers,
        # Batched, only their order distinguishes a send to the next stage from one to the previous
        # stage; between two stages they are mixed up, and gradients are silently wrong. Overlapped,
        # each has a message group of its own.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        # Megatron would wait for the whole device after every message, which torch 2.0 and older
        # needed.
        "batch_p2p_sync": False,
    }


def _expert_layout(shape: ModelShape, mesh: Mesh, device: Device) -> dict[str, Any]:
    """How tokens are routed to experts.

    There is no balancing loss: the policy's gradient alone trains the router."""
    # Megatron requires this dispatcher where messages differ in length, of dense models too.
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if not shape.num_experts:
        return dispatcher
    return dispatcher | {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_router_topk": shape.experts_per_token,
        # A softmax over the picked experts is one over all, its picked weights scaled to sum to 1.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": not device.local_layers,
        "expert_model_parallel_size": mesh.expert,
        "expert_tensor_parallel_size": mesh.expert_tensor,
    }


def build_chunks(
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    config: TransformerConfig,
    separate_norms: bool = False,
) -> list[GPTModel]:
    """This rank's model chunks in the order of their layers, on its device, weights undefined."""
    return [
        _build_chunk(
            shape, mesh, device, config=config, number=number, separate_norms=separate_norms
        )
        for number in range(mesh.virtual_pipeline)
    ]


def _build_chunk(
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    config: TransformerConfig,
    number: int,
    separate_norms: bool,
) -> GPTModel:
    """One model chunk of this rank, on its device; its weights are undefined."""
    local_layers = device.local_layers
    vp_stage = number if mesh.virtual_pipeline > 1 else None
    model = GPTModel(
        config,
        layer_spec(config, local_layers, vp_stage, separate_norms),
        vocab_size=padded_vocab(shape.vocab_size, mesh.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.pipeline_rank == 0 and number == 0,
        post_process=mesh.is_last_stage and number == mesh.virtual_pipeline - 1,
        position_embedding_type="none" if local_layers else "rope",  # our attention rotates
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if weight_map.has_value_head(shape.architecture) and model.post_process:
        model.output_layer = ValueHead(shape.hidden_size, config.sequence_parallel)
    elif model.post_process and device.head_dtype not in (None, device.params_dtype):
        model.output_layer.forward = partial(float32_logits, model.output_layer)
    model.rotary = None
    if local_layers:
        model.rotary = Rotary(
            rotary_frequencies(shape).to(device.torch_device), shape.rotary_magnitude
        )
        for module in model.modules():
            if isinstance(module, MLP):
                module.activation_func = swiglu
    elif shape.rope_scaling is not None or shape.rotary_dim is not None:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(shape)
    model = model.to(device.torch_device)
    # Mark the parameters that tensor-parallel ranks hold different parts of: in the gradient's norm
    # all parts count, of the others only the first rank's. megatron-core 0.16 marks them only while
    # it initialises a model: skipped here.
    for placed in placed_tensors(shape):
        parameter = local_parameter([model], placed)
        if parameter is not None and placed.rule.split_axis is not None:
            parameter.tensor_model_parallel = True
    return model


def wrap_for_training(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    distributed_optimizer: bool,
    overlap: bool = False,
) -> list[DistributedDataParallel]:
    """The chunks, each with one flat gradient buffer.

    It is reduced over the data-parallel ranks once per minibatch: after the last backward pass, or
    with `overlap` bucket by bucket during it."""
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap,
        grad_reduce_in_fp32=True,
    )
    wrapped = [DistributedDataParallel(config, reduction, chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.broadcast_params()
    if overlap:
        # Only the last micro-batch's backward pass starts reductions.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped
