"""A model with experts, spread over expert-parallel ranks, against transformers: logits, gradients, updates, and the
way of its weights in and out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import architectures_cases, oracle, policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_architectures import assert_same_weights
from tests.distributed.test_parity import assert_close
from tests.tiny_models import make_model_folder, make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(24)
LAYOUTS = [
    Case(),
    Case(data=2, expert=2),
    Case(data=2),
    Case(pipeline=2),
    Case(tensor=2, sequence=True, expert=2),
]
FULL_LAYOUTS = [
    Case(pipeline=2, data=2, expert=2, max_tokens=64),
    Case(data=4, expert=2, max_tokens=64),
    Case(data=4, expert=4, max_tokens=64),
    Case(tensor=2, data=2, sequence=True, expert=2, max_tokens=64),
    Case(tensor=2, data=2, sequence=True, expert=4, max_tokens=64),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("moe") / "m", architecture="Qwen3MoeForCausalLM")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of every sample, and the gradients of the loss over all."""
    model = oracle.load(folder)
    with torch.no_grad():
        ids = [torch.tensor(sample.prompt_ids + sample.completion_ids) for sample in SAMPLES]
        logits = [model(one[None]).logits[0] for one in ids]
    oracle.loss(model, SAMPLES).backward()
    return logits, in_files(oracle.gradients(model))


def in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as files on the Hub have them: transformers holds all experts of a layer in one."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                found[f"{layer}.experts.{expert}.gate_proj.weight"] = gate
                found[f"{layer}.experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, one in enumerate(tensor):
                found[f"{layer}.experts.{expert}.down_proj.weight"] = one
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize(
    "case", [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.full) for case in FULL_LAYOUTS)], ids=str
)
def test_experts_answer_learn_and_leave_as_in_transformers(
    ranks: RankPool,
    folder: Path,
    wanted: tuple[list[Tensor], dict[str, Tensor]],
    tmp_path: Path,
    case: Case,
) -> None:
    output = tmp_path / "out"
    by_rank = ranks.run(case.ranks, architectures_cases.round_trips, [folder], case, SAMPLES, [output])
    logits, gradients = wanted
    seen: set[int] = set()
    for (found,) in by_rank:
        for index, got in found.logits.items():
            distance = float((got - logits[index]).abs().max())
            assert distance <= 1e-4, f"the logits are off by {distance:.2e}"
        seen |= found.logits.keys()
        assert_close(found.gradients, gradients, 1e-4)
    assert seen == set(range(len(SAMPLES)))
    assert_same_weights(folder, output)
