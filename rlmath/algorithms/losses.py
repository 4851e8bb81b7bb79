"""The losses of the GRPO family over packed tokens: sums, never means.

Pure functions.

Every sampled token has a weight; Megatron divides the sum over all micro-batches and ranks by one
global number per minibatch (`Normalisation` has both).

| kind | loss of a token with ratio r and advantage A | source |
|---|---|---|
| "clip" | max(-A r, -A clip(r)), at most -A * dual_clip where A < 0 | PPO, arXiv:1707.06347, eq. 7 |
| "gspo" | the same with the geometric mean of the completion's ratios as r | GSPO-token, arXiv:2507.18071 |
| "cispo" | -A sg[clip(r)] log policy, sg without gradient | CISPO (MiniMax-M1), arXiv:2506.13585 |
| "gmpo" | as "gspo", with every ratio clipped before the mean | GMPO, arXiv:2507.20673, eq. 4 |
| "sapo" | -A 4 / tau sigmoid(tau (r - 1)) | SAPO, arXiv:2511.20347 |
| "dppo_tv" | -A r, 0 where r moves away and abs(p - q) is above its bound | DPPO, arXiv:2602.04879 |
| "dppo_kl" | the same with the binary KL(q, p) | DPPO, arXiv:2602.04879 |

clip(r) is r clipped to 1 - clip_ratio .. 1 + clip_ratio_high (two bounds: DAPO, arXiv:2503.14476;
dual clip: arXiv:1912.09729); "gmpo" clips log r to -clip_ratio .. clip_ratio_high, in the direction
that the advantage pushes. "dppo_*": p and q are the token's probabilities now and at the step's
start, the bound is clip_ratio_high where A > 0 (and p > q), clip_ratio where A < 0 (and p < q); the
gradient's r is at most dual_clip.

Only sampled tokens count, in sums and in what is taken over a completion: other entries may hold
anything, even NaN, and reach neither value nor gradient. Sampled tokens that are not learned count
like all others, but add nothing to the loss, and no gradient reaches them.
"""

# Shape legend: T packed tokens.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlmath.algorithms.importance_sampling import (
    MOST_LOG_WEIGHT,
    Correction,
    CorrectionLevel,
    binary_kl,
    corrected,
    segment_sums,
    sequence_log_ratio,
    uncorrected,
)
from rlmath.algorithms.kl import KLKind, kl_estimate
from rlmath.config.objectives import LossKind, ObjectiveSettings

LOSS_KINDS: tuple[str, ...] = get_args(LossKind)
NormalisationKind = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class LossSettings:
    """What shapes the loss; see `AlgorithmConfig`."""

    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """The surrogate, its bounds and temperatures."""
    correction: Correction | None = None
    """Correction for the difference between engine and trainer; None: the surrogate as it is."""
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_ratio: CorrectionLevel | None = None
    """Level at which the KL is weighed by policy / behaviour, with gradient.

    It is that of the token, or their product over the completion (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    entropy_coef: float = 0.0
    teacher_coef: float = 0.0
    """Weight of the KL to a teacher over the whole vocabulary."""
    off_policy_mask: float | None = None
    """Largest mean of log behaviour - log policy (nats; DeepSeek-V3.2, arXiv:2512.02556).

    Completions with a negative advantage are left out of the surrogate above it."""


@dataclass(frozen=True)
class Normalisation:
    """How the losses of a minibatch's tokens become one number.

    It is the sum over tokens of weight times loss, divided by the sum over samples of `count`, both
    over all ranks and micro-batches.

    | kind | loss of a minibatch | source |
    |---|---|---|
    | "token" | mean over all its tokens | DAPO, arXiv:2503.14476 |
    | "sequence" | mean over samples of the mean over their tokens | GRPO, arXiv:2402.03300 |
    | "constant" | mean over samples of (sum over their tokens / constant) | Dr. GRPO, arXiv:2503.20783 |

    >>> Normalisation("sequence").weight(n_tokens=4), Normalisation("sequence").count(n_tokens=4)
    (0.25, 1)
    """

    kind: NormalisationKind = "token"
    constant: int = 1
    """Tokens that "constant" divides by: the longest completion that may be."""

    def weight(self, n_tokens: int) -> float:
        """The weight of each of a completion's `n_tokens` tokens."""
        if self.kind == "sequence":
            return 1.0 / n_tokens if n_tokens else 0.0
        return 1.0 / self.constant if self.kind == "constant" else 1.0

    def count(self, n_tokens: int) -> int:
        """What a completion of `n_tokens` tokens adds to the denominator."""
        return n_tokens if self.kind == "token" else 1


TOKEN_MEAN = Normalisation()


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of the loss for every token.

    Log-probs and entropies in nats."""

    logprobs_T: Float[Tensor, "T"]
    """Log-probs of the policy now, with gradient."""
    entropy_T: Float[Tensor, "T"]
    """Entropy of the policy's distribution now; with gradient where it is part of the loss."""
    proximal_logprobs_T: Float[Tensor, "T"]
    """Log-probs of the policy at the start of the step, the importance ratio's denominator.

    They are the engine's where they were not recomputed."""
    behaviour_logprobs_T: Float[Tensor, "T"]
    """Log-probs of the engine that sampled."""
    reference_logprobs_T: Float[Tensor, "T"] | None
    """Log-probs of the reference; None without KL."""
    advantages_T: Float[Tensor, "T"]
    weights_T: Float[Tensor, "T"]
    """Weight of each sampled token in the loss."""
    sampled_T: Bool[Tensor, "T"]
    """Tokens that the model produced."""
    learned_T: Bool[Tensor, "T"]
    """Sampled tokens that have weight in the gradient."""
    segments_T: Int[Tensor, "T"]
    """Segment (sample) of the pack that the token is in, from 0."""
    n_segments: int
    teacher_kl_T: Float[Tensor, "T"] | None = None
    """KL(policy || teacher) of the whole distributions, with gradient.

    None without a teacher, or where its log-probs are in the advantages."""
    penalty_T: Float[Tensor, "T"] | None = None
    """Weight of abs(log policy - log proximal) in the loss of each token; None: nowhere."""


@dataclass(frozen=True)
class TokenLoss:
    """Sums over the tokens of one micro-batch.

    All but `loss` are without gradient and count every sampled token once, learned or not, whatever
    its weight in the loss."""

    loss: Float[Tensor, ""]
    """Surrogate, weighted KLs and entropy bonus of the learned tokens, weighted; with gradient."""
    tokens: Float[Tensor, ""]
    ratio: Float[Tensor, ""]
    """Ratios of single tokens to the proximal policy, for every kind of loss."""
    clipped: Float[Tensor, ""]
    """Tokens whose gradient the clip took or, for "cispo", limited."""
    approx_kl: Float[Tensor, ""]
    """Proximal log-prob minus new: the k1 estimate of KL(proximal || new)."""
    proximal_kl: Float[Tensor, ""]
    """The k3 estimate of the same, never negative."""
    reference_kl: Float[Tensor, ""]
    """The chosen estimate of KL(policy || reference)."""
    entropy: Float[Tensor, ""]
    correction: Float[Tensor, ""]
    """Weights for the difference between engine and trainer; 1 per token without them."""
    correction_cut: Float[Tensor, ""]
    """Tokens whose such weight was capped or masked."""
    teacher_kl: Float[Tensor, ""]
    """KL(policy || teacher) of the whole distributions; 0 where it is no part of the loss."""
    masked_geometric: Float[Tensor, ""]
    """Tokens that the geometric mask left out."""
    masked_binary_kl: Float[Tensor, ""]
    """Tokens that the mask of the binary KL left out."""
    masked_off_policy: Float[Tensor, ""]
    """Tokens of completions that `off_policy_mask` left out."""


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a surrogate for every token.

    Log-probs and advantages are 0 for tokens that do not count."""

    new_T: Float[Tensor, "T"]
    """Log-probs of the policy now, with the gradient of learned tokens."""
    log_ratio_T: Float[Tensor, "T"]
    """Log of the ratio to the proximal policy, with the same gradient."""
    advantages_T: Float[Tensor, "T"]
    counted_T: Bool[Tensor, "T"]
    segments_T: Int[Tensor, "T"]
    n_segments: int

    def sequence_mean(self, log_ratio_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        """Mean of the log ratios of each token's completion."""
        return sequence_log_ratio(log_ratio_T, self.counted_T, self.segments_T, self.n_segments)


@dataclass(frozen=True)
class Surrogate:
    """The policy-gradient loss of every token, and where it was clipped."""

    loss_T: Float[Tensor, "T"]
    clipped_T: Bool[Tensor, "T"]


def policy_loss(tokens: TokenInputs, settings: LossSettings) -> TokenLoss:
    """The loss of one micro-batch, as the module's table has it."""
    counted_T = tokens.sampled_T
    learned_T = tokens.learned_T
    new_T = torch.where(
        learned_T, tokens.logprobs_T, torch.where(counted_T, tokens.logprobs_T.detach(), 0.0)
    )
    proximal_T = torch.where(counted_T, tokens.proximal_logprobs_T, 0.0)
    entropy_T = torch.where(counted_T, tokens.entropy_T, 0.0)
    log_ratio_T = new_T - proximal_T
    inputs = SurrogateInputs(
        new_T=new_T,
        log_ratio_T=log_ratio_T,
        advantages_T=torch.where(counted_T, tokens.advantages_T, 0.0),
        counted_T=counted_T,
        segments_T=tokens.segments_T,
        n_segments=tokens.n_segments,
    )
    surrogate = SURROGATES[settings.objective.loss](inputs, settings.objective)
    correction = uncorrected(counted_T, proximal_T)
    behaviour_T = torch.where(counted_T, tokens.behaviour_logprobs_T, 0.0)
    if settings.correction is not None:
        correction = corrected(
            proximal_T,
            behaviour_T,
            counted_T=counted_T,
            segments_T=tokens.segments_T,
            n_segments=tokens.n_segments,
            correction=settings.correction,
        )
    loss_T = surrogate.loss_T * correction.weights_T
    off_policy_T = torch.zeros_like(counted_T)
    if settings.off_policy_mask is not None:
        drift_T = inputs.sequence_mean(behaviour_T - new_T.detach())
        off_policy_T = counted_T & (tokens.advantages_T < 0) & (drift_T > settings.off_policy_mask)
        loss_T = torch.where(off_policy_T, 0.0, loss_T)
    if tokens.penalty_T is not None:
        loss_T = loss_T + tokens.penalty_T * log_ratio_T.abs()
    kl_T = torch.zeros_like(new_T)
    if tokens.reference_logprobs_T is not None:
        reference_T = torch.where(counted_T, tokens.reference_logprobs_T, 0.0)
        kl_T = kl_estimate(settings.kl_kind, new_T, reference_T)
        if settings.kl_ratio is not None:
            log_weight_T = new_T - behaviour_T
            if settings.kl_ratio == "sequence":
                log_weight_T = segment_sums(log_weight_T, tokens.segments_T, tokens.n_segments)[
                    tokens.segments_T
                ]
            kl_T = kl_T * log_weight_T.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
        loss_T = loss_T + settings.kl_coef * kl_T
    if settings.entropy_coef:
        loss_T = loss_T - settings.entropy_coef * entropy_T
    teacher_kl_T = torch.zeros_like(new_T)
    if tokens.teacher_kl_T is not None:
        teacher_kl_T = torch.where(counted_T, tokens.teacher_kl_T, 0.0)
        loss_T = loss_T + settings.teacher_coef * teacher_kl_T

    def total(values_T: Tensor) -> Tensor:
        return torch.where(counted_T, values_T.detach(), 0.0).sum()

    return TokenLoss(
        loss=torch.where(learned_T, loss_T * tokens.weights_T, 0.0).sum(),
        tokens=total(torch.ones_like(new_T)),
        ratio=total(log_ratio_T.exp()),
        clipped=total(surrogate.clipped_T.to(new_T.dtype)),
        approx_kl=total(-log_ratio_T),
        proximal_kl=total(kl_estimate("k3", proximal_T, new_T)),
        reference_kl=total(kl_T),
        entropy=total(entropy_T),
        correction=total(correction.weights_T),
        correction_cut=total(correction.cut_T.to(new_T.dtype)),
        teacher_kl=total(teacher_kl_T),
        masked_geometric=total(correction.masked_geometric_T.to(new_T.dtype)),
        masked_binary_kl=total(correction.masked_binary_kl_T.to(new_T.dtype)),
        masked_off_policy=total(off_policy_T.to(new_T.dtype)),
    )


def _clip_high(settings: ObjectiveSettings) -> float:
    """The clip's upper bound."""
    return settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high


def _clip(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """PPO's surrogate, clipped on both sides, with `dual_clip` where it is set."""
    return _clipped_surrogate(inputs.log_ratio_T.exp(), inputs.advantages_T, settings)


def _bounded(ratio_T: Float[Tensor, "T"], settings: ObjectiveSettings) -> Float[Tensor, "T"]:
    """Ratios within the clip's range."""
    return ratio_T.clamp(1.0 - settings.clip_ratio, 1.0 + _clip_high(settings))


def _gspo(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """The surrogate of "clip" with the geometric mean of a completion's ratios."""
    sequence_T = inputs.sequence_mean(inputs.log_ratio_T)
    # GSPO-token: the value is the sequence's, each token's gradient is weighted by its own
    # advantage.
    ratio_T = sequence_T.detach().exp() * (inputs.new_T - inputs.new_T.detach()).exp()
    return _clipped_surrogate(ratio_T, inputs.advantages_T, settings)


def _clipped_surrogate(
    ratio_T: Float[Tensor, "T"], advantages_T: Float[Tensor, "T"], settings: ObjectiveSettings
) -> Surrogate:
    """PPO's surrogate of these ratios, clipped on both sides."""
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * _bounded(ratio_T, settings)
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_T = bounded_T > plain_T
    if settings.dual_clip is not None:
        most_T = -advantages_T * settings.dual_clip
        over_T = (advantages_T < 0) & (loss_T > most_T)
        loss_T = torch.where(over_T, most_T, loss_T)
        clipped_T = clipped_T | over_T
    return Surrogate(loss_T, clipped_T)


def _cispo(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """The log-prob's gradient, weighted by the clipped ratio."""
    ratio_T = inputs.log_ratio_T.detach().exp()
    cut_T = _bounded(ratio_T, settings)
    return Surrogate(-inputs.advantages_T * cut_T * inputs.new_T, cut_T != ratio_T)


def _gmpo(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """The geometric mean of ratios that were clipped before it.

    Value and gradient are those of the paper where all tokens of a completion have one advantage.
    """
    cut_T = torch.where(
        inputs.advantages_T > 0,
        inputs.log_ratio_T.clamp(max=_clip_high(settings)),
        inputs.log_ratio_T.clamp(min=-settings.clip_ratio),
    )
    mean_T = inputs.sequence_mean(cut_T.detach())
    ratio_T = mean_T.exp() * (cut_T - cut_T.detach()).exp()
    return Surrogate(-inputs.advantages_T * ratio_T, cut_T != inputs.log_ratio_T)


def _sapo(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """A soft gate of the ratio, whose temperature depends on the advantage's sign."""
    ratio_T = inputs.log_ratio_T.exp()
    tau_T = torch.full_like(ratio_T, settings.sapo_temperature_neg)
    tau_T = torch.where(inputs.advantages_T > 0, settings.sapo_temperature_pos, tau_T)
    gate_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    return Surrogate(-inputs.advantages_T * gate_T, torch.zeros_like(inputs.counted_T))


def _dppo(inputs: SurrogateInputs, settings: ObjectiveSettings) -> Surrogate:
    """The loss and its mask of "dppo_tv" and "dppo_kl".

    The mask looks at probabilities, so that improbable tokens may move far."""
    advantages_T = inputs.advantages_T
    now_T = inputs.new_T.detach()
    before_T = now_T - inputs.log_ratio_T.detach()
    gap_T = now_T.exp() - before_T.exp()
    divergence_T = gap_T.abs() if settings.loss == "dppo_tv" else binary_kl(before_T, now_T)
    leaves_T = torch.where(
        advantages_T > 0,
        (gap_T > 0) & (divergence_T > _clip_high(settings)),
        (gap_T < 0) & (divergence_T > settings.clip_ratio) & (advantages_T < 0),
    )
    weight_T = (now_T - before_T).exp()
    if settings.dual_clip is not None:
        weight_T = weight_T.clamp(max=settings.dual_clip)
    masked_weight_T = torch.where(leaves_T, 0.0, weight_T)
    loss_T = -advantages_T * masked_weight_T * (inputs.new_T - now_T).exp()
    return Surrogate(loss_T, leaves_T)


SURROGATES: dict[LossKind, Callable[[SurrogateInputs, ObjectiveSettings], Surrogate]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
}
"""The formula of every kind of loss."""
