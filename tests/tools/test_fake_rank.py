"""A rank of a GPU run on fake tensors holds what the plan says, whatever the layout."""

from __future__ import annotations

import json

import pytest

from tests.programs import run
from tests.selection import matrix

TOLERANCE = 0.02
"""The relative difference allowed between the plan and the count of what a phase holds in all."""


def counted(
    config: str, ranks: int, rank: int, *settings: str
) -> dict[tuple[str, str], tuple[float | None, int]]:
    """(planned, counted) bytes by phase and part, or by operation of what is sent."""
    command = [
        "tools/fake_rank.py",
        "--config",
        config,
        "--ranks",
        str(ranks),
        "--rank",
        str(rank),
        "--json",
    ]
    rows = [
        json.loads(line)
        for line in run(*command, *settings).stdout.splitlines()
        if line.startswith("{")
    ]
    return {(row["phase"], row["part"]): (row["planned"], row["counted"]) for row in rows}


@matrix
@pytest.mark.parametrize(
    ("config", "ranks", "rank", "settings"),
    [
        pytest.param("configs/areal/32b_n16.yaml", 128, 96, (), id="32B, last of four stages"),
        pytest.param(
            "configs/areal/7b_n4.yaml",
            512,
            256,
            (
                "parallel.data=null",
                "parallel.tensor=2",
                "parallel.pipeline=2",
                "parallel.virtual_pipeline=2",
                "parallel.sequence=true",
                "policy.head_dtype=float32",
                "policy.recompute_granularity=selective",
                "policy.recompute_method=null",
                "policy.recompute_num_layers=null",
            ),
            id="7B, last of two stages with two chunks each",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "configs/areal/7b_n4.yaml",
            64,
            32,
            (
                "model.path=/models/Qwen3-30B-A3B",
                "parallel.data=null",
                "parallel.tensor=2",
                "parallel.expert=8",
                "parallel.pipeline=2",
                "parallel.sequence=true",
                "data.max_prompt_tokens=512",
                "rollout.max_new_tokens=4096",
                "policy.max_tokens_per_microbatch=15360",
            ),
            id="experts, last of two stages",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "configs/areal/32b_n16.yaml",
            8,
            0,
            ("parallel.data=null", "parallel.tensor=8", "parallel.pipeline=1", "lora.rank=32"),
            id="32B on 8 GPUs, adapters",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_holds_what_the_plan_says(
    config: str, ranks: int, rank: int, settings: tuple[str, ...]
) -> None:
    bytes_by_part = counted(config, ranks, rank, *settings)
    for part in ("parameters", "gradients", "optimizer", "dummy_gradients", "gather_buffer"):
        planned, measured = bytes_by_part["update", part]
        assert measured == pytest.approx(planned, rel=1e-3), part
    for phase in ("logprobs", "update"):
        planned, measured = bytes_by_part[phase, "all"]
        assert measured == pytest.approx(planned, rel=TOLERANCE), phase
    if not any("lora" in setting for setting in settings):  # one replica
        assert bytes_by_part["update", "data: reduce_scatter"][1] > 0


def test_a_rank_that_a_run_has_not_is_refused() -> None:
    command = [
        "tools/fake_rank.py",
        "--config",
        "configs/areal/7b_n4.yaml",
        "--ranks",
        "32",
        "--rank",
        "40",
    ]
    assert "--rank is 40; needed: 0 to 31" in run(*command, expect=2).stderr
