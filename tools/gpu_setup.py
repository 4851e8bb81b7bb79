"""Setup that the stages of tools/gpu_check.py and the benchmarks share.

There are a random model, samples, the settings and the process group of one rank, and the function
with which a stage prints a figure."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlmath.algorithms.types import Sample
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.mesh import Mesh

REPOSITORY = Path(__file__).resolve().parents[1]
QWEN = {
    "tiny": (128, 256, 4, 4, 2, 101),
    "9.5M": (384, 1024, 6, 6, 2, 101),
    "100M": (768, 2304, 14, 12, 2, 101),
    "135M": (576, 1536, 30, 9, 3, 49_152),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
}
"""Shapes of Qwen2.5 and of SmolLM2, as Qwen2: hidden size, width of the feed-forward layers,
layers, heads, heads of keys and values, vocabulary; of the small ones the demo's tokenizer's."""
WORLD = Mesh(0, 1, 1, pipeline=1, engine_size=1)


def tell(
    quantity: str, value: float | str, unit: str = "", expected: str = "", holds: bool | None = None
) -> None:
    """Print a figure at once: what is measured stays known where the stage fails later."""
    if isinstance(value, float):
        value = float(f"{value:.4g}")
    line = {"what": quantity, "value": value, "unit": unit, "expected": expected, "holds": holds}
    print(json.dumps(line), flush=True)


# ---------------------------------------------------------------- models and samples


def random_model(folder: Path, size: str) -> Path:
    """A random Qwen2 in Hugging Face form with the demo's tokenizer, made once.

    A small one is in float32, for comparisons. "experts" is a Qwen3-MoE as small as "tiny"."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlmath.cli.make_tiny_model import make_tokenizer

    place = folder / f"model-{size}"
    if (place / "config.json").exists():
        return place
    with_experts = size == "experts"
    hidden, width, layers, heads, groups, vocabulary = QWEN["tiny" if with_experts else size]
    is_small = vocabulary == QWEN["tiny"][-1]
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    config = AutoConfig.for_model(
        "qwen3_moe" if with_experts else "qwen2",
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=not is_small,
        bos_token_id=None,
        eos_token_id=1,
        # its embedding would be 0, and a norm's gradient a thousandfold where it is sampled
        pad_token_id=None,
        **(experts | {"norm_topk_prob": True, "initializer_range": 0.05} if with_experts else {}),
    )
    torch.manual_seed(1)
    dtype = torch.float32 if is_small else torch.bfloat16
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(default_dtype)
    unfinished = folder / f"model-{size}.unfinished"
    model.save_pretrained(unfinished)
    make_tokenizer().save_pretrained(unfinished)
    unfinished.rename(place)
    return place


def make_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Samples of `length` tokens, a quarter of them the prompt's, the same on every device."""
    draw = torch.Generator().manual_seed(count * length)
    prompt = length // 4
    samples = []
    for number in range(count):
        ids = torch.randint(3, vocabulary, (length,), generator=draw).tolist()
        advantage = 1.0 if number % 2 else -0.5
        behaviour = (-6.0,) * (length - prompt)
        samples.append(Sample(tuple(ids[:prompt]), tuple(ids[prompt:]), behaviour, advantage))
    return samples


def settings(model: Path, device: Device, tokens: int, recompute: str | None = None) -> Config:
    """Settings of one rank that trains with `tokens` in a micro-batch."""
    layers = (
        {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    )
    return Config(
        run=RunConfig(device=device.kind),
        model=ModelConfig(path=str(model)),
        policy=PolicyConfig(
            max_tokens_per_microbatch=tokens,
            recompute_granularity=recompute,
            transformer_impl="local" if device.local_layers else "transformer_engine",
            **layers,
        ),
        optimizer=OptimizerConfig(lr=1e-6),
        algorithm=AlgorithmConfig(early_stop_ratio=None),
        memory=MemoryConfig(),
        rollout=RolloutConfig(
            group_size=8,
            max_new_tokens=256,
            max_num_seqs=256,
            cpu_kv_cache_gib=0.25,
            progress_bar=False,
        ),
    )


@contextmanager
def one_rank(kind: str, local_layers: bool, dtype: torch.dtype | None = None) -> Iterator[Device]:
    """The process group of one rank, and Megatron's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    device = open_device(kind, local_layers)
    if dtype is not None:
        device = replace(device, params_dtype=dtype)
    init_process_group(device, 600.0)
    from rlmath.models.megatron import start_megatron

    start_megatron(WORLD, device, 1, timeout_seconds=600.0)
    yield device
    if dist.is_initialized():
        dist.destroy_process_group()


def has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def sizes(arguments: argparse.Namespace) -> list[str]:
    if arguments.device == "cpu":
        return ["tiny"]
    return ["0.5B"] if arguments.quick else ["0.5B", "1.5B"]
