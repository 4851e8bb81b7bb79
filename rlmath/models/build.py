"""The models of a run, built from the settings: the actor of GRPO, that of supervised training, and the reference.

    transformer config -> chunks with the weights of model.path -> wrapped for training -> optimizer -> learner

`loss_settings` and `early_stop` turn the settings of the algorithm into the learner's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import LossSettings
from rlmath.checkpoint.hf.weights import load_hf_weights
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.learner import GrpoLearner, Learner, SftLearner
from rlmath.models.logprobs import MinTokensMask
from rlmath.models.megatron import (
    Recompute,
    build_chunks,
    fuses_gradient_accumulation,
    transformer_config,
    wrap_for_training,
)
from rlmath.models.optimizer import build_optimizer, build_scheduler

L = TypeVar("L", bound=Learner)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Actor(Generic[L]):
    """The learner, and the bare model chunks of this rank, whose weights are synced and exported."""

    learner: L
    chunks: list[GPTModel]

    @property
    def forward_backward(self) -> ForwardBackward:
        return self.learner.forward_backward


def build_actor(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    total_updates: int,
    stop_token_ids: tuple[int, ...],
) -> Actor[GrpoLearner]:
    """The policy of GRPO with the weights of `model.path`; `total_updates` optimizer steps end a decaying learning
    rate."""
    chunks, wrapped, optimizer = _trained_chunks(config, shape, mesh, device)
    mask = MinTokensMask(stop_token_ids, config.rollout.min_new_tokens)
    learner = GrpoLearner(
        ForwardBackward(wrapped, mesh, device, config.rollout.temperature, shape.vocab_size, mask),
        optimizer,
        build_scheduler(config.optimizer, optimizer, total_updates),
        settings=loss_settings(config.algorithm),
        bounds=early_stop(config.algorithm),
    )
    return Actor(learner, chunks)


def build_sft_actor(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, total_updates: int
) -> Actor[SftLearner]:
    """Likewise, for supervised training: the distribution is the model's own, at temperature 1 and without a mask."""
    chunks, wrapped, optimizer = _trained_chunks(config, shape, mesh, device)
    forward_backward = ForwardBackward(wrapped, mesh, device, 1.0, shape.vocab_size, MinTokensMask())
    scheduler = build_scheduler(config.optimizer, optimizer, total_updates)
    return Actor(SftLearner(forward_backward, optimizer, scheduler), chunks)


def build_reference(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, stop_token_ids: tuple[int, ...]
) -> ForwardBackward:
    """The model to start from, sharded like the actor, without gradients. Build it only where KL is used: it holds
    the memory of its parameters."""
    megatron = transformer_config(shape, mesh, device, config.parallel, Recompute())
    chunks = load_chunks(config, shape, mesh, device, megatron)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    mask = MinTokensMask(stop_token_ids, config.rollout.min_new_tokens)
    return ForwardBackward(chunks, mesh, device, config.rollout.temperature, shape.vocab_size, mask)


def _trained_chunks(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device
) -> tuple[list[GPTModel], list[DistributedDataParallel], Any]:
    """The chunks of the model that is trained, wrapped and bare, and their optimizer."""
    if mesh.rank == 0 and device.kind == "cuda" and not fuses_gradient_accumulation(device):
        logger.warning(
            "Gradients are added up in a pass of their own: apex's kernel fused_weight_gradient_mlp_cuda is not "
            "installed (the Dockerfile builds it)"
        )
    megatron = actor_config(config, shape, mesh, device)
    chunks = load_chunks(config, shape, mesh, device, megatron)
    overlap = config.optimizer.overlap_grad_reduce
    if overlap is None:
        overlap = device.kind == "cuda"
    wrapped = wrap_for_training(chunks, megatron, config.optimizer.distributed, overlap)
    return chunks, wrapped, build_optimizer(config.optimizer, wrapped, device)


def actor_config(config: Config, shape: ModelShape, mesh: Mesh, device: Device) -> TransformerConfig:
    """Megatron's description of the model that is trained, with what it recomputes."""
    policy = config.policy
    recompute = Recompute(policy.recompute_granularity, policy.recompute_method, policy.recompute_num_layers)
    return transformer_config(shape, mesh, device, config.parallel, recompute)


def load_chunks(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, megatron: TransformerConfig
) -> list[GPTModel]:
    """This rank's model chunks with the weights of `model.path`."""
    chunks = build_chunks(shape, mesh, device, megatron)
    load_hf_weights(chunks, config.model.path, shape, mesh)
    return chunks


def loss_settings(algorithm: AlgorithmConfig) -> LossSettings:
    """The loss that the settings name; their words were checked before."""
    correction = None
    if algorithm.importance_correction is not None or algorithm.masks_alone:
        correction = Correction(
            algorithm.importance_correction,
            algorithm.importance_cap,
            algorithm.importance_mask_low,
            algorithm.importance_mask_high,
            algorithm.importance_mask_geometric_low,
            algorithm.importance_mask_geometric_high,
            algorithm.importance_mask_binary_kl,
        )
    high = algorithm.clip_ratio if algorithm.clip_ratio_high is None else algorithm.clip_ratio_high
    return LossSettings(
        kind=algorithm.loss,
        clip_low=algorithm.clip_ratio,
        clip_high=high,
        dual_clip=algorithm.dual_clip,
        correction=correction,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_kind=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )


def early_stop(algorithm: AlgorithmConfig) -> EarlyStop:
    """The bounds that the settings name."""
    return EarlyStop(algorithm.early_stop_ratio, algorithm.early_stop_ratio_low, algorithm.early_stop_kl)
