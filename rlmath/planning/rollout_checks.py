"""Problems of the settings of completions and their schedule.

These are partial rollouts, tail batching and engines on ranks of their own; `data.curriculum`;
`algorithm.rollback`; `stages` and `validation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rlmath.checkpoint.save_schedule import kept_frequency, recovery_frequency
from rlmath.config import length_curriculum
from rlmath.config.length_curriculum import LengthStage
from rlmath.config.schema import AlgorithmConfig, Config, DataConfig, RolloutConfig, SaveConfig

# -------------------------------------------------- partial rollouts, engines on ranks of their own


def partial_rollout_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, per_step: int
) -> Iterator[str]:
    """Problems of settings that several policy versions sampling one completion do not allow.

    `per_step` is `data.prompts_per_step`."""
    if rollout.ranks and rollout.max_staleness > 0:
        got = f"rollout.ranks is {rollout.ranks} and rollout.max_staleness {rollout.max_staleness}"
        yield from _old_token_problems(algorithm, got)
    if rollout.tail != "carry" or rollout.ranks:
        return
    in_flight = rollout.max_groups_in_flight
    oldest = rollout.max_staleness
    if in_flight is not None and not per_step <= in_flight <= per_step * (oldest + 1):
        yield (
            f"rollout.max_groups_in_flight is {in_flight}; needed: from data.prompts_per_step, "
            f"{per_step}, as a step "
            f"learns from so many groups, to data.prompts_per_step x (rollout.max_staleness + 1) = "
            f"{per_step} x {oldest + 1} = {per_step * (oldest + 1)}, since more could not all be "
            "learned in time. "
            "Change it, or rollout.max_staleness."
        )
    if oldest > 0:
        yield from _old_token_problems(algorithm, 'rollout.tail is "carry"')


def _old_token_problems(algorithm: AlgorithmConfig, got: str) -> Iterator[str]:
    """Problems of a loss that learns from tokens of older versions of the policy.

    Where its ratio is not to these versions, it needs a bounded correction."""
    corrected = algorithm.importance_correction is not None
    bounded = algorithm.importance_cap is not None or algorithm.importance_mask_high is not None
    if algorithm.recompute_logprobs and not (corrected and bounded):
        yield (
            f"{got}: older versions of the policy sample a part of the tokens, and the ratio to "
            "recomputed log-probs "
            "leaves that uncorrected. Needed is a bounded weight per token: "
            "algorithm.importance_correction=token and "
            "algorithm.importance_mask_high=5 (or algorithm.importance_cap), as in "
            "configs/algorithms/decoupled.yaml; "
            "or rollout.max_staleness=0; or algorithm.recompute_logprobs=false, where the clip "
            "bounds the ratio to the "
            "older versions (AReaL without use_decoupled_loss)."
        )


# ---------------------------------------------------------------- curriculum and rollback


def rollback_problems(algorithm: AlgorithmConfig, save: SaveConfig) -> Iterator[str]:
    """Problems of a run that may go back to a checkpoint."""
    if algorithm.rollback == 0:
        return
    if recovery_frequency(save).never and kept_frequency(save).never:
        yield (
            f"algorithm.rollback is {algorithm.rollback}, and the run makes no checkpoint to go "
            "back to. Set "
            "save.ckpt_freq_steps or save.ckpt_freq_secs, or algorithm.rollback=0."
        )


def curriculum_problems(settings: DataConfig, group_size: int) -> Iterator[str]:
    """Problems of settings that do not go with draws by pass rate."""
    max_samples = settings.history_groups * group_size
    if settings.curriculum == "skip_solved" and settings.solved_samples > max_samples:
        yield (
            f"data.solved_samples is {settings.solved_samples}; a pass rate counts "
            "data.history_groups x "
            f"rollout.group_size = {settings.history_groups} x {group_size} = {max_samples} "
            "completions at most, and nothing would ever be skipped. Lower the former, or raise "
            "data.history_groups."
        )


# ---------------------------------------------------------------- stages and validation


Check = Callable[[Config], Iterable[str]]


def in_every_stage(stages: Sequence[LengthStage], check: Check) -> list[str]:
    """The problems of every stage, which is named.

    One that all stages have alike is listed once. Where the lists do not go together, there is no
    stage to check."""
    if not stages:
        return []
    problems_by_stage = [list(check(stage.config)) for stage in stages]
    common = [
        problem
        for problem in problems_by_stage[0]
        if all(problem in other_problems for other_problems in problems_by_stage[1:])
    ]
    return common + [
        f"Stage {stage.number + 1} (stages.*): {problem}"
        for stage, problems in zip(stages, problems_by_stage, strict=True)
        for problem in problems
        if problem not in common
    ]


def of_longest_stage(config: Config, check: Check) -> list[str]:
    """The problems of the run's largest lengths (`with_longest_lengths`)."""
    if any(length_curriculum.stage_list_problems(config)):
        return []
    longest = length_curriculum.with_longest_lengths(config)
    keys = [
        key for key in ("stages", "validation") if getattr(config, key) != getattr(Config(), key)
    ]
    note = (
        f" (The largest lengths of {' and '.join(f'{key}.*' for key in keys)} count.)"
        if keys
        else ""
    )
    return [problem + note * ("max_" in problem) for problem in check(longest)]


def in_validation(config: Config, check: Check) -> list[str]:
    """The problems of validation with its own longest completion."""
    if not length_curriculum.validates(config) or config.validation.max_new_tokens is None:
        return []
    rollout = replace(config.rollout, max_new_tokens=length_curriculum.validation_tokens(config))
    problems = check(replace(config, rollout=rollout))
    return [
        f"validation.max_new_tokens: {problem}"
        for problem in problems
        if "rollout.max_new_tokens" in problem
    ]


def validation_name_problems(paths: Sequence[str]) -> Iterator[str]:
    """Problems of files of `validation.paths` whose metrics would have one name."""
    names = Counter(length_curriculum.validation_names(paths))
    for name in (name for name, count in names.items() if count > 1):
        yield (
            f'validation.paths: {names[name]} files are named "{name}", and so would be their '
            "metrics. Rename one."
        )
