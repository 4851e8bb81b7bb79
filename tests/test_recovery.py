"""From which checkpoint a run goes on, and when it refuses to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.folders import open_partial, publish
from rlmath.checkpoint.progress import Progress, read_progress, write_progress
from rlmath.config import Config
from rlmath.config_files import config_as_yaml, load_config
from rlmath.fingerprints import data_fingerprint, model_fingerprint
from rlmath.recovery import MAY_CHANGE, Origin, find_recovery, refused_changes
from rlmath.settings import setting_values
from rlmath.types import Prompt

ORIGIN = Origin("model-1", "data-1")
PROGRESS = Progress(3, 0, 24, 6, 3, "TP1", 1, ("exp_avg",), ("torch",), "model-1", "data-1", {"torch": "2"})


def make_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        [], [f"run.output_dir={folder}", "model.path=m", "data.train_path=t.jsonl", *overrides]
    )


def checkpoint(folder: Path, step: int, config: Config | None = None) -> Path:
    partial = open_partial(folder / "checkpoints", step)
    write_progress(partial, replace(PROGRESS, step=step))
    (partial / "config.yaml").write_text(config_as_yaml(config or make_config(folder)))
    return publish(partial, step, False, {}).folder


def found_steps(config: Config, origin: Origin = ORIGIN) -> list[int]:
    recovery = find_recovery(config, origin)
    return [] if recovery is None else [one.step for one, _ in recovery.candidates]


def test_auto_takes_the_newest_and_disabled_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 12)
    assert found_steps(make_config(tmp_path)) == [12, 3]
    assert found_steps(make_config(tmp_path, "run.recover_mode=resume")) == [12, 3]
    assert found_steps(make_config(tmp_path, "run.recover_mode=disabled")) == []


def test_without_a_checkpoint_auto_starts_and_resume_refuses(tmp_path: Path) -> None:
    assert find_recovery(make_config(tmp_path), ORIGIN) is None
    with pytest.raises(ValueError, match="has no checkpoint to go on from"):
        find_recovery(make_config(tmp_path, "run.recover_mode=resume"), ORIGIN)


@pytest.mark.parametrize("name", ["manifest.json", "progress.json", "config.yaml"])
def test_a_damaged_newest_is_passed_over_and_told(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 5)
    (newest / name).write_text("{")
    recovery = find_recovery(make_config(tmp_path), ORIGIN)
    assert recovery is not None and [one.step for one, _ in recovery.candidates] == [3]
    assert "step-000005 is damaged and is passed over" in recovery.notes[0]


def test_resume_tells_of_the_damaged_ones(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 5) / "progress.json").unlink()
    with pytest.raises(ValueError, match="step-000005 is damaged"):
        find_recovery(make_config(tmp_path, "run.recover_mode=resume"), ORIGIN)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.prompts_per_step=64", "data.prompts_per_step: 128 there, 64 now"),
        ("rollout.group_size=4", "rollout.group_size: 16 there, 4 now"),
        ("optimizer.lr=1e-5", "optimizer.lr: 1e-06 there, 1e-05 now"),
        ("run.seed=2", "run.seed: 1 there, 2 now"),
        ("reward.scheme=mix", "reward.scheme: correctness there, mix now"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(tmp_path: Path, override: str, told: str) -> None:
    checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match=told):
        find_recovery(make_config(tmp_path, override), ORIGIN)


def test_another_model_and_other_prompts_are_refused_and_their_paths_are_not(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    moved = make_config(tmp_path, "model.path=elsewhere", "data.train_path=elsewhere.jsonl")
    assert found_steps(moved) == [3]
    with pytest.raises(ValueError, match="the model that the run started from has changed"):
        find_recovery(moved, replace(ORIGIN, model="model-2"))
    with pytest.raises(ValueError, match="the prompts have changed"):
        find_recovery(moved, replace(ORIGIN, data="data-2"))


def test_layout_length_and_what_is_kept_may_change(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    other = ("parallel.tensor=2", "rollout.tensor_parallel=2", "run.total_steps=9", "save.ckpt_freq_steps=1")
    assert found_steps(make_config(tmp_path, *other)) == [3]


def test_every_entry_of_the_list_is_a_setting() -> None:
    keys = list(setting_values(make_config(Path("x"))))
    for entry in MAY_CHANGE:
        assert any(key.startswith(entry) if entry.endswith(".") else key == entry for key in keys), entry


def test_a_setting_whose_name_only_begins_like_one_that_may_change_is_refused() -> None:
    then, now = (
        make_config(Path("x")),
        make_config(Path("x"), "reward.timeout_seconds=7", "optimizer.kind=sgd"),
    )
    assert refused_changes(then, now) == ["optimizer.kind: adam there, sgd now"]


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": "3"}, {"updates": None}, {"optimizer_tensors": 3}, {"epoch": True}]
)
def test_a_progress_of_the_wrong_kind_is_told(tmp_path: Path, change: dict[str, object]) -> None:
    write_progress(tmp_path, PROGRESS)
    assert read_progress(tmp_path) == PROGRESS
    path = tmp_path / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"progress.json cannot be read"):
        read_progress(tmp_path)


def test_fingerprints_tell_contents_and_not_places(tmp_path: Path) -> None:
    for name, weights in (("a", b"1" * 100), ("b", b"1" * 100), ("c", b"1" * 99 + b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    a, b, c = (model_fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
    prompts = [Prompt("1", "x", (1, 2), ("3",), "math"), Prompt("2", "y", (4,), ("5",), "math")]
    assert data_fingerprint(prompts) == data_fingerprint(list(prompts))
    assert data_fingerprint(prompts) != data_fingerprint(prompts[::-1])
    assert data_fingerprint(prompts) != data_fingerprint([prompts[0], replace(prompts[1], solutions=("6",))])
