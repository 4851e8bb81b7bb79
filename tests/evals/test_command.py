"""The command line of evaluations: what it refuses, and what it takes from the model's run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlmath.config.load import load_config, save_config
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE, read_exit_status
from rlmath.evals.command import input_problems, main, parse, plan_of, rollout_of, run_config

BASICS = ["--model", "m", "--benchmarks", "aime24", "--data-dir", "d", "--output", "o"]


def test_a_mistake_ends_with_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*BASICS, "--samples", "-1"]) == 2
    message = capfd.readouterr().err
    assert "--samples is -1" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m"], "--benchmarks, --data-dir, --output must be given"),
        ([*BASICS, "--samples", "0", "--no-greedy"], "samples nothing"),
        ([*BASICS, "--tensor-parallel", "0"], "--tensor-parallel is 0; needed: at least 1"),
        ([*BASICS, "--memory-share", "1.5"], "--memory-share is 1.5; needed: "),
        ([*BASICS, "--kv-cache-gib", "0"], "--kv-cache-gib is 0.0; needed: "),
        ([*BASICS, "--cpu-kv-cache-gib", "-1"], "--cpu-kv-cache-gib is -1.0; needed: "),
        ([*BASICS, "--max-num-seqs", "0"], "--max-num-seqs is 0; needed: at least 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments: list[str], message: str) -> None:
    namespace = parse(arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_of(namespace), rollout_of(namespace)


@pytest.mark.parametrize("file", ["config.json", "config.yaml", None])
def test_an_output_that_is_a_model_run_or_data_folder_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str | None
) -> None:
    """Nothing is written there, not even the exit status."""
    if file is not None:
        (tmp_path / file).write_text("{}")
    before = sorted(tmp_path.iterdir())
    arguments = [
        "--model",
        str(tmp_path if file is None else "m"),
        "--benchmarks",
        "b",
        "--data-dir",
        "d",
    ]
    assert main([*arguments, "--output", f"{tmp_path}/../{tmp_path.name}"]) == 2
    assert "Give a folder of its own" in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_no_cuda_graphs_unless_asked_for() -> None:
    assert not rollout_of(parse(BASICS)).cuda_graphs
    assert rollout_of(parse([*BASICS, "--cuda-graphs"])).cuda_graphs
    assert plan_of(parse([*BASICS, "--benchmarks", "a,b,a"])).benchmarks == ("a", "b")


def test_old_names_of_options_are_read() -> None:
    parsed = parse([*BASICS, "--judges", "3", "--judge-timeout=7.5"])
    assert (parsed.reward_workers, parsed.reward_timeout) == (3, 7.5)


def words(folder: Path) -> list[str]:
    """The command line of an evaluation whose model, data and output are in the folder."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    (folder / "quiz.jsonl").write_text("")
    places = ["--model", str(folder / "model"), "--data-dir", str(folder)]
    return [*places, "--benchmarks", "quiz", "--output", str(folder / "out")]


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([*words(tmp_path), "--device", "cuda"]) == MISTAKE
    assert '--device is "cuda", and torch finds no CUDA device' in capfd.readouterr().err
    assert "CUDA device" in read_exit_status(tmp_path / "out").message


def test_two_outputs_are_compared_in_the_order_in_which_they_are_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, right in (("early", 1), ("late", 3)):
        problems = [{"problem_id": "q", "greedy": None, "right": right, "samples": 4}]
        benchmarks = {"quiz": {"problems": problems}}
        content = {"format": 1, "settings": {}, "benchmarks": benchmarks}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(content))
    assert main(["--compare", str(tmp_path / "early"), str(tmp_path / "late")]) == 0
    text = capfd.readouterr().out
    assert f"A: {tmp_path}/early" in text and f"B: {tmp_path}/late" in text
    assert re.search(r"sample_pass@1 \|\s+25\.0 \|\s+75\.0 \|\s+\+50\.0", text)


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    arguments = parse([*words(tmp_path), "--benchmarks", "quiz,exam"])
    (problem,) = input_problems(plan_of(arguments))
    assert "has no exam.jsonl" in problem
    nowhere = str(tmp_path / "nowhere")
    arguments = parse([*words(tmp_path), "--model", nowhere, "--data-dir", nowhere])
    model_problem, data_problem = input_problems(plan_of(arguments))
    assert model_problem.startswith(f'--model: there is no "{nowhere}"')
    assert data_problem.startswith(f'--data-dir: there is no "{nowhere}"')


def saved_run(run: Path, overrides: Sequence[str]) -> Path:
    """The folder of a run with these settings."""
    run.mkdir()
    required = [f"run.output_dir={run}", "data.train_path=t.jsonl"]
    save_config(load_config([], [*required, *overrides]), run / "config.yaml")
    return run


def test_positions_leave_room_for_outputs_of_tools_and_are_those_of_the_runs_model(
    tmp_path: Path,
) -> None:
    """Before its first checkpoint a run has no model of its own."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"max_position_embeddings": 512}')
    tools = ["tools.format=fence", "tools.max_calls=2", "tools.max_output_tokens=84"]
    run = saved_run(tmp_path / "run", [f"model.path={base}", *tools])
    for lengths, message in (
        (["--max-new-tokens", "312"], "is 312 and 200 tokens of tools' outputs; the model has 512"),
        (["--max-new-tokens", "311"], None),
        (["--max-new-tokens", "300", "--max-prompt-tokens", "13"], "with --max-prompt-tokens 13"),
        (["--max-new-tokens", "300", "--max-prompt-tokens", "12"], None),
        (["--max-new-tokens", "511", "--tools", "none"], None),
    ):
        arguments = parse([*words(tmp_path), "--model", str(run), *lengths])
        problems = input_problems(plan_of(arguments))
        assert len(problems) == (message is not None)
        assert all(
            message in problem and f"in {base}/config.json" in problem for problem in problems
        )


@pytest.mark.parametrize(
    "place",
    [
        *("", "hf_model", "best_model", "hf_model/adapter", "best_model/adapter"),
        *("checkpoints/step-000010", "models/step-000010", "models/step-000010/adapter"),
    ],
)
def test_a_run_is_known_by_every_place_of_its_models(tmp_path: Path, place: str) -> None:
    run = saved_run(tmp_path / "run", ["model.path=m"])
    config = run_config(run / place)
    assert config is not None and config.run.output_dir == str(run)
    assert run_config(run / "logs") is None


def test_settings_that_were_saved_on_another_machine_count(tmp_path: Path) -> None:
    """The environment that one of its paths names is not here."""
    run = saved_run(tmp_path / "run", ["model.path=m", "data.template=raw"])
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("t.jsonl", "${oc.env:RLMATH_ELSEWHERE}/t.jsonl"))
    assert plan_of(parse([*words(tmp_path), "--model", str(run)])).template == "raw"
