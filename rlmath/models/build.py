"""The models of a run, built from the settings: actors of GRPO and SFT, reference, critic, teacher.

    transformer config -> chunks with the weights of model.path -> wrapped for training -> optimizer
    -> learner

`loss_settings` and `early_stop` turn the settings of the algorithm into the learner's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

from rlmath.algorithms.early_stop import EarlyStop
from rlmath.algorithms.importance_sampling import Correction
from rlmath.algorithms.losses import LossSettings
from rlmath.algorithms.token_selection import TokenRules
from rlmath.checkpoint.hf.weight_map import adapter_rules
from rlmath.checkpoint.hf.weights import load_hf_weights
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config, LoraConfig, OptimizerConfig, TeacherConfig
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models.critic import Critic, CriticLearner
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.learner import Actor, GrpoLearner, SftLearner
from rlmath.models.logprobs import MinTokensMask
from rlmath.models.lora import WithoutAdapters, add_adapters
from rlmath.models.megatron import Recompute, build_chunks, transformer_config, wrap_for_training
from rlmath.models.optimizer import LossScale, build_optimizer, build_scheduler
from rlmath.models.routing import RoutingReplay
from rlmath.models.teacher import Teacher

logger = logging.getLogger(__name__)
CRITIC_LR_FACTOR = 2.0
"""Learning rate of a critic, in that of its policy, where it is not set: VAPO's.

With 5, values of the demo's tokens stayed alike over 1500 updates (docs/benchmarks.md)."""
NO_TEACHER = TeacherConfig()


def build_actor(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    total_updates: int,
    stop_token_ids: tuple[int, ...],
) -> Actor[GrpoLearner]:
    """GRPO's policy with the weights of `model.path`.

    A decaying learning rate ends after `total_updates` optimizer steps."""
    chunks, wrapped, optimizer = _trained_chunks(
        config, shape, mesh, device=device, optimizer=config.optimizer, lora=config.lora
    )
    forward_backward = _as_the_engine(
        config, wrapped, mesh, device, vocab_size=shape.vocab_size, stops=stop_token_ids
    )
    if config.policy.routing_replay != "none":
        forward_backward.routing = RoutingReplay(chunks, mesh, shape.num_experts)
    learner = GrpoLearner(
        forward_backward,
        optimizer,
        build_scheduler(config.optimizer, optimizer, total_updates),
        settings=loss_settings(config.algorithm, config.teacher),
        bounds=early_stop(config.algorithm),
        loss_scale=build_loss_scale(config, device),
    )
    return Actor(learner, chunks)


def build_sft_actor(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, total_updates: int
) -> Actor[SftLearner]:
    """The policy of supervised training.

    Its distribution is the model's own, at temperature 1 and without a mask."""
    chunks, wrapped, optimizer = _trained_chunks(
        config, shape, mesh, device=device, optimizer=config.optimizer, lora=config.lora
    )
    forward_backward = ForwardBackward(wrapped, mesh, device, shape.vocab_size)
    scheduler = build_scheduler(config.optimizer, optimizer, total_updates)
    loss_scale = build_loss_scale(config, device)
    return Actor(SftLearner(forward_backward, optimizer, scheduler, loss_scale=loss_scale), chunks)


def build_reference(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    stop_token_ids: tuple[int, ...],
    actor: Actor,
) -> ForwardBackward:
    """The model to start from, sharded like the actor, without gradients.

    Build it only where KL is used: it holds the memory of its parameters, unless the actor has
    adapters, without which it is the reference."""
    chunks = actor.chunks
    passes = WithoutAdapters
    if not config.lora.rank:
        chunks = _frozen_chunks(
            config, config.model.path, shape, mesh=mesh, device=device, option="model.path"
        )
        passes = ForwardBackward
    stops = stop_token_ids
    vocab_size = shape.vocab_size
    return _as_the_engine(
        config, chunks, mesh, device, vocab_size=vocab_size, stops=stops, passes=passes
    )


def _as_the_engine(
    config: Config,
    chunks: Sequence[Any],
    mesh: Mesh,
    device: Device,
    vocab_size: int,
    stops: tuple[int, ...],
    passes: type[ForwardBackward] = ForwardBackward,
) -> ForwardBackward:
    """Passes of a model at the engine's temperature and with its mask of stop tokens."""
    mask = MinTokensMask(stops, config.rollout.min_new_tokens)
    return passes(
        chunks,
        mesh,
        device,
        vocab_size,
        temperature=config.rollout.temperature,
        min_tokens_mask=mask,
    )


def build_critic(
    config: Config, shape: ModelShape, mesh: Mesh, device: Device, total_updates: int
) -> Critic:
    """The critic of `algorithm.advantage` "gae", laid out like the policy.

    It has the weights of `critic.path`; `shape` is that of `config_json.critic_shape`."""
    settings = critic_optimizer(config)
    path = config.critic.path
    start = ("model.path", config.model.path) if path is None else ("critic.path", path)
    chunks, wrapped, optimizer = _trained_chunks(
        config, shape, mesh, device=device, optimizer=settings, lora=LoraConfig(), start=start
    )
    learner = CriticLearner(
        ForwardBackward(wrapped, mesh, device, shape.vocab_size),
        optimizer,
        build_scheduler(settings, optimizer, total_updates),
        clip=config.critic.clip,
        loss_scale=build_loss_scale(config, device),
    )
    return Critic(learner, chunks)


def critic_optimizer(config: Config) -> OptimizerConfig:
    """The policy's optimizer settings with the critic's learning rate and warm-up.

    `min_lr` is in the same proportion."""
    optimizer = config.optimizer
    critic = config.critic
    lr = CRITIC_LR_FACTOR * optimizer.lr if critic.lr is None else critic.lr
    min_lr = optimizer.min_lr / optimizer.lr * lr
    return replace(optimizer, lr=lr, min_lr=min_lr, warmup_steps=critic.warmup_steps)


@torch.no_grad()
def copy_weights(source: Sequence[GPTModel], target: Sequence[GPTModel]) -> None:
    """Copy the weights of bare chunks to those of another model of the same layout.

    Both are on the device."""
    for source_chunk, target_chunk in zip(source, target, strict=True):
        weights = dict(source_chunk.named_parameters())
        for name, parameter in target_chunk.named_parameters():
            parameter.copy_(weights.pop(name))
        assert not weights, f"the other model has no {sorted(weights)}"


def build_teacher(
    config: Config,
    shape: ModelShape,
    teacher_shape: ModelShape,
    mesh: Mesh,
    device: Device,
    stop_token_ids: tuple[int, ...],
) -> Teacher:
    """The model of `teacher.path`, sharded like the actor, without gradients.

    The actor's shape is `shape`. The teacher's distribution is that of the tokens which both know,
    at the same temperature and with the same mask."""
    assert config.teacher.path is not None
    same_rows = replace(teacher_shape, vocab_size=shape.vocab_size)
    chunks = _frozen_chunks(
        config, config.teacher.path, same_rows, mesh=mesh, device=device, option="teacher.path"
    )
    common = min(shape.vocab_size, teacher_shape.vocab_size)
    return Teacher(
        _as_the_engine(config, chunks, mesh, device, vocab_size=common, stops=stop_token_ids)
    )


def _frozen_chunks(
    config: Config, path: str, shape: ModelShape, mesh: Mesh, device: Device, option: str
) -> list[GPTModel]:
    """This rank's chunks of a model that is only read, with the weights of `path`.

    The setting `option` names the path."""
    megatron = transformer_config(
        shape, mesh, device, parallel=config.parallel, recompute=Recompute()
    )
    chunks = build_chunks(shape, mesh, device, config=megatron)
    load_hf_weights(chunks, path, shape, mesh=mesh, option=option)
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return chunks


def _trained_chunks(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    device: Device,
    optimizer: OptimizerConfig,
    lora: LoraConfig,
    start: tuple[str, str] | None = None,
) -> tuple[list[GPTModel], list[DistributedDataParallel], Any]:
    """The chunks of a model that is trained, bare and wrapped, and their optimizer.

    `start` is the setting that names the folder of its weights, and the folder (None: those of
    `model.path`)."""
    option, path = start or ("model.path", config.model.path)
    policy = config.policy
    recompute = Recompute(
        policy.recompute_granularity, policy.recompute_method, policy.recompute_num_layers
    )
    megatron = transformer_config(
        shape, mesh, device, parallel=config.parallel, recompute=recompute
    )
    chunks = build_chunks(shape, mesh, device, config=megatron, separate_norms=lora.rank > 0)
    load_hf_weights(chunks, path, shape, mesh=mesh, option=option)
    if lora.rank:
        add_adapters(chunks, shape, mesh, device=device, lora=lora, seed=config.run.seed)
    if lora.rank and config.model.adapter_path is not None:
        rules = adapter_rules(shape.architecture, lora.rank, lora.target)
        load_hf_weights(
            chunks,
            config.model.adapter_path,
            shape,
            mesh=mesh,
            option="model.adapter_path",
            rules=rules,
        )
    overlap = optimizer.overlap_grad_reduce
    if overlap is None:
        overlap = device.kind == "cuda"
    wrapped = wrap_for_training(chunks, megatron, optimizer.distributed, overlap)
    return chunks, wrapped, build_optimizer(optimizer, wrapped, device)


def build_loss_scale(config: Config, device: Device) -> LossScale | None:
    """The loss scale; None where gradients need none."""
    if device.params_dtype is not torch.float16:
        return None
    scale = config.optimizer.initial_loss_scale
    if scale is None:
        weight = max(
            config.stages.max_tokens_per_microbatch or [config.policy.max_tokens_per_microbatch]
        )
        if config.algorithm.loss_normalisation != "token":  # a completion's tokens weigh 1 together
            weight = max(1.0, weight / config.rollout.max_new_tokens)
        scale = 2.0 ** math.floor(math.log2(65536 / weight))
    return LossScale(scale, config.optimizer.loss_scale_window)


def loss_settings(algorithm: AlgorithmConfig, teacher: TeacherConfig = NO_TEACHER) -> LossSettings:
    """The loss that the settings name; their words were checked before."""
    correction = None
    if algorithm.importance_correction is not None or algorithm.masks_alone:
        correction = Correction(
            algorithm.importance_correction,
            algorithm.importance_cap,
            algorithm.importance_mask_low,
            mask_high=algorithm.importance_mask_high,
            geometric_low=algorithm.importance_mask_geometric_low,
            geometric_high=algorithm.importance_mask_geometric_high,
            binary_kl=algorithm.importance_mask_binary_kl,
        )
    return LossSettings(
        objective=algorithm,
        correction=correction,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_kind=algorithm.kl_estimator,
        kl_ratio=algorithm.kl_ratio,
        off_policy_mask=algorithm.off_policy_mask,
        entropy_coef=algorithm.entropy_coef,
        teacher_coef=teacher.coef if teacher.path is not None and teacher.loss == "full" else 0.0,
    )


def token_rules(algorithm: AlgorithmConfig) -> TokenRules | None:
    """The choice of tokens that the settings name; None: all alike."""
    if not algorithm.selects_tokens:
        return None
    return TokenRules(
        algorithm.top_entropy_share if algorithm.top_entropy_share < 1 else None,
        algorithm.clip_cov_ratio,
        algorithm.clip_cov_low,
        clip_high=algorithm.clip_cov_high,
        kl_cov=algorithm.kl_cov_ratio,
        kl_coef=algorithm.kl_cov_coef,
    )


def early_stop(algorithm: AlgorithmConfig) -> EarlyStop:
    """The bounds that the settings name."""
    return EarlyStop(
        algorithm.early_stop_ratio, algorithm.early_stop_ratio_low, algorithm.early_stop_kl
    )
