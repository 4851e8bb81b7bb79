"""Settings that change nothing in a run, or less than one may think: none is an error, all are told at the start.

`UNUSED` is the table of the first kind. The other functions have the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmath.config.help import all_settings, as_yaml_word, is_among, setting_values
from rlmath.config.load import preset_settings
from rlmath.config.schema import Config
from rlmath.planning.model_checks import teaches_alone
from rlmath.rewards.several_rewards import functions_of, is_verified

UNUSED = """
parallel.sequence: with parallel.tensor=1
lora.alpha lora.target: with lora.rank=0; all weights learn
memory.offload_reference: with lora.rank and with algorithm.kl_coef; the reference is the policy without its adapters
optimizer.min_lr: with optimizer.decay=constant
algorithm.loss algorithm.clip_ratio algorithm.clip_ratio_high algorithm.dual_clip algorithm.early_stop_ratio_low
    algorithm.early_stop_kl algorithm.kl_cov_ratio algorithm.kl_cov_coef algorithm.sapo_temperature_pos
    algorithm.sapo_temperature_neg algorithm.proximal_logprobs:
    with algorithm.n_minibatches=1 and with algorithm.epochs=1 and with algorithm.recompute_logprobs;
    one minibatch a step is learned from before the policy changes, and every importance ratio is 1
algorithm.dual_clip: with algorithm.loss=cispo,gmpo,sapo
algorithm.clip_ratio algorithm.clip_ratio_high: with algorithm.loss=sapo; its gate has no bounds
algorithm.proximal_logprobs: with algorithm.recompute_logprobs=false
algorithm.pass_k: without algorithm.advantage=pass@k
algorithm.entropy_delta: without algorithm.entropy_target
algorithm.clip_cov_low algorithm.clip_cov_high: without algorithm.clip_cov_ratio
algorithm.kl_cov_coef: without algorithm.kl_cov_ratio
algorithm.sapo_temperature_pos algorithm.sapo_temperature_neg: without algorithm.loss=sapo
algorithm.importance_cap algorithm.importance_mask_low algorithm.importance_mask_high:
    without algorithm.importance_correction
memory.offload_reference algorithm.reference_every_steps algorithm.kl_in algorithm.kl_ratio:
    with algorithm.kl_coef=0; there is no reference
critic. memory.offload_critic: without algorithm.advantage=gae
critic.policy_lambda: with critic.policy_length_alpha
teacher.loss teacher.coef teacher.with_rewards memory.offload_teacher: without teacher.path
selection.max_extra_prompts: without selection.dynamic_sampling
reward.mask_no_eos_with_zero: with selection.drop_truncated
reward.function_failure: with reward.rewards; what fails is left out
reward.output_scaling reward.output_bias: with reward.combine=gdpo; every reward of the list is normalised apart
rollout.max_staleness: without rollout.tail=carry and without rollout.ranks
rollout.memory_share: with rollout.kv_cache_gib
rollout.slice_tokens: with rollout.tail=wait
rollout.max_groups_in_flight: without rollout.tail=carry
rollout.on_new_weights rollout.max_concurrent_sequences: with rollout.ranks=0
rollout.on_new_weights: with rollout.ranks and with rollout.max_staleness=0;
    nothing is being sampled when new weights come
memory.offload_gradients memory.offload_optimizer memory.offload_parameters: with rollout.ranks;
    no engine takes turns with training on the same memory
algorithm.rollback_lr_factor algorithm.rollback_reward_drop algorithm.rollback_reward_steps: with algorithm.rollback=0
algorithm.rollback_reward_steps: with algorithm.rollback and without algorithm.rollback_reward_drop
data.solved_samples: without data.curriculum=skip_solved
data.band_low data.band_high: without data.curriculum=band
data.curriculum_floor: with data.curriculum=none
run.total_epochs rollout.max_new_tokens: with stages.steps
policy.max_tokens_per_microbatch: with stages.max_tokens_per_microbatch
validation.: without validation.every_steps
validation.samples validation.top_p: with validation.every_steps and with validation.temperature=0
"""
"""Settings, or whole sections, that have no effect in a run with, or without, a value of other settings, or any value
but 0, false, null and an empty list; and why."""


LORA_LEAST_LR = 5e-6
"""Below it optimizer.lr is one of full training, whose 1e-6 to 3e-6 are usual for billions of weights."""
SENSIBLE = (
    ("optimizer.lr", 0.0, 1.0),
    ("optimizer.weight_decay", 0.0, 10.0),
    ("critic.lr", 0.0, 1.0),
    ("rollout.temperature", 0.05, 10.0),
    ("rollout.max_new_tokens", 8, math.inf),
    ("validation.temperature", 0.0, 10.0),
    ("reward.timeout_seconds", 0.01, math.inf),
    ("save.ckpt_freq_secs", 1.0, math.inf),
    ("save.save_freq_secs", 1.0, math.inf),
)
"""Values that a run may have and that mean something: fewer tokens hold no \\boxed{...}, and a checkpoint takes longer
than less seconds."""


def config_warnings(config: Config, unused: Sequence[str] = ()) -> list[str]:
    """Settings that change nothing in this run, or less than one may think. `unused` are those of `only_used`."""
    found = [f"Without effect in supervised training: {', '.join(unused)}."] if unused else []
    values, defaults = setting_values(config), setting_values(Config())
    changed = [key for key in all_settings() if values[key] != defaults[key]]
    for line in UNUSED.replace("\n    ", " ").strip().split("\n"):
        keys, _, rest = line.partition(": ")
        when, _, why = rest.partition("; ")
        applies = [_is_so(clause, values) for clause in when.split(" and ")]
        if all(applies) and (given := [key for key in changed if is_among(key, keys.split())]):
            found.append(f"{', '.join(given)}: no effect {when}{why and ': '}{why}.")
    for key, low, high in SENSIBLE:
        if values[key] is not None and not low <= values[key] <= high:
            wanted = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            found.append(f"{key}={values[key]:g} is legal, and hardly what you mean: sensible is {wanted}.")
    if config.lora.rank and config.optimizer.lr < LORA_LEAST_LR:
        found.append(
            f"optimizer.lr={config.optimizer.lr:g} is a learning rate of full training, and with lora.rank="
            f"{config.lora.rank} teaches little: adapters want some ten times as much, 1e-5 to 1e-4."
        )
    if config.lora.rank and config.algorithm.advantage == "gae" and config.critic.lr is None:
        found.append(
            f"critic.lr is twice optimizer.lr={config.optimizer.lr:g}, a learning rate of adapters, and all weights of "
            "the critic learn. Give it one of full training, such as critic.lr=2e-6."
        )
    if config.model.adapter_path is not None and config.algorithm.kl_coef > 0:
        found.append(
            "the reference is model.path without the adapters of model.adapter_path: KL is not 0 at the start. To stay "
            "near that start, merge them into model.path."
        )
    for find in (_rollout_warnings, _algorithm_warnings, _selection_warnings):
        found += find(config)
    return found


def _is_so(clause: str, values: Mapping[str, Any]) -> bool:
    """Whether a clause of UNUSED holds, such as "without rollout.tail=carry" or "with rollout.ranks"."""
    word, _, said = clause.partition(" ")
    key, equals, wanted = said.partition("=")
    value = values[key]
    shown = f"{value:g}" if isinstance(value, float) else as_yaml_word(value)
    return (shown in wanted.split(",") if equals else bool(value)) == (word == "with")


def _rollout_warnings(config: Config) -> Iterator[str]:
    """Partial rollouts that fit the rest badly, and the loss of a run that learns from tokens of older versions."""
    rollout, algorithm, data = config.rollout, config.algorithm, config.data
    if rollout.tail == "carry" and rollout.max_staleness == 0:
        yield 'rollout.tail="carry" carries nothing with rollout.max_staleness=0: a step finishes what it begins.'
    odd_steps = rollout.tail == "defer" or (rollout.tail == "carry" and rollout.max_staleness > 1)
    if algorithm.advantage in ("ppo", "reinforce++", "gae") and odd_steps:
        yield (
            f'algorithm.advantage="{algorithm.advantage}" compares a completion with all of its step, and with '
            f'rollout.tail="{rollout.tail}" and rollout.max_staleness={rollout.max_staleness} some steps have more of '
            'the short groups and others more of the long ones: take rollout.tail="carry" with '
            'rollout.max_staleness=1, or advantages of a group ("grpo", "dr_grpo", "rloo").'
        )
    longest = max(config.stages.max_new_tokens or [rollout.max_new_tokens])
    if rollout.tail == "defer" and (rollout.slice_tokens or 0) >= longest:
        yield (
            f"rollout.slice_tokens={rollout.slice_tokens} is no less than the longest completion ({longest} tokens): "
            "nothing is deferred."
        )
    old = rollout.max_staleness > 0 and (rollout.tail == "carry" or rollout.ranks > 0)
    if old and not algorithm.recompute_logprobs:
        yield (
            f"algorithm.recompute_logprobs=false with rollout.max_staleness={rollout.max_staleness}: the loss clips "
            "the ratio to the versions that sampled the tokens, and tokens that the policy has moved away from since "
            "give no gradient. configs/algorithms/decoupled.yaml has the loss that is made for old tokens."
        )
    several = algorithm.n_minibatches * algorithm.epochs > 1
    if several and not old and algorithm.recompute_logprobs and not algorithm.recomputes:
        yield (
            'algorithm.proximal_logprobs="interpolate" without tokens of older weights (rollout.max_staleness with '
            "rollout.ranks or rollout.tail=carry): from a step's second update on the ratio is to the engine's "
            "log-probs."
        )
    if data.curriculum == "band" and data.band_low == 0 and data.band_high == 1:
        yield 'data.curriculum="band" skips nothing with data.band_low=0 and data.band_high=1.'


def _algorithm_warnings(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    cap, mask = algorithm.importance_cap, algorithm.importance_mask_high
    if cap is not None and mask is not None and cap >= mask:
        yield "algorithm.importance_cap: no effect with an algorithm.importance_mask_high that is not above it."
    if config.reward.rewards and config.reward.scheme != "correctness" and not is_verified(config.reward):
        yield "reward.scheme: no effect with reward.rewards that do not list correctness, whose scheme it is."
    if algorithm.rollback > 0 and algorithm.rollback_reward_drop is not None:
        for applies, why in (
            (config.data.curriculum != "none", "data.curriculum skips prompts that the policy solves"),
            (bool(config.stages.steps), "stages change the length of completions"),
        ):
            if applies:
                yield f"algorithm.rollback_reward_drop: {why}, and rewards may fall without a worse policy."
    if algorithm.loss == "gspo" and algorithm.clip_ratio > 0.01:
        yield (
            f"algorithm.clip_ratio={algorithm.clip_ratio:g} hardly ever clips the mean ratio of a completion; GSPO's "
            "paper has 3e-4, and 4e-4 for algorithm.clip_ratio_high."
        )
    if algorithm.loss == "gmpo" and algorithm.clip_ratio_high is None and algorithm.clip_ratio == 0.2:
        yield (
            "algorithm.clip_ratio=0.2 bounds the log of a token's ratio with algorithm.loss=gmpo; its paper has 0.4."
        )
    if config.algorithm.preset in all_settings()["algorithm.preset"].words:
        values, defaults = setting_values(config), setting_values(Config())
        parts = [
            (key, part)
            for key, part in preset_settings(config.algorithm.preset).items()
            if part != defaults[key]
        ]
        if parts and all(values[key] != part for key, part in parts):
            yield (
                f"algorithm.preset={config.algorithm.preset} changes nothing: a file or the command line says another "
                f"{', '.join(key for key, _ in parts)}. Leave these out there."
            )
    unweighted = algorithm.kl_in == "loss" and algorithm.kl_ratio is None
    if algorithm.kl_coef != 0 and unweighted and algorithm.kl_estimator == "k1":
        yield (
            'algorithm.kl_estimator="k1" in the loss has an expected gradient of 0 and holds nothing back; "k2" has '
            "that of the KL."
        )
    if algorithm.kl_coef != 0 and algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1":
        yield (
            f'algorithm.kl_estimator="{algorithm.kl_estimator}" in the reward has no gradient of first order near the '
            'reference and holds little back; "k1" has that of the KL.'
        )
    if algorithm.kl_coef != 0 and algorithm.kl_in == "reward" and algorithm.advantage == "grpo":
        yield (
            'algorithm.advantage="grpo" divides by the group\'s deviation: where all rewards of a group are equal, the '
            'KL alone makes it, whatever algorithm.kl_coef is. "rloo", "dr_grpo", "ppo" and kl_in="loss" do not.'
        )


def _selection_warnings(config: Config) -> Iterator[str]:
    """Dynamic sampling that fits the rest badly."""
    selection = config.selection
    if selection.dynamic_sampling is None:
        return
    if selection.max_extra_prompts == 0:
        yield (
            "selection.dynamic_sampling drops groups and, with selection.max_extra_prompts=0, samples none in their "
            "place."
        )
    functions = functions_of(config.reward)
    if selection.dynamic_sampling == "accuracy" and functions and not is_verified(config.reward):
        yield (
            f'selection.dynamic_sampling="accuracy" with {next(iter(functions))}: an answer counts as right where its '
            'metric "correct" is above 0, without one where its reward is. With partial credit whole groups are right '
            'and are dropped: return "correct", or take selection.dynamic_sampling=reward.'
        )
    if config.algorithm.advantage == "gae" and config.rollout.group_size > 1:
        yield (
            'selection.dynamic_sampling drops groups without contrast; algorithm.advantage="gae" compares with a '
            "critic's values, and could learn from them."
        )
    if teaches_alone(config):
        yield (
            f'selection.dynamic_sampling="{selection.dynamic_sampling}" drops groups by their rewards, and with '
            "teacher.with_rewards=false the teacher would teach them, too. Set selection.dynamic_sampling=null."
        )
