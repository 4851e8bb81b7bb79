"""Validations and evaluations of a run's models beside the model before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.report.accuracies import AFTER, BEFORE, BEST, model_of
from rlmath.report.run_folder import ShownRun, read_runs
from rlmath.telemetry.metrics_writer import MetricsWriter
from tests.report.folders import make_run


def run_of(folder: Path, *evaluations: Path) -> ShownRun:
    (run,) = read_runs([folder], evaluations)
    return run


def evaluation(
    folder: Path, model: str | Path, right: list[int], samples: int = 4, **settings: object
) -> Path:
    """An evaluation with a greedy answer to each problem, right where all samples are."""
    folder.mkdir(parents=True)
    problems = [
        {"problem_id": str(number), "greedy": count == samples, "right": count, "samples": samples}
        for number, count in enumerate(right)
    ]
    content = {
        "format": 1,
        "settings": {"about_model": str(model), "temperature": 1.0, "top_p": 1.0} | settings,
        "benchmarks": {"sums": {"row": {}, "problems": problems}},
    }
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def validate(folder: Path, step: int, accuracy: float, low: float, high: float) -> None:
    writer = MetricsWriter(str(folder), tensorboard=False)
    name = "validation/sums/accuracy"
    writer.write_validation(step, {name: accuracy, f"{name}_low": low, f"{name}_high": high})
    writer.close()


def test_validations_stand_beside_the_model_before_training(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "validation.jsonl").unlink()
    for step, accuracy in ((0, 0.25), (6, 0.75), (12, 0.5)):
        validate(folder, step, accuracy, accuracy - 0.1, accuracy + 0.1)
    (row,) = run_of(folder).validated
    assert row.problems == "sums" and list(row.by_model) == [BEFORE, BEST, AFTER]
    accuracies = [
        (measured.value, measured.interval, measured.step) for measured in row.by_model.values()
    ]
    assert accuracies == [(0.25, (0.15, 0.35), 0), (0.75, (0.65, 0.85), 6), (0.5, (0.4, 0.6), 12)]
    assert row.change is not None and row.change.value == 0.25


def test_validations_of_earlier_releases_have_no_intervals(tmp_path: Path) -> None:
    (row,) = run_of(make_run(tmp_path / "a")).validated
    assert row.problems == "all files" and row.by_model[AFTER].value == 0.75
    assert row.by_model[AFTER].interval is None


def test_evaluations_in_and_beside_a_run_are_found(tmp_path: Path) -> None:
    base = tmp_path / "base"
    folder = make_run(tmp_path / "a", settings=[f"model.path={tmp_path}/base"])
    evaluation(tmp_path / "eval-base", base, [0] * 12)
    evaluation(
        tmp_path / "eval-20",
        "x",
        [2] * 12,
        about_model_folder=f"{folder}/checkpoints/step-000020/state",
    )
    evaluation(folder / "eval", folder / "hf_model", [4] * 12)
    evaluation(tmp_path / "eval-other", tmp_path / "b" / "hf_model", [1] * 12)
    greedy, sampled = run_of(folder).evaluated
    assert (greedy.measure, sampled.measure) == ("greedy", "4 samples at temperature 1.0")
    assert set(greedy.by_model) == {BEFORE, "step 20", AFTER}
    assert [greedy.by_model[name].value for name in (BEFORE, "step 20", AFTER)] == [0, 0, 1]
    assert greedy.by_model[BEFORE].interval == pytest.approx((0, 0.2425), abs=1e-4)
    assert greedy.change is not None and greedy.change.value == 1
    # 12 differences of 1, with half a problem more of each of 0, 0, 1 and -1: 12/14 -+ z sqrt(0.194
    # / 14).
    assert greedy.change.interval == pytest.approx((0.6265, 1.0), abs=1e-4)
    assert sampled.by_model["step 20"].value == 0.5
    assert run_of(folder).notes == []


def test_evaluations_elsewhere_are_named_by_the_user(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a" / "run")
    run_evaluation = evaluation(tmp_path / "b" / "ours", folder, [1] * 3)
    other_evaluation = evaluation(tmp_path / "b" / "theirs", tmp_path / "elsewhere", [1] * 3)
    assert run_of(folder).evaluated == []
    run = run_of(folder, run_evaluation, other_evaluation, tmp_path / "none")
    assert [set(row.by_model) for row in run.evaluated] == [{AFTER}, {AFTER}]
    assert len(run.notes) == 2
    assert "theirs: an evaluation of" in run.notes[0] and "no model of this run" in run.notes[0]
    assert "there is no" in run.notes[1]


def test_ways_of_asking_are_not_mixed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    evaluation(folder / "warm", folder, [1] * 3)
    evaluation(folder / "cold", folder, [1] * 3, temperature=0.6, top_p=0.95)
    measures = [row.measure for row in run_of(folder).evaluated]
    assert sorted(measures) == [
        "4 samples at temperature 0.6, top-p 0.95",
        "4 samples at temperature 1.0",
        "greedy",
    ]


def test_a_damaged_evaluation_is_told_where_it_is_the_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    bad = evaluation(folder / "eval", folder, [1])
    beside = evaluation(tmp_path / "beside", folder, [1])
    for path in (bad, beside):
        (path / "results.json").write_text(
            '{"format": 1, "settings": {}, "benchmarks": {"sums": {"problems": [1]}}}'
        )
    run = run_of(folder)
    assert (
        run.evaluated == []
        and len(run.notes) == 1
        and "eval/results.json is no results.json" in run.notes[0]
    )
    content = (
        '{"format": 1, "settings": {}, "benchmarks": {"sums": {"problems": [{"problem_id": '
        '1, "greedy": 7, '
    )
    (bad / "results.json").write_text(content + '"right": 9, "samples": 1}]}}}')
    assert run_of(folder).evaluated == [] and "not from 0 to 1" in run_of(folder).notes[0]


@pytest.mark.parametrize(
    ("about", "base", "model"),
    [
        ("hf://org/name", "hf://org/name#abc", BEFORE),
        ("hf://org/other", "hf://org/name#abc", None),
        ("RUN", "hf://org/name#abc", AFTER),
        ("RUN/best_model", "", BEST),
        ("RUN/models/step-000120", "", "step 120"),
        ("RUN/models/stage-1", "", "models/stage-1"),
        ("RUN-2/hf_model", "", None),
        ("", "", None),
    ],
)
def test_a_model_is_known_by_its_place(
    tmp_path: Path, about: str, base: str, model: str | None
) -> None:
    folder = tmp_path / "run"
    settings = {"about_model": about.replace("RUN", str(folder))}
    assert model_of(settings, folder, base) == model
