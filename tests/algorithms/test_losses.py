import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import (
    LOSS_KINDS,
    LossKind,
    LossSettings,
    Normalisation,
    TokenInputs,
    policy_loss,
)
from rlmath.config.objectives import ObjectiveSettings
from tests.algorithms.test_losses_textbook import SUMS, with_leaves


def inputs(logprobs: list[float], **columns: list[float]) -> tuple[Tensor, TokenInputs]:
    """Tokens in float64, with their log-probs as the leaf of the gradient.

    By default they are on-policy, of advantage and weight 1, without reference, all in one segment.
    """
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)

    def column(name: str, default: list[float]) -> Tensor:
        return torch.tensor(columns.get(name, default), dtype=torch.float64)

    n = len(logprobs)
    proximal_T = column("proximal", logprobs)
    tokens = TokenInputs(
        logprobs_T=leaf,
        entropy_T=column("entropy", [0.0] * n),
        proximal_logprobs_T=proximal_T,
        behaviour_logprobs_T=proximal_T,
        reference_logprobs_T=column("reference", []) if "reference" in columns else None,
        advantages_T=column("advantages", [1.0] * n),
        weights_T=torch.ones(n, dtype=torch.float64),
        **masks("x" * n),
        segments_T=torch.zeros(n, dtype=torch.int64),
        n_segments=1,
    )
    return leaf, tokens


def masks(marks: str) -> dict[str, Tensor]:
    """The two masks of tokens: "x" is learned, "o" sampled and not learned, "." not sampled."""
    sampled_T = torch.tensor([mark != "." for mark in marks])
    return {"sampled_T": sampled_T, "learned_T": torch.tensor([mark == "x" for mark in marks])}


def gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    return torch.autograd.grad(loss, leaf)[0].tolist()


def test_a_penalty_pulls_back_to_the_proximal_policy():
    leaf, tokens = inputs([-1.0, -1.0, -2.0], proximal=[-1.5, -1.5, -1.5], advantages=[0.0] * 3)
    penalty_T = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    terms = policy_loss(replace(tokens, penalty_T=penalty_T), LossSettings())
    assert terms.loss.item() == pytest.approx(0.25 * 0.5 + 0.5 * 0.5)
    assert gradient(terms.loss, leaf) == [0.0, 0.25, -0.5]


# ---------------------------------------------------------------- what carries a gradient


def test_without_a_coefficient_entropy_is_only_counted():
    leaf, tokens = inputs([-1.0], advantages=[2.0])
    entropy_T = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(replace(tokens, entropy_T=entropy_T), LossSettings(entropy_coef=0.0))
    assert torch.autograd.grad(terms.loss, [leaf, entropy_T], allow_unused=True)[1] is None
    assert terms.loss.item() == -2.0
    assert terms.entropy.item() == pytest.approx(0.7)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_only_the_loss_carries_a_gradient(kind: LossKind):
    _, tokens = inputs([-1.0, -2.0], reference=[-1.5, -1.5], entropy=[1.0, 1.0])
    entropy_T = torch.ones(2, dtype=torch.float64, requires_grad=True)
    shape = LossSettings(
        ObjectiveSettings(kind), correction=Correction("token"), kl_coef=0.1, entropy_coef=0.1
    )
    terms = policy_loss(replace(tokens, entropy_T=entropy_T), shape)
    assert {name for name in SUMS if getattr(terms, name).requires_grad} == {"loss"}


# ---------------------------------------------------------------- what is not finite

COLUMNS = {
    "logprobs_T": [-1.0, -2.0, -1.5],
    "entropy_T": [0.5, 0.5, 0.5],
    "proximal_logprobs_T": [-1.1, -2.0, -1.4],
    "behaviour_logprobs_T": [-1.2, -2.0, -1.3],
    "reference_logprobs_T": [-1.2, -1.0, -1.5],
    "advantages_T": [1.0, 1.0, -1.0],
}
SEGMENTS = {"segments_T": torch.tensor([0, 0, 1]), "n_segments": 2}
DUAL = LossSettings(ObjectiveSettings(clip_ratio_high=0.3, dual_clip=3.0))
LEVELS = [
    None,
    Correction("token", 2.0, 0.1, 3.0),
    Correction("sequence", 2.0, 0.1, 3.0),
    Correction(None, geometric_low=0.1, geometric_high=30.0, binary_kl=9.0),
]


def everything(kind: LossKind, correction: Correction | None) -> LossSettings:
    """An objective with all that is added to it."""
    objective = ObjectiveSettings(kind, dual_clip=3.0)
    return LossSettings(objective, correction=correction, kl_coef=0.1, entropy_coef=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("correction", LEVELS)
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_what_stands_at_tokens_that_are_not_sampled_reaches_neither_value_nor_gradient(
    kind: LossKind, correction: Correction | None, column: str, bad: float
):
    def evaluate(poison: float) -> tuple[list[float], list[list[float]]]:
        tensors = {name: torch.tensor(values) for name, values in COLUMNS.items()}
        tensors[column][1] = poison
        tokens = TokenInputs(
            **tensors, weights_T=torch.tensor([1.0, 0.25, 0.5]), **masks("x.x"), **SEGMENTS
        )
        tokens, leaves = with_leaves(tokens)
        terms = policy_loss(tokens, everything(kind, correction))
        terms.loss.backward()
        return [getattr(terms, name).item() for name in SUMS], [
            leaf.grad.tolist() for leaf in leaves
        ]

    values, (by_logprob, by_entropy) = evaluate(bad)
    assert (values, [by_logprob, by_entropy]) == evaluate(-0.5)
    assert all(map(math.isfinite, values + by_logprob + by_entropy))
    assert by_logprob[1] == by_entropy[1] == 0.0


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("correction", LEVELS[1:])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_counted_nan_is_seen(kind: LossKind, correction: Correction, column: str):
    tensors = {name: torch.tensor(values) for name, values in COLUMNS.items()}
    tensors[column][1] = math.nan
    tokens = TokenInputs(**tensors, weights_T=torch.ones(3), **masks("xxx"), **SEGMENTS)
    terms = policy_loss(tokens, everything(kind, correction))
    assert math.isnan(terms.loss.item())


@pytest.mark.parametrize("shape", [LossSettings(), DUAL])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_ratio_that_overflows_is_seen(kind: LossKind, advantage: float, shape: LossSettings):
    row = torch.zeros(1)
    tokens = TokenInputs(
        row,
        row,
        row - 200,
        row - 200,
        None,
        row + advantage,
        row + 1,
        **masks("x"),
        segments_T=torch.zeros(1, dtype=torch.int64),
        n_segments=1,
    )
    assert (
        policy_loss(
            tokens, replace(shape, objective=replace(shape.objective, loss=kind))
        ).ratio.item()
        == math.inf
    )


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("correction", LEVELS)
def test_no_counted_token_gives_zeros_with_a_gradient_of_zeros(
    kind: LossKind, correction: Correction | None
):
    tensors = {name: torch.tensor(values) for name, values in COLUMNS.items()}
    weights_T = torch.ones(3)
    tokens, leaves = with_leaves(
        TokenInputs(**tensors, weights_T=weights_T, **masks("..."), **SEGMENTS)
    )
    terms = policy_loss(tokens, everything(kind, correction))
    terms.loss.backward()
    assert [getattr(terms, name).item() for name in SUMS] == [0.0] * len(SUMS)
    assert [leaf.grad.tolist() for leaf in leaves] == [[0.0] * 3] * 2


def test_the_kl_to_a_teacher_has_the_tokens_weights_and_no_ratio():
    """0.5 x (1 x 0.2 + 0.5 x 0.4) = 0.2 of the loss; metrics have 0.2 + 0.4.

    What is not sampled may be NaN."""
    tensors = {name: torch.tensor(values) for name, values in COLUMNS.items()}
    weights_T = torch.tensor([1.0, 0.0, 0.5])
    kl_T = torch.tensor([0.2, math.nan, 0.4], requires_grad=True)
    plain = TokenInputs(**tensors, weights_T=weights_T, **masks("x.x"), **SEGMENTS)
    settings = LossSettings(teacher_coef=0.5)
    with_teacher = policy_loss(replace(plain, teacher_kl_T=kl_T), settings)
    without = policy_loss(plain, settings)
    assert (with_teacher.loss - without.loss).item() == pytest.approx(0.2)
    assert with_teacher.teacher_kl.item() == pytest.approx(0.6) and without.teacher_kl.item() == 0.0
    with_teacher.loss.backward()
    assert kl_T.grad.tolist() == pytest.approx([0.5, 0.0, 0.25])


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("column", [*COLUMNS, "weights_T", "sampled_T", "learned_T", "segments_T"])
def test_shapes_are_checked(column: str):
    tensors = {name: torch.tensor(values) for name, values in COLUMNS.items()}
    tensors |= {"weights_T": torch.ones(3), "segments_T": SEGMENTS["segments_T"]} | masks("xxx")
    assert TokenInputs(**tensors, n_segments=2).n_segments == 2
    wrong_kind = tensors[column].float() if column == "segments_T" else tensors[column].int()
    for wrong in (tensors[column][:2], tensors[column][None], wrong_kind):
        with pytest.raises(TypeCheckError):
            TokenInputs(**tensors | {column: wrong}, n_segments=2)


# ----------------------------------------------------------- normalisation: weights and denominator


@pytest.mark.parametrize(
    ("normalisation", "wanted"),
    [
        (Normalisation("token"), 0.5),  # (4 x 1 + 1 x -1.5) / 5
        (Normalisation("sequence"), -0.25),  # (1 - 1.5) / 2
        (Normalisation("constant", 10), 0.125),  # (4 / 10 - 1.5 / 10) / 2
    ],
)
def test_a_minibatch_of_two_by_hand(normalisation: Normalisation, wanted: float):
    # four tokens of loss 1, one token of loss -1.5
    total = normalisation.weight(4) * 4 * 1.0 + normalisation.weight(1) * -1.5
    assert total / (normalisation.count(4) + normalisation.count(1)) == pytest.approx(wanted)
