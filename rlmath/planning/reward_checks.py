"""What of `reward.*` no run could start with: schemes and penalties, and the list of several rewards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from rlmath.config.help import nearest_word
from rlmath.config.schema import AlgorithmConfig, Config, RewardConfig
from rlmath.rewards.several_rewards import (
    BUILT_IN,
    MAX_FUNCTIONS,
    TAKEN,
    functions_of,
    is_verified,
    listed_functions,
)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def reward_problems(config: Config) -> Iterator[str]:
    """What was got, what is needed and what to change, one text per problem."""
    reward, limit = config.reward, config.rollout.max_new_tokens
    if reward.overlong_buffer > limit:
        yield (
            f"reward.overlong_buffer is {reward.overlong_buffer}, above rollout.max_new_tokens {limit}: even the "
            "shortest answer would cost. Lower it."
        )
    if reward.scheme != "correctness" and reward.format_penalty >= 1:
        yield (
            f"reward.format_penalty is {reward.format_penalty}; a right answer in a box gets 1 in scheme "
            f'"{reward.scheme}", and one without a box should get less. Lower it.'
        )
    yield from _list_problems(reward, config.algorithm, config.run.plugins)


def reward_warnings(config: Config) -> Iterator[str]:
    """Settings that change nothing in this run, or less than one may think."""
    if config.reward.rewards and config.reward.function_failure != RewardConfig().function_failure:
        yield "reward.function_failure has no effect with reward.rewards: what fails is left out."
    if config.reward.rewards and config.reward.scheme != "correctness" and not is_verified(config.reward):
        yield (
            f'reward.scheme is "{config.reward.scheme}", which is how correctness counts, and reward.rewards does not '
            "list it: it has no effect."
        )
    if config.reward.rewards and config.reward.combine == "gdpo":
        default = RewardConfig()
        for name in ("output_scaling", "output_bias"):
            if getattr(config.reward, name) != getattr(default, name):
                yield (
                    f"reward.{name} changes the reward that is logged alone: with reward.combine=gdpo every reward of "
                    "the list is normalised apart, and learned from as that."
                )
    if (
        config.selection.dynamic_sampling == "accuracy"
        and functions_of(config.reward)
        and not is_verified(config.reward)
    ):
        setting = next(iter(functions_of(config.reward)))
        yield (
            f'selection.dynamic_sampling="accuracy" with {setting}: an answer counts as right where its metric '
            '"correct" is above 0, without one where its reward is. With partial credit whole groups are right and are '
            'dropped: return "correct", or take selection.dynamic_sampling=reward.'
        )


def _list_problems(
    reward: RewardConfig, algorithm: AlgorithmConfig, plugins: Collection[str]
) -> Iterator[str]:
    if not reward.rewards:
        given = "weights" if reward.weights else "combine" if reward.combine == "gdpo" else None
        if given:
            yield f"reward.{given} is for the rewards of reward.rewards, which is empty. List them, or leave it out."
        return
    if reward.function is not None:
        yield (
            "reward.function and reward.rewards are both set. Take the function into the list, as "
            f'"mine={reward.function}", and set reward.function=null.'
        )
    names = [entry.partition("=")[0] for entry in reward.rewards]
    for entry in reward.rewards:
        yield from _entry_problems(entry, plugins)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"reward.rewards has {', '.join(map(repr, twice))} more than once. Give every reward a name of its own."
    functions = len(listed_functions(reward)) if plugins else sum("=" in entry for entry in reward.rewards)
    if functions > MAX_FUNCTIONS:
        yield f"reward.rewards has {functions} functions; at most {MAX_FUNCTIONS}, as each has workers of its own."
    if not functions and "correctness" not in names:
        yield (
            "reward.rewards has neither correctness nor a function of yours, so that no answer could be called right. "
            "Add correctness, with weight 0 if it is not to count."
        )
    if reward.weights and len(reward.weights) != len(names):
        yield (
            f"reward.weights has {len(reward.weights)} numbers for the {len(names)} rewards of reward.rewards. Give "
            "one for each, in that order, or none: then each weighs 1."
        )
    if reward.weights and not any(reward.weights):
        yield "reward.weights are all 0: nothing would be learned. Give a reward a weight."
    if reward.combine == "gdpo":
        yield from _gdpo_problems(reward, algorithm)


def _entry_problems(entry: str, plugins: Collection[str]) -> Iterator[str]:
    name, equals, function = entry.partition("=")
    if not equals and plugins and name not in BUILT_IN:
        equals, function = "=", name
    if not equals and name not in BUILT_IN:
        near = nearest_word(name, BUILT_IN)
        yield (
            f"reward.rewards has {entry!r}; needed: {', '.join(BUILT_IN)}, or a function of yours as "
            f'"name=package.module:function" or "name=path/to/file.py:function".{near}'
        )
    elif equals and (not _NAME.fullmatch(name) or name in (*BUILT_IN, *TAKEN) or not function):
        yield (
            f"reward.rewards has {entry!r}; before = stands a name: a small letter, then at most 39 small letters, "
            f"digits and underscores, none of {', '.join((*BUILT_IN, *TAKEN))}; after it a function."
        )


def _gdpo_problems(reward: RewardConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.advantage != "grpo":
        yield (
            f'algorithm.advantage is "{algorithm.advantage}", and reward.combine=gdpo normalises every reward as '
            '"grpo" does. Set algorithm.advantage="grpo", or reward.combine=sum.'
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        yield (
            'algorithm.kl_in is "reward", and with reward.combine=gdpo there is no one reward to take it from. Set '
            'algorithm.kl_in="loss", or reward.combine=sum.'
        )
    if reward.mask_no_eos_with_zero or reward.overlong_buffer:
        name = "mask_no_eos_with_zero" if reward.mask_no_eos_with_zero else "overlong_buffer"
        yield (
            f"reward.{name} changes the sum of the rewards, which reward.combine=gdpo does not learn from. List "
            "length, or a function of yours, as a reward of its own; or set reward.combine=sum."
        )
