"""The demo's model: its tokenizer is exact, its labels cover the completion only, and its files load."""

import json
import random
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_arithmetic import Addition, make_problems, worked_solution
from tools.make_tiny_model import (
    accuracy,
    batches,
    main,
    make_model,
    make_tokenizer,
    parse_args,
    read_problems,
    warm_up,
    warm_up_into_band,
)


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


def test_labels_are_the_completion_shifted_by_one():
    tokenizer = make_tokenizer()
    problem = Addition(47, 85)
    ids_BT, labels_BT = next(batches([problem], tokenizer, 2, 0.0, random.Random(0)))
    whole = tokenizer(problem.prompt + worked_solution(problem) + "<eos>")["input_ids"]
    prompt = len(problem.prompt)
    assert ids_BT.tolist() == [whole[:-1]] * 2
    assert labels_BT.tolist() == [[-100] * (prompt - 1) + whole[prompt:]] * 2


def test_shorter_examples_are_padded_and_not_learned():
    data = batches([Addition(1, 2), Addition(47, 85)], make_tokenizer(), 8, 0.0, random.Random(0))
    ids_BT, labels_BT = next(data)
    assert (labels_BT[ids_BT == 0] == -100).all()
    assert {len(row[row != -100]) for row in labels_BT} == {10, 22}


@pytest.fixture(scope="module")
def small_world():
    """All 100 single-digit sums and a model that learns them in seconds."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=32, layers=2, intermediate=64)
    return model, tokenizer, make_problems(seed=1, train=80, heldout=20, digits=1)


def test_warm_up_teaches_single_digit_sums(small_world):
    model, tokenizer, (train, heldout) = small_world
    assert accuracy(model, tokenizer, train, sample=False) == 0.0
    data = batches(train + heldout, tokenizer, 64, 0.0, random.Random(0))
    warm_up(model, data, steps=150, peak=1e-2)
    assert accuracy(model, tokenizer, train, sample=False) > 0.5


def test_a_model_out_of_the_band_is_an_error(small_world, capsys):
    _, tokenizer, problems = small_world
    model = make_model(tokenizer, hidden=8, layers=1, intermediate=8)
    args = parse_args(["--output", "unused", "--data", "unused", "--steps", "1"])
    with pytest.raises(RuntimeError, match="raise --steps"):
        warm_up_into_band(model, tokenizer, problems, args)
    assert "1 steps: sampled 0.000" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
def test_a_random_model_is_written_and_loads(tmp_path: Path, capsys, tied: bool):
    threads = str(torch.get_num_threads())
    options = ["--output", str(tmp_path), "--steps", "0", "--threads", threads]
    main([*options, "--tied"] if tied else options)
    result = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert result["parameters"] == model.num_parameters() == 617856 - (101 * 128 if tied else 0)
    assert model.config.tie_word_embeddings is tied
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
        threads = str(torch.get_num_threads())
        main(["--output", str(folder), "--steps", "0", "--seed", str(seed), "--threads", threads])
        models.append((folder / "model.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def test_mistakes_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="multiple of 8"):
        make_model(make_tokenizer(), hidden=36)
    with pytest.raises(ValueError, match="multiple of kv-heads"):
        make_model(make_tokenizer(), heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="no such file"):
        read_problems(tmp_path / "train.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Hi", "task": "math", "query_id": "1", "solutions": ["2"]}) + "\n")
    with pytest.raises(ValueError, match="is not a prompt of"):
        read_problems(other)
    with pytest.raises(ValueError, match="--data is needed"):
        parse_args(["--output", str(tmp_path / "model")])
    with pytest.raises(ValueError, match="is a file"):
        parse_args(["--output", str(other), "--steps", "0"])
    with pytest.raises(ValueError, match="at least 1"):
        parse_args(["--output", str(tmp_path), "--steps", "0", "--threads", "0"])
