"""Settings that change nothing in a run, or less than one may think: none is an error, all are told at the start.

`UNUSED` is the table of the first kind. The other functions have the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rlmath.config import length_curriculum
from rlmath.config.help import all_settings, is_among, setting_values
from rlmath.config.load import preset_settings
from rlmath.config.schema import Config
from rlmath.planning.model_checks import teaches_alone
from rlmath.rewards.several_rewards import functions_of, is_verified


def _samples_greedily(config: Config) -> bool:
    return length_curriculum.validates(config) and config.validation.temperature == 0


UNUSED: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("parallel.sequence", lambda c: c.parallel.tensor == 1, "with parallel.tensor=1"),
    ("optimizer.min_lr", lambda c: c.optimizer.decay == "constant", 'with optimizer.decay="constant"'),
    (
        "algorithm.loss algorithm.clip_ratio algorithm.clip_ratio_high algorithm.dual_clip "
        "algorithm.early_stop_ratio_low algorithm.early_stop_kl algorithm.kl_cov_ratio algorithm.kl_cov_coef "
        "algorithm.sapo_temperature_pos algorithm.sapo_temperature_neg algorithm.proximal_logprobs",
        lambda c: c.algorithm.recompute_logprobs and c.algorithm.n_minibatches == c.algorithm.epochs == 1,
        "since one minibatch a step (algorithm.n_minibatches=1, epochs=1) is learned from before the policy changes, "
        "and every importance ratio is 1",
    ),
    (
        "algorithm.dual_clip",
        lambda c: c.algorithm.loss in ("cispo", "gmpo", "sapo"),
        'with algorithm.loss="cispo", "gmpo" or "sapo"',
    ),
    (
        "algorithm.clip_ratio algorithm.clip_ratio_high",
        lambda c: c.algorithm.loss == "sapo",
        'with algorithm.loss="sapo", whose gate has no bounds',
    ),
    (
        "algorithm.proximal_logprobs",
        lambda c: not c.algorithm.recompute_logprobs,
        "with algorithm.recompute_logprobs=false",
    ),
    (
        "algorithm.pass_k",
        lambda c: c.algorithm.advantage != "pass@k",
        'without algorithm.advantage="pass@k"',
    ),
    (
        "algorithm.entropy_delta",
        lambda c: c.algorithm.entropy_target is None,
        "without algorithm.entropy_target",
    ),
    (
        "algorithm.clip_cov_low algorithm.clip_cov_high",
        lambda c: c.algorithm.clip_cov_ratio is None,
        "without algorithm.clip_cov_ratio",
    ),
    ("algorithm.kl_cov_coef", lambda c: c.algorithm.kl_cov_ratio is None, "without algorithm.kl_cov_ratio"),
    (
        "algorithm.sapo_temperature_pos algorithm.sapo_temperature_neg",
        lambda c: c.algorithm.loss != "sapo",
        'without algorithm.loss="sapo"',
    ),
    (
        "algorithm.importance_cap algorithm.importance_mask_low algorithm.importance_mask_high",
        lambda c: c.algorithm.importance_correction is None,
        "without algorithm.importance_correction",
    ),
    (
        "algorithm.importance_cap",
        lambda c: (c.algorithm.importance_cap or 0) >= (c.algorithm.importance_mask_high or math.inf),
        "with an algorithm.importance_mask_high that is not above it",
    ),
    (
        "memory.offload_reference algorithm.reference_every_steps algorithm.kl_in algorithm.kl_ratio",
        lambda c: c.algorithm.kl_coef == 0,
        "with algorithm.kl_coef=0: there is no reference",
    ),
    (
        "critic. memory.offload_critic",
        lambda c: c.algorithm.advantage != "gae",
        'without algorithm.advantage="gae"',
    ),
    (
        "critic.policy_lambda",
        lambda c: c.critic.policy_length_alpha is not None,
        "with critic.policy_length_alpha",
    ),
    (
        "teacher.loss teacher.coef teacher.with_rewards memory.offload_teacher",
        lambda c: c.teacher.path is None,
        "without teacher.path",
    ),
    (
        "selection.max_extra_prompts",
        lambda c: c.selection.dynamic_sampling is None,
        "without selection.dynamic_sampling",
    ),
    (
        "reward.mask_no_eos_with_zero",
        lambda c: c.selection.drop_truncated,
        "with selection.drop_truncated=true",
    ),
    (
        "reward.function_failure",
        lambda c: bool(c.reward.rewards),
        "with reward.rewards: what fails is left out",
    ),
    (
        "reward.scheme",
        lambda c: bool(c.reward.rewards) and not is_verified(c.reward),
        "with reward.rewards that do not list correctness, whose scheme it is",
    ),
    (
        "reward.output_scaling reward.output_bias",
        lambda c: bool(c.reward.rewards) and c.reward.combine == "gdpo",
        "on what is learned with reward.combine=gdpo: every reward of the list is normalised apart",
    ),
    (
        "rollout.max_staleness",
        lambda c: c.rollout.tail != "carry" and not c.rollout.ranks,
        'without rollout.tail="carry" or rollout.ranks',
    ),
    ("rollout.memory_share", lambda c: c.rollout.kv_cache_gib is not None, "with rollout.kv_cache_gib"),
    ("rollout.slice_tokens", lambda c: c.rollout.tail == "wait", 'with rollout.tail="wait"'),
    ("rollout.max_groups_in_flight", lambda c: c.rollout.tail != "carry", 'without rollout.tail="carry"'),
    (
        "rollout.on_new_weights rollout.max_concurrent_sequences",
        lambda c: not c.rollout.ranks,
        "with rollout.ranks=0",
    ),
    (
        "rollout.on_new_weights",
        lambda c: c.rollout.ranks > 0 and c.rollout.max_staleness == 0,
        "with rollout.max_staleness=0: nothing is being sampled when new weights come",
    ),
    (
        "memory.offload_gradients memory.offload_optimizer memory.offload_parameters",
        lambda c: c.rollout.ranks > 0,
        "with rollout.ranks, since no engine takes turns with training on the same memory",
    ),
    (
        "algorithm.rollback_lr_factor algorithm.rollback_reward_drop algorithm.rollback_reward_steps",
        lambda c: c.algorithm.rollback == 0,
        "without algorithm.rollback",
    ),
    (
        "algorithm.rollback_reward_steps",
        lambda c: c.algorithm.rollback > 0 and c.algorithm.rollback_reward_drop is None,
        "without algorithm.rollback_reward_drop",
    ),
    (
        "data.solved_samples",
        lambda c: c.data.curriculum != "skip_solved",
        'without data.curriculum="skip_solved"',
    ),
    ("data.band_low data.band_high", lambda c: c.data.curriculum != "band", 'without data.curriculum="band"'),
    ("data.curriculum_floor", lambda c: c.data.curriculum == "none", 'with data.curriculum="none"'),
    ("run.total_epochs rollout.max_new_tokens", length_curriculum.has_length_stages, "beside stages.steps"),
    (
        "policy.max_tokens_per_microbatch",
        lambda c: bool(c.stages.max_tokens_per_microbatch),
        "beside stages.max_tokens_per_microbatch",
    ),
    ("validation.", lambda c: not length_curriculum.validates(c), "without validation.every_steps"),
    ("validation.samples validation.top_p", _samples_greedily, "with validation.temperature=0"),
)
"""Settings or whole sections; in which runs they have no effect; and why, behind "no effect"."""


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
    for keys, applies, why in UNUSED:
        if (given := [key for key in changed if is_among(key, keys.split())]) and applies(config):
            found.append(f"{', '.join(given)}: no effect {why}.")
    for key, low, high in SENSIBLE:
        if values[key] is not None and not low <= values[key] <= high:
            wanted = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            found.append(f"{key}={values[key]:g} is legal, and hardly what you mean: sensible is {wanted}.")
    for find in (_rollout_warnings, _algorithm_warnings, _selection_warnings):
        found += find(config)
    return found


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
