"""A run with LoRA that is killed goes on as if nothing had happened, elsewhere too; its steps are made again; what it
leaves is a model and a folder of PEFT's, with which another run begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.programs import TRAIN, rows, run, small_run, torchrun_command
from tests.selection import matrix
from tests.test_resume import interrupted_after

pytestmark = [pytest.mark.distributed, matrix]

ADAPTERS = ("lora.rank=4", "lora.alpha=8")
SETTINGS = (
    *ADAPTERS,
    "run.total_steps=4",
    "optimizer.lr=2e-3",
    "algorithm.kl_coef=0.05",
    "save.ckpt_freq_steps=1",
    "save.keep_last=4",
    "save.save_freq_steps=3",
    "save.export_hf=true",
    "telemetry.capture_steps=[3]",
    "validation.every_steps=2",
    "validation.keep_best=true",
)
MODEL, ADAPTER = "model.safetensors", "adapter/adapter_model.safetensors"


def command(place: Path, folder: Path, *more: str) -> list[str]:
    held_out = f"validation.paths=[{place}/data/heldout.jsonl]"
    return [*small_run(place, folder), *SETTINGS, held_out, *more]


def train(place: Path, folder: Path, *more: str, ranks: int = 2) -> str:
    """What the console said."""
    return run(*torchrun_command(ranks, *TRAIN, *command(place, folder, *more)), timeout=999).stderr


@pytest.fixture(scope="module")
def whole(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("lora") / "whole"
    train(arithmetic, folder, "parallel.tensor=2")
    return folder


def test_resumed_after_a_step_the_run_is_the_same_to_the_bit(
    arithmetic: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupted_after(2, whole, folder)
    assert "step-000002, made on" in train(arithmetic, folder, "parallel.tensor=2")
    assert rows(folder) == rows(whole) and len(rows(whole)) == 4
    assert all(row["train/grad_norm"] > 0 for row in rows(whole))
    for place in ("hf_model", "models/step-000003", "best_model"):
        for name in (MODEL, ADAPTER, "adapter/adapter_config.json"):
            assert (folder / place / name).read_bytes() == (whole / place / name).read_bytes(), (place, name)


def test_the_run_goes_on_with_one_rank_and_leaves_the_adapters_alone(
    arithmetic: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupted_after(2, whole, folder)
    train(arithmetic, folder, "parallel.tensor=1", "save.merged=false", ranks=1)
    ours, theirs = rows(folder)[2], rows(whole)[2]
    assert ours["n_valid_tokens"] == theirs["n_valid_tokens"]
    for name in ("train/grad_norm", "train/reference_kl"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert [path.name for path in (folder / "hf_model").iterdir()] == ["adapter"]


def test_a_captured_step_is_made_again_to_the_bit(whole: Path) -> None:
    done = run("-m", "rlmath.cli.main", "replay", str(whole))
    (written,) = (whole / "captures").glob("*/replays/update-*/replay.json")
    assert json.loads(written.read_text())["bit_equal"], done.stderr


def test_another_run_begins_with_its_adapters(arithmetic: Path, whole: Path, tmp_path: Path) -> None:
    folder, adapter = tmp_path / "run", whole / "hf_model" / "adapter"
    train(
        arithmetic,
        folder,
        f"model.adapter_path={adapter}",
        "parallel.tensor=1",
        "run.total_steps=1",
        "optimizer.lr=1e-12",
        "optimizer.min_lr=0",
        ranks=1,
    )
    ours, theirs = (load_file(one / "hf_model" / MODEL) for one in (folder, whole))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
