import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from rlmath.algo.losses import TokenInputs, grpo_loss, kl_k3

CLIP = 0.2


def one_token(ratio: float, advantage: float) -> tuple[Tensor, TokenInputs]:
    """A token whose importance ratio is `ratio`, with its log-prob as the leaf of the gradient."""
    logprobs_T = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([value], dtype=torch.float64) for value in (-1.0, advantage, 1.0)]
    return logprobs_T, TokenInputs(logprobs_T, others[0], None, others[1], others[2])


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        (2.0, 1.0, -2.0, -2.0, 0.0),
        (2.0, 1.1, -2.2, -2.2, 0.0),  # inside: -A r, whose derivative by the log-prob is -A r too
        (2.0, 1.5, -2.4, 0.0, 1.0),  # a good token is pushed up to 1.2 and no further
        (2.0, 0.5, -1.0, -1.0, 0.0),  # below the clip a good token still counts in full
        (-2.0, 0.9, 1.8, 1.8, 0.0),
        (-2.0, 0.5, 1.6, 0.0, 1.0),  # a bad token is pushed down to 0.8 and no further
        (-2.0, 1.5, 3.0, 3.0, 0.0),  # above the clip a bad token still counts in full
        (0.0, 1.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_surrogate_of_one_token(
    advantage: float, ratio: float, loss: float, gradient: float, clipped: float
):
    logprobs_T, tokens = one_token(ratio, advantage)
    terms = grpo_loss(tokens, CLIP, kl_coef=0.0)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss, abs=1e-12)
    assert terms.surrogate.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs_T.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert terms.clipped.item() == clipped
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.approx_kl.item() == pytest.approx(-math.log(ratio), abs=1e-12)
    assert terms.reference_kl.item() == 0.0


@pytest.mark.parametrize(
    ("policy", "reference", "kl"),
    [(0.5, 0.25, 0.193147), (0.25, 0.5, 0.306853), (0.3, 0.3, 0.0), (0.1, 0.9, 5.802775)],
)
def test_k3_of_one_token(policy: float, reference: float, kl: float):
    # r = reference / policy: 0.5 - 1 + ln 2, 2 - 1 - ln 2, 0, 9 - 1 - ln 9
    got = kl_k3(torch.tensor([math.log(policy)]), torch.tensor([math.log(reference)]))
    assert float(got) == pytest.approx(kl, abs=1e-6)


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
    estimates = kl_k3(policy.log(), reference.log())
    assert (estimates >= 0).all()
    wanted = 0.2 * math.log(0.2 / 0.6) + 0.5 * math.log(0.5 / 0.1)
    assert float((policy * estimates).sum()) == pytest.approx(wanted, rel=1e-12)


def test_all_terms_are_weighted_sums():
    # ratios 1.5 and 0.5, references at half and twice the policy's probability
    tokens = TokenInputs(
        logprobs_T=torch.tensor([1.5, 0.5, 7.0]).log(),
        old_logprobs_T=torch.zeros(3),
        reference_logprobs_T=torch.tensor([0.75, 1.0, 1.0]).log(),
        advantages_T=torch.tensor([2.0, 3.0, 100.0]),
        weights_T=torch.tensor([1.0, 0.5, 0.0]),
    )
    terms = grpo_loss(tokens, CLIP, kl_coef=10.0)
    kl = 0.193147 + 0.5 * 0.306853
    assert terms.surrogate.item() == pytest.approx(-2.4 - 0.5 * 1.5)
    assert terms.ratio.item() == pytest.approx(1.5 + 0.25)
    assert terms.clipped.item() == 1.0
    assert terms.approx_kl.item() == pytest.approx(-math.log(1.5) + 0.5 * math.log(2.0))
    assert terms.reference_kl.item() == pytest.approx(kl, abs=1e-6)
    assert terms.loss.item() == pytest.approx(-3.15 + 10.0 * kl, abs=1e-5)


def test_only_the_loss_carries_a_gradient():
    leaf = torch.zeros(2, requires_grad=True)
    plain = torch.zeros(2)
    terms = grpo_loss(TokenInputs(leaf, plain, plain, plain + 1, plain + 1), CLIP, 0.1)
    assert terms.loss.requires_grad
    others = (terms.surrogate, terms.ratio, terms.clipped, terms.approx_kl, terms.reference_kl)
    assert not any(term.requires_grad for term in others)


def textbook_loss(tokens: TokenInputs, clip: float, kl_coef: float) -> Tensor:
    """The two papers' formulas token by token in float64, with the branch of the clip chosen by cases."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(tokens.weights_T)):
        weight, advantage = float(tokens.weights_T[t]), float(tokens.advantages_T[t])
        if weight == 0:
            continue
        ratio = torch.exp(tokens.logprobs_T[t]) / math.exp(tokens.old_logprobs_T[t])
        if advantage > 0 and ratio.item() > 1 + clip:
            objective = torch.tensor((1 + clip) * advantage, dtype=torch.float64)
        elif advantage < 0 and ratio.item() < 1 - clip:
            objective = torch.tensor((1 - clip) * advantage, dtype=torch.float64)
        else:
            objective = ratio * advantage
        if tokens.reference_logprobs_T is not None:
            reference = math.exp(tokens.reference_logprobs_T[t]) / torch.exp(tokens.logprobs_T[t])
            objective = objective - kl_coef * (reference - torch.log(reference) - 1)
        total = total - weight * objective
    return total


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clip=st.floats(0.05, 0.9),
    kl_coef=st.floats(0.0, 2.0),
    with_reference=st.booleans(),
)
def test_loss_and_gradient_equal_the_textbook_formula(
    seed: int, clip: float, kl_coef: float, with_reference: bool
):
    draw = torch.Generator().manual_seed(seed)
    logprobs, old, reference, advantages = torch.randn(4, 12, dtype=torch.float64, generator=draw)
    weights_T = (torch.rand(12, generator=draw) < 0.7).double()

    def evaluate(function) -> tuple[Tensor, Tensor]:
        leaf = logprobs.clone().requires_grad_()
        tokens = TokenInputs(leaf, old, reference if with_reference else None, advantages, weights_T)
        value = function(tokens, clip, kl_coef)
        # without any weight the textbook's sum has no gradient at all
        (gradient,) = torch.autograd.grad(value + 0.0 * leaf.sum(), leaf)
        return value.detach(), gradient

    got = evaluate(lambda *arguments: grpo_loss(*arguments).loss)
    for ours, wanted in zip(got, evaluate(textbook_loss), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "kl"),
    [
        ("logprobs_T", False),
        ("logprobs_T", True),
        ("old_logprobs_T", True),
        ("reference_logprobs_T", True),
        ("advantages_T", True),
    ],
)
def test_what_stands_at_tokens_without_weight_reaches_neither_value_nor_gradient(
    field: str, kl: bool, bad: float
):
    columns = {
        "logprobs_T": [-1.0, -2.0],
        "old_logprobs_T": [-1.1, -2.0],
        "reference_logprobs_T": [-1.2, -1.0],
        "advantages_T": [1.0, 1.0],
    }

    def evaluate(poison: float) -> tuple[list[float], list[float]]:
        tensors = {name: torch.tensor(values) for name, values in columns.items()}
        tensors[field][1] = poison
        leaf = tensors["logprobs_T"].requires_grad_()
        if not kl:
            tensors["reference_logprobs_T"] = None
        terms = grpo_loss(TokenInputs(**tensors, weights_T=torch.tensor([1.0, 0.0])), CLIP, 0.1)
        terms.loss.backward()
        return [value.item() for value in vars(terms).values()], leaf.grad.tolist()

    values, gradient = evaluate(bad)
    clean_values, clean_gradient = evaluate(-0.5)
    assert values == clean_values
    assert gradient == clean_gradient
    assert gradient[1] == 0.0


def test_a_counted_nan_is_seen():
    _, tokens = one_token(1.0, math.nan)
    terms = grpo_loss(tokens, CLIP, 0.0)
    assert math.isnan(terms.loss.item())


def test_no_counted_token_gives_zero_with_a_gradient_of_zeros():
    leaf = torch.full((3,), -1.0, requires_grad=True)
    zeros = torch.zeros(3)
    terms = grpo_loss(TokenInputs(leaf, zeros, zeros, zeros + 1, zeros), CLIP, 0.1)
    terms.loss.backward()
    assert terms.loss.item() == 0.0 and terms.ratio.item() == 0.0
    assert torch.equal(leaf.grad, zeros)


def test_shapes_are_checked():
    row = torch.zeros(3)
    with pytest.raises(TypeCheckError):
        TokenInputs(row, row, None, row, torch.zeros(4))
    with pytest.raises(TypeCheckError):
        TokenInputs(row[None], row[None], None, row[None], row[None])
    with pytest.raises(TypeCheckError):
        kl_k3(row, torch.zeros(2))
    with pytest.raises(TypeCheckError):
        kl_k3(row, torch.zeros(3, dtype=torch.int64))
