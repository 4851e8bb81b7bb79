"""What is wrong, or without effect, in the settings of the curriculum (`data.curriculum`) and of rollbacks
(`algorithm.rollback`): one text per problem, as in `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.schema import AlgorithmConfig, Config, DataConfig
from rlmath.run.recovery.save_schedule import kept_frequency, recovery_frequency


def rollback_problems(config: Config) -> Iterator[str]:
    """What a run that may go back to a checkpoint needs."""
    algorithm, save = config.algorithm, config.save
    if algorithm.rollback == 0:
        return
    if config.rollout.ranks > 0:
        yield (
            f"algorithm.rollback is {algorithm.rollback} and rollout.ranks {config.rollout.ranks}: engines on ranks of "
            "their own have begun prompts ahead of the steps, with weights that would be discarded, and cannot go "
            "back. Set algorithm.rollback=0, or rollout.ranks=0."
        )
    if recovery_frequency(save).never and kept_frequency(save).never:
        yield (
            f"algorithm.rollback is {algorithm.rollback}, and the run makes no checkpoint to go back to. Set "
            "save.ckpt_freq_steps or save.ckpt_freq_secs, or algorithm.rollback=0."
        )


def rollback_warnings(config: Config) -> Iterator[str]:
    """Settings of rollbacks that change nothing."""
    algorithm, default = config.algorithm, AlgorithmConfig()
    names = ["rollback_lr_factor", "rollback_reward_drop", "rollback_reward_steps"]
    if algorithm.rollback > 0:
        names = ["rollback_reward_steps"] if algorithm.rollback_reward_drop is None else []
    changed = [name for name in names if getattr(algorithm, name) != getattr(default, name)]
    if changed:
        missing = "algorithm.rollback" if algorithm.rollback == 0 else "algorithm.rollback_reward_drop"
        yield f"{', '.join(f'algorithm.{one}' for one in changed)}: no effect without {missing}."
    if algorithm.rollback > 0 and algorithm.rollback_reward_drop is not None:
        for key, why in (
            (config.data.curriculum != "none", "data.curriculum skips prompts that the policy solves"),
            (bool(config.stages.steps), "stages change the length of completions"),
        ):
            if key:
                yield f"algorithm.rollback_reward_drop: {why}, and rewards may fall without a worse policy."


def curriculum_problems(config: Config) -> Iterator[str]:
    """What does not go with draws by pass rate."""
    data, group_size = config.data, config.rollout.group_size
    if data.curriculum != "none" and config.rollout.ranks > 0:
        yield (
            f'data.curriculum is "{data.curriculum}" and rollout.ranks {config.rollout.ranks}: engines on ranks of '
            "their own begin prompts when they have a free place, so that which pass rates a draw would see depends on "
            "the clock, and no resumed run could draw the same. Set data.curriculum=none, or rollout.ranks=0."
        )
    if data.curriculum == "band" and data.band_low > data.band_high:
        yield (
            f"data.band_low is {data.band_low:g}, above data.band_high {data.band_high:g}: no pass rate lies between "
            "them. Lower the former, or raise the latter."
        )
    most = data.history_groups * group_size
    if data.curriculum == "skip_solved" and data.solved_samples > most:
        yield (
            f"data.solved_samples is {data.solved_samples}; a pass rate counts data.history_groups x "
            f"rollout.group_size = {data.history_groups} x {group_size} = {most} completions at most, and nothing "
            "would ever be skipped. Lower the former, or raise data.history_groups."
        )


def curriculum_warnings(config: Config) -> Iterator[str]:
    """Settings of the curriculum that change nothing."""
    data, default = config.data, DataConfig()
    used = {
        "none": (),
        "skip_solved": ("solved_samples", "curriculum_floor"),
        "band": ("band_low", "band_high", "curriculum_floor"),
    }[data.curriculum]
    names = ("solved_samples", "band_low", "band_high", "curriculum_floor")
    unused = [one for one in names if one not in used and getattr(data, one) != getattr(default, one)]
    if unused:
        yield f'{", ".join(f"data.{one}" for one in unused)}: no effect with data.curriculum="{data.curriculum}".'
    if data.curriculum == "band" and data.band_low == 0 and data.band_high == 1:
        yield 'data.curriculum="band" skips nothing with data.band_low=0 and data.band_high=1.'
