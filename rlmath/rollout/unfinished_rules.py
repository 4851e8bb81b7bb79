"""What the settings allow of unfinished completions: groups, their size, and tokens in a step."""

from __future__ import annotations

import sys

from rlmath.algorithms.partial_rollouts import UnfinishedRules
from rlmath.checkpoint.unfinished_groups import TOKEN_BYTES
from rlmath.config.length_curriculum import (
    unsampled_limit,
    with_longest_lengths,
    without_validation,
)
from rlmath.config.schema import Config, RolloutConfig


def unfinished_rules(config: Config) -> UnfinishedRules:
    """The rules of partial rollouts, and of engines on ranks of their own.

    The latter are bounded by `max_staleness` only."""
    rollout = config.rollout
    per_step = config.data.prompts_per_step
    dropped = (
        config.selection.max_extra_prompts if config.selection.dynamic_sampling is not None else 0
    )
    if rollout.tail == "defer":
        return UnfinishedRules(per_step, sys.maxsize, 0, max_dropped=dropped)
    max_groups = per_step * (rollout.max_staleness + 1)
    limit = rollout.max_groups_in_flight if rollout.ranks == 0 else None
    in_flight = max_groups if limit is None else limit
    return UnfinishedRules(per_step, in_flight, rollout.max_staleness, max_dropped=dropped)


def unfinished_bytes(config: Config) -> int:
    """The most that groups in flight take between two steps (bytes).

    They take it in the memory of every rank and in a checkpoint, with "carry" and with engines on
    ranks of their own: groups that no step has learned from yet x `rollout.group_size` x the
    greatest number of new tokens, those of tools included, x 8 bytes."""
    if config.rollout.tail != "carry" and config.rollout.ranks == 0:
        return 0
    training = with_longest_lengths(without_validation(config)).rollout
    rules = unfinished_rules(config)
    completions = (rules.max_groups - rules.groups_per_step) * training.group_size
    return completions * (training.max_new_tokens + unsampled_limit(config)) * TOKEN_BYTES


def slice_tokens(rollout: RolloutConfig) -> int:
    """Most new tokens of a completion in a round; with "defer" in a short one."""
    rounds = 2 if rollout.tail == "defer" else rollout.max_staleness + 1
    return rollout.slice_tokens or -(-rollout.max_new_tokens // rounds)
