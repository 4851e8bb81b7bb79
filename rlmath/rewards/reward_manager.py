"""The scores of completions, by the verifier or by the user's reward function, in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import RewardConfig
from rlmath.config.terminal import visible
from rlmath.rewards.custom_function import FunctionResult
from rlmath.rewards.extraction import has_box
from rlmath.rewards.schemes import Scheme, function_score, score
from rlmath.rewards.verifier import Rules
from rlmath.rewards.worker_pool import VerifierPool


def open_reward_workers(reward: RewardConfig) -> VerifierPool:
    """The workers of one rank. Start them before process groups, CUDA and engines."""
    rules = Rules(reward.answer_from, protocol=not reward.strict)
    return VerifierPool(reward.workers, reward.timeout_seconds, rules=rules, function=reward.function)


def text_to_verify(prompt_text: str, completion_text: str) -> str:
    """The completion, preceded by `<think>` where the prompt ends inside a thinking section.

    >>> text_to_verify("What is 1+1?<think>\\n", "It is 2.")
    '<think>It is 2.'
    """
    opens = prompt_text.rfind("<think>") > prompt_text.rfind("</think>")
    return "<think>" + completion_text if opens else completion_text


CALL_NEEDED = (
    "It is called as function(completion: str, solutions: list[str], row: dict) and must return a number, or a number "
    "and a dict of numbers (docs/rewards.md)"
)


class RewardFunctionError(Exception):
    """The reward function failed on every completion of a step. Raised on all ranks alike, before anything is learned
    of them."""


def try_reward_function(reward: RewardConfig, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Call the user's function, if there is one, on the first of the prompts, as a run would. Warnings.

    ValueError where it fails on each of a few completions that are made up. One that takes longer than its limit is
    only warned of: it may have waited for a network.
    """
    if reward.function is None or not prompts:
        return ()
    prompt = prompts[0]
    failures: list[FunctionResult] = []
    with open_reward_workers(replace(reward, workers=1)) as pool:
        for completion in _made_up_completions(prompt):
            try:
                result = pool.call(completion, prompt.solutions, prompt.row).result()
            except RuntimeError as error:
                raise ValueError(f"reward.function {reward.function}: {error}") from None
            if result.failure is None:
                return ()
            if result.failure == "timeout":
                return (
                    f"reward.function took more than reward.timeout_seconds={reward.timeout_seconds:g} on "
                    "the first row of the training data. Such answers get reward.function_failure.",
                )
            failures.append(result)
    raise ValueError(
        f"reward.function {reward.function} fails on the first row of the training data ({prompt.prompt_id!r}), with "
        f"each of {len(failures)} completions that were made up to try it:\n{_indented(failures[0].message)}\n"
        f"{CALL_NEEDED}. Correct the function."
    )


def _made_up_completions(prompt: Prompt) -> tuple[str, ...]:
    """What a model may write, right, in the usual forms at once; a function may well fail on one text, so there are
    more."""
    answer = prompt.solutions[0] if prompt.solutions else "1"
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    text = f"<think>\nLet us see.\n</think>\n<answer>\nThe answer is {boxed}.\n</answer>\n#### {answer}"
    return text, text + " ", answer


def raise_if_every_call_failed(scores: Sequence[Score]) -> None:
    """RewardFunctionError where the user's function failed on every completion of a step. One that took too long is no
    failure of its code."""
    if scores and all(score.verdict == "error" for score in scores):
        what, _, trace = _indented(scores[0].extracted).strip().partition("\n")
        raise RewardFunctionError(
            f"reward.function failed on all of {len(scores)} completions: {what}\n{trace}".strip()
        )


def first_function_failure(groups: Sequence[ScoredGroup]) -> str | None:
    """Message and traceback of the first failure of the user's function, indented; None where it only took too
    long."""
    failed = (score.extracted for group in groups for score in group.scores if score.verdict == "error")
    return next(map(_indented, failed), None)


def _indented(message: str) -> str:
    return "\n".join(f"  {line}" for line in visible(message).splitlines())


@dataclass(frozen=True, eq=False)
class _Submitted:
    completion: Completion
    boxed: bool
    future: Future[Any]
    was_known: bool
    """The future was done at once: the answer waited for no worker."""
    key: Any


class RewardManager:
    """Scores completions while others are still sampled: `submit` each, then `collect` all scores, or take those that
    are there by `take_finished`."""

    def __init__(self, pool: VerifierPool, reward: RewardConfig, max_new_tokens: int) -> None:
        self._pool = pool
        self._reward = reward
        self._scheme = Scheme(
            reward.scheme,
            reward.format_penalty,
            reward.output_scaling,
            reward.output_bias,
            reward.mask_no_eos_with_zero,
            reward.overlong_buffer,
            reward.overlong_penalty,
        )
        self._limit = max_new_tokens
        self._submitted: list[_Submitted] = []

    def __len__(self) -> int:
        """Completions whose scores are not taken."""
        return len(self._submitted)

    def submit(self, prompt: Prompt, completion: Completion, key: Any = None) -> None:
        """Queue a completion for the workers; `key` is what `take_finished` calls it."""
        text = text_to_verify(prompt.text, completion.text)
        if self._reward.function is None:
            future: Future[Any] = self._pool.submit(text, prompt.solutions, prompt.task)
        else:
            future = self._pool.call(completion.text, prompt.solutions, prompt.row)
        self._submitted.append(_Submitted(completion, has_box(text), future, future.done(), key))

    def collect(self, on_progress: Callable[[], None] = lambda: None) -> list[Score]:
        """The scores of all completions submitted since the last call, in that order, when all are there: answers time
        out one by one, each after `reward.timeout_seconds` of its own. `on_progress` is called every second."""
        submitted, self._submitted = self._submitted, []
        results = self._pool.results([one.future for one in submitted], on_progress)
        return [self._score(one, result) for one, result in zip(submitted, results, strict=True)]

    def take_finished(self, wait: bool = False) -> list[tuple[Any, Score]]:
        """The scores that are there and were not taken, with their keys; `wait` for all."""
        taken: list[_Submitted] = []
        left: list[_Submitted] = []
        for one in self._submitted:
            (taken if wait or one.future.done() else left).append(one)
        self._submitted = left
        results = self._pool.results([one.future for one in taken]) if taken else []
        return [(one.key, self._score(one, result)) for one, result in zip(taken, results, strict=True)]

    def _score(self, submitted: _Submitted, result: Any) -> Score:
        completion, boxed = submitted.completion, submitted.boxed
        length, truncated = len(completion.token_ids), completion.finish_reason == "length"
        if submitted.was_known:
            result = replace(result, queue_seconds=0.0)
        if self._reward.function is not None:
            worst = self._reward.function_failure
            return function_score(self._scheme, result, worst, boxed, length, self._limit, truncated)
        return score(self._scheme, result, boxed, length, self._limit, truncated)
