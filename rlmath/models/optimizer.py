"""Megatron's optimizer and learning-rate schedule from our settings; the loss scale of float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Megatron's optimizer over this rank's parameters.

    With the setting `distributed` its state is shared over data-parallel ranks."""
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
            fp16=device.params_dtype is torch.float16,
            loss_scale=1.0
            if device.params_dtype is torch.float16
            else None,  # the learner's is `LossScale`
            use_distributed_optimizer=settings.distributed,
        ),
        list(chunks),
    )
    if USING_PYTORCH_OPTIMIZER:  # one call steps all tensors of a group only where it is asked to
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


LEAST_LOSS_SCALE = 2**-8
"""Gradients of weights are sums over the tokens of a micro-batch, and may overflow at 1."""


@dataclass
class LossScale:
    """Factor of a loss before a backward pass in float16, which has nothing between 0 and 6e-8.

    Gradients are divided by it afterwards; a power of two costs them no bit. It halves where
    gradients overflow. Megatron has a scale in each optimizer: that of a model's experts could
    differ from that of the rest."""

    scale: float
    window: int
    """Updates without an overflow after which it doubles."""
    clean_updates: int = 0
    """Updates without an overflow since it last changed."""

    def update(self, overflow: bool) -> bool:
        """Adapt it after a backward pass; whether it was too large, never at `LEAST_LOSS_SCALE`.

        >>> scale = LossScale(4.0, window=2)
        >>> [(scale.update(one), scale.scale) for one in (True, False, False, False)]
        [(True, 2.0), (False, 2.0), (False, 4.0), (False, 4.0)]
        >>> LossScale(LEAST_LOSS_SCALE, window=2).update(True)
        False
        """
        if overflow and self.scale <= LEAST_LOSS_SCALE:
            return False
        self.clean_updates = 0 if overflow else self.clean_updates + 1
        if overflow:
            self.scale /= 2
        elif self.clean_updates == self.window:
            self.scale = 2 * self.scale
            self.clean_updates = 0
        return overflow


def build_scheduler(
    settings: OptimizerConfig, optimizer: Any, total_updates: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine; counted in optimizer steps.

    With `warmup_steps` 3 the first steps have 1/4, 2/4, 3/4 and all of the rate."""
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
