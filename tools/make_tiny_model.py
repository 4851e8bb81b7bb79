"""Makes the demo's model: a Qwen2 of 0.6M parameters that can add but slips, in Hugging Face form.

    python tools/make_tiny_model.py --output models/tiny --data data/arithmetic --seed 1

`--data` is a folder written by `tools/make_arithmetic.py`. The model starts from random weights and is
warmed up by supervised training on worked solutions in which every result slips with some probability
(`worked_solution`). It learns both: the right result is its most likely next token nearly everywhere, and a
slip has the probability it had in the data. So its greedy answers are right, while those sampled at
temperature 1 are right as often as was chosen (35%), and that is the gap GRPO closes. `--steps 0` writes
the random model.

Prints one JSON line: accuracy_sampled, accuracy_greedy (held-out), parameters, seconds, steps, output.
"""

# Shape legend: B examples of a batch, T tokens of an example, V vocabulary.

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep; on busy cores they would spin

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.data.readers import read_boba
from tools.make_arithmetic import Addition, slip_for_accuracy, worked_solution

MAX_POSITIONS = 512
ACCURACY_TARGET = 0.35
ACCURACY_BAND = (0.25, 0.45)
"""Sampled accuracy that the demo may start from."""
GREEDY_FLOOR = 0.93
"""Below this the model has not learned to add, whatever it samples."""

_EXTRA_ROUNDS = 4
_EVAL_PROMPTS = 500
_PROMPT = re.compile(r"(\d+)\+(\d+)=")
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


def read_problems(path: Path) -> list[Addition]:
    """The problems of a file of `tools/make_arithmetic.py`. Raises ValueError when it is not one."""
    problems = []
    for row in read_boba(str(path)):
        match = _PROMPT.fullmatch(row.prompt)
        if match is None:
            raise ValueError(f"{path}: {row.prompt[:40]!r} is not a prompt of tools/make_arithmetic.py")
        problems.append(Addition(int(match[1]), int(match[2])))
    return problems


def batches(
    problems: list[Addition], tokenizer: Qwen2Tokenizer, size: int, slip: float, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids_BT, labels_BT), padded on the right; labels are next tokens, -100 outside completions."""
    while True:
        chosen = rng.choices(problems, k=size)
        prompts = tokenizer([p.prompt for p in chosen])["input_ids"]
        answers = tokenizer([worked_solution(p, slip, rng) + _EOS for p in chosen])["input_ids"]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) - 1
        ids_BT = torch.full((size, width), tokenizer.pad_token_id)
        labels_BT = torch.full((size, width), -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            last = len(prompt) + len(answer) - 1
            ids_BT[row, :last] = torch.tensor((prompt + answer)[:-1])
            labels_BT[row, len(prompt) - 1 : last] = torch.tensor(answer)
        yield ids_BT, labels_BT


def warm_up(
    model: Qwen2ForCausalLM, data: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int, peak: float
) -> None:
    """Supervised AdamW on `steps` batches; the rate rises to `peak` in 30 steps and ends in a line to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 30, (1 - step / steps) / 0.6)
        ids_BT, labels_BT = next(data)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Addition], sample: bool
) -> float:
    """Share of problems whose one completion ends in the right boxed answer and the end token."""
    model.eval()
    prompts = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    longest = max(len(worked_solution(p)) for p in problems)
    out = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=longest + 4,
        do_sample=sample,
        **({} if sample else {"temperature": None, "top_p": None, "top_k": None}),
    )
    texts = tokenizer.batch_decode(out[:, prompts["input_ids"].shape[1] :])
    ends = [problem.solution + _EOS for problem in problems]
    right = sum(text.replace(_PAD, "").endswith(end) for text, end in zip(texts, ends, strict=True))
    return right / len(problems)


def warm_up_into_band(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: tuple[list[Addition], list[Addition]],
    args: argparse.Namespace,
) -> tuple[float, float, int]:
    """Warms up on the first of (training, held-out) until it fits the second; (sampled, greedy, steps).

    Further rounds are shorter and aim off by what the last one missed. Raises RuntimeError when none fits.
    """
    (train, heldout), rng = problems, random.Random(args.seed)
    target, taken, length, peak = ACCURACY_TARGET, 0, args.steps, args.lr
    for _ in range(1 + _EXTRA_ROUNDS):
        slip = slip_for_accuracy(train, target)
        warm_up(model, batches(train, tokenizer, args.batch, slip, rng), length, peak)
        taken += length
        sampled, greedy = (accuracy(model, tokenizer, heldout, sample) for sample in (True, False))
        if ACCURACY_BAND[0] <= sampled <= ACCURACY_BAND[1] and greedy >= GREEDY_FLOOR:
            return sampled, greedy, taken
        print(f"{taken} steps: sampled {sampled:.3f}, greedy {greedy:.3f}; training on", file=sys.stderr)
        if greedy >= GREEDY_FLOOR:
            target = min(0.9, max(0.1, target + ACCURACY_TARGET - sampled))
        length, peak = max(50, args.steps // 4), args.lr / 3
    raise RuntimeError(
        f"after {taken} steps, {sampled:.3f} of the held-out prompts are right when sampled (needed"
        f" {ACCURACY_BAND[0]} to {ACCURACY_BAND[1]}) and {greedy:.3f} greedily (needed {GREEDY_FLOOR}):"
        " raise --steps, or make the model larger"
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises ValueError for values out of range, before any work."""
    parser = argparse.ArgumentParser(description="Makes a tiny Qwen2 and warms it up on additions.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--data", type=Path, help="folder of tools/make_arithmetic.py; not for --steps 0")
    parser.add_argument("--seed", type=int, default=1, help="of weights, batches and sampling (default 1)")
    for name, default, what in (
        ("hidden", 128, "hidden size"),
        ("layers", 4, "layers"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key-value heads"),
        ("intermediate", 256, "width of the feed-forward layers"),
        ("steps", 400, "warm-up steps; 0 writes random weights"),
        ("batch", 64, "examples per warm-up step"),
        ("threads", 2, "torch threads"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    parser.add_argument("--tied", action="store_true", help="share input and output embeddings")
    args = parser.parse_args(argv)
    if args.steps < 0 or min(args.batch, args.threads) < 1 or not 0 < args.lr < 1:
        raise ValueError("--steps must be at least 0, --batch and --threads at least 1, --lr between 0 and 1")
    if args.steps and args.data is None:
        raise ValueError("--data is needed for the warm-up: name a folder of tools/make_arithmetic.py")
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output} is a file; name a folder")
    return args


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, makes the model, and writes it with its tokenizer."""
    args, start = parse_args(argv), time.perf_counter()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    shape = (args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate, args.tied)
    model = make_model(tokenizer, *shape)
    sampled, greedy, steps = None, None, 0
    if args.steps:
        train = read_problems(args.data / "train.jsonl")
        heldout = read_problems(args.data / "heldout.jsonl")[:_EVAL_PROMPTS]
        sampled, greedy, steps = warm_up_into_band(model, tokenizer, (train, heldout), args)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    result = {
        "accuracy_sampled": sampled,
        "accuracy_greedy": greedy,
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
        "steps": steps,
        "output": str(args.output),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
