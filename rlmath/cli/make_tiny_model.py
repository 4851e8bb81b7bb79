"""Makes the demo's random model and tokenizer: a Qwen2 of 0.6M parameters, in Hugging Face form.

    python -m rlmath.cli.make_tiny_model --output models/tiny --seed 1
    python -m rlmath.cli.make_tiny_model --output models/mixture --experts 8

`rlmath sft` then teaches it to add, from the worked solutions that `rlmath/cli/make_arithmetic.py`
writes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlmath.checkpoint.convert.sources import check_output

MAX_POSITIONS = 512
INTERMEDIATE = 256
"""Intermediate size of a layer, or of the experts of a token together."""
EXPERTS_PER_TOKEN = 2
_PAD = "<pad>"
_EOS = "<eos>"
_UNK = "<unk>"
_BOXED = "\\boxed{"


def make_tokenizer() -> Qwen2Tokenizer:
    r"""A tokenizer of printable ASCII characters, tab, newline, `\boxed{` and 3 special tokens.

    Text of those characters decodes to itself; others are dropped. The 101 tokens do not divide
    among tensor ranks, so the vocabulary has to be padded. It is a Qwen2Tokenizer without merges
    because transformers 5 loads the tokenizer of any Qwen2 folder as one, with that class's rules,
    whatever its tokenizer.json says.
    """
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    characters = ["\n", "\t", *map(chr, range(ord(" "), ord("~") + 1))]
    tokens = [
        _PAD,
        _EOS,
        _UNK,
        _BOXED,
        *(byte_level.pre_tokenize_str(character)[0][0] for character in characters),
    ]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNK,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(_BOXED, normalized=False)])
    return tokenizer


def make_model(
    tokenizer: Qwen2Tokenizer, hidden: int = 128, layers: int = 4, experts: int = 0
) -> PreTrainedModel:
    """A random Qwen2 of 4 heads in fp32, from torch's global seed.

    With `experts` it is a Qwen3-MoE whose layers send each token to EXPERTS_PER_TOKEN of them.
    Raises ValueError for an impossible shape."""
    if hidden < 1 or layers < 1 or hidden % 8:
        raise ValueError(
            f"hidden is {hidden} and layers {layers}; needed: a multiple of 8, and at least 1"
        )
    if experts and experts < EXPERTS_PER_TOKEN:
        raise ValueError(
            f"experts is {experts}; needed: 0 (none), or at least the {EXPERTS_PER_TOKEN} of a token"
        )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.05,  # at this size it learns in two thirds of the steps that 0.02 takes
        "tie_word_embeddings": False,
        "bos_token_id": None,
        **ends,
    }
    model: PreTrainedModel
    if experts:
        mixture = Qwen3MoeConfig(
            **sizes,
            head_dim=hidden // 4,
            num_experts=experts,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            moe_intermediate_size=INTERMEDIATE // EXPERTS_PER_TOKEN,
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(mixture).float()
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).float()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **ends
    )
    return model


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, makes the model, and writes it with its tokenizer."""
    parser = argparse.ArgumentParser(description="Makes a tiny random Qwen2 and its tokenizer.")
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (default 1)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    experts_help = (
        f"experts of each layer, {EXPERTS_PER_TOKEN} a token: a Qwen3-MoE (default: none)"
    )
    parser.add_argument("--experts", type=int, default=0, help=experts_help)
    arguments = parser.parse_args(argv)
    check_output(arguments.output)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments.hidden, arguments.layers, experts=arguments.experts)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: a random model of {model.num_parameters()} parameters")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        sys.exit(2)
