"""LoRA on every layout against PEFT.

Compared are log-probs, gradients, three steps of Adam and merged weights; and what frozen weights
hold.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import Tensor

from tests.distributed import lora_learning_cases, offload_cases, oracle, sft_cases
from tests.distributed.lora_learning_cases import Learned
from tests.distributed.policy_cases import LEARNING_RATE, LORA_ALPHA, LORA_RANK, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close, assert_close_together
from tests.selection import keeping, matrix
from tests.tiny_models import make_model_folder, make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

MODULES = {
    "attention": ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "gate_up_proj", "down_proj"],
}
"""PEFT's names; `qkv_proj` and `gate_up_proj` are Phi-3's."""
MODULES["all"] = MODULES["attention"] + MODULES["mlp"]
PARTS = [make_samples(12, seed=seed) for seed in (31, 32, 33)]
ADAM = Case(optimizer="adam", distributed=False, max_tokens=64, lora="all")
"""Not distributed, so that every rank has whole gradients."""


def on(case: Case = ADAM, **changes: object) -> Case:
    return replace(case, **changes)


TP2 = on(tensor=2)
TP2_SP = on(tensor=2, sequence=True)
VPP2_RC = on(pipeline=2, virtual_pipeline=2, recompute=True)
LAYOUTS = [
    TP2_SP,
    VPP2_RC,
    on(data=2),
    on(tensor=2, pipeline=2),
    ADAM,
    TP2,
    on(tensor=2, sequence=True, selective=True),
    on(tensor=2, sequence=True, recompute=True),
    on(tensor=2, data=2),
    on(tensor=2, pipeline=2, sequence=True, recompute=True, data=2),
]
OTHERS = [
    pytest.param("qwen3", on(TP2, lora="attention"), marks=pytest.mark.full),
    ("phi3", on(TP2_SP, lora="all")),
    ("tied", on(VPP2_RC, lora="mlp")),
]


@pytest.fixture(scope="module")
def folder_of(
    untied_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("adapted")

    @cache
    def folder(name: str) -> Path:
        if name in ("qwen2", "tied"):
            return untied_model if name == "qwen2" else tied_model
        return make_model_folder(place / name, architecture=f"{name.title()}ForCausalLM")

    return folder


@cache
def of_peft(folder: Path, target: str) -> tuple[dict[str, Tensor], Learned]:
    """Adapters to begin with, none of them zero, and what PEFT makes of them."""
    import peft

    torch.set_num_threads(1)
    torch.manual_seed(7)
    base = oracle.load(folder)
    samples = list(enumerate(PARTS[0]))
    with torch.no_grad():
        reference = {
            index: oracle.completion_logprobs(base, sample).tolist() for index, sample in samples
        }
    settings = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=MODULES[target], init_lora_weights=False
    )
    model = peft.get_peft_model(base, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.2)
    start = adapters_of(model)
    merged = deepcopy(model).merge_and_unload()
    weights = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    with torch.no_grad():
        logprobs = {
            index: oracle.completion_logprobs(model, sample).tolist() for index, sample in samples
        }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE["adam"], betas=(0.9, 0.95), weight_decay=0.0
    )
    gradients = []
    norms = []
    for part in PARTS:
        optimizer.zero_grad()
        oracle.loss(model, part).backward()
        gradients.append(
            {
                name.replace(".default", ""): gradient
                for name, gradient in oracle.gradients(model).items()
            }
        )
        norms.append(
            float(
                torch.cat([gradient.flatten() for gradient in gradients[-1].values()])
                .double()
                .norm()
            )
        )
        optimizer.step()
    return start, Learned(reference, logprobs, gradients[0], norms, adapters_of(model), weights)


def adapters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    import peft

    return {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def check(
    ranks: RankPool,
    folder: Path,
    case: Case,
    exact: float = 1e-5,
    learned: FunctionType = lora_learning_cases.learned,
) -> None:
    start, expected = of_peft(folder, case.lora)
    by_rank = ranks.run(case.ranks, learned, folder, case, start, PARTS)
    for name in ("reference", "logprobs"):
        values_by_index = {
            index: values for outcome in by_rank for index, values in getattr(outcome, name).items()
        }
        for index, values in getattr(expected, name).items():
            torch.testing.assert_close(
                torch.tensor(values_by_index[index]),
                torch.tensor(values),
                atol=exact,
                rtol=0.0,
                msg=f"{name} {index}",
            )
    assert_close(by_rank[0].gradients, expected.gradients, exact)
    assert all(
        outcome.norms[0] == pytest.approx(expected.norms[0], rel=exact) for outcome in by_rank
    )
    moves = [
        {name: after[name] - start[name] for name in start}
        for after in (by_rank[0].adapters, expected.adapters)
    ]
    assert_close_together(*moves, 3e-3)
    assert by_rank[0].norms == pytest.approx(expected.norms, rel=1e-3)
    both = by_rank[0].weights.keys() & expected.weights.keys()  # experts have other names
    assert_close(
        *({name: outcome.weights[name] for name in both} for outcome in (by_rank[0], expected)),
        1e-6,
    )


@pytest.mark.parametrize("case", keeping(LAYOUTS, TP2_SP, VPP2_RC, others=2), ids=str)
def test_adapters_learn_as_those_of_peft_on_every_layout(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    check(ranks, untied_model, case)


@matrix
@pytest.mark.parametrize(("name", "case"), OTHERS, ids=str)
def test_so_do_those_of_other_models_and_layers(
    ranks: RankPool, folder_of: Callable[[str], Path], name: str, case: Case
) -> None:
    check(ranks, folder_of(name), case)


@pytest.mark.full
def test_so_do_those_of_ranks_that_share_sequences(ranks: RankPool, untied_model: Path) -> None:
    check(ranks, untied_model, on(context=2), learned=lora_learning_cases.learned_in_context)


@matrix
def test_new_adapters_change_nothing_and_are_the_same_on_every_layout(
    ranks: RankPool, untied_model: Path
) -> None:
    adapters, other_adapters = (
        ranks.run(case.ranks, lora_learning_cases.new_adapters, untied_model, case)[0]
        for case in (ADAM, on(tensor=2, pipeline=2))
    )
    assert adapters.keys() == other_adapters.keys() and all(
        torch.equal(adapters[name], other_adapters[name]) for name in adapters
    )
    for name, tensor in adapters.items():
        bound = 0.0 if "lora_B" in name else tensor.shape[1] ** -0.5
        assert bound * 0.9 <= tensor.abs().max() <= bound, name


@matrix
def test_supervised_training_has_the_same_curve_on_every_layout(
    ranks: RankPool, untied_model: Path
) -> None:
    arguments = (sft_cases.make_sequences(20, seed=1), sft_cases.make_sequences(5, seed=2), 4)
    plain_curve, split_curve = (
        ranks.run(case.ranks, sft_cases.curve, untied_model, case, *arguments)[0]
        for case in (on(lr=0.01), on(TP2_SP, lr=0.01))
    )
    losses = [[row["train/loss"] for row in curve[1:]] for curve in (plain_curve, split_curve)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert split_curve[-1]["held_out/loss"] == pytest.approx(
        plain_curve[-1]["held_out/loss"], rel=1e-5
    )
    assert abs(plain_curve[-1]["held_out/loss"] - plain_curve[0]["held_out/loss"]) > 0.01, (
        "or nothing would be learned"
    )


@matrix
def test_frozen_weights_have_no_gradient_no_state_and_no_copy(
    ranks: RankPool, untied_model: Path
) -> None:
    """Numbers have 16 bits.

    What the optimizer and the gradients hold leaves the device and comes back."""
    case = Case(optimizer="adam", dtype="bfloat16", lora="all")
    (report,) = ranks.run(1, offload_cases.learn_around_an_offload, untied_model, case, PARTS[0])
    attention = (3 * 128 + 2 * 4 * 32) + (128 + 128)  # columns and rows of A and B: qkv, proj
    trained = 4 * LORA_RANK * (attention + (2 * 128 + 2 * 192) + (192 + 128))
    counters = sum(name.endswith(".step") for name in report["state"])
    assert report["here"]["gradients"] == report["left"]["gradients"] == 4 * trained
    assert report["left"]["optimizer"] == 3 * 4 * trained + 4 * counters
    assert counters == 4 * 4 * 2, "one for each A and B"
    assert report["left"] == report["back"] and set(report["away"].values()) == {0}
    assert report["same"] and report["gradients not zero"] == []
