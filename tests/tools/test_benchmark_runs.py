import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.cli import demo
from tools import benchmark_runs
from tools.benchmark_runs import TwoKindTask, print_figure, run_interleaved

TASK = TwoKindTask(
    "base",
    long_digits=4,
    long_share=0.25,
    right_short=0.9,
    right_long=0.3,
    problems=40,
    heldout=10,
    worked=60,
    epochs=1,
    kind_problems=50,
)


def test_what_is_measured_is_kept_and_what_was_stopped_or_has_other_settings_is_measured_again(tmp_path):
    folder, measured = tmp_path / "case", []

    def measure() -> dict:
        assert [one.name for one in folder.iterdir()] == [".measurement"]
        (folder / "left").write_text("of a measurement")
        measured.append(len(measured))
        if len(measured) == 1:
            raise SystemExit(3)
        return {"number": measured[-1]}

    with pytest.raises(SystemExit):
        benchmark_runs.load_or_measure(folder, "settings", measure)
    assert [benchmark_runs.load_or_measure(folder, "settings", measure)["number"] for _ in range(2)] == [1, 1]
    assert benchmark_runs.load_or_measure(folder, "others", measure)["number"] == 2


def test_a_recipe_is_known_by_the_contents_of_its_files_and_by_its_layout(tmp_path, monkeypatch):
    files = (demo.ALGORITHMS / "grpo.yaml", "configs/demo.yaml")
    layout = demo.Layout(2, 2, 1)
    first = benchmark_runs.fingerprint(files, layout)
    assert benchmark_runs.fingerprint(files, demo.Layout(2, 2, 1)) == first
    assert benchmark_runs.fingerprint(files, demo.Layout(2, 1, 2)) != first
    changed = Path(shutil.copy(files[0], tmp_path))
    changed.write_text(changed.read_text() + "  kl_coef: 0.1\n")
    assert benchmark_runs.fingerprint((changed, files[1]), layout) != first


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="give another --output"):
        benchmark_runs.load_or_measure(tmp_path / "base", "settings", dict)
    assert (tmp_path / "base" / "model.safetensors").exists()


def test_ways_take_turns_and_a_failure_ends_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, told = [], []

    def learn(way: str, seed: int) -> int:
        made.append((way, seed))
        if len(made) == 6:
            raise SystemExit("the samples are too few")
        return seed

    given = ("bench", tmp_path, ["a", "b"])
    status, found = run_interleaved(
        *given, [1, 2], learn, lambda way, found: told.append((way, list(found[way])))
    )
    assert (status, found) == (0, {"a": [1, 2], "b": [1, 2]})
    assert made == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] and told == [("a", [1, 2]), ("b", [1, 2])]
    status, _ = run_interleaved(*given, [3], learn, lambda way, found: None)
    assert status == 1 and "bench: b, seed 3: the samples are too few" in capsys.readouterr().err


def test_a_figure_has_a_ratio_where_both_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    print_figure("x", "case", "seconds", 2.0, "s", ("grpo", 1.0), less=True)
    print_figure("x", "case", "tokens", None, "tokens", ("none", 5.0))
    print_figure("x", "case", "accuracy", 0.5, "", ("none", None))
    print_figure("x", "case", "accuracy", 0.5, "", None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["value"], row["baseline"], row["ratio"]) for row in rows] == [
        (2.0, "grpo: 1.0000", 0.5),
        (None, "none: 5.0000", None),
        (0.5, "none: not reached", None),
        (0.5, None, None),
    ]


def test_problems_of_two_kinds(tmp_path: Path) -> None:
    TASK.write_problems(tmp_path / "data")
    rows = {
        name: [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "short", "long", "worked")
    }
    assert {name: len(found) for name, found in rows.items()} == {
        "train": 40,
        "short": 10,
        "long": 10,
        "worked": 60,
    }
    long = {
        name: sum(len(row["prompt"]) == len("1234+1234=") for row in found) for name, found in rows.items()
    }
    assert long == {"train": 10, "short": 0, "long": 10, "worked": 30}
    trained = {row["prompt"] for row in rows["train"]}
    assert not trained & {row["prompt"] for row in (*rows["short"], *rows["long"])}
    with pytest.raises(ValueError, match="more than 20 of a kind"):
        replace(TASK, kind_problems=20).write_problems(tmp_path / "more")
