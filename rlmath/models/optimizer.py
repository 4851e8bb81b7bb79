"""Megatron's optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlmath.config.schema import OptimizerConfig
from rlmath.distributed.device import Device


def build_optimizer(
    settings: OptimizerConfig, chunks: Sequence[DistributedDataParallel], device: Device
) -> Any:
    """Megatron's optimizer over this rank's parameters; with `distributed` its state is shared over data-parallel
    ranks. Without Transformer Engine and apex, as on CPU, it is torch's, which steps all tensors of a group in one call
    only where it is asked to."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=settings.kind,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            sgd_momentum=0.0,
            clip_grad=settings.clip_grad,
            params_dtype=device.params_dtype,
            bf16=device.params_dtype is torch.bfloat16,
            use_distributed_optimizer=settings.distributed,
        ),
        list(chunks),
    )
    if USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def build_scheduler(settings: OptimizerConfig, optimizer: Any, total_updates: int) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine; counted in optimizer steps.

    The warm-up starts one part above 0, so that the first step is not lost: with `warmup_steps` 3 the first steps have
    1/4, 2/4, 3/4 and all of the rate.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (settings.warmup_steps + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_updates, settings.warmup_steps + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_updates,
        wd_incr_style="constant",
    )


def learning_rate(optimizer: Any) -> float:
    """The rate of the next optimizer step."""
    return float(optimizer.param_groups[0]["lr"])
