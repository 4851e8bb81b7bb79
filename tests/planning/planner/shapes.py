"""A model small enough to count by hand, and where it runs."""

from __future__ import annotations

import math
from dataclasses import replace

from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.config.gpu_specs import Machine
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)
from rlmath.planning.memory_estimate import Target
from rlmath.planning.planner.cluster import Cluster, Coefficients
from rlmath.planning.planner.lengths import Batch, Lengths
from rlmath.planning.planner.step import step_inputs
from rlmath.planning.planner.training import StepInputs

TINY = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=4,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=16,
    vocab_size=32,
    tied_embeddings=False,
    max_positions=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    attention_bias=True,
    torch_dtype="bfloat16",
)
LAYER_FLOPS = 2 * (4 * 8 * 8 + 3 * 8 * 16)
"""FLOPs of a token's forward pass: four square matrices of attention, three of the feed-forward."""
HEAD_FLOPS = 2 * 8 * 32
PAIR_FLOPS = 4 * 4 * 8 / 2
"""FLOPs of attention's forward pass for each square of a sequence's length.

4 x layers x query size, half of it masked."""
GPU = Target("cuda", "H100-80GB", 79 * 2**30, local_layers=False)
FREE = Coefficients(1.0, 1.0, 1.0, *(0.0,) * 8)
"""All of a machine's speed, and nothing on top: seconds are work over speed."""
ALIKE = Lengths(median=10.0, spread=0.02, longest=16)
"""Completions of almost exactly 10 tokens."""
BATCH = Batch(sequences=8, group=2, prompt_tokens=6.0, lengths=ALIKE)
CONFIG = Config(
    run=RunConfig(output_dir="o"),
    model=ModelConfig(path="m"),
    data=DataConfig(train_path="t", prompts_per_step=4, max_prompt_tokens=16),
    policy=PolicyConfig(max_tokens_per_microbatch=33),
    rollout=RolloutConfig(group_size=2, max_new_tokens=16, max_num_seqs=4),
)


def with_ranks(config: Config, **parallel: int) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))


def inputs(
    config: Config,
    ranks: int,
    nodes: int = 1,
    batch: Batch = BATCH,
    shape: ModelShape = TINY,
    **speeds: float,
) -> StepInputs:
    """Inputs of a machine without limits, but for the `speeds` named (FLOP/s or bytes/s)."""
    best = dict.fromkeys(("flops", "memory", "node", "network", "host"), math.inf)
    cluster = Cluster(Machine("test", "cuda", **(best | speeds)), nodes, ranks // nodes, FREE)
    return step_inputs(config, read_run_shapes(config, shape), GPU, cluster, batch)
