"""Settings that change nothing in a run, or less than one may think.

None is an error; all are logged at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmath.config.help import all_settings, as_yaml_word, setting_values
from rlmath.config.load import preset_values, recorded_settings
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    SelectionConfig,
)
from rlmath.distributed.device_kind import number_format, resolve_kind
from rlmath.planning.sensible_values import doubtful_values
from rlmath.planning.setting_tables import doubts, without_effect
from rlmath.rewards.several_rewards import functions_of, is_verified

LORA_LEAST_LR = 5e-6
"""Learning rate below which optimizer.lr is one of full training.

1e-6 to 3e-6 are usual for billions of weights."""


def config_warnings(
    config: Config, unused: Sequence[str] = (), parameters: int | None = None
) -> list[str]:
    """Warnings about settings that change nothing in this run, or less than one may think.

    Numbers that are hardly meant are among them. `unused` are those of `only_used`, `parameters`
    those of the model, if it is known."""
    messages = [f"Without effect in supervised training: {', '.join(unused)}."] if unused else []
    values = setting_values(config)
    defaults = setting_values(Config())
    changed = [key for key in all_settings() if values[key] != defaults[key]]
    messages += [*without_effect(config, changed), *doubts(config)]
    messages += doubtful_values(config, parameters)
    if config.lora.rank and config.optimizer.lr < LORA_LEAST_LR:
        messages.append(
            f"optimizer.lr={config.optimizer.lr:g} is a learning rate of full training, and with "
            "lora.rank="
            f"{config.lora.rank} teaches little: adapters want some ten times as much, 1e-5 to "
            "1e-4."
        )
    engine_format = number_format(config.policy.dtype, resolve_kind(config.run.device))
    if config.lora.rank and config.lora.engine == "merged" and engine_format != "float32":
        messages.append(
            f'lora.engine="merged" rounds the engines\' weights to {engine_format}, which loses most '
            "of the first steps' small updates (docs/lora.md). lora.engine=adapters keeps them."
        )
    if config.lora.rank and config.algorithm.advantage == "gae" and config.critic.lr is None:
        messages.append(
            f"critic.lr is twice optimizer.lr={config.optimizer.lr:g}, a learning rate of "
            "adapters, and all weights of "
            "the critic learn. Give it one of full training, such as critic.lr=2e-6."
        )
    if config.model.adapter_path is not None and config.algorithm.kl_coef > 0:
        messages.append(
            "the reference is model.path without the adapters of model.adapter_path: KL is not 0 "
            "at the start. To stay "
            "near that start, merge them into model.path."
        )
    preset = preset_values(config)
    messages += _preset_warnings(config, preset)
    longest = max(config.stages.max_new_tokens or [config.rollout.max_new_tokens])
    messages += _rollout_warnings(config.rollout, config.algorithm, longest)
    return [*messages, *_reward_warnings(config.reward, config.selection, preset)]


def _preset_warnings(config: Config, preset: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about preset settings that a resuming run keeps as they were at its beginning.

    They were as the preset had them then, or overridden."""
    if config.algorithm.preset is None or config.run.recover_mode == "disabled":
        return
    values = setting_values(config)
    recorded = recorded_settings(config.run.output_dir, config.algorithm.preset)
    kept_keys = [
        key for key in preset if key in recorded and values[key] == recorded[key] != preset[key]
    ]
    if kept_keys:
        yield (
            f"algorithm.preset={config.algorithm.preset}: kept as the run in "
            f"{config.run.output_dir} has recorded it: "
            + ", ".join(
                f"{key}={as_yaml_word(values[key])} (the preset has {as_yaml_word(preset[key])})"
                for key in kept_keys
            )
        )


def _rollout_warnings(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, longest: int
) -> Iterator[str]:
    """Warnings about partial rollouts that fit the other settings badly.

    The loss of a run that learns from tokens of older versions is among them. `longest` is the most
    tokens of a completion to learn from."""
    odd_steps = rollout.tail == "defer" or (rollout.tail == "carry" and rollout.max_staleness > 1)
    if algorithm.advantage in ("ppo", "reinforce++", "gae") and odd_steps:
        yield (
            f'algorithm.advantage="{algorithm.advantage}" compares a completion with all of its '
            "step, and with "
            f'rollout.tail="{rollout.tail}" and rollout.max_staleness={rollout.max_staleness} '
            "some steps have more of "
            'the short groups and others more of the long ones: take rollout.tail="carry" with '
            'rollout.max_staleness=1, or advantages of a group ("grpo", "dr_grpo", "rloo").'
        )
    if rollout.tail == "defer" and (rollout.slice_tokens or 0) >= longest:
        yield (
            f"rollout.slice_tokens={rollout.slice_tokens} is no less than the longest completion "
            f"({longest} tokens): "
            "nothing is deferred."
        )
    has_old_tokens = rollout.max_staleness > 0 and (rollout.tail == "carry" or rollout.ranks > 0)
    if has_old_tokens and not algorithm.recompute_logprobs:
        yield (
            "algorithm.recompute_logprobs=false with "
            f"rollout.max_staleness={rollout.max_staleness}: the loss clips "
            "the ratio to the versions that sampled the tokens, and tokens that the policy has "
            "moved away from since "
            "give no gradient. configs/algorithms/decoupled.yaml has the loss that is made for "
            "old tokens."
        )
    several = algorithm.n_minibatches * algorithm.epochs > 1
    if several and not has_old_tokens and algorithm.recompute_logprobs and not algorithm.recomputes:
        yield (
            'algorithm.proximal_logprobs="interpolate" without tokens of older weights '
            "(rollout.max_staleness with "
            "rollout.ranks or rollout.tail=carry): from a step's second update on the ratio is to "
            "the engine's "
            "log-probs."
        )


def _reward_warnings(
    reward: RewardConfig, selection: SelectionConfig, preset: Mapping[str, Any]
) -> Iterator[str]:
    """Warnings about settings of `reward` and `selection` that hardly do what is meant."""
    own_scheme = preset.get("reward.scheme", RewardConfig.scheme) != reward.scheme
    if reward.rewards and own_scheme and not is_verified(reward):
        yield (
            "reward.scheme: no effect with reward.rewards that do not list correctness, whose "
            "scheme it is."
        )
    functions = functions_of(reward)
    if selection.dynamic_sampling == "accuracy" and functions and not is_verified(reward):
        yield (
            f'selection.dynamic_sampling="accuracy" with {next(iter(functions))}: an answer '
            "counts as right where its "
            'metric "correct" is above 0, without one where its reward is. With partial credit '
            "whole groups are right "
            'and are dropped: return "correct", or take selection.dynamic_sampling=reward.'
        )
    if selection.resample_to is not None and functions and not is_verified(reward):
        yield (
            f"selection.resample_to with {next(iter(functions))}: an answer counts as right where "
            'its metric "correct" is above 0, without one where its reward is. Return "correct".'
        )
