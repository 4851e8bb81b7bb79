"""The exit status is written whatever the disk says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.config.run_files import EXIT_STATUS_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    SAVED_AND_STOPPED,
    read_exit_status,
    reserve_exit_status,
    write_exit_status,
)
from tests.disks import (
    an_ordinary_user,
    files_no_larger_than,
    small_disk,
    use_up_inodes,
    use_up_space,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_without_trouble_the_status_alone_is_left(tmp_path: Path) -> None:
    (tmp_path / EXIT_STATUS_FILE).write_text("of an earlier run")
    (tmp_path / f".{EXIT_STATUS_FILE}.4711.tmp").write_text("of a killed one")
    reserve_exit_status(tmp_path)
    assert EXIT_STATUS_FILE not in names(tmp_path) and f".{EXIT_STATUS_FILE}.4711.tmp" not in names(
        tmp_path
    )
    assert read_exit_status(tmp_path).status == FAILURE
    write_exit_status(tmp_path, FINISHED, "all 3 steps are done")
    assert read_exit_status(tmp_path).status == FINISHED and names(tmp_path) == {EXIT_STATUS_FILE}


@pytest.mark.parametrize("use_up", [use_up_inodes, use_up_space])
def test_on_a_full_disk_the_last_status_is_there(tmp_path: Path, use_up) -> None:
    with small_disk(tmp_path / "disk") as disk:
        reserve_exit_status(disk)
        use_up(disk)
        before = names(disk)
        write_exit_status(disk, FAILURE, "No space left on device " * 1000)
        assert json.loads((disk / EXIT_STATUS_FILE).read_text())["meaning"] == "failed"
        assert read_exit_status(disk).message.startswith("No space left on device No space")
        write_exit_status(disk, SAVED_AND_STOPPED, "short")
        write_exit_status(disk, FINISHED, "longer " * 100)
        assert read_exit_status(disk).message == "longer " * 100
        assert {name for name in names(disk) - before if not name.startswith("inode")} == {
            EXIT_STATUS_FILE
        }


def test_in_a_folder_that_may_not_be_written_the_status_is_replaced_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exit_status(tmp_path, FAILURE, "first")
    (tmp_path / EXIT_STATUS_FILE).chmod(0o666)
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    with an_ordinary_user():
        write_exit_status(".", SAVED_AND_STOPPED, "second")
    assert read_exit_status(tmp_path).message == "second" and names(tmp_path) == {EXIT_STATUS_FILE}


def test_a_status_that_nothing_can_write_is_logged_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with files_no_larger_than(0):
        write_exit_status(tmp_path, FAILURE, "why\nand more")
    assert "the exit status 1 (why) cannot be written: " in caplog.text and names(tmp_path) == set()
