"""New weights from the policy's shards into the engines, in memory.

Whole Hugging Face tensors are streamed out of the training layout, one at a time; vLLM's own loader keeps of each what
the engine's layout needs. At most one tensor is whole on a rank at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from rlmath.checkpoint.hf_io import stream_hf_tensors
from rlmath.model_shape import ModelShape
from rlmath.parallel.mesh import Mesh
from rlmath.rollout.engine import Engine


def hf_stream(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh):
    """`stream_hf_tensors` over Megatron's groups of this run."""
    return stream_hf_tensors(
        chunks,
        shape,
        mesh,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )


def sync_weights(chunks: Sequence[torch.nn.Module], engine: Engine, shape: ModelShape, mesh: Mesh) -> None:
    """Load the policy's weights as they are now into the engine. A collective over all ranks."""
    engine.load_weights(hf_stream(chunks, shape, mesh))
