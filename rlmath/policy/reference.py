"""The frozen policy that KL is measured against."""

from __future__ import annotations

from rlmath.checkpoint.hf_io import load_hf_weights
from rlmath.config import Config
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.executor import Executor
from rlmath.policy.logprobs import HeldBack
from rlmath.policy.model import Recompute, build_chunks, transformer_config


def build_reference(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, stop_token_ids: tuple[int, ...]
) -> Executor:
    """The model to start from, sharded like the actor, without gradients. Build it only where KL is used: it holds
    the memory of its parameters."""
    megatron = transformer_config(shape, mesh, device, config.parallel, Recompute())
    chunks = build_chunks(shape, mesh, device, megatron)
    load_hf_weights(chunks, config.model.path, shape, mesh)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    held_back = HeldBack(stop_token_ids, config.rollout.min_new_tokens)
    return Executor(chunks, mesh, device, config.rollout.temperature, shape.vocab_size, held_back)
