"""What is wrong with a run before a rank of it starts, by its settings and the names of files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.load import config_as_yaml, load_config
from rlmath.config.schema import Config
from rlmath.run.early_checks import early_problems
from tests.run.test_resume_choice import checkpoint
from tests.run.test_startup import write_sums

SMALL = (
    "data.template=raw",
    "data.prompts_per_step=4",
    "data.max_prompt_tokens=64",
    "rollout.max_new_tokens=16",
    "run.device=cpu",
)


@pytest.fixture
def settings(tied_model: Path, tmp_path: Path) -> list[str]:
    paths = [f"run.output_dir={tmp_path / 'run'}", f"model.path={tied_model}"]
    return [*paths, f"data.train_path={write_sums(tmp_path)}", *SMALL]


def problems_of(config: Config, ranks: int = 1) -> list[str]:
    return early_problems(config, ranks, "grpo")[0]


def test_a_run_that_can_start_has_no_problem_and_its_models_shapes(
    settings: list[str], tied_model: Path
) -> None:
    problems, shapes = early_problems(load_config([], settings), 1, "grpo")
    assert problems == [] and shapes is not None
    assert shapes.policy.vocab_size == 101 and shapes.critic is None
    _, with_critic = early_problems(
        load_config([], [*settings, "algorithm.advantage=gae", f"critic.path={tied_model}"]),
        1,
        "grpo",
    )
    assert with_critic is not None and with_critic.critic is not None


def test_problems_of_settings_files_and_the_model_are_told_together(
    settings: list[str], tied_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "broken"
    shutil.copytree(tied_model, model)
    (model / "config.json").write_text("{")
    overrides = [f"model.path={model}", f"data.train_path={tmp_path}/no.jsonl"]
    problems = problems_of(load_config([], [*settings, *overrides, "parallel.tensor=2"]))
    text = "\n".join(problems)
    assert "config.json" in text and "no.jsonl" in text and "parallel.tensor" in text
    assert not problems_of(load_config([], [*settings, "parallel.tensor=2"]), ranks=2)


def test_a_model_that_is_not_there_is_told_with_the_folder_that_was_meant(
    settings: list[str], tied_model: Path
) -> None:
    near = tied_model.with_name(f"{tied_model.name}x")
    (problem,) = problems_of(load_config([], [*settings, f"model.path={near}"]))
    assert problem == f'model.path: there is no "{near}". There is "{tied_model}".'


def test_a_model_on_the_hub_has_no_shape_yet(settings: list[str]) -> None:
    config = load_config([], [*settings, "model.path=hf://org/base"])
    assert early_problems(config, 1, "grpo") == ([], None)


def test_what_only_a_gpu_can_do_is_told_for_the_cpu_alone(settings: list[str]) -> None:
    config = load_config([], [*settings, "parallel.context=2", "policy.transformer_impl=local"])
    on_gpu = problems_of(replace(config, run=replace(config.run, device="cuda")), ranks=2)
    told = [problem for problem in problems_of(config, ranks=2) if problem not in on_gpu]
    assert len(told) == 1 and "parallel.context" in told[0]


# ---------------------------------------------------------------- the run's folder


def test_other_settings_than_the_newest_checkpoints_are_told_all_at_once(
    settings: list[str], tmp_path: Path
) -> None:
    config = load_config([], settings)
    checkpoint(tmp_path / "run", 3, config)
    (tmp_path / "run" / "config.yaml").write_text(config_as_yaml(config))
    assert problems_of(config) == []
    changed = load_config([], [*settings, "optimizer.lr=1e-5", "run.seed=7"])
    (problem,) = problems_of(changed)
    assert problem == (
        f'the run in "{tmp_path}/run" cannot go on with other settings: run.seed: 1 there, 7 now; '
        "optimizer.lr: 1e-06 there, 1e-05 now. Give another run.output_dir."
    )


def test_a_problem_of_the_runs_folder_is_told_with_the_setting_that_names_it(
    settings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    (problem,) = problems_of(load_config([], settings))
    assert problem.startswith(f'run.output_dir "{tmp_path}/run": ')


def test_a_folder_that_cannot_be_read_is_told_once(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/mnt/not-mounted")
    (problem,) = problems_of(load_config([], settings))
    assert problem.startswith(f'run.output_dir "{tmp_path}/run": what the run can resume from')
