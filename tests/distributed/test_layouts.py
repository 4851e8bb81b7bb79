"""Stages of several model chunks (Megatron's interleaved pipeline) and stages of unlike size, against transformers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.hf.weights import HFReader
from tests.distributed import engine_cases, policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import SAMPLES, check_gradients, check_logprobs, check_update
from tests.selection import keeping, matrix

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

INTERLEAVED = Case(pipeline=2, virtual_pipeline=2, max_tokens=64)
FIRST_HEAVY = Case(pipeline=2, first_stage_layers=3, last_stage_layers=1)
LAST_HEAVY = Case(pipeline=2, last_stage_layers=3)
LAYOUTS = [INTERLEAVED, FIRST_HEAVY, LAST_HEAVY]
FULL_LAYOUTS = [
    replace(INTERLEAVED, max_tokens=512),
    replace(INTERLEAVED, tensor=2, sequence=True, recompute=True),
    replace(INTERLEAVED, data=2),
    replace(INTERLEAVED, first_stage_layers=2, last_stage_layers=2),
    Case(pipeline=3, first_stage_layers=2),
    Case(pipeline=3, first_stage_layers=1, last_stage_layers=2, max_tokens=64),
]


@pytest.mark.parametrize("case", keeping(LAYOUTS, INTERLEAVED), ids=str)
def test_logprobs_equal_those_of_transformers(ranks: RankPool, untied_model: Path, case: Case) -> None:
    check_logprobs(ranks, untied_model, case, SAMPLES)


@pytest.mark.parametrize("case", keeping(LAYOUTS, INTERLEAVED, FIRST_HEAVY), ids=str)
def test_gradients_equal_those_of_transformers(ranks: RankPool, untied_model: Path, case: Case) -> None:
    check_gradients(ranks, untied_model, case)


@pytest.mark.parametrize("case", keeping([INTERLEAVED, FIRST_HEAVY], INTERLEAVED), ids=str)
def test_tied_embeddings_get_the_gradient_of_both_uses(ranks: RankPool, tied_model: Path, case: Case) -> None:
    check_gradients(ranks, tied_model, case)


@pytest.mark.parametrize("case", keeping(LAYOUTS, INTERLEAVED), ids=str)
def test_one_sgd_update_equals_that_of_torch(ranks: RankPool, untied_model: Path, case: Case) -> None:
    check_update(ranks, untied_model, case, 1e-5)


@pytest.mark.parametrize("case", keeping([INTERLEAVED, FIRST_HEAVY], INTERLEAVED), ids=str)
def test_a_tied_model_is_updated_alike_on_both_of_its_stages(
    ranks: RankPool, tied_model: Path, case: Case
) -> None:
    check_update(ranks, tied_model, case, 1e-5)


def test_one_adam_update_of_all_chunks_equals_that_of_torch(ranks: RankPool, untied_model: Path) -> None:
    check_update(ranks, untied_model, replace(INTERLEAVED, optimizer="adam"), 1e-3)


def test_kl_against_a_reference_of_the_same_layout(ranks: RankPool, untied_model: Path) -> None:
    check_update(ranks, untied_model, replace(INTERLEAVED, kl_coef=0.3), 1e-5)


@pytest.mark.parametrize("optimizer", keeping(["sgd", "adam"], "adam"))
def test_a_discarded_minibatch_leaves_every_bit_of_all_chunks(
    ranks: RankPool, untied_model: Path, optimizer: str
) -> None:
    case = replace(INTERLEAVED, optimizer=optimizer, early_stop_ratio=5.0)
    for report in ranks.run(case.ranks, policy_cases.discard, untied_model, case, SAMPLES, "runaway"):
        assert (report["first"], report["same"], report["goes_on"]) == (None, True, True)
        assert "ratio" in report["reason"]
        assert {name.split(".")[0] for name in report["names"]} >= {"parameter 0", "parameter 1"}


@pytest.mark.parametrize("case", keeping(LAYOUTS, INTERLEAVED, LAST_HEAVY), ids=str)
@pytest.mark.parametrize("model", keeping(["untied_model", "tied_model"], "tied_model"))
def test_the_stream_gives_back_the_very_tensors_of_the_folder(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, case: Case
) -> None:
    folder = request.getfixturevalue(model)
    streamed, reader = ranks.run(case.ranks, policy_cases.streamed, folder, case)[0], HFReader(folder)
    assert streamed.keys() == reader.names
    assert all(torch.equal(tensor, reader.tensor(name)) for name, tensor in streamed.items())


@pytest.mark.parametrize(
    ("name", "place", "number"),
    [
        ("lm_head.weight", (3, 4), float("nan")),
        ("model.layers.3.self_attn.v_proj.bias", (0,), float("inf")),
        ("model.layers.0.mlp.up_proj.weight", (191, 0), float("-inf")),
    ],
)
def test_all_ranks_refuse_weights_that_are_not_finite_whoever_reads_them(
    ranks: RankPool, untied_model: Path, tmp_path: Path, name: str, place: tuple[int, ...], number: float
) -> None:
    """Each of these tensors is on one of two pipeline stages only."""
    folder = Path(shutil.copytree(untied_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = number
    save_file(tensors, folder / "model.safetensors")
    told = ranks.run(2, policy_cases.refusal, folder, Case(pipeline=2))
    assert told[0] == told[1] and f"{name} in {folder / 'model.safetensors'}: 1 of " in told[0]
    assert "numbers are NaN or infinite" in told[0]


@pytest.mark.parametrize("case", [INTERLEAVED, pytest.param(FIRST_HEAVY, marks=pytest.mark.full)], ids=str)
@matrix
def test_engine_logprobs_equal_the_policys_after_every_update(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    results = ranks.run(case.ranks, engine_cases.mismatch_after_updates, untied_model, case, 1, 2)
    assert len(results[-1]) == 3 and max(results[-1]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_LAYOUTS, ids=str)
def test_gradients_and_updates_agree_on_larger_layouts(
    ranks: RankPool, untied_model: Path, tied_model: Path, case: Case
) -> None:
    check_gradients(ranks, untied_model, case)
    check_gradients(ranks, tied_model, case)
    check_update(ranks, untied_model, replace(case, optimizer="adam"), 1e-3)
