import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.algorithms.kl import KL_KINDS, KLKind, kl_estimate, to_go
from rlmath.algorithms.losses import LossSettings, TokenInputs, policy_loss

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
@settings(deadline=None, max_examples=50)
@given(d=st.floats(-30.0, 30.0, width=32))
def test_all_but_k1_are_never_negative(kind: KLKind, d: float):
    assert float(kl_estimate(kind, torch.tensor([d]), torch.zeros(1))) >= 0.0


def test_k3_keeps_its_digits_near_equality():
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998333e-7, which exp(-d) - 1 + d in float32 would miss by a
    # tenth
    got = kl_estimate("k3", torch.tensor([1e-3]), torch.zeros(1))
    assert float(got) == pytest.approx(4.998333e-7, rel=1e-3)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_a_nan_is_seen(kind: KLKind):
    got = kl_estimate(kind, torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, math.nan]))
    assert got.isnan().all()


# --------------------------------------------------------------- expected gradients, by enumeration


def policies(seed: int, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of the policy, and log-probs of the policy, the reference and an older policy."""
    draw = torch.Generator().manual_seed(seed)
    logits, *other_logits = torch.randn(3, *shape, dtype=torch.float64, generator=draw)
    logits.requires_grad_()
    return (
        logits,
        logits.log_softmax(-1),
        *(policy_logits.log_softmax(-1) for policy_logits in other_logits),
    )


def loss_of(
    logp: Tensor, sampled: Tensor, ref: Tensor | None, advantages: Tensor, **rule: Any
) -> Tensor:
    """The loss of [completion, token].

    A completion's chance of being sampled is its tokens' weight."""
    n, length = sampled.shape
    weights = sampled.sum(1).exp()
    segments = torch.arange(n).repeat_interleave(length)
    columns = [
        logp,
        0 * sampled,
        sampled,
        sampled,
        ref,
        advantages,
        weights[:, None].expand(n, length),
    ]
    columns += [torch.ones_like(sampled, dtype=torch.bool)] * 2
    flat = [None if column is None else column.flatten() for column in columns]
    return policy_loss(TokenInputs(*flat, segments, n), LossSettings(kl_coef=1.0, **rule)).loss


def expected_gradients(kind: KLKind) -> dict[str, Tensor]:
    """Gradients of one token out of five, by where the estimate stands."""
    logits, *logprobs = policies(3, 5)
    logp, ref, old = (row[:, None] for row in logprobs)
    current = logp.detach()
    zeros = torch.zeros_like(old)
    losses = {
        "loss": loss_of(logp, current, ref, zeros, kl_kind=kind),
        "loss, older policy": loss_of(logp, old, ref, zeros, kl_kind=kind),
        "loss, `kl_ratio`": loss_of(logp, old, ref, zeros, kl_kind=kind, kl_ratio="token"),
        "reward": loss_of(
            logp, current, None, -kl_estimate(kind, current[:, 0], ref[:, 0])[:, None]
        ),
    }
    return {
        place: torch.autograd.grad(loss, logits, retain_graph=True)[0]
        for place, loss in losses.items()
    }


def named_gradients() -> dict[str, Tensor]:
    logits, logp, ref, old = policies(3, 5)
    p = logp.exp()
    d = logp - ref
    kl = (p * d).sum()
    forward = (ref.exp() * -d).sum()
    square = (p * d**2).sum() / 2
    twice_tv = (p - ref.exp()).abs().sum()
    absolute = (p * d.abs()).sum()
    formulas = {
        "none": 0 * kl,
        "**exact**": kl,
        "KL(ref \\|\\| p)": forward,
        "2 TV": twice_tv,
        "E d^2 / 2": square,
        "E \\|d\\|": absolute,
        "KL - KL(ref \\|\\| p)": kl - forward,
        "E d^2 / 2 - KL": square - kl,
        "E \\|d\\| - 2 TV": absolute - twice_tv,
        "-KL(old \\|\\| p)": (old.exp() * logp).sum(),
    }
    return {
        name: torch.autograd.grad(formula, logits, retain_graph=True)[0]
        for name, formula in formulas.items()
    }


WORDS = {
    "k1": ("`d`", "`kl`"),
    "k2": ("`d^2 / 2`", "`mse`"),
    "k3": ("`exp(-d) - 1 + d`", "`low_var_kl`"),
    "abs": ("`\\|d\\|`", "`abs`"),
}
"""Each estimate as the docs write it, and verl's word for it."""


def test_the_table_of_gradients_in_the_docs_is_that_of_the_enumeration():
    known_gradients = named_gradients()
    lines = []
    for kind in KL_KINDS:
        cells = [f"`{kind}`", *WORDS[kind]]
        for gradient in expected_gradients(kind).values():
            fits = [
                name
                for name, known_gradient in known_gradients.items()
                if torch.allclose(known_gradient, gradient, rtol=0, atol=1e-12)
            ]
            cells.append(fits[0] if fits else "another")
        lines.append(f"| {' | '.join(cells)} |")
    head = ["estimator", "estimate", "verl's word", *expected_gradients("k1")]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]
    assert "\n".join(table) in (ROOT / "docs/algorithm.md").read_text()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighed_by_the_ratio_the_gradient_is_that_of_the_kl_of_whole_completions(
    kind: KLKind, level
):
    """All completions of two tokens out of three are sampled by an older policy.

    Rows 0 to 2 of the second token's distributions are those behind each first token."""
    first, logp1, ref1, old1 = policies(5, 3)
    second, logp2, ref2, old2 = policies(6, 3, 3)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))

    def of_both(one: Tensor, two: Tensor) -> Tensor:
        return torch.stack((one[pairs[:, 0]], two[pairs[:, 0], pairs[:, 1]]), 1)

    old = of_both(old1, old2)
    ref = of_both(ref1, ref2)
    loss = loss_of(
        of_both(logp1, logp2), old, ref, torch.zeros_like(old), kl_kind=kind, kl_ratio=level
    )
    behind = (
        logp1 if level == "sequence" else old1
    ).exp()  # who samples the first token of the second's KL
    kl = (logp1.exp() * (logp1 - ref1)).sum() + (
        behind * (logp2.exp() * (logp2 - ref2)).sum(1)
    ).sum()
    gradients = (
        torch.autograd.grad(term, [first, second], retain_graph=True) for term in (loss, kl)
    )
    for gradient, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)
    assert loss.item() == pytest.approx(kl.item(), abs=1e-12)


def test_to_go_by_hand():
    values_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    bounds = torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    assert to_go(values_T, bounds).tolist() == [7.0, 6.0, 4.0, 8.0, 16.0]
