"""The scores of completions, by the verifier or by the user's reward function, in worker processes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlmath.algorithms.types import Completion, Prompt, Score
from rlmath.config.schema import RewardConfig
from rlmath.rewards.custom_function import FunctionResult
from rlmath.rewards.extraction import extract_answer, has_box
from rlmath.rewards.schemes import Scheme, function_score, score
from rlmath.rewards.verifier import MAX_ANSWER_CHARS, Rules, Verdict
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


@dataclass(frozen=True)
class _Submitted:
    completion: Completion
    text: str
    """From `text_to_verify`."""
    boxed: bool
    future: Future[Any]


class RewardManager:
    """Scores completions while others are still sampled: `submit` each, then `collect` all scores."""

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

    def submit(self, prompt: Prompt, completion: Completion) -> None:
        """Queue a completion for the workers."""
        text = text_to_verify(prompt.text, completion.text)
        if self._reward.function is None:
            future: Future[Any] = self._pool.submit(text, prompt.solutions, prompt.task)
        else:
            future = self._pool.call(completion.text, prompt.solutions, prompt.row)
        self._submitted.append(_Submitted(completion, text, has_box(text), future))

    def collect(self) -> list[Score]:
        """The scores of all completions submitted since the last call, in that order. Waits at most
        `reward.timeout_seconds` plus a quarter of a second; what is late then counts as timed out. The wait starts
        again whenever an answer is scored a second time or a fork server is replaced."""
        submitted, self._submitted = self._submitted, []
        results = self._pool.results([one.future for one in submitted])
        return [self._score(one, result) for one, result in zip(submitted, results, strict=True)]

    def _score(self, submitted: _Submitted, result: Any) -> Score:
        completion, boxed = submitted.completion, submitted.boxed
        length, truncated = len(completion.token_ids), completion.finish_reason == "length"
        if self._reward.function is not None:
            result = result or FunctionResult(0.0, failure="timeout", message="timeout")
            worst = self._reward.function_failure
            return function_score(self._scheme, result, worst, boxed, length, self._limit, truncated)
        if result is None:
            answer = extract_answer(submitted.text, self._reward.answer_from) or ""
            result = Verdict(False, answer.strip()[:MAX_ANSWER_CHARS], "timeout")
        return score(self._scheme, result, boxed, length, self._limit, truncated)
