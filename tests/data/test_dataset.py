"""What is checked of tokenizer and data before a run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import AlgorithmConfig, Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from rlmath.data.dataset import load_inputs
from rlmath.data.tokenizer import load_tokenizer, stop_token_ids
from rlmath.models.hf_config import read_model_shape
from rlmath.run.recovery.resume import data_fingerprint
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
    assert 'has the form "boba"' in inputs.lines[0] and "10 read" in inputs.lines[1]
    assert inputs.unusable == () and inputs.dropped_share == 0
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
    assert stop_token_ids(str(folder), tokenizer, 101) == (1, 5, 7)
    (folder / "generation_config.json").write_text(json.dumps({}))
    assert stop_token_ids(str(folder), tokenizer, 101) == (1,)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_mixture_of_forms_with_weights(tmp_path: Path, place: Path, config: Config) -> None:
    plain = [{"question": f"{n}-1", "answer": n - 1, "id": f"q{n}"} for n in range(8)]
    more = write_rows(tmp_path / "more.jsonl", [*plain, {"question": "9-1"}])
    data = replace(
        config.data,
        more_train_paths=[more],
        train_weights=[1.0, 0.5],
        template="raw",
        max_prompt_tokens=5,
        max_unusable_share=0.2,
    )
    inputs = load_inputs(replace(config, data=data), read_model_shape(place / "model"))
    assert [prompt.prompt_id for prompt in inputs.prompts[8:12]] == ["q8", "q9", "more/q0", "more/q1"]
    assert inputs.prompts[10].text == "0-1" and inputs.prompts[10].solutions == ("-1",)
    assert inputs.total_steps == 3 * ((10 + 4) // 4)
    assert [row.where for row in inputs.unusable] == [f"{more}, line 9"]
    assert [report.form for report in inputs.reports] == ["boba", "question_answer"]
    assert data_fingerprint(inputs.prompts, [10, 8]) != data_fingerprint(inputs.prompts, [9, 9])
    short = replace(data, train_weights=[1.0])
    with pytest.raises(ValueError, match="train_weights has 1 numbers for 2 files"):
        load_inputs(replace(config, data=short), read_model_shape(place / "model"))


def test_dropped_prompts_are_a_share_of_those_that_could_be_used(
    tmp_path: Path, place: Path, config: Config
) -> None:
    rows = [{"question": "1" * length, "answer": 1} for length in (2, 3, 4, 30, 2, 40)]
    path = write_rows(tmp_path / "p.jsonl", [*rows, {"question": ""}])
    data = replace(
        config.data,
        train_path=path,
        template="raw",
        max_prompt_tokens=9,
        prompts_per_step=2,
        max_unusable_share=0.2,
    )
    inputs = load_inputs(replace(config, data=data), read_model_shape(place / "model"))
    assert inputs.dropped_share == 2 / 6
    assert [one.tokens for one in inputs.reports[0].examples] == [30, 40]
