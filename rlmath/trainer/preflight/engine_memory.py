"""Bytes of a vLLM engine on one of its ranks: weights, workspace, KV cache.

On GPU `rollout.memory_share` of the device is what vLLM takes for itself in all: it measures the free memory when it
starts, before anything of ours is built, and again after a trial run; what it took in between and the trial run's peak
are subtracted from the share, and the rest becomes the KV cache (vLLM 0.32, `gpu_worker.determine_available_memory`).
The CUDA context and NCCL's first buffers are there before and come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import RolloutConfig
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes, engine_vocab_rows

FLOAT32_BYTES = 4
CUDA_GRAPH_BYTES = 2**30
"""Allowed for captured CUDA graphs (a guess on the safe side, not measured)."""
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""Tokens of one block of the KV cache."""


@dataclass(frozen=True)
class EngineBytes:
    """One engine rank's memory."""

    weights: int
    workspace: int
    """Activations of the largest engine step, logits and sampling, CUDA graphs; 0 on CPU, where it is small beside the
    training's."""
    kv_cache: int
    """On GPU what the share leaves, below 0 where it leaves nothing."""
    asleep: int
    """What of the workspace stays while the engine sleeps: CUDA graphs, which vLLM does not give back."""


def engine_bytes(
    shape: ModelShape, rollout: RolloutConfig, device_kind: str, itemsize: int, device_bytes: int | None
) -> EngineBytes:
    """Of one rank. `device_bytes` is the GPU's memory; on CPU the cache has the size that the settings give it."""
    weights = weight_bytes(shape, rollout.tensor_parallel, itemsize, packed_head=device_kind == "cpu")
    if device_kind == "cpu" or device_bytes is None:
        block = BLOCK_TOKENS["cpu"] * kv_bytes_per_token(shape, rollout.tensor_parallel, itemsize)
        return EngineBytes(weights, 0, int(rollout.cpu_kv_cache_gib * 2**30) // block * block, 0)
    workspace = workspace_bytes(shape, rollout, itemsize, device_bytes)
    share = int(rollout.memory_share * device_bytes)
    return EngineBytes(weights, workspace, share - weights - workspace, _graph_bytes(rollout))


@lru_cache(maxsize=64)
def weight_bytes(shape: ModelShape, ranks: int, itemsize: int, packed_head: bool) -> int:
    """Weights of one of `ranks` engine ranks, with the table of rotary angles that all layers share.

    `packed_head`: on CPU the head is held twice, plain and packed for oneDNN. Every other matrix is held packed only,
    in as many bytes.
    """
    shapes = engine_shapes(shape, ranks)
    elements = sum(rows * columns for rows, columns in shapes.values())
    if packed_head:
        elements += engine_vocab_rows(shape, ranks) * shape.hidden_size
    return itemsize * elements + FLOAT32_BYTES * shape.max_positions * shape.head_dim


def kv_heads(shape: ModelShape, ranks: int) -> int:
    """Key-value heads of one engine rank; with more ranks than heads each has a copy of one."""
    return max(1, shape.num_kv_heads // ranks)


def kv_bytes_per_token(shape: ModelShape, ranks: int, itemsize: int) -> int:
    """Keys and values of one token over all layers, on one rank."""
    return 2 * shape.num_layers * kv_heads(shape, ranks) * shape.head_dim * itemsize


def longest_sequence_bytes(
    shape: ModelShape, ranks: int, itemsize: int, tokens: int, device_kind: str
) -> int:
    """KV cache of one sequence of `tokens` tokens in whole blocks, and one block that vLLM keeps for itself."""
    block = BLOCK_TOKENS[device_kind]
    return (-(-tokens // block) + 1) * block * kv_bytes_per_token(shape, ranks, itemsize)


def workspace_bytes(shape: ModelShape, rollout: RolloutConfig, itemsize: int, device_bytes: int) -> int:
    """What vLLM sets aside on GPU beside weights and cache: a formula, not measured.

    Per token of an engine step the residual, two hidden states, the fused projection or the MLP's gate, up and product;
    per sequence four rows of logits in float32 (raw, processed, sorted, log-probs).
    """
    tokens = rollout.max_num_batched_tokens or default_batched_tokens(device_bytes)
    tokens = max(tokens, rollout.max_num_seqs)
    units = shape.ffn_size * max(1, shape.experts_per_token)
    width = 3 * shape.hidden_size + 3 * units // rollout.tensor_parallel
    logits = 4 * rollout.max_num_seqs * shape.vocab_size * FLOAT32_BYTES
    return tokens * width * itemsize + logits + _graph_bytes(rollout)


def _graph_bytes(rollout: RolloutConfig) -> int:
    return CUDA_GRAPH_BYTES if rollout.cuda_graphs else 0


def default_batched_tokens(device_bytes: int) -> int:
    """vLLM 0.32's default for a GPU of 70 GiB and more, and for smaller ones (`arg_utils`; A100 has the smaller one,
    whatever its memory)."""
    return 16384 if device_bytes >= 70 * 2**30 else 8192
