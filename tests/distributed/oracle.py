"""The same GRPO step in plain torch with transformers: one process, no packing, no sharding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlmath.types import Sample

TEMPERATURE = 0.8


def load(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def completion_logprobs(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Log-probs of a completion's tokens at TEMPERATURE."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(ids[None]).logits[0].float() / TEMPERATURE
    all_logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
    return all_logprobs[len(sample.prompt_ids) - 1 :]


def loss(
    model: torch.nn.Module,
    samples: list[Sample],
    kl_coef: float = 0.0,
    reference: torch.nn.Module | None = None,
) -> Tensor:
    """Token-mean clipped surrogate plus k3 KL, as the papers write it."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        logprobs = completion_logprobs(model, sample)
        ratio = (logprobs - torch.tensor(sample.behaviour_logprobs)).exp()
        surrogate = torch.min(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        total = total - surrogate.sum()
        if reference is not None:
            with torch.no_grad():
                ref = completion_logprobs(reference, sample)
            total = total + kl_coef * ((ref - logprobs).exp() - (ref - logprobs) - 1).sum()
        tokens += len(sample.completion_ids)
    return total / tokens


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
