"""Every setting of `data` reaches the prompts and their order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import AlgorithmConfig, Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from rlmath.data.dataset import load_inputs
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
