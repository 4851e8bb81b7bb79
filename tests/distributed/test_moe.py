"""A model with experts, spread over expert-parallel ranks, against transformers.

Compared are logits, gradients, updates, and the way of its weights in and out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.checkpoint.hf.weights import HFReader
from tests.distributed import architectures_cases, oracle, policy_cases, store_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.store_cases import Outcome
from tests.distributed.test_architectures import assert_same_weights
from tests.distributed.test_engine import check_engines
from tests.distributed.test_lora_learning import check as check_adapters
from tests.distributed.test_lora_learning import on
from tests.distributed.test_parity import assert_close, assert_close_together
from tests.selection import keeping, matrix
from tests.tiny_models import make_model_folder, make_samples

pytestmark = pytest.mark.distributed

SAMPLES = make_samples(24)
EP2 = Case(data=2, expert=2)
LAYOUTS = [Case(), EP2, Case(tensor=2, sequence=True, expert=2)]
FULL_LAYOUTS = [
    Case(data=2, expert=2, recompute=True, max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, data=2, expert=2, max_tokens=64),
    Case(data=4, expert=4, max_tokens=64),
    Case(tensor=2, data=2, sequence=True, expert=4, max_tokens=64),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("moe") / "m", architecture="Qwen3MoeForCausalLM"
    )


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    return of_transformers(folder)


def of_transformers(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of every sample, and the gradients of the loss over all."""
    model = oracle.load(folder)
    with torch.no_grad():
        ids = [torch.tensor(sample.prompt_ids + sample.completion_ids) for sample in SAMPLES]
        logits = [model(token_ids[None]).logits[0] for token_ids in ids]
    oracle.loss(model, SAMPLES).backward()
    return logits, in_files(oracle.gradients(model))


def in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as files on the Hub have them: transformers holds all experts of a layer in one."""
    file_tensors = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                file_tensors[f"{layer}.experts.{expert}.gate_proj.weight"] = gate
                file_tensors[f"{layer}.experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, matrix in enumerate(tensor):
                file_tensors[f"{layer}.experts.{expert}.down_proj.weight"] = matrix
        else:
            file_tensors[name] = tensor
    return file_tensors


@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    [
        *keeping(LAYOUTS, EP2, others=0),
        *(pytest.param(case, marks=pytest.mark.full) for case in FULL_LAYOUTS),
    ],
    ids=str,
)
def test_experts_answer_learn_and_leave_as_in_transformers(
    ranks: RankPool,
    folder: Path,
    wanted: tuple[list[Tensor], dict[str, Tensor]],
    tmp_path: Path,
    case: Case,
) -> None:
    check_round_trip(ranks, folder, wanted, tmp_path / "out", case)


@pytest.mark.parity
@matrix
def test_the_weights_of_a_tokens_experts_may_be_left_unscaled(
    ranks: RankPool, tmp_path: Path
) -> None:
    unscaled = {"norm_topk_prob": False, "num_experts_per_tok": 3}
    folder = make_model_folder(tmp_path / "m", architecture="Qwen3MoeForCausalLM", **unscaled)
    check_round_trip(ranks, folder, of_transformers(folder), tmp_path / "out", EP2)


def check_round_trip(
    ranks: RankPool,
    folder: Path,
    wanted: tuple[list[Tensor], dict[str, Tensor]],
    output: Path,
    case: Case,
) -> None:
    by_rank = ranks.run(
        case.ranks, architectures_cases.round_trips, [folder], case, SAMPLES, [output]
    )
    logits, gradients = wanted
    indices: set[int] = set()
    for (outcome,) in by_rank:
        for index, index_logits in outcome.logits.items():
            distance = float((index_logits - logits[index]).abs().max())
            assert distance <= 1e-4, f"the logits are off by {distance:.2e}"
        indices |= outcome.logits.keys()
        assert_close(outcome.gradients, gradients, 1e-4)
    assert indices == set(range(len(SAMPLES)))
    assert_same_weights(folder, output)


@matrix
@pytest.mark.parity
@pytest.mark.parametrize("case", [EP2, pytest.param(Case(data=2), marks=pytest.mark.full)], ids=str)
def test_a_rank_without_samples_takes_part(ranks: RankPool, folder: Path, case: Case) -> None:
    samples = SAMPLES[:1]
    gradients = ranks.run(case.ranks, policy_cases.gradients, folder, case, samples)[0]
    model = oracle.load(folder)
    oracle.loss(model, samples).backward()
    expected = in_files(oracle.gradients(model))
    # Experts that no token of the sample was sent to have no gradient.
    idle = {name for name, gradient in expected.items() if not gradient.any()}
    assert idle and all(not gradients[name].any() for name in idle)
    assert_close(
        {name: gradient for name, gradient in gradients.items() if name not in idle},
        {name: gradient for name, gradient in expected.items() if name not in idle},
        1e-4,
    )


@matrix
@pytest.mark.parity
@pytest.mark.parametrize(
    ("case", "optimizer", "clip_grad"),
    [
        pytest.param(EP2, "sgd", 0.0, marks=pytest.mark.full),
        (EP2, "adam", 0.25),
        pytest.param(Case(tensor=2, sequence=True, expert=2), "adam", 0.25, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_experts_shared_by_ranks_are_updated_as_those_of_one_rank(
    ranks: RankPool,
    folder: Path,
    wanted: tuple[list[Tensor], dict[str, Tensor]],
    case: Case,
    optimizer: str,
    clip_grad: float,
) -> None:
    cases = [replace(layout, optimizer=optimizer, clip_grad=clip_grad) for layout in (Case(), case)]
    (unshared, result), (shared, other) = (
        ranks.run(layout.ranks, policy_cases.update, folder, layout, SAMPLES)[0] for layout in cases
    )
    norm = float(torch.cat([gradient.flatten() for gradient in wanted[1].values()]).double().norm())
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert other.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5, "too small to be clipped"
    assert other.sums == pytest.approx(result.sums, rel=1e-4, abs=1e-4)
    before = HFReader(folder)
    moves = [
        {name: weights[name] - before.tensor(name) for name in weights}
        for weights in (unshared, shared)
    ]
    if optimizer == "adam":
        assert_close_together(moves[1], moves[0], 1e-2)
    else:
        assert_close(moves[1], moves[0], 1e-4)


@matrix
@pytest.mark.parity
@pytest.mark.parametrize("case", keeping(LAYOUTS, EP2, others=0), ids=str)
def test_adapters_of_attention_learn_as_those_of_peft_beside_frozen_experts(
    ranks: RankPool, folder: Path, case: Case
) -> None:
    check_adapters(
        ranks, folder, on(case, optimizer="adam", distributed=False, lora="attention"), 1e-4
    )


@matrix
@pytest.mark.parametrize("case", [EP2, pytest.param(Case(data=2), marks=pytest.mark.full)], ids=str)
def test_an_overlapped_reduction_waits_for_no_idle_expert(
    ranks: RankPool, folder: Path, case: Case
) -> None:
    case = replace(case, max_tokens=64, optimizer="adam")
    plain, overlapped = (
        ranks.run(case.ranks, policy_cases.updates, folder, variant, SAMPLES)[0]
        for variant in (case, replace(case, overlap_grad_reduce=True))
    )
    assert overlapped[1:] == plain[1:] and plain[2] > 0
    assert all(torch.equal(overlapped[0][name], weight) for name, weight in plain[0].items())


@pytest.fixture(scope="module")
def saved(
    ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """A checkpoint made by two expert-parallel ranks, and what rank 0 had then and later."""
    root = tmp_path_factory.mktemp("experts")
    case = replace(EP2, optimizer="adam", lr=1e-3)
    return root, ranks.run(case.ranks, store_cases.save, folder, case, SAMPLES, root)[0]


@matrix
@pytest.mark.parametrize(
    "target",
    [EP2, Case(), pytest.param(Case(pipeline=2, data=2, expert=2), marks=pytest.mark.full)],
    ids=str,
)
def test_a_checkpoint_with_experts_loads_on_this_and_on_other_layouts(
    ranks: RankPool, folder: Path, saved: tuple[Path, Outcome], target: Case
) -> None:
    root, before = saved
    case = replace(target, optimizer="adam", lr=1e-3)
    after = ranks.run(case.ranks, store_cases.load, folder, case, SAMPLES, root)[0]
    for name, tensor in before.weights.items():
        assert torch.equal(tensor, after.weights[name]), name
    assert_close_together(after.later, before.later, 1e-6)


@pytest.mark.parametrize(
    ("cases", "engine_size"),
    [
        ([EP2], 1),
        pytest.param([EP2, Case(tensor=2, sequence=True, expert=2)], 2, marks=pytest.mark.full),
    ],
    ids=lambda parameter: (
        "+".join(map(str, parameter)) if isinstance(parameter, list) else parameter
    ),
)
@matrix
def test_engine_logprobs_equal_the_policys_after_every_update(
    ranks: RankPool, folder: Path, cases: list[Case], engine_size: int
) -> None:
    check_engines(ranks, folder, cases, engine_size, updates=2)
