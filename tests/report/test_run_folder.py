"""Folders that are no runs, restarts, rollbacks, and what runs are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmath.report.run_folder import NoRunError, events_of, label_of, read_runs, require_run
from rlmath.report.settings import changed, differing, read_settings
from tests.report.folders import make_run, write_event


def write_two_starts(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").unlink(missing_ok=True)
    write_event(folder, "start")
    write_event(folder, "warning", text="slow disk")
    write_event(folder, "warning", 2, text="slow disk")
    write_event(folder, "error", 2, text="rank 1 failed\n  with a second line")
    write_event(folder, "took back", 2, last_step=4)
    write_event(folder, "start")
    write_event(folder, "resume", 2, text="Resuming from x")
    write_event(folder, "alert", 3, text="entropy fell")


def test_starts_and_messages_have_their_steps(tmp_path: Path) -> None:
    write_two_starts(tmp_path)
    notes: list[str] = []
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("{}\n{unfinished")
    events = events_of(tmp_path / "events.jsonl", notes)
    assert events.starts == 2
    assert [
        (message.kind, message.text, message.count, message.steps) for message in events.messages
    ] == [
        ("error", "rank 1 failed\n  with a second line", 1, ["step 2"]),
        ("alert", "entropy fell", 1, ["step 3"]),
        ("resume", "Resuming from x", 1, ["step 2"]),
        ("warning", "slow disk", 2, ["before the first step of start 1", "step 2"]),
    ]
    assert notes == ["events.jsonl: 1 lines are no events and were left out."]


def test_different_messages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmath.report.run_folder.MOST_MESSAGES", 2)
    write_two_starts(tmp_path)
    notes: list[str] = []
    assert [message.kind for message in events_of(tmp_path / "events.jsonl", notes).messages] == [
        "error",
        "warning",
    ]
    assert "2 more warnings and errors" in notes[0]


def test_restarts_and_rollbacks_are_marked(tmp_path: Path) -> None:
    write_two_starts(tmp_path)
    write_event(tmp_path, "checkpoint", 4)
    write_event(tmp_path, "resume", 4)  # of the checkpoint of the rollback
    write_event(tmp_path, "rollback", 4, text="the loss is NaN")
    events = events_of(tmp_path / "events.jsonl", [])
    assert events.markers == [{"x": 2, "kind": "restart"}, {"x": 4, "kind": "rollback"}]
    assert [(message.kind, message.steps) for message in events.messages[2:4]] == [
        ("rollback", ["step 4"]),
        ("resume", ["step 2"]),
    ]
    (tmp_path / "events.jsonl").unlink()
    for kind, step in (("start", None), ("checkpoint", 4), ("resume", 4), ("rollback", 4)):
        write_event(tmp_path, kind, step)
    assert events_of(tmp_path / "events.jsonl", []).markers == [{"x": 4, "kind": "rollback"}]


def test_settings_that_differ(tmp_path: Path) -> None:
    first, other = read_runs(
        [
            make_run(
                tmp_path / "a", settings=["optimizer.lr=1e-06", "run.seed=3", "data.shuffle=false"]
            ),
            make_run(tmp_path / "b", settings=["run.seed=4", "data.shuffle=false"]),
        ]
    )
    assert changed(first.settings)["run.seed"] == ("3", "1")
    assert changed(first.settings)["data.shuffle"] == ("false", "true")
    assert set(differing([first.settings, other.settings])) - {"optimizer.lr"} == {
        "run.output_dir",
        "run.seed",
    }


def test_a_number_without_a_point_is_a_number(tmp_path: Path) -> None:
    """PyYAML reads it as text."""
    (tmp_path / "config.yaml").write_text("optimizer:\n  lr: 1e-05\n")
    assert differing([read_settings(tmp_path / "config.yaml"), {"optimizer.lr": 0.00001}]) == {}
    assert differing([{"a.b": True}, {"a.b": 1}]) == {"a.b": ["true", "1"]}
    assert differing([{"a.b": None}, {}]) == {}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "which is not there"),
        ("emtpy", '/empty".'),
        ("file", "Not a directory"),
        ("empty", "which has no metrics.jsonl"),
        ("fifo", "is a FIFO"),
        ("a\nb", r"a\nb"),
    ],
)
def test_what_is_no_run_is_named_in_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "metrics.jsonl")
    with pytest.raises(NoRunError) as caught:
        require_run(tmp_path / name)
    text = str(caught.value)
    assert (
        says in text and "needed: the folder of a run (run.output_dir)" in text and "\n" not in text
    )


def test_a_label_is_one_line_and_not_long() -> None:
    assert label_of(Path("outputs/a\nb")) == r"outputs/a\nb"
    assert label_of(Path.cwd() / "outputs/a") == "outputs/a"
    assert label_of(Path("x" * 100 + "/run")) == "…" + "x" * 55 + "/run"


def test_a_run_given_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert len(read_runs([tmp_path / "a", tmp_path / "a" / ".." / "a"])) == 1
