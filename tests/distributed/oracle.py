"""The same GRPO step in plain torch with transformers: one process, no packing, no sharding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample

TEMPERATURE = 0.8


def load(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def completion_logprobs(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Log-probs of a completion's tokens at TEMPERATURE."""
    return completion_terms(model, sample)[0]


def completion_terms(model: torch.nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probs of a completion's tokens and entropies of their distributions at TEMPERATURE."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    all_logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / TEMPERATURE, -1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    start = len(sample.prompt_ids) - 1
    return all_logprobs.gather(1, ids[1:, None])[start:, 0], entropy[start:]


def loss(
    model: torch.nn.Module,
    samples: list[Sample],
    kl_coef: float = 0.0,
    reference: torch.nn.Module | None = None,
    kind: str = "clip",
    normalisation: str = "token",
    entropy_coef: float = 0.0,
    off_policy_mask: float | None = None,
    kl_ratio: str | None = None,
) -> Tensor:
    """The losses of docs/algorithm.md as the papers write them, sample by sample.

    The KL is k3; the mean is over tokens or over the samples' means. With `kl_ratio` a tenth of the
    KL to the policy that sampled is added."""
    total = torch.zeros(())
    count = 0
    for sample in samples:
        logprobs, entropy = completion_terms(model, sample)
        log_ratio = logprobs - torch.tensor(sample.behaviour_logprobs)
        per_token = _surrogate(kind, logprobs, log_ratio, sample.advantage)
        if (
            off_policy_mask is not None
            and sample.advantage < 0
            and -log_ratio.mean() > off_policy_mask
        ):
            per_token = 0.0 * per_token
        per_token = per_token - entropy_coef * entropy
        if reference is not None:
            with torch.no_grad():
                ref = completion_logprobs(reference, sample)
            per_token = per_token + kl_coef * ((ref - logprobs).exp() - (ref - logprobs) - 1)
        if kl_ratio is not None:
            weight = (log_ratio if kl_ratio == "token" else log_ratio.sum()).clamp(-20, 20).exp()
            per_token = per_token + 0.1 * weight * ((-log_ratio).exp() + log_ratio - 1)
        total = total + (per_token.sum() if normalisation == "token" else per_token.mean())
        count += len(sample.completion_ids) if normalisation == "token" else 1
    return total / count


def _surrogate(kind: str, logprobs: Tensor, log_ratio: Tensor, advantage: float) -> Tensor:
    if kind == "cispo":
        return -log_ratio.detach().exp().clamp(0.8, 1.2) * advantage * logprobs
    if kind == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantage
    if kind == "dppo_tv":
        probability = logprobs.detach().exp()
        moved = probability - probability / log_ratio.detach().exp()
        return torch.where(
            (moved * advantage > 0) & (moved.abs() > 0.2), 0.0, -log_ratio.exp() * advantage
        )
    if kind == "dppo_kl":
        p, q = logprobs.detach().exp(), (logprobs - log_ratio).detach().exp()
        divergence = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        away = ((p - q) * advantage > 0) & (divergence > 0.2)
        return torch.where(away, 0.0, -log_ratio.exp() * advantage)
    if kind == "gmpo":
        cut = log_ratio.clamp(max=0.2) if advantage > 0 else log_ratio.clamp(min=-0.2)
        return (-cut.mean().exp() * advantage).expand_as(logprobs)
    ratio = (log_ratio.mean() if kind == "gspo" else log_ratio).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -surrogate.expand_as(logprobs)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
