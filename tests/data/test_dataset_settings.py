"""Every setting of `data` reaches the prompts and their order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    ValidationConfig,
)
from rlmath.data.dataset import load_inputs, load_validation
from rlmath.data.order import Share
from tests.tiny_models import shape_of


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(path: Path, count: int) -> str:
    rows = [{"question": f"{n}+1", "answer": n + 1, "id": f"{path.stem}-{n}"} for n in range(count)]
    return write(path, rows)


@pytest.fixture
def config(tmp_path: Path, tied_model: Path) -> Config:
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


def test_the_order_of_prompts(config: Config, tied_model: Path) -> None:
    found = load_inputs(config, shape_of(tied_model))
    order = found.order
    assert (order.n_prompts, order.prompts_per_step, order.seed, order.shuffle) == (17, 4, 77, False)
    assert order.shares == (Share(9, 2.0), Share(8, 0.5))
    assert found.total_steps == 6 * ((18 + 4) // 4)
    assert [prompt.prompt_id for prompt in found.prompts] == [
        *(f"a-{n}" for n in range(9)),
        *(f"b-{n}" for n in range(8)),
    ]
    shuffled = load_inputs(
        replace(config, data=replace(config.data, shuffle=True)), shape_of(tied_model)
    ).order
    assert shuffled.shuffle and shuffled.batch(0) != order.batch(0)


def test_form_template_and_length(config: Config, tied_model: Path) -> None:
    shape = shape_of(tied_model)

    def load(**changes: object) -> list[str]:
        data = replace(config.data, more_train_paths=[], train_weights=[], **changes)  # type: ignore[arg-type]
        return [prompt.text for prompt in load_inputs(replace(config, data=data), shape).prompts]

    raw = [f"{n}+1" for n in range(9)]
    assert load() == load(format="question_answer") == raw
    with pytest.raises(ValueError, match="boba"):
        load(format="boba")
    boxed = load(template="qwen_boxed")
    assert all(text.startswith("<|im_start|>system") for text in boxed)
    with pytest.raises(ValueError):
        load(template="qwen_boxed", max_prompt_tokens=20)
    assert load(template="qwen_boxed", max_prompt_tokens=300) == boxed


def test_the_share_of_unusable_rows(tmp_path: Path, config: Config, tied_model: Path) -> None:
    rows = [{"question": f"{n}+1", "answer": n + 1} for n in range(8)] + [{"question": "9+1"}] * 2
    data = replace(
        config.data, train_path=write(tmp_path / "c.jsonl", rows), more_train_paths=[], train_weights=[]
    )
    enough = replace(config, data=replace(data, max_unusable_share=0.21))
    assert len(load_inputs(enough, shape_of(tied_model)).prompts) == 8
    with pytest.raises(ValueError, match="max_unusable_share"):
        load_inputs(replace(config, data=replace(data, max_unusable_share=0.19)), shape_of(tied_model))


def test_a_warm_up_counts_every_update(config: Config, tied_model: Path) -> None:
    algorithm = AlgorithmConfig(n_minibatches=3, epochs=2)
    total = 30 * 3 * 2
    for steps, fits in ((total - 1, True), (total, False)):
        other = replace(config, algorithm=algorithm, optimizer=OptimizerConfig(warmup_steps=steps))
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
    tmp_path: Path, config: Config, tied_model: Path
) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    pairs = write(tmp_path / "pairs.jsonl", [{"left": f"{n}", "right": n} for n in range(5)])
    held = problems(tmp_path / "held.jsonl", 2)
    config = replace(
        config,
        run=replace(config.run, plugins=[str(tmp_path / "own.py")]),
        data=replace(
            config.data,
            train_path=pairs,
            more_train_paths=[],
            train_weights=[],
            format="pairs",
            template="asked",
            max_prompt_tokens=7,
        ),
        rollout=RolloutConfig(max_new_tokens=11),
        validation=ValidationConfig(every_steps=1, paths=[held], template="held", max_new_tokens=9),
    )
    inputs = load_inputs(config, shape_of(tied_model))
    assert [prompt.text for prompt in inputs.prompts] == [f"Q{n}" for n in range(5)]

    def validated(**changes: object) -> list[tuple[str, tuple[int, ...]]]:
        one = replace(config, validation=replace(config.validation, **changes))  # type: ignore[arg-type]
        (file,) = load_validation(one, inputs.tokenizer, shape_of(tied_model).vocab_size)
        assert file.name == "held"
        return [(prompt.text, tuple(prompt.token_ids)) for prompt in file.prompts]

    def expected(before: str, count: int = 2) -> list[tuple[str, tuple[int, ...]]]:
        texts = [f"{before}{n}+1" for n in range(count)]
        return [(text, tuple(inputs.tokenizer(text)["input_ids"])) for text in texts]

    assert validated() == expected("HH")
    assert validated(template="raw") == expected("")
    assert validated(template=None) == expected("Q")
    # The context grows with the completions of validation; that template's text is longer than data.max_prompt_tokens.
    with pytest.raises(ValueError, match="leaves room for 14 new tokens in a context of 21"):
        validated(max_new_tokens=14, template="qwen_boxed")


def test_pass_rates_of_an_earlier_run(tmp_path: Path, config: Config, tied_model: Path) -> None:
    groups = [
        {"query_id": "b-3", "groups": [[0, 4], [1, 4], [3, 4]]},
        {"query_id": "a-0", "groups": [[2, 4]]},
    ]
    rates = write(tmp_path / "rates.jsonl", groups)
    shape = shape_of(tied_model)
    nothing = load_inputs(config, shape)
    assert (dict(nothing.history.groups), nothing.history_line) == ({}, "")
    data = replace(config.data, history_path=rates, history_groups=2)
    found = load_inputs(replace(config, data=data), shape)
    assert dict(found.history.groups) == {0: ((2, 4),), 12: ((1, 4), (3, 4))} and found.history.keep == 2
    assert f"pass rates of 2 of 17 prompts from {rates}" in found.history_line
