"""What the trainer asks for: a score for every completion, by the judge or by the user's function."""

from __future__ import annotations

from collections.abc import Sequence
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


def scheme_of(reward: RewardConfig) -> Scheme:
    """The scheme that the settings name."""
    return Scheme(
        reward.scheme,  # type: ignore[arg-type]  # one of the names, as the settings' check has seen
        reward.format_penalty,
        reward.output_scaling,
        reward.output_bias,
        reward.mask_no_eos_with_zero,
        reward.overlong_buffer,
        reward.overlong_penalty,
    )


def rules_of(reward: RewardConfig) -> Rules:
    """The rules that the settings name."""
    return Rules(reward.answer_from, protocol=not reward.strict)  # type: ignore[arg-type]


def open_judges(reward: RewardConfig) -> VerifierPool:
    """The workers of one rank. Start them before process groups, CUDA and engines."""
    return VerifierPool(
        reward.workers, reward.timeout_seconds, rules=rules_of(reward), function=reward.function
    )


def judged_text(prompt_text: str, completion_text: str) -> str:
    """The completion as the judge reads it: a prompt that ends inside of thoughts opens them.

    >>> judged_text("What is 1+1?<think>\\n", "It is 2.")
    '<think>It is 2.'
    """
    opens = prompt_text.rfind("<think>") > prompt_text.rfind("</think>")
    return "<think>" + completion_text if opens else completion_text


@dataclass(frozen=True)
class _Asked:
    completion: Completion
    text: str
    """As the judge reads it."""
    boxed: bool
    future: Future[Any]


class Judge:
    """Takes completions as they come, and gives their scores at the end."""

    def __init__(self, pool: VerifierPool, reward: RewardConfig, max_new_tokens: int) -> None:
        self._pool = pool
        self._reward = reward
        self._scheme = scheme_of(reward)
        self._limit = max_new_tokens
        self._asked: list[_Asked] = []

    def ask(self, prompt: Prompt, completion: Completion) -> None:
        """Hands a completion to the workers."""
        text = judged_text(prompt.text, completion.text)
        if self._reward.function is None:
            future: Future[Any] = self._pool.submit(text, prompt.solutions, prompt.task)
        else:
            future = self._pool.call(completion.text, prompt.solutions, prompt.row)
        self._asked.append(_Asked(completion, text, has_box(text), future))

    def scores(self) -> list[Score]:
        """The scores of all that was asked since the last call, in that order; waits at most one answer's limit."""
        asked, self._asked = self._asked, []
        results: Sequence[Any] = self._pool.results([one.future for one in asked])
        return [self._score(one, result) for one, result in zip(asked, results, strict=True)]

    def _score(self, asked: _Asked, result: Any) -> Score:
        completion, text = asked.completion, asked.text
        lengths = len(completion.token_ids), self._limit, completion.finish_reason == "length"
        if self._reward.function is not None:
            said = result or FunctionResult(0.0, failure="timeout", message="timeout")
            return function_score(self._scheme, said, self._reward.function_failure, asked.boxed, *lengths)
        if result is None:
            answer = extract_answer(text, self._reward.answer_from) or ""  # type: ignore[arg-type]
            result = Verdict(False, answer.strip()[:MAX_ANSWER_CHARS], "timeout")
        return score(self._scheme, result, asked.boxed, *lengths)
