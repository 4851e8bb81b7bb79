"""Who may take an output folder, and what becomes of what an earlier run left there."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.run import run_dir
from rlmath.run.run_dir import check_output_folder, claim_run_folder, sole_user, take_back
from rlmath.telemetry.wandb import run_id
from tests.programs import metric_rows


def make_config(folder: Path | str, *overrides: str) -> Config:
    return load_config(
        [], [f"run.output_dir={folder}", "model.path=m", "data.train_path=t.jsonl", *overrides]
    )


def refusal(folder: Path | str, config: Config | None = None) -> str:
    """The error of the check, which the claim repeats without having touched anything."""
    config = config or make_config("anywhere")
    with pytest.raises(ValueError, match="problem") as error:
        check_output_folder(folder, config)
    with pytest.raises(ValueError, match="problem") as claim_error:
        claim_run_folder(folder, config)
    assert str(claim_error.value) == str(error.value)
    return str(error.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- folders that may be taken


def test_a_new_folder_is_made_with_the_config_in_it(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    config = make_config(folder)
    check_output_folder(folder, config)
    assert not folder.parent.exists(), "the check writes nothing"
    assert claim_run_folder(str(folder), config) == folder
    assert names(folder) == ["config.yaml"]
    assert load_config([folder / "config.yaml"], []) == config


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("auto", "there is no checkpoint in checkpoints/"),
        ("disabled", 'run.recover_mode is "disabled"'),
    ],
)
def test_what_is_moved_aside_is_logged_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, why: str
):
    config = make_config(tmp_path, f"run.recover_mode={mode}")
    claim_run_folder(tmp_path, config)
    assert "moved" not in caplog.text and "earlier" not in caplog.text
    (tmp_path / "metrics.jsonl").write_text("left")
    (tmp_path / "checkpoints").symlink_to("/mnt/not-mounted")
    claim_run_folder(tmp_path, config)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    aside = tmp_path / "earlier" / "001"
    moved_files = f"what an earlier one left is in {aside}: checkpoints, metrics.jsonl"
    assert record.getMessage() == f"The run starts from the beginning ({why}); {moved_files}"
    assert (aside / "checkpoints").is_symlink()


def test_a_repeated_run_moves_aside_what_was_there(tmp_path: Path):
    folder = tmp_path / "run"
    config = make_config(tmp_path / "run")
    for text in ("first", "second", "third"):
        claim_run_folder(folder, config)
        assert not (folder / "metrics.jsonl").exists()
        (folder / "metrics.jsonl").write_text(text)
        (folder / "samples").mkdir()
        (folder / "samples" / ".hidden").write_text(text)
    claim_run_folder(folder, config)
    assert names(folder) == ["config.yaml", "earlier"]
    for number, text in (("001", "first"), ("002", "second"), ("003", "third")):
        aside = folder / "earlier" / number
        assert names(aside) == ["config.yaml", "metrics.jsonl", "samples"]
        assert (
            (aside / "metrics.jsonl").read_text()
            == (aside / "samples" / ".hidden").read_text()
            == text
        )
        assert load_config([aside / "config.yaml"], []) == config


def test_a_claim_that_was_left_at_once_leaves_nothing_to_move(tmp_path: Path):
    for _ in range(3):
        claim_run_folder(tmp_path, make_config(tmp_path))
    assert names(tmp_path) == ["config.yaml"]


def test_the_folder_may_be_spelled_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claim_run_folder(tmp_path / "run", make_config(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    claim_run_folder("./run", make_config("./run"))
    (tmp_path / "run").rename(tmp_path / "renamed")
    claim_run_folder("renamed", make_config("renamed"))


def test_what_a_killed_claim_left_is_no_obstacle(tmp_path: Path):
    folder = tmp_path / "run"
    config = make_config(tmp_path / "run")
    folder.mkdir()
    (folder / ".config.yaml.0123abcd.tmp").write_text("run:\n  se")
    claim_run_folder(folder, config)
    assert names(folder) == ["config.yaml"]
    (folder / "earlier" / "001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("left")
    claim_run_folder(folder, config)
    assert (folder / "earlier" / "002" / "metrics.jsonl").read_text() == "left"


# ---------------------------------------------------------------- folders that may not


def test_a_folder_of_another_run_names_the_keys_that_differ(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    message = refusal(tmp_path, make_config(tmp_path, "optimizer.lr=1e-5", "run.seed=7"))
    assert "run.seed: 1 there, 7 now; optimizer.lr: 1e-06 there, 1e-05 now" in message
    assert (
        "Give a new run.output_dir" in message and f"--config {tmp_path / 'config.yaml'}" in message
    )
    assert names(tmp_path) == ["config.yaml"]


def test_a_run_may_start_anew_on_another_layout_and_with_another_length(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("left")
    claim_run_folder(tmp_path, make_config(tmp_path, "parallel.tensor=2", "run.total_steps=7"))
    assert names(tmp_path) == ["config.yaml", "earlier"]
    assert "tensor: 1" in (tmp_path / "earlier" / "001" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["c", "b", "a"], "a, b, c"),
        (["d", "c", "b", "a", ".config.yaml.0123abcd.tmp", ".lock"], "a, b, c, ..."),
    ],
)
def test_the_first_files_of_a_folder_that_no_run_made_are_named(
    tmp_path: Path, files: list[str], told: str
):
    for name in files:
        (tmp_path / name).touch()
    assert f"it is not empty ({told}) and has no config.yaml" in refusal(tmp_path)


def test_a_folder_that_another_run_uses_is_told_with_the_setting_that_names_it(tmp_path: Path):
    (tmp_path / "file").touch()
    with sole_user(tmp_path / "a" / "run"):
        with (
            pytest.raises(ValueError, match=f'is working in run.output_dir "{tmp_path}/a/run"'),
            sole_user(tmp_path / "a" / "run"),
        ):
            pass
        with (
            pytest.raises(ValueError, match=f'is working in eval.output "{tmp_path}/a/run"'),
            sole_user(tmp_path / "a" / "run", "eval.output"),
        ):
            pass
    with (
        pytest.raises(ValueError, match=f'^eval.output "{tmp_path}/file" cannot be written'),
        sole_user(tmp_path / "file", "eval.output"),
    ):
        pass


@pytest.mark.parametrize("key", ["model.path", "critic.path", "teacher.path", "sft.held_out_path"])
def test_an_input_in_the_folder_is_refused_also_where_the_run_goes_on(tmp_path: Path, key: str):
    """A link outside the folder that leads into it counts, too."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "x")
    config = make_config(tmp_path / "run", f"{key}={tmp_path}/link")
    with pytest.raises(ValueError, match=f'{key} "{tmp_path}/link" lies in it'):
        check_output_folder(tmp_path / "run", config, resumes=True)
    beside = make_config(tmp_path / "run", f"{key}={tmp_path}/runs")
    check_output_folder(tmp_path / "run", beside, resumes=True)


def test_what_a_broken_start_left_is_no_obstacle(tmp_path: Path):
    (tmp_path / "exit_status.json").write_text("{}")
    (tmp_path / ".exit_status.json.4711.tmp").write_text("{")
    (tmp_path / ".exit_status.json.reserved").write_text(" ")
    (tmp_path / "stacks").mkdir()
    claim_run_folder(tmp_path, make_config(tmp_path))
    assert "config.yaml" in names(tmp_path)


def test_damaged_lines_of_metrics_do_not_keep_a_run_from_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    (tmp_path / "validation.jsonl").write_text("\x00\n")
    claim_run_folder(tmp_path, make_config(tmp_path), steps_done=3)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'
    assert "metrics.jsonl: 1 lines cannot be read" in caplog.text
    assert "has the metrics of 2 steps only, the checkpoint is that of step 3" in caplog.text


def test_a_run_that_goes_on_removes_what_a_killed_one_left_unfinished(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "samples").mkdir()
    unfinished = (
        ".metrics.jsonl.0123abcd.tmp",
        ".summary.json.0123abcd.tmp",
        "samples/.step-000001.jsonl.0123abcd.tmp",
    )
    for name in (*unfinished, "samples/step-000001.jsonl"):
        (tmp_path / name).write_text("{}")
    claim_run_folder(tmp_path, make_config(tmp_path), steps_done=1)
    assert names(tmp_path) == ["config.yaml", "samples"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000001.jsonl"]


def test_a_run_that_goes_on_keeps_files_and_folders_of_the_user(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "samples").mkdir()
    files = ("notes.tmp", ".mine.tmp", "samples/notes.tmp", "samples/mine-7.jsonl")
    for name in files:
        (tmp_path / name).write_text("mine")
    folders = (
        "work.tmp",
        "samples/work.tmp",
        ".metrics.jsonl.0123abcd.tmp",
        "samples/step-000009.jsonl",
    )
    for name in folders:
        (tmp_path / name).mkdir()
    claim_run_folder(tmp_path, make_config(tmp_path), steps_done=1)
    assert all((tmp_path / name).read_text() == "mine" for name in files)
    assert all((tmp_path / name).is_dir() for name in folders)


def test_a_run_that_goes_on_keeps_what_is_there_but_for_later_steps(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.3}\n')
    (tmp_path / "samples").mkdir()
    for name in ("step-000001", "step-000002", "failure-000002"):
        (tmp_path / "samples" / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-000002.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    claim_run_folder(tmp_path, make_config(tmp_path, "run.total_steps=7"), steps_done=1)
    assert names(tmp_path) == ["checkpoints", "config.yaml", "metrics.jsonl", "samples"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.1}\n'
    assert names(tmp_path / "samples") == ["step-000001.jsonl"]
    assert names(tmp_path / "checkpoints") == ["step-000001"]
    assert "total_steps: 7" in (tmp_path / "config.yaml").read_text()


def test_a_run_that_goes_on_may_have_other_stages_and_a_prompt_history_of_its_own(tmp_path: Path):
    """Whether they fit what is done, its checkpoint says; a run from the beginning may not."""
    claim_run_folder(tmp_path, make_config(tmp_path))
    history = tmp_path / "prompt_history.jsonl"
    history.write_text("{}\n")
    config = make_config(
        tmp_path,
        "stages.steps=[3,4]",
        "stages.max_new_tokens=[16384,8]",
        f"data.history_path={history}",
    )
    message = refusal(tmp_path, config)
    assert "stages.steps: " in message and "data.history_path" in message
    claim_run_folder(tmp_path, config, steps_done=3)
    assert names(tmp_path) == ["config.yaml", "prompt_history.jsonl"]
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_a_folder_that_no_run_made_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    message = refusal(tmp_path)
    assert "it is not empty (thesis.tex)" in message and "Give a new or empty folder" in message
    assert names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["run: [", "run:\n  no_such_key: 1\n", "run:\n  seed: 1\n"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    assert "its config.yaml cannot be compared with this run's" in refusal(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run", file / "a" / "b"):
        assert f'"{file}" is not a folder' in refusal(folder)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "link", tmp_path / "link" / "run"):
        message = refusal(folder)
        assert (
            f'"{tmp_path}/link" is not a folder' in message
            and "a disk that is not mounted?" in message
        )
    (tmp_path / "loop").symlink_to("loop")
    for folder in (tmp_path / "loop", tmp_path / "loop" / "run"):
        assert f'"{folder}" cannot be looked at (Too many levels of symbolic links)' in refusal(
            folder
        )
    assert "cannot be looked at (File name too long)" in refusal(tmp_path / ("x" * 300) / "run")


def test_a_config_that_is_a_link_to_nothing_is_named(tmp_path: Path):
    (tmp_path / "config.yaml").symlink_to("/mnt/not-mounted/config.yaml")
    (tmp_path / "metrics.jsonl").write_text("left")
    assert '/config.yaml" is a link to "/mnt/not-mounted/config.yaml"' in refusal(tmp_path)
    assert names(tmp_path) == ["config.yaml", "metrics.jsonl"]


@pytest.mark.parametrize("folder", ["", " ", "~/runs"])
def test_no_path_is_refused(folder: str):
    assert "needed: a path, written in full" in refusal(folder)


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))
    assert f'"{tmp_path}" cannot be written into.' in refusal(tmp_path / "a" / "run")


def test_the_trained_model_must_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 3 * 2**30))
    check_output_folder(tmp_path / "run", make_config(tmp_path), needed_bytes=2 * 2**30)
    with pytest.raises(
        ValueError, match=r"at least 3\.50 GiB, of which 2\.50 GiB for the trained model"
    ):
        check_output_folder(tmp_path / "run", make_config(tmp_path), needed_bytes=5 * 2**29)


def test_inputs_inside_the_folder_are_refused(tmp_path: Path):
    config = make_config(
        tmp_path, f"model.path={tmp_path}/base", f"data.train_path={tmp_path}/../x.jsonl"
    )
    message = refusal(tmp_path, config)
    assert "model.path" in message and "lies in it" in message and "data.train_path" not in message
    config_with_more_paths = make_config(
        tmp_path, f"data.more_train_paths=[x.jsonl,{tmp_path}/y.jsonl]"
    )
    assert f'data.more_train_paths "{tmp_path}/y.jsonl" lies in it' in refusal(
        tmp_path, config_with_more_paths
    )


def test_a_write_that_fails_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir, "save_config", no_space)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device"):
        claim_run_folder(tmp_path, make_config(tmp_path))


# ---------------------------------------------------------------- other ranks


def test_the_check_passes_at_every_moment_of_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A late rank checks after every file operation of rank 0.

    It does so at the first claim and at a repeated one."""
    folder = tmp_path / "run"
    checks = []
    config = make_config(folder)

    def checked(operation):
        def call(*args, **kwargs):
            returned = operation(*args, **kwargs)
            check_output_folder(folder, config)
            checks.append(operation.__name__)
            return returned

        return call

    for owner, name in (
        (os, "mkdir"),
        (os, "fsync"),
        (os, "replace"),
        (os, "rename"),
        (shutil, "copy2"),
    ):
        monkeypatch.setattr(owner, name, checked(getattr(owner, name)))
    claim_run_folder(folder, config)
    assert checks == ["mkdir", "fsync", "replace"]
    (folder / "a").write_text("")
    (folder / "b").write_text("")
    claim_run_folder(folder, config)
    assert checks[3:] == ["mkdir", "mkdir", "copy2", "rename", "rename", "fsync", "replace"]


def test_a_claim_between_two_looks_of_a_late_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "run"
    config = make_config(folder)
    folder.mkdir()
    iterdir = Path.iterdir

    def claimed_just_before(path: Path):
        monkeypatch.setattr(Path, "iterdir", iterdir)
        claim_run_folder(folder, config)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", claimed_just_before)
    check_output_folder(folder, config)
    assert names(folder) == ["config.yaml"]


def test_the_lock_is_no_obstacle_to_the_run_that_holds_it(tmp_path: Path):
    with sole_user(tmp_path / "run"):
        claim_run_folder(tmp_path / "run", make_config(tmp_path / "run"))
    assert names(tmp_path / "run") == [".lock", "config.yaml"]


@pytest.mark.parametrize(
    ("umask", "modes"), [(0o077, (0o600, 0o600, 0o700)), (0o002, (0o664, 0o664, 0o775))]
)
def test_what_a_start_writes_follows_the_umask(
    tmp_path: Path, umask: int, modes: tuple[int, int, int]
):
    folder = tmp_path / "run"
    before = os.umask(umask)
    try:
        with sole_user(folder):
            claim_run_folder(folder, make_config(folder))
    finally:
        os.umask(before)
    paths = (folder / ".lock", folder / "config.yaml", folder)
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == modes


def test_starting_anew_takes_other_settings_and_keeps_what_was_there(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    claim_run_folder(
        tmp_path, make_config(tmp_path, "rollout.group_size=4", "run.recover_mode=disabled")
    )
    assert names(tmp_path) == ["config.yaml", "earlier"]
    assert names(tmp_path / "earlier" / "001") == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "validation.jsonl", "summary.json", "exit_status.json"]
)
def test_what_is_no_file_in_the_place_of_one_is_refused(tmp_path: Path, name: str) -> None:
    """Opening a FIFO would wait for ever, and a folder could not be replaced.

    It is refused where the run resumes, too."""
    config = make_config(tmp_path / "run")
    claim_run_folder(tmp_path / "run", config)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(
        ValueError, match=f'{name}" is a FIFO; needed: a regular file. Move it away'
    ):
        check_output_folder(tmp_path / "run", config, resumes=True)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).mkdir()
    assert f'{name}" is a folder; needed: a regular file' in refusal(tmp_path / "run", config)


def test_a_run_that_starts_anew_is_another_one_to_wandb(tmp_path: Path):
    claim_run_folder(tmp_path, make_config(tmp_path))
    first = run_id(tmp_path)
    claim_run_folder(tmp_path, make_config(tmp_path), steps_done=0)
    assert run_id(tmp_path) == first, "one that goes on is the same"
    claim_run_folder(tmp_path, make_config(tmp_path, "run.recover_mode=disabled"))
    assert run_id(tmp_path) != first == run_id(tmp_path / "earlier" / "001")


@pytest.mark.parametrize("steps_done", [None, 3])
def test_halves_of_models_that_a_killed_run_left_are_removed(
    tmp_path: Path, steps_done: int | None
):
    config = make_config(tmp_path)
    claim_run_folder(tmp_path, config)
    for name in ("best_model.partial", "best_model.before.partial", "models/stage-1.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").touch()
    claim_run_folder(tmp_path, config, steps_done)
    assert not list(tmp_path.rglob("*.partial"))


# ---------------------------------------------------------------- back to an earlier step


def test_a_folder_is_taken_back_to_the_step_that_a_run_resumes_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.dumps({"step": step}) for step in range(1, 6)]
    for file in ("metrics.jsonl", "validation.jsonl", "summary.json"):
        (tmp_path / file).write_text("\n".join(rows))
    for step in (3, 4):
        (tmp_path / f"models/step-{step:06d}").mkdir(parents=True)
        (tmp_path / f"samples/step-{step:06d}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"samples/step-{step:06d}.jsonl").touch()
    take_back(tmp_path, 3)
    assert names(tmp_path / "models") == ["step-000003"]
    assert names(tmp_path / "samples") == ["step-000003.jsonl"]
    for file in ("metrics.jsonl", "validation.jsonl"):
        assert [row["step"] for row in metric_rows(tmp_path, file)] == [1, 2, 3]
    assert not (tmp_path / "summary.json").exists()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    take_back(tmp_path, 4)
    assert "has the metrics of 3 steps only, the checkpoint is that of step 4" in caplog.text
