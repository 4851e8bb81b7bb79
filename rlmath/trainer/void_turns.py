"""Which completions end in a turn without call or answer, and what is learned of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlmath.algorithms.types import Completion, Prompt, turn_tokens
from rlmath.config.schema import Config
from rlmath.data.tool_formats import has_void_turn
from rlmath.rewards.several_rewards import is_verified

VoidRule = Callable[[Prompt, Completion], bool]


def void_rule(config: Config) -> VoidRule:
    """Says which completions have a void turn.

    Where the verifier judges nothing, whatever ends by itself is an answer."""
    answer_from = config.reward.answer_from if is_verified(config.reward) else None
    return partial(has_void_turn, answer_from=answer_from, tools=config.tools)


def void_rule_of(config: Config, action: str) -> VoidRule | None:
    """The rule where `tools.void_turns` is this word, and there are tools; else None."""
    applies = config.tools.format is not None and config.tools.void_turns == action
    return void_rule(config) if applies else None


def learned_tokens(
    prompt: Prompt, completion: Completion, is_void: VoidRule | None
) -> list[bool] | None:
    """Whether each token of a completion has weight in the gradient; None: all sampled ones."""
    if is_void is None or not is_void(prompt, completion):
        return None
    tokens = len(completion.token_ids)
    void = turn_tokens(completion)
    return [True] * (tokens - void) + [False] * void
