"""The demo's model: its tokenizer is exact, and its files load."""

import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmath.cli.make_tiny_model import main, make_model, make_tokenizer
from tests.tiny_models import shape_of


def test_text_decodes_to_itself():
    tokenizer = make_tokenizer()
    text = string.printable[:-3].replace("\r", "")
    text += " two  spaces\n\n\t\\boxed{\\boxed{12}} \\boxed {3} .,' n't Xs ."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert len(tokenizer) == 101


def test_boxed_is_one_token():
    tokenizer = make_tokenizer()
    assert tokenizer.tokenize(r"=\boxed{132}") == ["=", "\\boxed{", "1", "3", "2", "}"]


def test_a_random_model_is_written_and_loads(tmp_path: Path, capsys):
    main(["--output", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == 617856
    assert capsys.readouterr().out == f"{tmp_path}: a random model of 617856 parameters\n"
    assert model.config.tie_word_embeddings is False
    assert model.config.vocab_size == 101
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = " 7+5=12  4+8+1=13 \\boxed{132}"
    assert tokenizer(text)["input_ids"] == make_tokenizer()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 101


def test_the_seed_decides_the_weights(tmp_path: Path):
    models = []
    for number, seed in enumerate((5, 5, 6)):
        folder = tmp_path / str(number)
        main(["--output", str(folder), "--seed", str(seed)])
        models.append((folder / "model.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def test_a_mixture_has_experts_that_this_program_trains(tmp_path: Path):
    """The experts of a token are as large together as the layer of a model without."""
    main(["--output", str(tmp_path), "--experts", "8"])
    shape = shape_of(tmp_path)
    assert (shape.num_experts, shape.experts_per_token, shape.ffn_size) == (8, 2, 128)
    assert (shape.num_layers, shape.hidden_size, shape.head_dim) == (4, 128, 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 1
    with pytest.raises(ValueError, match="experts is 1; needed: 0"):
        make_model(make_tokenizer(), experts=1)


def test_mistakes_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="multiple of 8"):
        make_model(make_tokenizer(), hidden=36)
    other = tmp_path / "other"
    other.write_text("")
    with pytest.raises(ValueError, match="is not an empty folder"):
        main(["--output", str(other)])
