"""The policy on every layout against transformers: log-probs, gradients, updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from tests.distributed import oracle, policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix
from tests.tiny_models import make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

LAYOUTS = [Case(), Case(tensor=2), Case(pipeline=2), Case(data=2), Case(tensor=2, pipeline=2)]
TIED_LAYOUTS = [*LAYOUTS[1:4], Case(tensor=2, pipeline=2, max_tokens=64)]
SAMPLES = make_samples(24)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    """Every tensor within a relative L2 distance."""
    assert got.keys() == wanted.keys()
    distances = {
        name: float((got[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted
    }
    worst = max(distances, key=lambda name: distances[name])
    assert distances[worst] <= relative, f"{worst} is off by {distances[worst]:.2e}"


def assert_close_together(
    got: dict[str, Tensor], wanted: dict[str, Tensor], relative: float
) -> None:
    """All tensors as one vector.

    Adam's first step is nearly the gradient's sign, which rounding decides where the gradient is
    nearly zero; one such element is much in a small tensor and little in the model."""
    got_vector, wanted_vector = (
        torch.cat([t[name].flatten() for name in sorted(wanted)]) for t in (got, wanted)
    )
    distance = float((got_vector - wanted_vector).norm() / wanted_vector.norm())
    assert distance <= relative, f"off by {distance:.2e}"


def check_logprobs(
    ranks: RankPool,
    folder: Path,
    case: Case,
    samples: list[Sample],
    cases: ModuleType = policy_cases,
) -> None:
    logprobs: dict[int, list[float]] = {}
    for part in ranks.run(case.ranks, cases.logprobs, folder, case, samples):
        logprobs |= part
    model = oracle.load(folder)
    with torch.no_grad():
        for index, sample in enumerate(samples):
            torch.testing.assert_close(
                torch.tensor(logprobs[index]),
                oracle.completion_logprobs(model, sample),
                atol=3e-6,
                rtol=1e-6,
            )


def check_gradients(
    ranks: RankPool,
    folder: Path,
    case: Case,
    cases: ModuleType = policy_cases,
    together: float | None = None,
) -> None:
    gradients = ranks.run(case.ranks, cases.gradients, folder, case, SAMPLES)[0]
    model = oracle.load(folder)
    oracle.loss(model, SAMPLES).backward()
    if together is None:
        assert_close(gradients, oracle.gradients(model), 1e-5)
    else:
        assert_close_together(gradients, oracle.gradients(model), together)


def check_update(
    ranks: RankPool, folder: Path, case: Case, relative: float, cases: ModuleType = policy_cases
) -> None:
    weights, result = ranks.run(case.ranks, cases.update, folder, case, SAMPLES)[0]
    assert result.discarded is None
    model = oracle.load(folder)
    reference = None
    if case.kl_coef:
        reference = oracle.load(folder)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.05)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = oracle.loss(model, SAMPLES, case.kl_coef, reference)
    loss.backward()
    lr = policy_cases.LEARNING_RATE[case.optimizer]
    if case.optimizer == "sgd":
        torch.optim.SGD(model.parameters(), lr=lr).step()
    else:
        torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        ).step()
    expected = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    compare = assert_close if case.optimizer == "sgd" else assert_close_together
    compare({name: weights[name] - start[name] for name in expected}, expected, relative)
    assert result.sums["loss"] / result.sums["tokens"] == pytest.approx(loss.item(), rel=1e-5)
    norm = (
        torch.cat([gradient.flatten() for gradient in oracle.gradients(model).values()])
        .double()
        .norm()
    )
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("case", keeping(LAYOUTS, Case(tensor=2), others=0), ids=str)
def test_logprobs_equal_those_of_transformers(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    check_logprobs(ranks, untied_model, case, SAMPLES)


@matrix
@pytest.mark.parametrize("case", keeping(TIED_LAYOUTS, Case(pipeline=2), others=0), ids=str)
def test_tied_embeddings_get_the_gradient_of_both_uses(
    ranks: RankPool, tied_model: Path, case: Case
) -> None:
    check_gradients(ranks, tied_model, case)


EXACT_HEAD = Case(
    tensor=2,
    sequence=True,
    max_tokens=64,
    dtype="float16",
    head_dtype="float32",
    initial_loss_scale=128.0,  # that of 512 tokens: at 1024 random weights of this size overflow
)


@matrix
@pytest.mark.parametrize(
    "case",
    keeping(
        [
            EXACT_HEAD,
            Case(pipeline=2, data=2, dtype="float16", head_dtype="float32"),
            Case(data=2, dtype="float16"),
            Case(tensor=2, dtype="bfloat16", head_dtype="float32"),
        ],
        EXACT_HEAD,
        others=0,
    ),
    ids=str,
)
def test_gradients_in_16_bits_are_those_of_float32_but_for_rounding(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    """Unscaled: a loss scale that is left in is 128.

    No token of these stands where the ratio's clip begins."""
    check_gradients(ranks, untied_model, case, together=0.003 if case.dtype == "float16" else 0.02)


@pytest.mark.parametrize("case", keeping(LAYOUTS[::-1], Case(tensor=2), others=1), ids=str)
def test_one_sgd_update_equals_that_of_torch(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    """So are its gradients, of which SGD makes the update."""
    check_update(ranks, untied_model, case, 1e-5)


@matrix
def test_one_adam_update_equals_that_of_torch(ranks: RankPool, untied_model: Path) -> None:
    check_update(ranks, untied_model, Case(tensor=2, pipeline=2, optimizer="adam"), 1e-3)


@matrix
@pytest.mark.parametrize(
    "case",
    keeping(
        [
            Case(data=2, max_tokens=64),
            Case(data=2, max_tokens=64, optimizer="adam"),
            Case(pipeline=2, data=2, max_tokens=64),
            Case(pipeline=2, virtual_pipeline=2, data=2, max_tokens=64, optimizer="adam"),
            pytest.param(Case(data=2, max_tokens=64, optimizer="adam", lora="all")),
        ],
        Case(data=2, max_tokens=64, optimizer="adam"),
        Case(pipeline=2, data=2, max_tokens=64),
        others=0,
    ),
    ids=str,
)
def test_an_overlapped_reduction_gives_the_same_bits(
    ranks: RankPool, tied_model: Path, case: Case
) -> None:
    """The bits are compared from the second minibatch on.

    In the first one, Megatron learns which parameters have gradients."""
    plain, overlapped = (
        ranks.run(case.ranks, policy_cases.updates, tied_model, variant, SAMPLES)[0]
        for variant in (case, replace(case, overlap_grad_reduce=True))
    )
    assert [result.discarded is None for result in plain[1]] == [True, False, True, True]
    assert overlapped[1] == plain[1]
    assert all(torch.equal(overlapped[0][name], weight) for name, weight in plain[0].items())


@matrix
def test_kl_against_a_reference_is_part_of_the_update(ranks: RankPool, untied_model: Path) -> None:
    check_update(ranks, untied_model, Case(tensor=2, pipeline=2, kl_coef=0.3, max_tokens=64), 1e-5)
