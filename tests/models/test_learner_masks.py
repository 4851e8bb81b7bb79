"""The three learners' losses of packs in which not all tokens are sampled, and not all learned.

Others wrote some tokens. Values, metrics and gradients by the logits are those of dense formulas in
float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import LOSS_KINDS, LossKind, LossSettings, Normalisation, TokenInputs
from rlmath.algorithms.types import Sample
from rlmath.config.objectives import ObjectiveSettings
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.mesh import Mesh
from rlmath.models.critic import CriticLearner, ValueTargets
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.learner import GRPO_MAXIMA, LOSS_SUMS, GrpoLearner, SftLearner
from tests.algorithms.test_losses_textbook import Book

VOCABULARY = 11
TEMPERATURE = 0.7
MARKS = ("xx..oxx", "x.x.")
"""The completions: "x" is learned, "o" sampled and not learned, "." what others wrote."""
COUNTED = "xxoxxxx"
"""Marks of the sampled tokens."""
NOTHING: Any = None


@pytest.fixture(autouse=True)
def one_rank(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", dist.group.WORLD)


def forward_backward() -> ForwardBackward:
    """One whose model has no layers: the logits are given."""
    model = torch.nn.Module()
    model.rotary = None
    return ForwardBackward(
        [model], Mesh(0, 1, 1, 1, 1), NOTHING, VOCABULARY, temperature=TEMPERATURE
    )


def random_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(normalisation: Normalisation) -> MicroBatch:
    """Two samples; what others wrote has NaN in every column."""
    samples = [
        Sample(
            (3, 4)[: 2 - number],
            tuple((5 * t + number) % VOCABULARY for t in range(len(marks))),
            tuple(
                math.nan if mark == "." else -1.0 - 0.2 * (t % 3) for t, mark in enumerate(marks)
            ),
            advantage=(0.8, -0.6)[number],
            sampled=[mark != "." for mark in marks],
            learned=[mark == "x" for mark in marks],
            lag=[t % 2 for t in range(len(marks))],
        )
        for number, marks in enumerate(MARKS)
    ]
    batch = pack(samples, [0, 1], 4, normalisation)
    columns = ("advantages_T", "behaviour_logprobs_T")
    return replace(batch, **{name: spoiled(batch, getattr(batch, name)) for name in columns})


def spoiled(batch: MicroBatch, values_T: Tensor) -> Tensor:
    """The values of sampled tokens, else NaN."""
    return torch.where(batch.sampled_T, values_T, math.nan)


def dense(logits_TV: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies of tokens, and the leaf that gradients arrive at, in float64."""
    leaf_TV = logits_TV.detach().double().requires_grad_()
    every_TV = torch.log_softmax(leaf_TV / TEMPERATURE, -1)
    rows = torch.arange(len(batch.token_ids_T)) - 1
    return every_TV[rows, batch.token_ids_T], -(every_TV.exp() * every_TV).sum(-1)[rows], leaf_TV


@pytest.mark.parametrize("normalisation", [Normalisation("token"), Normalisation("sequence")])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_the_loss_of_grpo(kind: LossKind, normalisation: Normalisation) -> None:
    settings = LossSettings(
        ObjectiveSettings(kind, dual_clip=3.0),
        correction=Correction("sequence", cap=2.0),
        kl_coef=0.3,
        kl_ratio="sequence",
        entropy_coef=0.2,
    )
    learner = GrpoLearner(forward_backward(), NOTHING, NOTHING, settings, EarlyStop())
    learner.step_version = -1
    batch = make_batch(normalisation)
    T = len(batch.token_ids_T)
    logits_TV = random_numbers(0, T, VOCABULARY)
    logprobs_T, entropy_T, dense_TV = dense(logits_TV, batch)
    old_T = spoiled(batch, logprobs_T.detach().float() + 0.3 * random_numbers(1, T))
    reference_T = spoiled(batch, logprobs_T.detach().float() + 0.5 * random_numbers(2, T))

    leaf_TV = logits_TV.clone().requires_grad_()
    loss, count, metrics = learner._loss(
        0,
        batch,
        leaf_TV,
        old=[old_T],
        reference=[reference_T],
        on_policy=False,
        teacher=None,
    )
    loss.backward()
    tokens = TokenInputs(
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        proximal_logprobs_T=old_T.double(),
        behaviour_logprobs_T=batch.behaviour_logprobs_T.double(),
        reference_logprobs_T=reference_T.double(),
        advantages_T=batch.advantages_T.double(),
        weights_T=batch.loss_weights_T.double(),
        sampled_T=batch.sampled_T,
        learned_T=batch.learned_T,
        segments_T=batch.segments_T,
        n_segments=batch.n_segments,
    )
    book_sums = Book(tokens, settings).sums()
    (gradient_TV,) = torch.autograd.grad(book_sums["loss"], dense_TV)
    torch.testing.assert_close(leaf_TV.grad.double(), gradient_TV, rtol=1e-4, atol=1e-6)
    assert not leaf_TV.grad[~batch.learned_T.roll(-1)].any() and leaf_TV.grad.any()
    assert loss.item() == pytest.approx(book_sums["loss"].item(), rel=1e-4)
    assert count.item() == (len(COUNTED) if normalisation.kind == "token" else len(MARKS))
    assert metrics["tokens"].item() == len(COUNTED)
    for name in LOSS_SUMS:
        assert metrics[name].item() == pytest.approx(
            torch.as_tensor(book_sums[name]).item(), rel=1e-4, abs=1e-5
        ), name
    mismatch_N = (old_T - batch.behaviour_logprobs_T)[batch.sampled_T].abs()
    assert metrics["mismatch"].item() == pytest.approx(float(mismatch_N.sum()))
    assert [metrics[name].item() for name in GRPO_MAXIMA] == [
        pytest.approx(float(mismatch_N.max()))
    ]
    # Half a step back where the engine's weights are one step older, else the engine's own.
    between_T = batch.behaviour_logprobs_T + 0.5 * batch.lag_T * (
        logprobs_T.detach() - batch.behaviour_logprobs_T
    )
    error_N = (between_T - old_T)[batch.sampled_T].abs()
    assert metrics["proximal_error"].item() == pytest.approx(error_N.sum().item(), rel=1e-4)


def test_the_loss_of_supervised_training() -> None:
    learner = SftLearner(forward_backward(), NOTHING, NOTHING)
    batch = make_batch(Normalisation("token"))
    logits_TV = random_numbers(0, len(batch.token_ids_T), VOCABULARY)
    logprobs_T, _, dense_TV = dense(logits_TV, batch)
    leaf_TV = logits_TV.clone().requires_grad_()
    loss, count, metrics = learner._loss(0, batch, leaf_TV)
    loss.backward()
    expected_loss = -logprobs_T[batch.learned_T].sum()
    (gradient_TV,) = torch.autograd.grad(expected_loss, dense_TV)
    torch.testing.assert_close(leaf_TV.grad.double(), gradient_TV, rtol=1e-4, atol=1e-6)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert (count.item(), metrics["tokens"].item()) == (len(COUNTED), len(COUNTED))


def test_the_loss_of_the_critic() -> None:
    """Old values 0, no clip: half the squared distance from the returns."""
    learner = CriticLearner(forward_backward(), NOTHING, NOTHING, clip=None)
    batch = make_batch(Normalisation("sequence"))
    T = len(batch.token_ids_T)
    output_T1 = random_numbers(0, T, 1).requires_grad_()
    returns_T = spoiled(batch, random_numbers(1, T))
    targets = [ValueTargets(spoiled(batch, torch.zeros(T)), returns_T)]
    loss, count, metrics = learner._loss(targets, 0, batch, output_T1)
    loss.backward()
    expected_gradient = torch.zeros(T, 1, dtype=torch.float64)
    total = 0.0
    for t in batch.learned_T.nonzero()[:, 0].tolist():
        length = sum(mark != "." for mark in MARKS[int(batch.segments_T[t])])
        distance = (output_T1[t - 1, 0] - returns_T[t]).item()
        expected_gradient[t - 1, 0] = distance / length
        total += distance**2 / 2 / length
    torch.testing.assert_close(output_T1.grad.double(), expected_gradient, rtol=1e-5, atol=1e-7)
    assert loss.item() == pytest.approx(total)
    assert (count.item(), metrics["tokens"].item()) == (len(MARKS), len(COUNTED))
