"""The frozen policy that KL is measured against."""

from __future__ import annotations

from rlmath.checkpoint.hf_io import load_hf_weights
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.model import Recompute, build_model, transformer_config
from rlmath.policy.step import Executor


def build_reference(
    model_path: str,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    sequence_parallel: bool,
    temperature: float,
) -> Executor:
    """The model to start from, sharded like the actor, without gradients. Build it only where KL is used: it holds
    the memory of its parameters."""
    config = transformer_config(shape, mesh, device, sequence_parallel, Recompute())
    model = build_model(shape, mesh, device, config)
    load_hf_weights(model, model_path, shape, mesh)
    return Executor(model.requires_grad_(False).eval(), mesh, device, temperature, shape.vocab_size)
