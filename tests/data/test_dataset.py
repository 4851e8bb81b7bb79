"""What is checked of tokenizer and data before a run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
    ValidationConfig,
)
from rlmath.data.dataset import load_inputs, load_validation
from rlmath.data.order import Share
from rlmath.run.recovery.resume import data_fingerprint
from tests.tiny_models import make_model_folder, shape_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model_folder(folder / "model")
    rows = [
        {
            "prompt": f"{n}+1=",
            "task": "math",
            "query_id": f"q{n}",
            "solutions": [f"\\boxed{{{n + 1}}}"],
        }
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


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    place: Path, config: Config
) -> None:
    shape = replace(read_model_shape(place / "model"), vocab_size=15)
    with pytest.raises(ValueError, match=r"the tokenizer gives token \d+ .*the model has 15"):
        load_inputs(config, shape)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_mixture_of_forms_with_weights(tmp_path: Path, place: Path, config: Config) -> None:
    plain = [{"question": f"{n}-1", "answer": n - 1, "id": f"q{n}"} for n in range(8)]
    other_path = write_rows(tmp_path / "more.jsonl", [*plain, {"question": "9-1"}])
    data = replace(
        config.data,
        more_train_paths=[other_path],
        train_weights=[1.0, 0.5],
        template="raw",
        max_prompt_tokens=5,
        max_unusable_share=0.2,
    )
    inputs = load_inputs(replace(config, data=data), read_model_shape(place / "model"))
    assert [prompt.prompt_id for prompt in inputs.prompts[8:12]] == [
        "q8",
        "q9",
        "more/q0",
        "more/q1",
    ]
    assert inputs.prompts[10].text == "0-1" and inputs.prompts[10].solutions == ("-1",)
    assert inputs.total_steps == 3 * ((10 + 4) // 4)
    assert [row.where for row in inputs.unusable] == [f"{other_path}, line 9"]
    assert [report.form for report in inputs.reports] == ["boba", "question_answer"]
    assert data_fingerprint(inputs.prompts, [10, 8]) != data_fingerprint(inputs.prompts, [9, 9])


# ------------------------------------------------------- settings reach the prompts and their order


def problems(path: Path, count: int) -> str:
    rows = [{"question": f"{n}+1", "answer": n + 1, "id": f"{path.stem}-{n}"} for n in range(count)]
    return write_rows(path, rows)


@pytest.fixture
def mixed(tmp_path: Path, tied_model: Path) -> Config:
    return Config(
        run=RunConfig(seed=77, total_epochs=6),
        model=ModelConfig(path=str(tied_model)),
        data=DataConfig(
            train_path=problems(tmp_path / "a.jsonl", 9),
            more_train_paths=[problems(tmp_path / "b.jsonl", 8)],
            train_weights=[2.0, 0.5],
            template="raw",
            prompts_per_step=4,
            shuffle=False,
        ),
    )


def test_the_order_of_prompts(mixed: Config, tied_model: Path) -> None:
    inputs = load_inputs(mixed, shape_of(tied_model))
    order = inputs.order
    assert (order.n_prompts, order.prompts_per_step, order.seed, order.shuffle) == (
        17,
        4,
        77,
        False,
    )
    assert order.shares == (Share(9, 2.0), Share(8, 0.5))
    assert inputs.total_steps == 6 * ((18 + 4) // 4)
    assert [prompt.prompt_id for prompt in inputs.prompts] == [
        *(f"a-{n}" for n in range(9)),
        *(f"b-{n}" for n in range(8)),
    ]
    shuffled = load_inputs(
        replace(mixed, data=replace(mixed.data, shuffle=True)), shape_of(tied_model)
    ).order
    assert shuffled.shuffle and shuffled.batch(0) != order.batch(0)


def test_a_warm_up_counts_every_update(mixed: Config, tied_model: Path) -> None:
    algorithm = AlgorithmConfig(n_minibatches=3, epochs=2)
    total = 30 * 3 * 2
    for steps, fits in ((total - 1, True), (total, False)):
        other = replace(mixed, algorithm=algorithm, optimizer=OptimizerConfig(warmup_steps=steps))
        if fits:
            load_inputs(other, shape_of(tied_model))
            continue
        with pytest.raises(ValueError, match=f"the run has {total} optimizer steps"):
            load_inputs(other, shape_of(tied_model))


PLUGIN = """
from rlmath import hooks

@hooks.data_form("pairs")
def pairs(row):
    return {"prompt": row["left"], "solutions": [row["right"]], "query_id": row["left"]}

@hooks.template("asked")
def asked(problem, row):
    return "Q" + problem

@hooks.template("held")
def held(problem, row):
    return "HH" + problem
"""


def test_plugins_make_prompts_of_rows_and_validation_has_a_template_of_its_own(
    tmp_path: Path, mixed: Config, tied_model: Path
) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"left": f"{n}", "right": n} for n in range(5)])
    held_out_path = problems(tmp_path / "held.jsonl", 2)
    config = replace(
        mixed,
        run=replace(mixed.run, plugins=[str(tmp_path / "own.py")]),
        data=replace(
            mixed.data,
            train_path=pairs,
            more_train_paths=[],
            train_weights=[],
            format="pairs",
            template="asked",
            max_prompt_tokens=7,
        ),
        rollout=RolloutConfig(max_new_tokens=11),
        validation=ValidationConfig(
            every_steps=1, paths=[held_out_path], template="held", max_new_tokens=9
        ),
    )
    inputs = load_inputs(config, shape_of(tied_model))
    assert [prompt.text for prompt in inputs.prompts] == [f"Q{n}" for n in range(5)]

    def validated(**changes: object) -> list[tuple[str, tuple[int, ...]]]:
        changed = replace(config, validation=replace(config.validation, **changes))  # type: ignore[arg-type]
        (file,) = load_validation(changed, inputs.tokenizer, shape_of(tied_model).vocab_size)
        assert file.name == "held"
        return [(prompt.text, tuple(prompt.token_ids)) for prompt in file.prompts]

    def expected(before: str, count: int = 2) -> list[tuple[str, tuple[int, ...]]]:
        texts = [f"{before}{n}+1" for n in range(count)]
        return [(text, tuple(inputs.tokenizer(text)["input_ids"])) for text in texts]

    assert validated() == expected("HH")
    assert validated(template="raw") == expected("")
    assert validated(template=None) == expected("Q")
    # The context grows with outputs of tools, and none is left for longer prompts.
    tools = ToolsConfig(format="fence", max_calls=10, max_output_tokens=64)
    config = replace(config, tools=tools)
    with pytest.raises(ValueError, match="leaves room for 9 new tokens in a context of 818"):
        validated(template="qwen_boxed")
    assert validated() == expected("HH")
    config = replace(config, tools=ToolsConfig())
    # The context grows with the completions of validation; that template's text is longer than
    # data.max_prompt_tokens.
    with pytest.raises(ValueError, match="leaves room for 14 new tokens in a context of 21"):
        validated(max_new_tokens=14, template="qwen_boxed")


def test_pass_rates_of_an_earlier_run(tmp_path: Path, mixed: Config, tied_model: Path) -> None:
    groups = [
        {"query_id": "b-3", "groups": [[0, 4], [1, 4], [3, 4]]},
        {"query_id": "a-0", "groups": [[2, 4]]},
    ]
    rates = write_rows(tmp_path / "rates.jsonl", groups)
    shape = shape_of(tied_model)
    nothing = load_inputs(mixed, shape)
    assert (dict(nothing.history.groups), nothing.history_line) == ({}, "")
    data = replace(mixed.data, history_path=rates, history_groups=2)
    inputs = load_inputs(replace(mixed, data=data), shape)
    assert (
        dict(inputs.history.groups) == {0: ((2, 4),), 12: ((1, 4), (3, 4))}
        and inputs.history.keep == 2
    )
    assert f"pass rates of 2 of 17 prompts from {rates}" in inputs.history_line
