"""Small models and samples with random numbers, made by transformers.

They are the oracle of the parity tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rlmath.algorithms.types import Sample
from rlmath.config.model_shape import ModelShape

VOCAB = 101
"""Odd, so that it does not divide by any tensor-parallel size."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""One of the 16 wavelengths of a head of 32 dims stays, two are blended, the others stretched."""

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + number / 8 for number in range(12)],
    "long_factor": [4.0] * 12,
}
"""It turns 24 of the 32 dims of a head."""

_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Qwen3MoeForCausalLM": {
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "MistralForCausalLM": {"head_dim": 64, "sliding_window": None},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1, 0]},
    "Phi3ForCausalLM": {},
}
"""What a tiny model of an architecture has beside the settings that all have. 4 heads of 64 dims
are twice the hidden size."""


def make_model_folder(
    folder: Path,
    tied: bool = False,
    seed: int = 5,
    architecture: str = "Qwen2ForCausalLM",
    **changes: Any,
) -> Path:
    """A random model in Hugging Face form.

    It has 4 layers, 4 heads in 2 groups, and biases and norms off their defaults."""
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    config = model_class.config_class(**settings | _OWN_SETTINGS[architecture] | changes)
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)
    return folder


def _make_tokenizer() -> Any:
    """A tokenizer of single characters with VOCAB tokens: pad, eos, bos, then characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    names = ["<pad>", "<eos>", "<bos>", *characters]
    names += [f"<{number}>" for number in range(VOCAB - len(names))]
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(names)}, merges=[], unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def shape_of(folder: Path) -> ModelShape:
    """The model's shape, as the program itself reads it."""
    from rlmath.checkpoint.hf.config_json import inspect_model_folder

    shape, problems = inspect_model_folder(folder)
    assert shape is not None and not problems, problems
    return shape


def make_samples(count: int, seed: int = 0, longest: int = 16) -> list[Sample]:
    """Samples with random tokens, advantages and behaviour log-probs.

    Prompts have 2 to 8 tokens, completions 2 to `longest`."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt = tuple(draw.randrange(3, VOCAB) for _ in range(draw.randint(2, 8)))
        completion = tuple(draw.randrange(3, VOCAB) for _ in range(draw.randint(2, longest)))
        logprobs = tuple(-draw.uniform(3.5, 5.5) for _ in completion)
        samples.append(Sample(prompt, completion, logprobs, advantage=draw.uniform(-1.5, 1.5)))
    return samples
