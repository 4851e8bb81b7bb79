"""Makes the demo's random model and its tokenizer: a Qwen2 of 0.6M parameters, in Hugging Face form.

    python -m rlmath.cli.make_tiny_model --output models/tiny --seed 1

`rlmath sft` then teaches it to add, from the worked solutions that `rlmath/cli/make_arithmetic.py` writes.

Prints one JSON line: parameters, seconds, output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rlmath.checkpoint.convert.sources import check_output

MAX_POSITIONS = 512
_PAD, _EOS, _UNK, _BOXED = "<pad>", "<eos>", "<unk>", "\\boxed{"


def make_tokenizer() -> Qwen2Tokenizer:
    r"""One token per printable ASCII character, tab and newline, one for `\boxed{`, and three special ones.

    Text of those characters decodes to itself; others are dropped. The 101 tokens do not divide among tensor
    ranks, so the vocabulary has to be padded. It is a Qwen2Tokenizer without merges because transformers 5
    loads the tokenizer of any Qwen2 folder as one, with that class's rules, whatever its tokenizer.json says.
    """
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    characters = ["\n", "\t", *map(chr, range(ord(" "), ord("~") + 1))]
    tokens = [_PAD, _EOS, _UNK, _BOXED, *(byte_level.pre_tokenize_str(c)[0][0] for c in characters)]
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
    tokenizer: Qwen2Tokenizer,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 256,
    tied: bool = False,
) -> Qwen2ForCausalLM:
    """A random Qwen2 in fp32, from torch's global seed. Raises ValueError for an impossible shape."""
    if min(hidden, layers, heads, kv_heads, intermediate) < 1:
        raise ValueError("hidden, layers, heads, kv-heads and intermediate must all be at least 1")
    if hidden % (2 * heads):
        raise ValueError(f"hidden is {hidden} with {heads} heads; it must be a multiple of {2 * heads}")
    if heads % kv_heads:
        raise ValueError(f"heads is {heads} with {kv_heads} kv-heads; heads must be a multiple of kv-heads")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,  # at this size it learns in two thirds of the steps that 0.02 takes
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **ends)
    return model


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises ValueError for an output that cannot be, before any work."""
    parser = argparse.ArgumentParser(description="Makes a tiny random Qwen2 and its tokenizer.")
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (default 1)")
    for name, default, what in (
        ("hidden", 128, "hidden size"),
        ("layers", 4, "layers"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key-value heads"),
        ("intermediate", 256, "width of the feed-forward layers"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--tied", action="store_true", help="share input and output embeddings")
    args = parser.parse_args(argv)
    check_output(args.output)
    return args


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, makes the model, and writes it with its tokenizer."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    shape = (args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate, args.tied)
    model = make_model(tokenizer, *shape)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"{args.output}: a random model of {model.num_parameters()} parameters")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        sys.exit(2)
