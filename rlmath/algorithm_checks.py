"""What can be wrong with the settings of algorithm and selection before a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config import Config


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
    """Settings that change nothing in this run."""
    algorithm, selection = config.algorithm, config.selection
    if algorithm.importance_correction is None:
        for name in ("importance_cap", "importance_mask_low", "importance_mask_high"):
            if getattr(algorithm, name) is not None:
                yield f"algorithm.{name} has no effect without algorithm.importance_correction."
    if algorithm.loss == "cispo" and algorithm.dual_clip is not None:
        yield 'algorithm.dual_clip has no effect with algorithm.loss="cispo".'
    if algorithm.kl_in == "loss" and algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1":
        yield (
            'algorithm.kl_estimator="k1" in the loss has an expected gradient of 0 and holds nothing back; "k2" has '
            "that of the KL."
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coef == 0:
        yield 'algorithm.kl_in="reward" has no effect with algorithm.kl_coef=0.'
    if selection.dynamic_sampling is None and selection.max_extra_prompts > 0:
        yield "selection.max_extra_prompts has no effect without selection.dynamic_sampling."
    if selection.drop_truncated and config.reward.mask_no_eos_with_zero:
        yield "reward.mask_no_eos_with_zero has no effect with selection.drop_truncated=true."
