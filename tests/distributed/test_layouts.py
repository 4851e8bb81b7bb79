"""Stages of several model chunks and stages of unlike size, against transformers.

Several chunks make Megatron's interleaved pipeline.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.hf.weights import HFReader
from tests.distributed import policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import check_gradients, check_update
from tests.selection import keeping, matrix

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

INTERLEAVED = Case(pipeline=2, virtual_pipeline=2, max_tokens=64)
FIRST_HEAVY = Case(pipeline=2, first_stage_layers=3, last_stage_layers=1)
LAST_HEAVY = Case(pipeline=2, last_stage_layers=3)
LAYOUTS = [INTERLEAVED, FIRST_HEAVY, LAST_HEAVY]
FULL_LAYOUTS = [
    Case(pipeline=4),
    replace(INTERLEAVED, max_tokens=512),
    replace(INTERLEAVED, tensor=2, sequence=True, recompute=True),
    replace(INTERLEAVED, data=2),
    replace(INTERLEAVED, first_stage_layers=2, last_stage_layers=2),
    Case(pipeline=3, first_stage_layers=2),
    Case(pipeline=3, first_stage_layers=1, last_stage_layers=2, max_tokens=64),
]


@pytest.mark.parametrize("case", keeping(LAYOUTS, INTERLEAVED), ids=str)
def test_one_sgd_update_equals_that_of_torch(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    check_update(ranks, untied_model, case, 1e-5)


STREAMED = [(model, case) for model in ("untied_model", "tied_model") for case in LAYOUTS]


@matrix
@pytest.mark.parametrize(
    ("model", "case"),
    keeping(STREAMED, ("untied_model", FIRST_HEAVY), ("tied_model", INTERLEAVED), others=0),
    ids=str,
)
def test_the_stream_gives_back_the_very_tensors_of_the_folder(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, case: Case
) -> None:
    folder = request.getfixturevalue(model)
    streamed = ranks.run(case.ranks, policy_cases.streamed, folder, case)[0]
    reader = HFReader(folder)
    assert streamed.keys() == reader.files.keys()
    assert all(torch.equal(tensor, reader.tensor(name)) for name, tensor in streamed.items())


@matrix
@pytest.mark.parametrize(
    ("name", "place", "number"),
    [
        ("lm_head.weight", (3, 4), float("nan")),
        ("model.layers.3.self_attn.v_proj.bias", (0,), float("inf")),
        ("model.layers.0.mlp.up_proj.weight", (191, 0), float("-inf")),
    ],
)
def test_all_ranks_refuse_weights_that_are_not_finite_whoever_reads_them(
    ranks: RankPool,
    untied_model: Path,
    tmp_path: Path,
    name: str,
    place: tuple[int, ...],
    number: float,
) -> None:
    """Each of these tensors is on one of two pipeline stages only."""
    folder = Path(shutil.copytree(untied_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = number
    save_file(tensors, folder / "model.safetensors")
    messages = ranks.run(2, policy_cases.refusal, folder, Case(pipeline=2))
    assert (
        messages[0] == messages[1]
        and f"{name} in {folder / 'model.safetensors'} has numbers that are NaN" in messages[0]
    )


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_LAYOUTS, ids=str)
def test_gradients_and_updates_agree_on_larger_layouts(
    ranks: RankPool, untied_model: Path, tied_model: Path, case: Case
) -> None:
    check_gradients(ranks, untied_model, case)
    check_gradients(ranks, tied_model, case)
    check_update(ranks, untied_model, replace(case, optimizer="adam"), 1e-3)
