"""A run with LoRA leaves a folder of PEFT's, with which another run begins.

`test_everything_on.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked_ranks import run_ranks
from tests.programs import TRAIN, run, small_run
from tests.selection import matrix

pytestmark = [pytest.mark.distributed, matrix]

ADAPTER = "hf_model/adapter"


def train(place: Path, folder: Path, ranks: int, *more: str) -> Path:
    """The folder of a run of one step, with a rank's own part of every layer."""
    settings = [
        *small_run(place, folder),
        "run.total_steps=1",
        "lora.rank=4",
        "lora.alpha=8",
        *more,
    ]
    run_ranks(ranks, [*TRAIN, *settings, f"parallel.tensor={ranks}"])
    return folder


def test_another_run_begins_with_the_adapters_that_a_run_leaves(
    arithmetic: Path, tmp_path: Path
) -> None:
    first = train(arithmetic, tmp_path / "first", 1, "save.merged=false", "optimizer.lr=2e-3")
    assert [path.name for path in (first / "hf_model").iterdir()] == ["adapter"]
    assert "library_name: peft" in (first / ADAPTER / "README.md").read_text()
    unmoved = ("optimizer.lr=1e-12", "optimizer.min_lr=0", "telemetry.capture_steps=[1]")
    second = train(
        arithmetic, tmp_path / "second", 2, f"model.adapter_path={first / ADAPTER}", *unmoved
    )
    before, after = (
        load_file(folder / ADAPTER / "adapter_model.safetensors") for folder in (first, second)
    )
    assert all(
        torch.allclose(after[name], tensor, rtol=0, atol=1e-8) for name, tensor in before.items()
    )
    assert any(tensor.any() for name, tensor in before.items() if "lora_B" in name)
    run(
        "-m", "rlmath.cli.main", "replay", str(second), "--part", "rollout"
    )  # samples with the adapters
