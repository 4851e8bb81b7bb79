"""The policy that learns: model, optimizer and schedule, built from the settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlmath.checkpoint.hf_io import load_hf_weights
from rlmath.config import Config
from rlmath.model_shape import ModelShape
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.policy.executor import Executor
from rlmath.policy.learner import Learner, LossSettings
from rlmath.policy.logprobs import HeldBack
from rlmath.policy.model import Recompute, build_model, transformer_config, wrap_for_training
from rlmath.policy.optimizer import build_optimizer, build_scheduler


@dataclass(frozen=True)
class Actor:
    """The learner, and the bare model whose weights are synced and exported."""

    learner: Learner
    model: torch.nn.Module

    @property
    def executor(self) -> Executor:
        return self.learner.executor


def build_actor(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    total_updates: int,
    stop_token_ids: tuple[int, ...],
) -> Actor:
    """The actor with the weights of `model.path`; `total_updates` optimizer steps end a decaying learning rate."""
    recompute = Recompute(
        config.policy.recompute_granularity,
        config.policy.recompute_method,
        config.policy.recompute_num_layers,
    )
    megatron = transformer_config(shape, mesh, device, config.parallel.sequence, recompute)
    model = build_model(shape, mesh, device, megatron)
    load_hf_weights(model, config.model.path, shape, mesh)
    wrapped = wrap_for_training(model, megatron, config.optimizer.distributed)
    optimizer = build_optimizer(config.optimizer, wrapped, device)
    scheduler = build_scheduler(config.optimizer, optimizer, total_updates)
    settings = LossSettings(
        config.algorithm.clip_ratio,
        config.algorithm.kl_coef,
        config.algorithm.early_stop_ratio,
        config.algorithm.early_stop_ratio_low,
    )
    held_back = HeldBack(stop_token_ids, config.rollout.min_new_tokens)
    executor = Executor(wrapped, mesh, device, config.rollout.temperature, shape.vocab_size, held_back)
    return Actor(Learner(executor, optimizer, scheduler, settings), model)
