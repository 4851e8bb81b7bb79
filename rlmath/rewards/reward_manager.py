"""The scores of completions by the verifier or the user's functions, in worker processes.

The time limit of one call, `reward.timeout_seconds`, is kept by `workers.worker_pool`; `FailedSteps`
says what follows when calls are too late step after step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.answers.extraction import has_box
from rlmath.config.schema import RewardConfig
from rlmath.config.terminal import visible
from rlmath.rewards.several_rewards import (
    MeasuredRows,
    RewardWorkers,
    is_right,
    is_verified,
    reward_hooks,
    rewards_of,
    score_of,
)
from rlmath.workers.function_calls import FunctionResult
from rlmath.workers.hooks import Hook
from rlmath.workers.user_functions import UserFunctionError
from rlmath.workers.worker_pool import WorkerPool


def open_reward_workers(
    reward: RewardConfig,
    plugins: Sequence[str] = (),
    measured: MeasuredRows = MeasuredRows(),  # noqa: B008
) -> RewardWorkers:
    """The workers of one rank: of `reward.rewards`, of `reward.function` or of the verifier.

    Start them before process groups, CUDA and engines. `plugins` register functions of the user's
    by name."""
    hooks: dict[str, Hook | None] = {}
    for named_reward in rewards_of(reward):
        if named_reward.function is not None:
            setting = (
                f"reward.rewards: {named_reward.name}" if named_reward.name else "reward.function"
            )
            hooks[named_reward.name] = Hook(
                "reward",
                named_reward.function,
                setting,
                plugins=tuple(plugins),
                takes=reward.function_takes,
            )
        elif named_reward.name == "correctness":
            hooks[named_reward.name] = None
    return RewardWorkers(hooks, reward, measured)


def open_scorer(hook: Hook, reward: RewardConfig) -> RewardWorkers:
    """The workers of a function that says what is right in validation.

    Its limits are those of rewards."""
    return RewardWorkers({"": hook}, reward)


def scorer_settings(reward: RewardConfig) -> RewardConfig:
    """The settings by which a scorer's result becomes a score: right where it is above 0."""
    return RewardConfig(
        function="scorer", workers=reward.workers, timeout_seconds=reward.timeout_seconds
    )


def text_to_verify(prompt_text: str, completion_text: str) -> str:
    """The completion, preceded by `<think>` where the prompt ends inside a thinking section.

    >>> text_to_verify("What is 1+1?<think>\\n", "It is 2.")
    '<think>It is 2.'
    """
    opens = prompt_text.rfind("<think>") > prompt_text.rfind("</think>")
    return "<think>" + completion_text if opens else completion_text


CALL_NEEDED = {
    "completion": "It is called as function(completion: str, solutions: list[str], row: dict) and "
    "must return a "
    "number, or a number and a dict of numbers (docs/rewards.md)",
    "group": "With reward.function_takes=group it is called as function(completions: list[str], "
    "solutions: list[str], "
    "row: dict) and must return a list with a number, or a number and a dict of numbers, for each "
    "completion "
    "(docs/rewards.md)",
}
UNSCORED = Score(0.0, False, extracted="", verdict="unscored")
"""The score of a completion that waits for the others of its group, with functions that take
groups."""


class RewardFunctionError(UserFunctionError):
    """The reward function failed on every completion of a step.

    All ranks raise it, before anything is learned."""


@dataclass(frozen=True)
class Trial:
    """The outcome of calling functions of the user's before a run."""

    lines: tuple[str, ...] = ()
    """Lines for the console: the return value of each function."""
    warnings: tuple[str, ...] = ()
    wrong_answers: tuple[FunctionResult, ...] = ()
    """The result of each function for a wrong answer; none of one that failed, or where no
    answer is known to be wrong."""

    def __add__(self, other: Trial) -> Trial:
        return Trial(
            self.lines + other.lines,
            self.warnings + other.warnings,
            self.wrong_answers + other.wrong_answers,
        )


def try_reward_function(
    reward: RewardConfig, prompts: Sequence[Prompt], plugins: Sequence[str] = ()
) -> Trial:
    """Call each of the user's functions on the first of the prompts, as a run would.

    ValueError where one fails on each of a few made-up completions; warns also of one that is late:
    it may have waited for a network."""
    hooks = reward_hooks(reward, plugins) if prompts else []
    trial = sum((_trial_of(hook, reward, prompts[0]) for hook in hooks), Trial())
    wrong_answers = trial.wrong_answers
    if (
        wrong_answers
        and len(wrong_answers) == len(hooks)
        and not is_verified(reward)
        and is_right(wrong_answers)
        and wrong_answers[0].reward > 0
    ):
        warning = (
            f"{hooks[0].setting} pays {wrong_answers[0].reward:g} for a wrong answer that was "
            "made up: dynamic "
            "sampling, the curriculum of prompts and reward/correct take what is paid more than 0 "
            "for right, whatever "
            'the verifier says. Pay wrong answers at most 0, or return (reward, {"correct": 0 or '
            "1})."
        )
        return trial + Trial(warnings=(warning,))
    return trial


def try_scorer(hook: Hook, reward: RewardConfig, prompts: Sequence[Prompt]) -> Trial:
    """Call a scorer for validation on the first of the prompts; see `try_reward_function`."""
    return _trial_of(hook, reward, prompts[0]) if prompts else Trial()


def _trial_of(hook: Hook, reward: RewardConfig, prompt: Prompt) -> Trial:
    """Call one function on completions that are made up, until it has an answer or is late."""
    setting = hook.setting
    function_name = f"{hook.setting} {hook.spec}"
    consequence = "Such answers get reward.function_failure."
    if hook.kind == "scorer":
        consequence = "Such answers count as wrong."
    elif reward.rewards:
        setting = function_name = f"{hook.setting}={hook.spec}"
        consequence = "Such answers do without it."
    failures: list[FunctionResult] = []
    with WorkerPool(1, reward.timeout_seconds, function=hook) as pool:
        for completion in _made_up_completions(prompt):
            try:
                right, wrong = _tried(pool, hook, completion, prompt=prompt)
            except RuntimeError as error:
                raise ValueError(f"{function_name}: {error}") from None
            if right.failure is None:
                return Trial(
                    lines=(_tried_line(hook, right, wrong),),
                    wrong_answers=(wrong,) if wrong and not wrong.failure else (),
                )
            if right.failure == "timeout":
                warning = (
                    f"{setting} took more than reward.timeout_seconds={reward.timeout_seconds:g} "
                    "on the first row of "
                    f"the training data. {consequence}"
                )
                return Trial(warnings=(warning,))
            failures.append(right)
    raise ValueError(
        f"{function_name} fails on the first row of the training data ({prompt.prompt_id!r}), with "
        f"each of {len(failures)} completions that were made up to try "
        f"it:\n{_indented(failures[0].message)}\n"
        f"{CALL_NEEDED[hook.takes]}. {_change(hook, reward, prompt)}"
    )


def _tried_line(hook: Hook, right: FunctionResult, wrong: FunctionResult | None) -> str:
    argument = "all completions of a prompt" if hook.takes == "group" else "each completion"
    wrong_text = "" if wrong is None else f", a wrong one {wrong.failure or f'{wrong.reward:g}'}"
    return (
        f"{hook.setting}={hook.spec} is called with {argument}; tried: a right answer gets "
        f"{right.reward:g}{wrong_text}"
    )


def _change(hook: Hook, reward: RewardConfig, prompt: Prompt) -> str:
    """A sentence on what to change where a function fails: what it takes, where it works so."""
    takes = "completion" if hook.takes == "group" else "group"
    if hook.kind == "reward":
        other_hook = replace(hook, takes=takes)
        with WorkerPool(1, reward.timeout_seconds, function=other_hook) as pool:
            right, _ = _tried(pool, other_hook, _made_up_completions(prompt)[0], prompt=prompt)
        if right.failure is None:
            return (
                f"It works so with reward.function_takes: {takes}. Set that, or correct the "
                "function."
            )
    return "Correct the function."


def _tried(
    pool: WorkerPool, hook: Hook, completion: str, prompt: Prompt
) -> tuple[FunctionResult, FunctionResult | None]:
    """The results of trial calls on a completion and, where one is known, on a wrong one.

    Both are in one group where the function takes groups."""
    completions = [completion]
    if prompt.solutions and not any(WRONG in solution for solution in prompt.solutions):
        completions.append(_written(WRONG))
    if hook.takes == "completion":
        results = [pool.call(text, prompt.solutions, prompt.row).result() for text in completions]
    else:
        group = [*completions, *_made_up_completions(prompt)]
        results = pool.call_group(group, prompt.solutions, prompt.row).result()
    return results[0], results[1] if len(completions) > 1 else None


WRONG = "987654321"
"""An answer that is wrong, to any solution without it."""


def _made_up_completions(prompt: Prompt) -> tuple[str, ...]:
    """Right completions in the usual forms that a model may write.

    They are several, since a function may well fail on one."""
    answer = prompt.solutions[0] if prompt.solutions else "1"
    return _written(answer), _written(answer) + " ", answer


def _written(answer: str) -> str:
    """A completion with thinking, tags and a box around the answer."""
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return (
        f"<think>\nLet us see.\n</think>\n<answer>\nThe answer is {boxed}.\n</answer>\n#### "
        f"{answer}"
    )


def raise_if_every_call_failed(scores: Sequence[Score]) -> None:
    """RewardFunctionError where a user's function raised on every completion of a step.

    A late call did not fail."""
    called: dict[str, list[str]] = {}
    for name, message in _function_errors(scores):
        called.setdefault(f"reward.rewards: {name}" if name else "reward.function", []).append(
            message
        )
    for setting, messages in called.items():
        if len(messages) == len(scores):
            first_line, _, trace = _indented(messages[0]).strip().partition("\n")
            raise RewardFunctionError(
                f"{setting} failed on all of {len(scores)} completions: "
                f"{first_line}\n{trace}".strip()
            )


class FailedSteps:
    """Checks whether the user's functions give a run anything to learn from."""

    def __init__(self, timeout_seconds: float) -> None:
        """`timeout_seconds` is the limit of a call."""
        self._timeout_seconds = timeout_seconds
        self._before: frozenset[str] = frozenset()
        """Settings whose every call failed in the step before."""

    def check(self, scores: Sequence[Score]) -> None:
        """RewardFunctionError where a function raised on every completion of a step.

        Also where it failed on every completion of two steps in a row, be it by being late. All
        ranks call it with the scores of every step."""
        raise_if_every_call_failed(scores)
        kinds: dict[str, list[str]] = {}
        for name, kind in _failures(scores):
            kinds.setdefault(f"reward.rewards: {name}" if name else "reward.function", []).append(
                kind
            )
        failed = frozenset(
            setting for setting, failures in kinds.items() if len(failures) == len(scores)
        )
        failed_again = sorted(failed & self._before)
        self._before = failed
        if failed_again:
            n_late = kinds[failed_again[0]].count("timeout")
            raise RewardFunctionError(
                f"{failed_again[0]} failed on all completions of two steps in a row: on "
                f"{n_late} of {len(scores)} it took more than "
                f"reward.timeout_seconds={self._timeout_seconds:g}. Nothing is learned from "
                "such a step. Make it "
                "faster, or raise reward.timeout_seconds."
            )


def _failures(scores: Sequence[Score]) -> Iterator[tuple[str, str]]:
    """(name, "error" or "timeout") of every call of a function that failed.

    Names are those of `_function_errors`."""
    for score in scores:
        if score.verdict in ("error", "timeout") and not score.parts:
            yield "", score.verdict
        for failure in score.failures:
            if failure.name != "correctness":
                yield failure.name, failure.kind


def first_function_failure(groups: Sequence[ScoredGroup]) -> str | None:
    """Message and traceback of the first error of a user's function, indented.

    None where functions only took too long."""
    errors = _function_errors([score for group in groups for score in group.scores])
    return next(
        (_indented(f"{name}: {message}" if name else message) for name, message in errors), None
    )


def _function_errors(scores: Sequence[Score]) -> Iterator[tuple[str, str]]:
    """(name, message) of every error of a function of `reward.rewards`.

    The function of `reward.function` has no name."""
    for score in scores:
        if score.verdict == "error" and not score.parts:
            yield "", score.extracted
        for failure in score.failures:
            if failure.kind == "error" and failure.name != "correctness":
                yield failure.name, failure.message


def _indented(message: str) -> str:
    return "\n".join(f"  {line}" for line in visible(message).splitlines())


@dataclass(frozen=True, eq=False)
class _Submitted:
    """A completion; with functions that take groups, all completions of a prompt."""

    completions: tuple[Completion, ...]
    boxed: tuple[bool, ...]
    futures: tuple[dict[str, Future[Any]], ...]
    """Results to come, by completion and name of the reward."""
    group_futures: dict[str, Future[list[FunctionResult]]]
    """Lists of results to come, by the name of the reward."""
    was_known: tuple[frozenset[str], ...]
    """Names of the futures of each completion that were done at once: the answer waited for no
    worker."""
    key: Any

    @property
    def all_futures(self) -> list[Future[Any]]:
        single_futures = [future for futures in self.futures for future in futures.values()]
        return [*single_futures, *self.group_futures.values()]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.all_futures)


class RewardManager:
    """Scores completions while others are still sampled.

    `submit` each, then `collect` all, or `take_finished` ones."""

    def __init__(
        self,
        workers: RewardWorkers,
        reward: RewardConfig,
        max_new_tokens: int,
        validates: bool = False,
        discount: float = 1.0,
    ) -> None:
        """`validates`: completions are those of a validation.

        A reward above 0 is multiplied by `discount` for each retry."""
        self._workers = workers
        self._validates = validates
        self._reward = reward
        self._limit = max_new_tokens
        self._discount = discount
        self._submitted: list[_Submitted] = []

    def __len__(self) -> int:
        """Completions whose scores are not taken."""
        return sum(len(submitted.completions) for submitted in self._submitted)

    @property
    def takes_groups(self) -> bool:
        """Whether completions are submitted by group."""
        return bool(self._workers.of_groups)

    def submit(self, prompt: Prompt, completion: Completion, key: Any = None) -> None:
        """Queue a completion for the workers; `key` is what `take_finished` calls it."""
        assert not self.takes_groups, "the functions take groups"
        self.submit_group(prompt, [completion], key)

    def submit_group(
        self, prompt: Prompt, completions: Sequence[Completion], key: Any = None
    ) -> None:
        """Queue all completions of a prompt for the workers.

        `key` is what `take_finished` calls them."""
        texts = [
            text_to_verify(prompt.text + completion.earlier_text, completion.answer_text)
            for completion in completions
        ]
        futures = [
            self._workers.submit(text, prompt, completion, self._validates)
            for text, completion in zip(texts, completions, strict=True)
        ]
        known_rewards = [
            frozenset(name for name, future in by_name.items() if future.done())
            for by_name in futures
        ]
        self._submitted.append(
            _Submitted(
                tuple(completions),
                boxed=tuple(map(has_box, texts)),
                futures=tuple(futures),
                group_futures=self._workers.submit_group(prompt, completions),
                was_known=tuple(known_rewards),
                key=key,
            )
        )

    def collect(self, on_progress: Callable[[], None] = lambda: None) -> list[Score]:
        """The scores of all completions submitted since the last call, when all are there.

        They are in the order of submission. Answers time out one by one, each after
        `reward.timeout_seconds` of its own. `on_progress` is called every second."""
        self.wait(on_progress)
        return [score for _, scores in self.take_finished() for score in scores]

    def wait(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait until all that is submitted has its scores; as `collect`."""
        futures = [future for submitted in self._submitted for future in submitted.all_futures]
        WorkerPool.results(futures, on_progress)

    def await_any(self, seconds: float) -> None:
        """Wait until something that is submitted may have its scores, at most so long.

        Returns at once where scores are there."""
        if any(submitted.is_done for submitted in self._submitted):
            return
        futures = [future for submitted in self._submitted for future in submitted.all_futures]
        wait_for([future for future in futures if not future.done()], seconds, FIRST_COMPLETED)

    def take_finished(self, wait: bool = False) -> list[tuple[Any, list[Score]]]:
        """The scores that are there and were not taken, with their keys; `wait` for all."""
        finished: list[_Submitted] = []
        unfinished: list[_Submitted] = []
        for submitted in self._submitted:
            (finished if wait or submitted.is_done else unfinished).append(submitted)
        self._submitted = unfinished
        return [(submitted.key, self._scores(submitted)) for submitted in finished]

    def _scores(self, submitted: _Submitted) -> list[Score]:
        """The scores of what was submitted, by completion."""
        group_rewards = {name: future.result() for name, future in submitted.group_futures.items()}
        scores = []
        for g, completion in enumerate(submitted.completions):
            rewards = {name: future.result() for name, future in submitted.futures[g].items()}
            for name in submitted.was_known[g]:
                rewards[name] = replace(rewards[name], queue_seconds=0.0)
            score = score_of(
                self._reward,
                rewards | {name: group_results[g] for name, group_results in group_rewards.items()},
                boxed=submitted.boxed[g],
                length=completion.n_sampled,
                limit=self._limit,
                truncated=completion.finish_reason == "length",
            )
            # A wrong answer must not cost less for a retry.
            factor = self._discount**completion.retries if score.reward > 0 else 1.0
            scores.append(replace(score, reward=score.reward * factor))
        return scores
