"""Which checkpoints are complete, and what is wrong with a damaged one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlmath.checkpoint.directory import (
    MANIFEST,
    PROGRESS,
    complete_checkpoints,
    file_entry,
    finish_partial,
    open_partial,
    read_checkpoint,
    read_progress,
    remove_partial,
    set_newer_aside,
    write_error_text,
    wrong_contents,
)
from tests.disks import small_disk, use_up_inodes, use_up_space


def make(root: Path, step: int, kept: bool = False) -> Path:
    partial = open_partial(root, step)
    (partial / "state" / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    for name in ("progress.json", "config.yaml", "state/.metadata"):
        (partial / name).write_text("{}")
    return finish_partial(partial, step, kept, {}).folder


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(root)[0]]


def test_what_is_published_is_found_newest_first_with_every_file(tmp_path: Path) -> None:
    for step in (2, 10, 7):
        make(tmp_path, step)
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [10, 7, 2] and problems == []
    assert checkpoints[0].files.keys() == {
        "state/__0_0.distcp",
        "state/.metadata",
        "progress.json",
        "config.yaml",
    }
    assert checkpoints[0].files["state/__0_0.distcp"].size == 2560
    assert wrong_contents(checkpoints[0], checkpoints[0].files) == []


def test_the_checksum_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_entry(tmp_path / "file").sha256 == known


def test_what_is_being_written_is_not_found_and_is_removed_by_the_next_run(tmp_path: Path) -> None:
    make(tmp_path, 1)
    open_partial(tmp_path, 2)
    assert steps(tmp_path) == [1]
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_files_and_links_with_the_names_of_unfinished_folders_are_removed(tmp_path: Path) -> None:
    whole = make(tmp_path, 1)
    for name in ("step-000002.partial", "hf_model.partial"):
        (tmp_path / name).write_text("what else used this name")
    (tmp_path / "step-000003.partial").symlink_to(whole)
    assert open_partial(tmp_path, 2).is_dir()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (whole / "manifest.json").is_file()


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "manifest.json").unlink()
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [1]
    assert "step-000002 is damaged and is skipped" in problems[0]


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": 1}',
        '{"format": 99, "step": 1, "kept": false, "files": {}}',
        '{"format": 1, "step": "x", "kept": false, "files": {}}',
        '{"format": 1, "step": 1, "kept": false, "files": []}',
        '{"format": 1, "step": 1, "kept": false, "files": {"../../etc/passwd": {"size": 1, '
        '"sha256": ""}%s}}',
        '{"format": 1, "step": 1e999, "kept": false, "files": {}}',
        '{"format": 1, "step": 1, "kept": false, "files": {"a": {"size": 1e999, "sha256": ""}}}',
        '{"format": 1, "step": 1, "kept": false, "files": {}}',
        '{"format": 1, "step": true, "kept": false, "files": {}}',
        '{"format": 1, "step": 1, "kept": false, "files": {"/etc/passwd": {"size": 1, "sha256": '
        '""}%s}}',
    ],
)
def test_a_manifest_that_cannot_be_used_is_told(tmp_path: Path, manifest: str) -> None:
    folder = make(tmp_path, 1)
    needed = "".join(
        f', "{name}": {{"size": 2, "sha256": ""}}'
        for name in ("progress.json", "config.yaml", "state/.metadata")
    )
    (folder / "manifest.json").write_text(manifest.replace("%s", needed))
    with pytest.raises(ValueError, match=r"manifest.json (cannot be read|names files outside)"):
        read_checkpoint(folder)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("name", [MANIFEST, PROGRESS])
def test_a_small_file_that_has_become_huge_is_refused_unread(tmp_path: Path, name: str) -> None:
    """The file is sparse: its 40 GiB, more than the machine's memory, take no disk space."""
    make(tmp_path, 3)
    (folder,) = tmp_path.glob("step-*")
    (folder / name).touch()
    os.truncate(folder / name, 40 * 2**30)
    with pytest.raises(
        ValueError, match=f"{name} cannot be read .*has 42949672960 bytes, more than"
    ):
        read_checkpoint(folder) if name == MANIFEST else read_progress(folder)
    checkpoints, (problem,) = complete_checkpoints(tmp_path)
    assert checkpoints == [] and "is damaged and is skipped" in problem


def test_a_truncated_a_missing_and_a_changed_file_are_told(tmp_path: Path) -> None:
    truncated, missing, changed = (make(tmp_path, step) for step in (1, 2, 3))
    part = truncated / "state" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    (missing / "progress.json").unlink()
    part = changed / "state" / "__0_0.distcp"
    flipped = bytearray(part.read_bytes())
    flipped[300] ^= 1
    part.write_bytes(flipped)
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [3], "sizes do not tell a flipped bit"
    assert any("has 255 bytes, the manifest says 256" in problem for problem in problems)
    assert any("progress.json cannot be read" in problem for problem in problems)
    assert wrong_contents(checkpoints[0], checkpoints[0].files) == [
        "state/__0_0.distcp has other contents than were written (SHA-256 differs)"
    ]


def test_a_checkpoint_under_another_ones_name_is_passed_over(tmp_path: Path) -> None:
    shutil.copytree(make(tmp_path, 1), tmp_path / "step-000005")
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [
        1
    ] and "its manifest is that of step 1" in problems[0]


def test_a_file_that_is_not_as_its_writer_left_it_is_not_published(tmp_path: Path) -> None:
    partial = open_partial(tmp_path, 1)
    (partial / "state" / "a").write_bytes(b"1234")
    known = {"state/a": file_entry(partial / "state" / "a")}
    (partial / "state" / "a").write_bytes(b"123")
    with pytest.raises(ValueError, match="state/a has 3 bytes, the manifest says 4"):
        finish_partial(partial, 1, False, known)
    (partial / "state" / "a").unlink()
    with pytest.raises(ValueError, match="state/a is not there"):
        finish_partial(partial, 1, False, known)
    assert steps(tmp_path) == []


def test_a_folder_that_the_disk_refuses_to_look_at_is_not_absent(tmp_path: Path) -> None:
    """A name that is too long stands for any error of the disk, such as a stale file handle."""
    with pytest.raises(ValueError, match=r"cannot be looked at \(File name too long\)"):
        complete_checkpoints(tmp_path / ("x" * 300) / "checkpoints")


def test_nothing_is_set_aside_without_a_word_or_over_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 1)
    for _ in range(3):
        make(tmp_path, 2)
        set_newer_aside(tmp_path, 1)
    make(tmp_path, 1)
    names = {path.name for path in tmp_path.iterdir()}
    damaged = [f"step-000002.damaged{number}" for number in ("", "-2", "-3")]
    assert names == {"step-000001", "step-000001.damaged", *damaged} and steps(tmp_path) == [1]
    assert all(f" is {name} now" in caplog.text for name in names - {"step-000001"})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "progress.json", "state/__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_is_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    make(tmp_path, 1)
    folder = make(tmp_path, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != "manifest.json":  # it passes for an empty file
        manifest["files"][name] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [1]
    assert (
        len(problems) == 1
        and "is a FIFO; needed: a regular file" in problems[0]
        and name in problems[0]
    )


def save(path: Path, as_stream: bool) -> None:
    if not as_stream:
        torch.save(torch.zeros(50_000), path)
        return
    with path.open("wb") as stream:  # as the writer process does it
        torch.save(torch.zeros(50_000), stream)


@pytest.mark.parametrize("use_up", [use_up_inodes, use_up_space])
@pytest.mark.parametrize("as_stream", [True, False])
def test_what_torch_reports_of_a_full_disk_names_the_disk(
    tmp_path: Path, use_up: Callable[[Path], object], as_stream: bool
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "__0_0.distcp"
        if use_up is use_up_space:
            path.touch()
        use_up(disk)
        with pytest.raises((RuntimeError, OSError)) as raised:
            save(path, as_stream)
        text = write_error_text(raised.value, path)
    assert text.startswith(f"{path} was not written: ") and "files (inodes) left" in text
    assert ("0 files" in text) == (use_up is use_up_inodes) and ("0.000 GiB" in text) == (
        use_up is use_up_space
    )
