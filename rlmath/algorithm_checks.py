"""What can be wrong with the settings of algorithm and selection before a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config import AlgorithmConfig, Config


def algorithm_problems(config: Config) -> Iterator[str]:
    """What was got, what is needed and what to change, one text per problem."""
    algorithm = config.algorithm
    if config.rollout.group_size < 2 and algorithm.advantage != "ppo":
        yield (
            f'rollout.group_size is {config.rollout.group_size}; algorithm.advantage="{algorithm.advantage}" compares '
            'the completions of a group and needs at least 2. Raise it, or set algorithm.advantage="ppo".'
        )
    if algorithm.importance_correction is not None and not algorithm.recompute_logprobs:
        yield (
            f'algorithm.importance_correction is "{algorithm.importance_correction}"; it weighs recomputed log-probs '
            "against the engine's. Set algorithm.recompute_logprobs=true, or the former to null."
        )
    yield from _count_problems(config)
    yield from _selection_problems(config)


def _count_problems(config: Config) -> Iterator[str]:
    samples = config.data.prompts_per_step * config.rollout.group_size
    minibatches = config.algorithm.n_minibatches
    if samples < minibatches:
        yield (
            f"data.prompts_per_step x rollout.group_size gives {samples} samples a step, which cannot fill "
            f"{minibatches} minibatches (algorithm.n_minibatches). Raise the former or lower the latter."
        )


def _selection_problems(config: Config) -> Iterator[str]:
    selection, limit = config.selection, config.rollout.max_new_tokens
    if selection.dynamic_sampling is not None and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size is {config.rollout.group_size}; selection.dynamic_sampling drops groups without "
            "contrast, and a completion alone has none. Raise it, or set selection.dynamic_sampling=null."
        )
    least, most = selection.min_completion_tokens, selection.max_completion_tokens
    if least > limit:
        yield (
            f"selection.min_completion_tokens is {least}, above rollout.max_new_tokens {limit}: every completion would "
            "be left out. Lower it."
        )
    if most is not None and most < max(least, config.rollout.min_new_tokens):
        yield (
            f"selection.max_completion_tokens is {most}, below selection.min_completion_tokens {least} or "
            f"rollout.min_new_tokens {config.rollout.min_new_tokens}: every completion would be left out. Raise it."
        )


def harmless_algorithm_settings(config: Config) -> Iterator[str]:
    """Settings that change nothing in this run, or less than one may think."""
    yield from _loss_notes(config.algorithm)
    yield from _kl_notes(config.algorithm)
    yield from _selection_notes(config)


ON_RATIO = ("loss", "clip_ratio", "clip_ratio_high", "dual_clip", "early_stop_ratio_low", "early_stop_kl")
"""Settings of `AlgorithmConfig` that only matter where the importance ratio is not 1."""

GSPO_CLIP = 0.01
"""Far above the bounds of GSPO's paper, 3e-4 and 4e-4: the mean of a completion hardly ever leaves it."""


def _loss_notes(algorithm: AlgorithmConfig) -> Iterator[str]:
    changed = [name for name in ON_RATIO if getattr(algorithm, name) != getattr(AlgorithmConfig(), name)]
    if changed and algorithm.recompute_logprobs and algorithm.n_minibatches == 1 and algorithm.epochs == 1:
        yield (
            f"{_keys(changed)}: no effect, since one minibatch a step (algorithm.n_minibatches=1, epochs=1) is learned "
            "from before the policy changes, and every importance ratio is 1."
        )
    if algorithm.loss == "gspo" and algorithm.clip_ratio > GSPO_CLIP:
        yield (
            f"algorithm.clip_ratio={algorithm.clip_ratio:g} hardly ever clips the mean ratio of a completion; GSPO's "
            "paper has 3e-4, and 4e-4 for algorithm.clip_ratio_high."
        )
    if algorithm.loss == "cispo" and algorithm.dual_clip is not None:
        yield 'algorithm.dual_clip has no effect with algorithm.loss="cispo".'
    bounds = ("importance_cap", "importance_mask_low", "importance_mask_high")
    given = [name for name in bounds if getattr(algorithm, name) is not None]
    if given and algorithm.importance_correction is None:
        yield f"{_keys(given)}: no effect without algorithm.importance_correction."
    cap, mask = algorithm.importance_cap, algorithm.importance_mask_high
    if cap is not None and mask is not None and cap >= mask:
        yield f"algorithm.importance_cap={cap:g} has no effect: importance_mask_high={mask:g} is not above it."


def _kl_notes(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_coef == 0:
        if algorithm.kl_in == "reward":
            yield 'algorithm.kl_in="reward" has no effect with algorithm.kl_coef=0.'
        return
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            'algorithm.kl_estimator="k1" in the loss has an expected gradient of 0 and holds nothing back; "k2" has '
            "that of the KL."
        )
    if algorithm.kl_in == "reward" and algorithm.advantage == "grpo":
        yield (
            'algorithm.advantage="grpo" divides by the group\'s deviation: where all rewards of a group are equal, the '
            'KL alone makes it, whatever algorithm.kl_coef is. "rloo", "dr_grpo", "ppo" and kl_in="loss" do not.'
        )


def _selection_notes(config: Config) -> Iterator[str]:
    selection = config.selection
    if selection.dynamic_sampling is None and selection.max_extra_prompts > 0:
        yield "selection.max_extra_prompts has no effect without selection.dynamic_sampling."
    if selection.dynamic_sampling is not None and selection.max_extra_prompts == 0:
        yield (
            "selection.dynamic_sampling drops groups and, with selection.max_extra_prompts=0, samples none in their "
            "place."
        )
    if selection.drop_truncated and config.reward.mask_no_eos_with_zero:
        yield "reward.mask_no_eos_with_zero has no effect with selection.drop_truncated=true."


def _keys(names: list[str]) -> str:
    return ", ".join(f"algorithm.{name}" for name in names)
