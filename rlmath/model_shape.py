"""The shape of a model, as its config.json gives it (read and checked by `preflight`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What the program needs to know of a Hugging Face config.json."""

    architecture: str
    """The first of `architectures`, for example "Qwen2ForCausalLM"."""
    num_layers: int
    hidden_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int
    ffn_size: int
    vocab_size: int
    """Rows of the embedding in the Hugging Face files, before padding for tensor parallelism."""
    tied_embeddings: bool
    """The output layer is the embedding."""
    max_positions: int
    """Longest sequence (tokens)."""
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    """Query, key and value projections have a bias."""
    torch_dtype: str
    """Number format of the files, for example "bfloat16"; "float32" where config.json does not say."""
