"""What is read once of a run's models and lengths, before it is planned."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.run_shapes import inspect_run_shapes, read_run_shapes
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    PolicyConfig,
    StagesConfig,
    TeacherConfig,
)
from rlmath.distributed.mesh import Mesh
from rlmath.planning.memory_estimate import Target, plan_rank
from tests.tiny_models import make_model_folder, shape_of

GAE = AlgorithmConfig(advantage="gae")
STAGES = StagesConfig(steps=[3, 4], max_new_tokens=[60, 30], max_tokens_per_microbatch=[900, 700])


def test_a_plan_of_the_record_opens_no_file(untied_model: Path, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "teacher", tied=True)
    config = Config(teacher=TeacherConfig(path=str(folder), loss="full"), algorithm=GAE)
    shapes = read_run_shapes(config, shape_of(untied_model))
    shutil.rmtree(folder)
    target = Target("cpu", "CPU", None, local_layers=True)
    plan = plan_rank(config, shapes, Mesh(0, 1, 1, 1, 1), target=target)
    assert plan.part("teacher") > 0 and plan.part("critic_parameters") > 0


def test_models_that_cannot_be_read_are_problems_by_name(untied_model: Path) -> None:
    config = Config(
        algorithm=GAE,
        critic=CriticConfig(path="/nowhere/critic"),
        teacher=TeacherConfig(path="/nowhere/teacher"),
    )
    policy = shape_of(untied_model)
    inspected = inspect_run_shapes(config, policy)
    assert (inspected.shapes.critic, inspected.shapes.teacher) == (None, None)
    assert list(inspected.problem_of_model) == ["critic", "teacher"]
    for model, problem in inspected.problem_of_model.items():
        assert f'{model}.path: there is no folder "/nowhere/{model}"' in problem
    with pytest.raises(ValueError, match=r"(?s)/nowhere/critic.*/nowhere/teacher"):
        read_run_shapes(config, policy)
    assert inspect_run_shapes(config, policy, "sft").problem_of_model == {}


def test_the_longest_micro_batch_of_all_length_stages_counts(untied_model: Path) -> None:
    policy = shape_of(untied_model)
    config = Config(stages=STAGES, policy=PolicyConfig(max_tokens_per_microbatch=2000))
    shapes = read_run_shapes(config, policy)
    assert shapes.microbatch_tokens == 900
    assert [stage.end for stage in shapes.length_stages] == [3, 7]
    plain = read_run_shapes(replace(config, stages=StagesConfig()), policy)
    assert plain.microbatch_tokens == 2000 and plain.length_stages[0].end == 0
    nine_steps = plain.with_total_steps(plain.length_stages[0].config, 9)
    assert nine_steps.length_stages[0].end == 9 and nine_steps.policy == policy


def test_lists_of_stages_that_do_not_go_together_give_no_stage(untied_model: Path) -> None:
    config = Config(stages=replace(STAGES, steps=[3]))
    policy = shape_of(untied_model)
    assert inspect_run_shapes(config, policy).shapes.length_stages == ()
    with pytest.raises(ValueError, match=r"stages\.steps has 1"):
        read_run_shapes(config, policy)
