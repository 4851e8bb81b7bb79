"""The rewards of a completion, and their workers.

`reward.rewards` lists them, `reward.weights` weighs them.

    completion -> a value of every reward, None where it failed -> weighted sum | GDPO
    (algorithms.advantages)

| entry of the list | value |
|---|---|
| "correctness" | of `reward.scheme`, before bias and scaling: 1 or -1 by default |
| "format" | 1 where the final part of the completion has a complete box, else 0 |
| "length" | 1 - tokens / rollout.max_new_tokens, right or wrong: from almost 1 down to 0 |
| "name=package.module:function" | what the user's function returns |
| the name of one that a plugin registers | what the function returns |

Every function has workers of its own, and so has the verifier: one that hangs or breaks keeps no
other waiting.
"""

# Shape legend: G completions of a group, K rewards of the list.

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from rlmath.algorithms.types import Completion, Prompt, RewardFailure, Score, ScoredGroup
from rlmath.answers.verifier import FAILURES, Rules, Verdict
from rlmath.config.schema import RewardConfig
from rlmath.rewards.schemes import raw_reward, reward_scale, scaled_reward
from rlmath.workers.function_calls import FunctionResult
from rlmath.workers.hooks import REWARD_WORDS, Hook
from rlmath.workers.worker_pool import WorkerPool

BUILT_IN = REWARD_WORDS
TAKEN = (
    "correct",
    "boxed",
    "truncated",
    "failures",
    "verdict",
    "own",
    "queue_wait_s",
    "queue_wait_s_max",
)
"""Names after `reward/` that other metrics have."""
MEASURED = "(verifier)"
"""Name of the verifier's result where it is no part of the reward, but gives the accuracy; no
reward is called so."""
VERIFIED = ("correctness", MEASURED)
"""Names of results that are the verifier's."""
MAX_FUNCTIONS = 8
"""Most functions of the list; each has up to `reward.workers` processes."""


@dataclass(frozen=True)
class NamedReward:
    """One entry of `reward.rewards`."""

    name: str
    weight: float
    function: str | None = None
    """The user's function, "package.module:name"; None: one of BUILT_IN."""


def named_rewards(reward: RewardConfig) -> tuple[NamedReward, ...]:
    """The list, in order; empty where `reward.scheme` or `reward.function` gives the reward."""
    weights = reward.weights or [1.0] * len(reward.rewards)
    functions = listed_functions(reward)
    names = [entry.partition("=")[0] for entry in reward.rewards]
    return tuple(
        NamedReward(name, weight, functions.get(name))
        for name, weight in zip(names, weights, strict=True)
    )


def rewards_of(reward: RewardConfig) -> tuple[NamedReward, ...]:
    """The list of rewards; of a run without a list its one reward.

    That is "correctness", or a function without a name."""
    only_reward = NamedReward(
        "correctness" if reward.function is None else "", 1.0, reward.function
    )
    return named_rewards(reward) or (only_reward,)


def listed_functions(reward: RewardConfig) -> dict[str, str]:
    """The user's functions of the list, by the reward's name.

    A function that a plugin registers has the name of its reward."""
    parted = [entry.partition("=") for entry in reward.rewards]
    return {
        name: function or name
        for name, equals, function in parted
        if equals or name not in BUILT_IN
    }


def functions_of(reward: RewardConfig) -> dict[str, str]:
    """The user's functions by the setting that names them, as messages call it."""
    if reward.function is not None:
        return {"reward.function": reward.function}
    return {
        f"reward.rewards: {name}": function for name, function in listed_functions(reward).items()
    }


def reward_hooks(reward: RewardConfig, plugins: Sequence[str] = ()) -> list[Hook]:
    """The user's functions, to be loaded."""
    return [
        Hook("reward", function, setting, plugins=tuple(plugins), takes=reward.function_takes)
        for setting, function in functions_of(reward).items()
    ]


def takes_groups(reward: RewardConfig) -> bool:
    """Whether the user's functions are called once for all completions of a prompt."""
    return reward.function_takes == "group" and bool(functions_of(reward))


def rules_of(reward: RewardConfig) -> Rules:
    """The rules by which the verifier finds and compares answers."""
    return Rules(reward.answer_from, protocol=not reward.strict)


def is_verified(reward: RewardConfig) -> bool:
    """Whether answers are compared with the solutions."""
    return "correctness" in reward.rewards if reward.rewards else reward.function is None


def compared_rewards(reward: RewardConfig) -> tuple[int, ...]:
    """Positions of the rewards that count, where there are several.

    A group has contrast where one of them differs."""
    return tuple(k for k, named_reward in enumerate(named_rewards(reward)) if named_reward.weight)


# ---------------------------------------------------------------- workers


@dataclass(frozen=True)
class MeasuredRows:
    """The rows whose accuracy the verifier measures, where the user's functions give all rewards.

    These rows all have a solution which an answer could equal. It is decided once, before the
    run."""

    training: bool = False
    validation: bool = False


class RewardWorkers:
    """The workers of the verifier and of every function of the user's.

    The verifier has workers where correctness counts or is measured."""

    def __init__(
        self,
        hooks: Mapping[str, Hook | None],
        reward: RewardConfig,
        measured: MeasuredRows = MeasuredRows(),
    ) -> None:
        """Returns at once, as `WorkerPool`.

        `hooks` are functions by the reward's name; None: the verifier."""
        rules = rules_of(reward)
        self.measured = measured
        self.of_groups = [
            name for name, hook in hooks.items() if hook is not None and hook.takes == "group"
        ]
        """Names of the functions that take groups."""
        if measured.training or measured.validation:
            hooks = {**hooks, MEASURED: None}
        self.by_name: dict[str, WorkerPool] = {}
        with contextlib.ExitStack() as stack:
            for name, hook in hooks.items():
                pool = WorkerPool(
                    reward.workers, reward.timeout_seconds, rules=rules, function=hook
                )
                self.by_name[name] = stack.enter_context(pool)
            self._stack = stack.pop_all()

    def submit(
        self, text: str, prompt: Prompt, completion: Completion, validates: bool = False
    ) -> dict[str, Future[Any]]:
        """Queue a completion for every reward that needs a worker, and for the measuring verifier.

        The completion is one of a validation or of training; `text` is what is verified."""
        is_measured = self.measured.validation if validates else self.measured.training
        return {
            name: pool.submit(text, prompt.solutions, prompt.task, question=prompt.question)
            if name in VERIFIED
            else pool.call(completion.last_answer, prompt.solutions, prompt.row)
            for name, pool in self.by_name.items()
            if name not in self.of_groups and (name != MEASURED or is_measured)
        }

    def submit_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, Future[list[FunctionResult]]]:
        """Queue all completions of a prompt for every function that takes groups.

        Results are in the order of the completions."""
        texts = [completion.last_answer for completion in completions]
        return {
            name: self.by_name[name].call_group(texts, prompt.solutions, prompt.row)
            for name in self.of_groups
        }

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------- scores


def score_of(
    settings: RewardConfig,
    results: Mapping[str, Verdict | FunctionResult],
    *,
    boxed: bool,
    length: int,
    limit: int,
    truncated: bool,
) -> Score:
    """The score of a completion from the results of verifier and functions.

    Its reward is (weighted sum of the rewards that did not fail - bias) * scaling, with the
    settings about length. Without a list of rewards the score has no parts, and a function that
    failed counts as `reward.function_failure`. The completion is right where the verifier says so,
    if it is a part of the reward; without it where the first metric "correct" of a function, else
    the first function's reward, is above 0."""
    waited = max((result.queue_seconds for result in results.values()), default=0.0)
    measured = results.get("correctness", results.get(MEASURED))
    results = {name: result for name, result in results.items() if name != MEASURED}
    rewards = rewards_of(settings)
    values = tuple(
        _value(named_reward, settings, results, boxed=boxed, length=length, limit=limit)
        for named_reward in rewards
    )
    failures = tuple(
        RewardFailure(name, result.failure or "error", result.message)
        if isinstance(result, FunctionResult)
        else RewardFailure(name, result.verdict, "")
        for name, result in results.items()
        if _failed(result)
    )
    verdict = results.get("correctness")
    failure_reward = 0.0 if settings.rewards else settings.function_failure
    known_values = [failure_reward if value is None else value for value in values]
    number = sum(
        named_reward.weight * value
        for named_reward, value in zip(rewards, known_values, strict=True)
    )
    reward = scaled_reward(
        settings, number, verdict is not None, length=length, limit=limit, truncated=truncated
    )
    called = {
        name: result for name, result in results.items() if isinstance(result, FunctionResult)
    }
    metrics = tuple(
        (f"{name}/{metric}" if name else metric, value)
        for name, result in called.items()
        for metric, value in result.metrics
    )
    if isinstance(verdict, Verdict):
        correct = verdict.correct
        extracted = verdict.extracted
        kind = verdict.verdict
    else:
        all_failed = len(failures) == len(called)
        kind, extracted = (
            (failures[0].kind, failures[0].message) if all_failed else ("function", "")
        )
        correct = is_right(list(called.values()))
    return Score(
        reward,
        correct,
        extracted=extracted,
        verdict=kind,
        boxed=boxed,
        metrics=metrics,
        queue_seconds=waited,
        parts=values if settings.rewards else (),
        failures=failures if settings.rewards else (),
        verified_correct=measured.correct if isinstance(measured, Verdict) else None,
    )


def _failed(result: Verdict | FunctionResult) -> bool:
    """Whether verifier or function came to no result."""
    return (
        (result.failure is not None)
        if isinstance(result, FunctionResult)
        else result.verdict in FAILURES
    )


def _value(
    named_reward: NamedReward,
    settings: RewardConfig,
    results: Mapping[str, Verdict | FunctionResult],
    boxed: bool,
    length: int,
    limit: int,
) -> float | None:
    """The value of one reward of the list; None where its function failed."""
    if named_reward.name == "format":
        return float(boxed)
    if named_reward.name == "length":
        return max(0.0, 1.0 - length / limit)
    result = results[named_reward.name]
    if isinstance(result, FunctionResult):
        return result.reward if result.failure is None else None
    # An answer whose check does not end is wrong: the policy wrote it.
    return raw_reward(settings, result.correct, boxed)


def is_right(results: Sequence[FunctionResult]) -> bool:
    """Whether the user's functions call a completion right: their value is above 0.

    The value is the first metric "correct", else the first function's reward."""
    successes = [result for result in results if result.failure is None]
    correct_metrics = [
        dict(result.metrics)["correct"] for result in successes if "correct" in dict(result.metrics)
    ]
    return (
        correct_metrics[0] > 0
        if correct_metrics
        else results[0].failure is None and results[0].reward > 0
    )


def summed_rewards(group: ScoredGroup, reward: RewardConfig) -> list[float]:
    """The rewards of a group that advantages of weighted sums are made of, less the length penalty.

    They are the rewards of the scores, where a reward that failed counts as the mean of its values
    for the others of the group, so that it moves nothing; where it has no value for any, it adds
    nothing. A completion that `mask_no_eos_with_zero` sets to 0 stays there. The penalty is
    `reward.length_penalty`."""
    rewards = _without_failures(group, reward)
    if not reward.length_penalty:
        return rewards
    tokens = [completion.n_sampled for completion in group.completions]
    return length_penalised(
        rewards, tokens, [score.correct for score in group.scores], penalty=reward.length_penalty
    )


def length_penalised(
    rewards: Sequence[float], tokens: Sequence[int], correct: Sequence[bool], penalty: float
) -> list[float]:
    """Rewards less `penalty` per 1,000 tokens times the share of right ones, at least 1 / G.

    Source: ALP, arXiv:2506.05256.

    >>> length_penalised([1.0, 0.0], [1000, 500], [True, False], penalty=0.5)
    [0.75, -0.125]
    """
    cost = penalty / 1000 * max(sum(correct), 1) / max(1, len(correct))
    return [reward - cost * n for reward, n in zip(rewards, tokens, strict=True)]


def _without_failures(group: ScoredGroup, reward: RewardConfig) -> list[float]:
    """The group's rewards with the mean of a reward in the place of its failures."""
    if not reward.rewards or not any(score.failures for score in group.scores):
        return group.rewards
    scale = reward_scale(reward, is_verified(reward))
    filled = group.rewards
    for k, named_reward in enumerate(named_rewards(reward)):
        values = [value for score in group.scores if (value := score.parts[k]) is not None]
        if not values or len(values) == len(filled):
            continue
        mean = values[0] if len(set(values)) == 1 else sum(value / len(values) for value in values)
        for g, score in enumerate(group.scores):
            masked = reward.mask_no_eos_with_zero and group.completions[g].finish_reason == "length"
            if score.parts[k] is None and not masked:
                filled[g] += named_reward.weight * mean * scale
    return filled
