"""What is checked of tokenizer and data before a run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config import AlgorithmConfig, Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from rlmath.data.tokenizer import load_tokenizer, stop_token_ids
from rlmath.inputs import load_inputs
from rlmath.model_folder import read_model_shape
from tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model_folder(folder / "model")
    rows = [
        {"prompt": f"{n}+1=", "task": "math", "query_id": f"q{n}", "solutions": [f"\\boxed{{{n + 1}}}"]}
        for n in range(10)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def config(place: Path) -> Config:
    return Config(
        run=RunConfig(total_epochs=3),
        model=ModelConfig(path=str(place / "model")),
        data=DataConfig(train_path=str(place / "train.jsonl"), prompts_per_step=4),
    )


def test_prompts_steps_and_stop_tokens(place: Path, config: Config) -> None:
    inputs = load_inputs(config, read_model_shape(place / "model"))
    assert len(inputs.prompts) == 10
    assert inputs.total_steps == 3 * (10 // 4)
    assert inputs.stop_token_ids == (1,)
    assert "10 read" in inputs.lines[0]
    shorter = replace(config, run=RunConfig(total_epochs=3, total_steps=5))
    assert load_inputs(shorter, read_model_shape(place / "model")).total_steps == 5


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(place: Path, config: Config) -> None:
    shape = replace(read_model_shape(place / "model"), vocab_size=15)
    with pytest.raises(ValueError, match=r"the tokenizer gives token \d+ .*the model has 15"):
        load_inputs(config, shape)


def test_a_warm_up_longer_than_the_run_is_refused(place: Path, config: Config) -> None:
    longer = replace(
        config, optimizer=OptimizerConfig(warmup_steps=12), algorithm=AlgorithmConfig(n_minibatches=2)
    )
    with pytest.raises(ValueError, match=r"warmup_steps is 12; the run has 12 optimizer steps \(6 steps x 2"):
        load_inputs(longer, read_model_shape(place / "model"))


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 5]}))
    assert stop_token_ids(str(folder), tokenizer) == (1, 5, 7)
    (folder / "generation_config.json").write_text(json.dumps({}))
    assert stop_token_ids(str(folder), tokenizer) == (1,)
