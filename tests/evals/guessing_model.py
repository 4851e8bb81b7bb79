"""A model that guesses.

It writes boxes with letters and digits in them, whatever the problem, and is right now and then.
It is a bigram table in the weights of a Qwen2: the layers add nothing, so the next token depends
on the last one only.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BOX = "\\boxed{"
END = "<eos>"
GUESSES = "ABCD0123456789"
CHATTER = "abcdefgh "


def make_guessing_model(base: Path, folder: Path, positions: int = 2048) -> Path:
    """`base`: a folder of rlmath.cli.make_tiny_model, `--steps 0`.

    Every character leads to a box, a box to one letter or digit, that to another digit or the end
    of the box, and this to chatter, in which it may end."""
    shutil.copytree(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, max_position_embeddings=positions
    )
    size = model.config.hidden_size
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows <= size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(rows, size))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        # The norm makes sqrt(size) of the 1 of an embedding.
        model.lm_head.weight[:, :rows] = (
            bigrams(tokenizer, rows).log().clamp(min=-30.0).T / size**0.5
        )
    model.save_pretrained(folder)
    return folder


def bigrams(tokenizer: object, rows: int) -> torch.Tensor:
    """Probability of the next token (column) after each (row)."""

    def number(token: str) -> int:
        token_id = tokenizer.convert_tokens_to_ids("Ġ" if token == " " else token)  # type: ignore[attr-defined]
        assert token_id is not None and 0 <= token_id < rows, token
        return token_id

    table = torch.zeros(rows, rows)
    table[:, number(BOX)] = 1.0

    def follows(token: str, chances: dict[str, float]) -> None:
        table[number(token)] = 0.0
        for other, chance in chances.items():
            table[number(token), number(other)] = chance

    follows(BOX, {guess: 1 / len(GUESSES) for guess in GUESSES})
    for guess in GUESSES:
        follows(guess, {"}": 0.7, **{digit: 0.03 for digit in "0123456789"}})
    talk = {letter: 0.9 / len(CHATTER) for letter in CHATTER}
    follows("}", talk | {END: 0.1})
    for letter in CHATTER:
        follows(letter, talk | {END: 0.06, BOX: 0.04})
    return table
