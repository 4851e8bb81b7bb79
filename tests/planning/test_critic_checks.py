"""What is told of a critic before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.config_json import critic_config_file, read_critic_shape
from rlmath.checkpoint.hf.run_shapes import inspect_run_shapes, read_run_shapes
from rlmath.checkpoint.save_schedule import checkpoint_bytes
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.data.dataset import check_critic
from rlmath.planning.model_checks import (
    critic_folder_problems,
    critic_layout_problems,
    length_problems,
)
from rlmath.planning.setting_tables import conflicts
from rlmath.planning.setting_warnings import config_warnings
from tests.tiny_models import VOCAB, make_model_folder, shape_of

PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t", "rollout.max_new_tokens=100"]
GAE = "algorithm.advantage=gae"


def config_of(*overrides: str) -> Config:
    return load_config([], [*PATHS, "data.max_prompt_tokens=100", *overrides])


def problems(policy: Path, *overrides: str) -> list[str]:
    config = config_of(GAE, *overrides)
    shape = shape_of(policy)
    inspected = inspect_run_shapes(config, shape)
    messages = [
        *critic_folder_problems(config.critic, config.algorithm.advantage, shape),
        *critic_layout_problems(inspected, config.critic, config.parallel, policy=config.policy),
        *length_problems(config, inspected.shapes),
        *conflicts(config),
    ]
    return list(dict.fromkeys(messages))


def test_a_critic_of_the_policy_needs_no_folder(untied_model: Path) -> None:
    assert problems(untied_model) == []
    shape = read_run_shapes(config_of(GAE), shape_of(untied_model)).critic
    assert shape is not None and shape.outputs == 1 and shape.vocab_size == VOCAB
    assert read_run_shapes(config_of(), shape_of(untied_model)).critic is None


def test_a_critic_of_another_model_is_looked_at(untied_model: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", num_key_value_heads=1)
    assert problems(untied_model, f"critic.path={other}") == []
    (problem,) = problems(untied_model, f"critic.path={other}", "parallel.tensor=2")
    assert problem.startswith("critic.path, which has the layout of the policy: parallel.tensor")
    (problem,) = problems(untied_model, f"critic.path={other}", "rollout.max_new_tokens=200")
    assert "the model in critic.path has 256 positions" in problem
    problem, *_ = problems(untied_model, f"critic.path={tmp_path}/othr")
    assert "critic.path" in problem and "othr" in problem


def test_a_folder_that_is_no_model_is_refused(untied_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2Model"]}))
    (problem, *_) = problems(untied_model, f"critic.path={tmp_path}")
    assert "GPT2Model" in problem and "Qwen2ForTokenClassification" in problem


def test_a_critics_config_says_what_it_is(untied_model: Path, tmp_path: Path) -> None:
    policy = shape_of(untied_model)
    shape = read_run_shapes(config_of(GAE), policy).critic
    assert shape is not None
    path = tmp_path / "critic.json"
    path.write_bytes(critic_config_file(untied_model, shape))
    assert read_critic_shape(path) == shape
    values = json.loads(path.read_text())
    assert values["architectures"] == ["Qwen2ForTokenClassification"] and values["id2label"] == {
        "0": "value"
    }


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["critic.pretrain_steps=5"], "critic.pretrain_steps is 5; the run has 5 steps"),
        (
            ["critic.warmup_steps=10"],
            "critic.warmup_steps is 10; the critic has 10 optimizer steps",
        ),
    ],
)
def test_a_critic_that_is_never_ready_is_refused(overrides: list[str], told: str) -> None:
    config = config_of(GAE, "algorithm.n_minibatches=2", *overrides)
    with pytest.raises(ValueError, match="never") as error:
        check_critic(config, total_steps=5)
    assert told in str(error.value)


def test_settings_without_effect_are_named() -> None:
    (note,) = config_warnings(config_of("critic.gamma=0.9", "memory.offload_critic=true"))
    assert note.startswith("memory.offload_critic, critic.gamma: no effect")
    (note,) = config_warnings(
        config_of(GAE, "critic.policy_lambda=0.9", "critic.policy_length_alpha=0.05")
    )
    assert note == "critic.policy_lambda: no effect with critic.policy_length_alpha."
    assert list(config_warnings(config_of())) == []


def test_a_value_after_the_end_needs_whole_packs(untied_model: Path) -> None:
    (problem,) = problems(untied_model, "critic.bootstrap_truncated=true", "parallel.context=2")
    assert "critic.bootstrap_truncated is true and parallel.context 2" in problem


def test_a_checkpoint_is_larger_by_the_critic(untied_model: Path) -> None:
    policy = shape_of(untied_model)
    without_critic, with_critic = (
        checkpoint_bytes(config, read_run_shapes(config, policy))
        for config in (config_of("run.device=cpu"), config_of("run.device=cpu", GAE))
    )
    head = (
        VOCAB * policy.hidden_size - policy.hidden_size - 1
    )  # a row for each token, or one and a bias
    assert with_critic == 2 * without_critic - 12 * head
