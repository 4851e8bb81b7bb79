"""What the settings say of completions that a step leaves unfinished: how many groups of them there may be, of which
size, and how many tokens a step samples of one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rlmath.algorithms.partial_rollouts import UnfinishedRules
from rlmath.checkpoint.unfinished_groups import TOKEN_BYTES
from rlmath.config.length_curriculum import with_longest_lengths, without_validation
from rlmath.config.schema import Config, RolloutConfig


def unfinished_rules(config: Config) -> UnfinishedRules:
    """The rules of partial rollouts, and of engines on ranks of their own, which have no other bound than
    `max_staleness`."""
    rollout, per_step = config.rollout, config.data.prompts_per_step
    dropped = config.selection.max_extra_prompts if config.selection.dynamic_sampling is not None else 0
    if rollout.tail == "defer":
        return UnfinishedRules(per_step, sys.maxsize, 0, dropped)
    most = per_step * (rollout.max_staleness + 1)
    given = rollout.max_groups_in_flight if rollout.ranks == 0 else None
    in_flight = most if given is None else given
    return UnfinishedRules(per_step, in_flight, rollout.max_staleness, dropped)


@dataclass(frozen=True)
class UnfinishedSize:
    """What the groups in flight take at most: if every completion were as long as any may be (bytes)."""

    during_step: int
    """In the memory of every rank, which has them all."""
    after_step: int
    """In the memory of every rank between two steps, and in a checkpoint."""


def unfinished_size(config: Config) -> UnfinishedSize:
    """The size with "carry", and with engines on ranks of their own: groups in flight x `rollout.group_size` x the
    greatest number of new tokens x 8 bytes, and between steps data.prompts_per_step groups fewer. The others leave no
    token unfinished."""
    if config.rollout.tail != "carry" and config.rollout.ranks == 0:
        return UnfinishedSize(0, 0)
    training = with_longest_lengths(without_validation(config)).rollout
    group, rules = training.group_size * training.max_new_tokens * TOKEN_BYTES, unfinished_rules(config)
    return UnfinishedSize(
        (rules.max_groups + rules.max_dropped) * group, (rules.max_groups - rules.groups_per_step) * group
    )


def slice_tokens(rollout: RolloutConfig) -> int:
    """Most new tokens of a completion in a round; with "defer" in a short one."""
    rounds = 2 if rollout.tail == "defer" else rollout.max_staleness + 1
    return rollout.slice_tokens or -(-rollout.max_new_tokens // rounds)
