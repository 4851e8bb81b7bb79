"""The words of a program of several ranks, and in which order its ranks end with a mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MISTAKE, read_exit_status
from rlmath.run import command_line
from rlmath.run.command_line import (
    launcher_mistake,
    let_first_rank_end,
    log_mistake,
    read_command_line,
    record_exit,
    refuse_launcher,
)
from rlmath.run.run_dir import sole_user


@pytest.fixture(autouse=True)
def without_launcher_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTHER_RANKS_WAIT_SECONDS", "FIRST_RANK_WAIT_SECONDS"):
        monkeypatch.setattr(command_line, name, 0.0)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_takes_ranks_and_oversubscribe() -> None:
    words = ["--dry-run", "--ranks", "8", "--oversubscribe", "run.seed=3"]
    arguments = read_command_line("Train.", words)
    assert (arguments.ranks, arguments.oversubscribe) == (8, True)
    assert arguments.overrides == ["run.seed=3"]
    plain = read_command_line("Train.", [])
    assert (plain.dry_run, plain.ranks, plain.oversubscribe) == (False, None, False)


def test_help_lists_the_settings_of_a_program_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_command_line("Train.", ["--help", "run"], keys=["run.seed"])
    text = capsys.readouterr().out
    assert "run.seed" in text and "run.device" not in text


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({"RANK": "4", "LOCAL_RANK": "0"}, True),
        ({"RANK": "0", "LOCAL_RANK": "1"}, False),
        ({"RANK": "0"}, True),
        ({"RANK": "4"}, False),
    ],
    ids=["a node's first", "another of a node", "the first", "another"],
)
def test_the_first_rank_of_a_node_reports_a_mistake_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_first: bool
) -> None:
    """The others tell it, by a file, that they wait until it has ended."""
    folder = tmp_path / "attempt" / "1"
    folder.mkdir(parents=True)
    report = folder / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    files_at_show: list[tuple[bool, bool]] = []
    let_first_rank_end(
        "no folder",
        show=lambda: files_at_show.append(((folder / "waits").exists(), report.exists())),
    )
    assert files_at_show == [(not is_first, False)]
    assert json.loads(report.read_text())["message"]["message"] == "no folder"


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_rank_waits_until_all_others_of_its_node_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    waits: list[tuple[str, float]] = []
    monkeypatch.setattr(command_line, "OTHER_RANKS_WAIT_SECONDS", 7.0)
    monkeypatch.setattr(command_line, "FIRST_RANK_WAIT_SECONDS", 3.0)
    for name in ("wait_for_torchrun", "wait_for_waiting_ranks"):
        monkeypatch.setattr(
            command_line.exit_codes, name, lambda seconds, name=name: waits.append((name, seconds))
        )
    monkeypatch.setenv("LOCAL_RANK", "0" if is_first else "1")
    let_first_rank_end("no folder", show=lambda: waits.append(("show", 0.0)))
    show = ("show", 0.0)
    first = [show, ("wait_for_waiting_ranks", 3.0)]
    assert waits == (first if is_first else [("wait_for_torchrun", 7.0), show])


def test_a_mistake_is_logged_and_reported_with_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = tmp_path / "0" / "error.json"
    report.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    log_mistake(ValueError("2 problems:\n  - 100%\n  - b"))
    assert caplog.messages == ["2 problems:\n  - 100%\n  - b"]
    assert json.loads(report.read_text())["message"]["message"] == caplog.messages[0]


def test_only_rank_0_records_an_exit_in_a_folder_that_is_there_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_exit(None, FAILURE, "lost")
    record_exit(tmp_path / "run", FAILURE, "lost")
    assert list(tmp_path.iterdir()) == []
    with sole_user(tmp_path / "run"):
        record_exit(tmp_path / "run", FAILURE, "lost")
    monkeypatch.setenv("RANK", "1")
    record_exit(tmp_path / "run", FAILURE, "lost")
    assert os.listdir(tmp_path / "run") == [".lock"]
    monkeypatch.setenv("RANK", "0")
    record_exit(tmp_path / "run", FAILURE, "lost")
    assert read_exit_status(tmp_path / "run").status == FAILURE


# ---------------------------------------------------------------- without torchrun


def test_every_variable_of_the_launcher_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert launcher_mistake() is None
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("MASTER_PORT")
    assert "without torchrun: WORLD_SIZE, MASTER_PORT not set." in (launcher_mistake() or "")


def test_a_start_without_torchrun_ends_with_its_settings_problems_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command_line, "set_up_rank_logging", lambda: None)
    settings = [f"run.output_dir={tmp_path}", "model.path=m", "data.train_path=t"]

    def check(config: Config) -> None:
        raise ValueError("run.seed is -1")

    status = refuse_launcher("no torchrun", lambda: load_config([], settings), check)
    message = "run.seed is -1\nno torchrun"
    assert status == MISTAKE and caplog.messages == [message]
    recorded = read_exit_status(tmp_path)
    assert (recorded.status, recorded.message) == (MISTAKE, message)
