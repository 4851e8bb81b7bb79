"""Which length stage a step belongs to, its settings, and the errors about impossible stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.length_curriculum import (
    checked_length_stages,
    engine_length,
    length_stage_at,
    length_stages,
    planned_steps,
    sequence_text,
    validation_names,
    validation_tokens,
    with_longest_lengths,
)
from rlmath.config.load import load_config
from rlmath.config.schema import Config, ToolsConfig
from rlmath.planning.checks import setting_problems
from rlmath.planning.setting_warnings import config_warnings
from tests.planning.of_policy import problems_of_shapes
from tests.tiny_models import make_model_folder, shape_of

THREE = ("stages.steps=[10,20,5]", "stages.max_new_tokens=[8192,16384,24576]")
BUDGETS = "stages.max_tokens_per_microbatch=[10000,20000,30000]"


def settings(*overrides: str) -> Config:
    needed = [
        "run.output_dir=o",
        "model.path=m",
        "data.train_path=t",
        "data.max_prompt_tokens=1000",
    ]
    return load_config([], [*needed, *overrides])


def listed_problems(config: Config) -> list[str]:
    return setting_problems(config, checked_length_stages(config), world_size=1)


def problems(*overrides: str) -> str:
    return "\n".join(listed_problems(settings(*overrides)))


def test_stages_follow_each_other_with_settings_of_their_own():
    config = settings(*THREE, BUDGETS)
    stages = length_stages(config, None)
    assert [(stage.number, stage.first_step, stage.end) for stage in stages] == [
        (0, 0, 10),
        (1, 10, 30),
        (2, 30, 35),
    ]
    assert [stage.config.rollout.max_new_tokens for stage in stages] == [8192, 16384, 24576]
    assert [stage.config.policy.max_tokens_per_microbatch for stage in stages] == [
        10000,
        20000,
        30000,
    ]
    assert all(
        stage.config.data == config.data and not stage.config.stages.steps for stage in stages
    )
    assert [length_stage_at(stages, step).number for step in (0, 9, 10, 29, 30, 34, 35)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        2,
    ]
    assert planned_steps(config, steps_per_epoch=7) == 35


def test_one_budget_is_that_of_all_stages():
    stages = length_stages(settings(*THREE, "policy.max_tokens_per_microbatch=50000"), None)
    assert [stage.config.policy.max_tokens_per_microbatch for stage in stages] == [50000] * 3


@pytest.mark.parametrize(("total", "steps"), [("null", 14), ("9", 9), ("100", 14)])
def test_a_run_without_stages_is_one_of_its_own_length(total: str, steps: int):
    config = settings("run.total_epochs=2", f"run.total_steps={total}")
    assert planned_steps(config, steps_per_epoch=7) == steps
    (stage,) = length_stages(config, steps)
    assert (stage.first_step, stage.end, stage.config) == (0, steps, config)
    assert with_longest_lengths(config) == config


def test_engine_and_memory_have_room_for_the_longest():
    shrinking = settings(
        "stages.steps=[1,1]", "stages.max_new_tokens=[400,300]", "rollout.max_new_tokens=9000"
    )
    assert (
        with_longest_lengths(shrinking).rollout.max_new_tokens == 400
        and engine_length(shrinking) == 1400
    )
    assert with_longest_lengths(settings(*THREE, BUDGETS)).policy.max_tokens_per_microbatch == 30000
    validation = ("validation.every_steps=5", "validation.max_new_tokens=30000")
    assert engine_length(settings(*THREE, *validation)) == 31000
    assert engine_length(settings(*THREE, validation[1])) == 25576, (
        "without every_steps nothing is validated"
    )


def test_the_engine_has_room_for_what_tools_write():
    """Outputs and 16 tokens of fences around each, for every call."""
    config = settings("rollout.max_new_tokens=700", "tools.format=fence")
    tools = ToolsConfig(format="fence", max_calls=2, max_output_tokens=100)
    assert engine_length(replace(config, tools=tools)) == 1932
    in_chat = replace(config, tools=replace(tools, format="chat"))
    assert engine_length(in_chat) == 1700 + 2 * (100 + 64)
    assert sequence_text(in_chat).endswith("+ tools.max_calls x (tools.max_output_tokens + 64)")
    assert engine_length(replace(config, tools=replace(tools, format=None))) == 1700


def test_every_validation_of_a_run_has_the_same_limit():
    assert validation_tokens(settings("rollout.max_new_tokens=700")) == 700
    assert validation_tokens(settings(*THREE)) == 24576
    assert validation_tokens(settings(*THREE, "validation.max_new_tokens=50")) == 50
    assert validation_names(["bench/aime24.jsonl", "more/set/"]) == ["aime24", "set"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (THREE[:1], "stages.steps has 3, stages.max_new_tokens has 0"),
        ((*THREE, BUDGETS, "run.total_steps=7"), "run.total_steps is 7 beside stages.steps"),
        (("stages.steps=[1,0]", "stages.max_new_tokens=[1,1]"), "stages.steps is [1, 0]; needed: "
        "at least 1"),
        ((*THREE, "stages.max_tokens_per_microbatch=[10000,10000,30000]"),
         "Stage 2 (stages.*): policy.max_tokens_per_microbatch is 10000; the longest sequence "
         "(data.max_prompt_tokens "
         "+ rollout.max_new_tokens) has 1000 + 16384 = 17384 tokens"),
        ((*THREE, BUDGETS, "rollout.min_new_tokens=9000"),
         "Stage 1 (stages.*): rollout.min_new_tokens is 9000, above rollout.max_new_tokens 8192"),
        (("validation.keep_best=true",), "validation.keep_best needs accuracies"),
        (("validation.every_steps=5",), "validation.paths is empty"),
        (("validation.paths=[a/x.jsonl,b/x.parquet]",), '2 files are named "x"'),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told(overrides: tuple[str, ...], told: str):
    assert told in problems(*overrides)


def test_what_the_engine_lacks_for_the_longest_names_its_key():
    short = ("rollout.chunked_prefill=false", "rollout.max_num_batched_tokens=20000")
    assert "least the longest sequence, 25576 tokens" in problems(*THREE, BUDGETS, *short)
    assert not problems(*THREE, BUDGETS, *short[:1], "rollout.max_num_batched_tokens=25576")
    validation = (
        "validation.every_steps=5",
        "validation.paths=[a.jsonl]",
        "validation.max_new_tokens=30000",
    )
    text = problems(
        *THREE, BUDGETS, *validation, *short[:1], "rollout.max_num_batched_tokens=25576"
    )
    assert "least the longest sequence, 31000 tokens" in text


def test_right_stages_have_no_problems():
    assert not problems(*THREE, BUDGETS, "validation.every_steps=5", "validation.paths=[a.jsonl]")


def test_what_all_stages_have_alike_is_told_once():
    messages = listed_problems(settings(*THREE, "policy.max_tokens_per_microbatch=100"))
    assert [text.partition(":")[0] for text in messages] == [
        f"Stage {n} (stages.*)" for n in (1, 2, 3)
    ]
    alike = (
        "stages.steps=[1,2]",
        "stages.max_new_tokens=[90,90]",
        "policy.max_tokens_per_microbatch=100",
    )
    (message,) = listed_problems(settings(*alike))
    assert message.startswith("policy.max_tokens_per_microbatch is 100")


def test_stages_and_validation_must_fit_the_model(tmp_path: Path):
    shape = shape_of(make_model_folder(tmp_path / "model"))
    staged = ("stages.steps=[1,1]", "stages.max_new_tokens=[200,300]", "data.max_prompt_tokens=50")
    validation = (
        "validation.every_steps=1",
        "validation.paths=[a.jsonl]",
        "validation.max_new_tokens=207",
    )
    messages = [
        text
        for text in problems_of_shapes(settings(*staged, *validation), shape)
        if "positions" in text
    ]
    assert len(messages) == 2
    assert messages[0].startswith(
        "Stage 2 (stages.*): data.max_prompt_tokens + rollout.max_new_tokens is 50 + 300 = 350; "
        "the model has 256"
    )
    assert messages[1].startswith(
        "validation.max_new_tokens: data.max_prompt_tokens + rollout.max_new_tokens is 50 + 207"
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((*THREE, "run.total_epochs=3"), "run.total_epochs: no effect with stages.steps"),
        ((*THREE, BUDGETS, "policy.max_tokens_per_microbatch=7"), "policy.max_tokens_per_microbatch: no effect"),
        (("validation.paths=[a.jsonl]", "validation.samples=4"),
         "validation.paths, validation.samples: no effect without validation.every_steps"),
        (("validation.every_steps=1", "validation.temperature=0", "validation.samples=4"),
         "validation.samples: no effect with validation.every_steps and with "
         "validation.temperature=0"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_noted(overrides: tuple[str, ...], told: str):
    assert told in "\n".join(config_warnings(settings(*overrides)))


def test_usual_settings_are_not_noted():
    usual = settings(*THREE, BUDGETS, "validation.every_steps=1", "validation.paths=[a.jsonl]")
    assert not [note for note in config_warnings(usual) if "stages" in note or "validation" in note]
