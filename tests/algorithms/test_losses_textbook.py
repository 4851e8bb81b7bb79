"""Every loss of the family against the papers' formulas in float64.

Losses are compared token by token, and with the pack split in two."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.kl import KL_KINDS
from rlmath.algorithms.losses import (
    LOSS_KINDS,
    LossKind,
    LossSettings,
    TokenInputs,
    TokenLoss,
    policy_loss,
)
from rlmath.config.objectives import OBJECTIVES, ObjectiveSettings

SUMS = tuple(field.name for field in fields(TokenLoss))


# --------------------------------------------------------- any tokens, against the papers' formulas


@dataclass
class Book:
    """The papers' formulas token by token in float64, every case written out."""

    tokens: TokenInputs
    rule: LossSettings

    @property
    def objective(self) -> ObjectiveSettings:
        return self.rule.objective

    def upper_clip(self) -> float:
        high = self.objective.clip_ratio_high
        return self.objective.clip_ratio if high is None else high

    def counted(self, segment: int | None = None) -> list[int]:
        every = range(len(self.tokens.weights_T))
        return [
            t
            for t in every
            if self.tokens.sampled_T[t]
            and (segment is None or self.tokens.segments_T[t] == segment)
        ]

    def logprob(self, t: int) -> Tensor:
        """The policy's log-prob; no gradient reaches a token that is not learned."""
        return (
            self.tokens.logprobs_T[t]
            if self.tokens.learned_T[t]
            else self.tokens.logprobs_T[t].detach()
        )

    def ratio(self, t: int) -> Tensor:
        return torch.exp(self.logprob(t)) / math.exp(self.tokens.proximal_logprobs_T[t])

    def surrogate(self, t: int) -> tuple[Tensor, bool]:
        """The quantity that is maximised, and whether the clip is at work."""
        low = 1 - self.objective.clip_ratio
        high = 1 + self.upper_clip()
        A = float(self.tokens.advantages_T[t])
        if self.objective.loss == "cispo":
            r = self.ratio(t).item()
            return min(max(r, low), high) * A * self.logprob(t), not low <= r <= high
        r = self.ratio(t)
        if self.objective.loss == "sapo":
            tau = (
                self.objective.sapo_temperature_pos
                if A > 0
                else self.objective.sapo_temperature_neg
            )
            return 4 / (tau * (1 + torch.exp(tau * (1 - r)))) * A, False
        if self.objective.loss in ("dppo_tv", "dppo_kl"):
            return self.divergence_masked(t, A)
        if self.objective.loss == "gmpo":
            positions = [self.bounded(u) for u in self.counted(int(self.tokens.segments_T[t]))]
            mean = math.prod(u.item() for u in positions) ** (1 / len(positions))
            cut = self.bounded(t)
            return mean * A * cut / cut.item(), cut.item() != r.item()
        if self.objective.loss == "gspo":
            positions = self.counted(int(self.tokens.segments_T[t]))
            mean = torch.stack([self.ratio(u) for u in positions]).prod() ** (1 / len(positions))
            r = mean.detach() * r / r.detach()  # GSPO-token
        if A > 0 and r.item() > high:
            return torch.tensor(high * A, dtype=torch.float64), True
        if A < 0 and r.item() < low:
            return torch.tensor(low * A, dtype=torch.float64), True
        dual_clip = self.objective.dual_clip
        if A < 0 and dual_clip is not None and r.item() > dual_clip:
            return torch.tensor(dual_clip * A, dtype=torch.float64), True
        return r * A, False

    def bounded(self, t: int) -> Tensor:
        """The ratio of "gmpo", which is clipped where the advantage pushes it."""
        r = self.ratio(t)
        low = math.exp(-self.objective.clip_ratio)
        high = math.exp(self.upper_clip())
        if self.tokens.advantages_T[t] > 0:
            return torch.tensor(high, dtype=torch.float64) if r.item() > high else r
        return torch.tensor(low, dtype=torch.float64) if r.item() < low else r

    def divergence_masked(self, t: int, A: float) -> tuple[Tensor, bool]:
        p = self.tokens.logprobs_T[t].detach().exp().item()
        q = math.exp(self.tokens.proximal_logprobs_T[t])
        gap = abs(p - q)
        if self.objective.loss == "dppo_kl":
            at_most_1 = min(p, 1 - 1e-6), min(q, 1 - 1e-6)
            gap = at_most_1[1] * math.log(at_most_1[1] / at_most_1[0])
            gap += (1 - at_most_1[1]) * math.log((1 - at_most_1[1]) / (1 - at_most_1[0]))
        bound = self.upper_clip() if A > 0 else self.objective.clip_ratio
        if gap > bound and (p - q) * A > 0:
            return torch.zeros((), dtype=torch.float64), True
        return A * min(p / q, self.objective.dual_clip or math.inf) * self.ratio(t) / (p / q), False

    def off_policy(self, t: int) -> bool:
        if self.rule.off_policy_mask is None or self.tokens.advantages_T[t] >= 0:
            return False
        positions = self.counted(int(self.tokens.segments_T[t]))
        gaps = [
            (self.tokens.behaviour_logprobs_T[u] - self.tokens.logprobs_T[u]).item()
            for u in positions
        ]
        return sum(gaps) / len(gaps) > self.rule.off_policy_mask

    def masks(self, t: int) -> tuple[bool, bool]:
        """Whether the geometric mask and that of the binary KL leave the token out."""
        rule = self.rule.correction
        if rule is None:
            return False, False
        positions = self.counted(int(self.tokens.segments_T[t]))
        mean = math.prod(self.mismatch(u) for u in positions) ** (1 / len(positions))
        low, high = rule.geometric_low or 0.0, rule.geometric_high or math.inf
        p = math.exp(self.tokens.proximal_logprobs_T[t])
        b = math.exp(self.tokens.behaviour_logprobs_T[t])
        p = min(p, 1 - 1e-6)
        b = min(b, 1 - 1e-6)
        kl = p * math.log(p / b) + (1 - p) * math.log((1 - p) / (1 - b))
        return not low <= mean <= high, kl > (rule.binary_kl or math.inf)

    def mismatch(self, t: int) -> float:
        return math.exp(self.tokens.proximal_logprobs_T[t]) / math.exp(
            self.tokens.behaviour_logprobs_T[t]
        )

    def correction(self, t: int) -> tuple[float, bool]:
        rule = self.rule.correction
        if rule is None:
            return 1.0, False
        if any(self.masks(t)):
            return 0.0, True
        positions = {
            "token": [t],
            "sequence": self.counted(int(self.tokens.segments_T[t])),
            None: [],
        }[rule.level]
        weight = 1.0
        for u in positions:
            weight *= self.mismatch(u)
        if rule.mask_low is not None and weight < rule.mask_low:
            return 0.0, True
        if rule.mask_high is not None and weight > rule.mask_high:
            return 0.0, True
        if rule.cap is not None and weight > rule.cap:
            return rule.cap, True
        return weight, False

    def kl(self, t: int) -> Tensor:
        if self.tokens.reference_logprobs_T is None:
            return torch.zeros((), dtype=torch.float64)
        policy = torch.exp(self.logprob(t))
        reference = math.exp(self.tokens.reference_logprobs_T[t])
        positions_by_level = {
            "token": [t],
            "sequence": self.counted(int(self.tokens.segments_T[t])),
            None: [],
        }
        weight = torch.ones((), dtype=torch.float64)
        for u in positions_by_level[self.rule.kl_ratio]:
            weight = weight * torch.exp(self.logprob(u) - self.tokens.behaviour_logprobs_T[u])
        estimate = {
            "k1": torch.log(policy / reference),
            "k2": torch.log(policy / reference) ** 2 / 2,
            "k3": reference / policy - torch.log(reference / policy) - 1,
            "abs": torch.log(policy / reference) * (1 if policy.item() > reference else -1),
        }
        return weight * estimate[self.rule.kl_kind]

    def sums(self) -> dict[str, Tensor]:
        total = {name: torch.zeros((), dtype=torch.float64) for name in SUMS}
        for t in self.counted():
            objective, clipped = self.surrogate(t)
            weight, cut = self.correction(t)
            weight_of_it = 0.0 if self.off_policy(t) else weight
            r = self.ratio(t).item()
            kl = self.kl(t)
            entropy = self.tokens.entropy_T[t]
            objective = (
                weight_of_it * objective - self.rule.kl_coef * kl + self.rule.entropy_coef * entropy
            )
            terms = {
                "loss": -self.tokens.weights_T[t] * objective if self.tokens.learned_T[t] else 0.0,
                "tokens": 1,
                "ratio": r,
                "clipped": clipped,
                "approx_kl": -math.log(r),
                "proximal_kl": r - 1 - math.log(r),
                "reference_kl": kl.item(),
                "entropy": entropy.item(),
                "correction": weight,
                "correction_cut": cut,
                "teacher_kl": 0,
                "masked_geometric": self.masks(t)[0],
                "masked_binary_kl": self.masks(t)[1],
                "masked_off_policy": self.off_policy(t),
            }
            total = {name: total[name] + terms[name] for name in SUMS}
        return total


def drawn_tokens(
    seed: int, lengths: list[int], sampled: float, learned: float, sequence_weights: bool, kl: bool
) -> TokenInputs:
    """A pack of segments of these lengths, with a share `sampled` of sampled tokens.

    About a share `learned` of the sampled ones is learned. All others are NaN."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    new, drift, mismatch, reference, entropy, advantages = torch.randn(
        6, n, dtype=torch.float64, generator=draw
    )
    segments_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sampled_T = torch.rand(n, generator=draw) < sampled
    learned_T = sampled_T & (torch.rand(n, generator=draw) < learned)
    weights_T = sampled_T.double()
    if sequence_weights:
        weights_T = weights_T * torch.rand(len(lengths), generator=draw).double()[segments_T]
    new = torch.where(sampled_T, new, math.nan)
    proximal_T = new + 0.5 * drift
    return TokenInputs(
        logprobs_T=new,
        entropy_T=torch.where(sampled_T, entropy.exp(), math.nan),
        proximal_logprobs_T=proximal_T,
        behaviour_logprobs_T=proximal_T + 0.5 * mismatch,
        reference_logprobs_T=new + reference if kl else None,
        advantages_T=torch.where(sampled_T, advantages, math.nan),
        weights_T=weights_T,
        sampled_T=sampled_T,
        learned_T=learned_T,
        segments_T=segments_T,
        n_segments=len(lengths),
    )


packs = st.builds(
    drawn_tokens,
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    sampled=st.sampled_from([0.0, 0.7, 1.0]),
    learned=st.sampled_from([0.0, 0.7, 1.0]),
    sequence_weights=st.booleans(),
    kl=st.booleans(),
)
corrections = st.builds(
    Correction,
    level=st.sampled_from([None, "token", "sequence"]),
    cap=st.none() | st.floats(1.0, 3.0),
    mask_low=st.none() | st.floats(0.1, 0.9),
    mask_high=st.none() | st.floats(1.1, 3.0),
    geometric_low=st.none() | st.floats(0.5, 0.99),
    geometric_high=st.none() | st.floats(1.01, 2.0),
    binary_kl=st.none() | st.floats(0.001, 0.5),
)
objectives = st.builds(
    ObjectiveSettings,
    loss=st.sampled_from(LOSS_KINDS),
    clip_ratio=st.floats(0.05, 0.9),
    clip_ratio_high=st.none() | st.floats(0.05, 0.9),
    dual_clip=st.none() | st.floats(2.0, 4.0),
    sapo_temperature_pos=st.floats(0.5, 2.0),
    sapo_temperature_neg=st.floats(0.5, 2.0),
)
rules = st.builds(
    LossSettings,
    objective=objectives,
    correction=st.none() | corrections,
    kl_coef=st.floats(0.0, 2.0),
    kl_kind=st.sampled_from(KL_KINDS),
    kl_ratio=st.sampled_from([None, "token", "sequence"]),
    off_policy_mask=st.none() | st.floats(0.1, 0.5),
    entropy_coef=st.sampled_from([0.0, 0.3]),
)


def with_leaves(tokens: TokenInputs) -> tuple[TokenInputs, list[Tensor]]:
    leaves = [tokens.logprobs_T.clone().requires_grad_(), tokens.entropy_T.clone().requires_grad_()]
    return replace(tokens, logprobs_T=leaves[0], entropy_T=leaves[1]), leaves


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    # without any token the book's sum has no gradient at all
    return list(torch.autograd.grad(loss + sum(0.0 * leaf.sum() for leaf in leaves), leaves))


def assert_equals_the_book(pack: TokenInputs, rule: LossSettings) -> None:
    """All sums, and the gradients of log-probs and entropies, are those of the papers' formulas."""
    tokens, leaves = with_leaves(pack)
    got = policy_loss(tokens, rule)
    book_tokens, book_leaves = with_leaves(pack)
    book_sums = Book(book_tokens, rule).sums()
    for name in SUMS:
        torch.testing.assert_close(getattr(got, name), book_sums[name], rtol=1e-10, atol=1e-10)
    for gradient, book_gradient in zip(
        gradients(got.loss, leaves), gradients(book_sums["loss"], book_leaves), strict=True
    ):
        torch.testing.assert_close(gradient, book_gradient, rtol=1e-10, atol=1e-10)


@settings(max_examples=80, deadline=None)
@given(packs, rules)
def test_all_sums_and_gradients_equal_the_papers_formulas(pack: TokenInputs, rule: LossSettings):
    assert_equals_the_book(pack, rule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("clip_ratio_high", [None, 0.4])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_every_loss_is_its_papers_where_all_its_settings_count(
    kind: LossKind, clip_ratio_high: float | None, dual_clip: float | None, seed: int
):
    """Three completions of learned tokens, on both sides of every bound and of both advantages."""
    pack = drawn_tokens(
        seed, lengths=[7, 6, 5], sampled=0.8, learned=0.9, sequence_weights=True, kl=False
    )
    for sign in (-1, 1):
        assert (pack.learned_T & (pack.advantages_T * sign > 0)).sum() >= 3
    objective = ObjectiveSettings(
        loss=kind,
        clip_ratio=0.1,
        clip_ratio_high=clip_ratio_high,
        dual_clip=dual_clip,
        sapo_temperature_pos=1.7,
        sapo_temperature_neg=0.6,
    )
    assert_equals_the_book(pack, LossSettings(objective))


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_an_objective_reads_the_settings_that_its_row_names(kind: LossKind):
    """They change the losses of these packs, and no other does."""
    packs = [
        drawn_tokens(
            seed, lengths=[7, 6, 5], sampled=0.8, learned=0.9, sequence_weights=True, kl=False
        )
        for seed in range(20)
    ]

    def losses(objective: ObjectiveSettings) -> list[float]:
        return [policy_loss(pack, LossSettings(objective)).loss.item() for pack in packs]

    plain = ObjectiveSettings(kind, clip_ratio=0.02, clip_ratio_high=0.02)
    changes = {
        "clip_ratio": 0.3,
        "clip_ratio_high": 0.3,
        "dual_clip": 1.2,
        "sapo_temperature_pos": 1.7,
        "sapo_temperature_neg": 0.6,
    }
    assert ["loss", *changes] == [setting.name for setting in fields(ObjectiveSettings)]
    read = [
        name
        for name, number in changes.items()
        if losses(replace(plain, **{name: number})) != losses(plain)
    ]
    assert read == list(OBJECTIVES[kind].settings)


@settings(max_examples=40, deadline=None)
@given(packs.filter(lambda pack: pack.n_segments > 1), rules, st.data())
def test_a_pack_split_between_segments_gives_the_same_sums_and_gradients(
    pack: TokenInputs, rule: LossSettings, data: st.DataObject
):
    border = data.draw(st.integers(1, pack.n_segments - 1))
    first_T = pack.segments_T < border

    def part(of_T: Tensor, first_segment: int, n_segments: int) -> TokenInputs:
        columns = {
            name: column[of_T] for name, column in vars(pack).items() if isinstance(column, Tensor)
        }
        columns["segments_T"] = columns["segments_T"] - first_segment
        return replace(pack, **columns, n_segments=n_segments)

    whole, leaves = with_leaves(pack)
    parts = [
        with_leaves(part(first_T, 0, border)),
        with_leaves(part(~first_T, border, pack.n_segments - border)),
    ]
    once = policy_loss(whole, rule)
    split = [policy_loss(tokens, rule) for tokens, _ in parts]
    for name in SUMS:
        sums = getattr(split[0], name) + getattr(split[1], name)
        torch.testing.assert_close(sums, getattr(once, name), rtol=1e-12, atol=1e-12)
    by_part = [
        gradients(terms.loss, part_leaves)
        for terms, (_, part_leaves) in zip(split, parts, strict=True)
    ]
    for whole_gradient, *part_gradients in zip(gradients(once.loss, leaves), *by_part, strict=True):
        torch.testing.assert_close(
            torch.cat(part_gradients), whole_gradient, rtol=1e-12, atol=1e-12
        )
