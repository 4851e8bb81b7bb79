"""Functions of the user's, of the kinds of `rlmath.workers.hooks`, called in worker processes.

    UserFunction (this process) -> WorkerPool of one worker -> the function

A call that hangs, fills memory, ends its process or leaves others costs that call alone, as with
reward functions. The functions of rewards and scorers are called by `RewardManager`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rlmath.algorithms.types import ScoredGroup
from rlmath.config.schema import Config
from rlmath.workers.function_calls import HookResult
from rlmath.workers.hooks import Hook, hook_of
from rlmath.workers.worker_pool import WorkerPool

CALL_SECONDS = 60.0
"""Time limit of one call, by the clock."""
METRIC_SECONDS = 10.0
"""Time limit of one call of a metric: the other ranks may wait for rank 0 meanwhile."""
ALL_SECONDS = 600.0
"""Time limit of all calls of a step, such as those of a selection for every group: the ranks wait
for them."""
AT_ONCE = 1000
"""Calls that wait for the worker at a time: as much of their arguments is held."""


class UserFunctionError(Exception):
    """A user's function that a step needs failed.

    All ranks raise it, before anything is learned of the step."""


class UserFunction:
    """One function with its worker.

    Its text is the setting's value."""

    def __init__(self, hook: Hook, seconds: float = CALL_SECONDS) -> None:
        """Returns at once.

        `seconds` is the time limit of a call."""
        self.hook = hook
        self._seconds = seconds
        self._pool = WorkerPool(1, seconds, function=hook)
        self.was_late = False
        """Whether the last call took too long."""

    def __str__(self) -> str:
        return self.hook.spec

    def map(self, calls: Iterable[Sequence[Any]]) -> Iterator[HookResult]:
        """The result of each call, by its arguments.

        ValueError where the function cannot be loaded."""
        calls = iter(calls)
        try:
            while chunk := list(itertools.islice(calls, AT_ONCE)):
                yield from self._pool.results(
                    [self._pool.call_hook(arguments) for arguments in chunk]
                )
        except RuntimeError as error:
            raise ValueError(f"{self.hook.setting} {self}: {error}") from None

    def values(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """The return values of the function for all calls.

        UserFunctionError at the first failure, and after ALL_SECONDS."""
        values = []
        started = time.monotonic()
        for arguments in calls:
            result = next(self.map([arguments]))
            self.was_late = result.failure == "timeout"
            if result.failure is not None:
                raise UserFunctionError(f"{self.hook.setting} {self} failed: {self.reason(result)}")
            values.append(result.value)
            if time.monotonic() - started > ALL_SECONDS:
                raise UserFunctionError(
                    f"{self.hook.setting} {self} failed: its calls of a step took more than "
                    f"{ALL_SECONDS:g} s"
                )
        return values

    def call(self, *arguments: Any) -> Any:
        """The return value of the function for one call.

        UserFunctionError where it fails."""
        return self.values([arguments])[0]

    def reason(self, result: HookResult) -> str:
        """The reason of a failure, for messages."""
        return (
            f"it took more than {self._seconds:g} s"
            if result.failure == "timeout"
            else result.message
        )

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def word_or_function(hook: Hook | None, word: str) -> Iterator[str | UserFunction]:
    """The function that a setting names, with its worker until the end.

    Where it names none, the setting's word."""
    if hook is None:
        yield word
    else:
        with UserFunction(hook) as function:
            yield function


# ---------------------------------------------------------------- what a run's settings name


def form_hook(config: Config) -> Hook | None:
    return hook_of("data_form", "data.format", config.data.format, plugins=config.run.plugins)


def template_hook(config: Config, validation: bool = False) -> Hook | None:
    """The function of `data.template`, or of `validation.template`."""
    validation_template = config.validation.template if validation else None
    setting = "data.template" if validation_template is None else "validation.template"
    return hook_of(
        "template", setting, validation_template or config.data.template, plugins=config.run.plugins
    )


def advantage_hook(config: Config) -> Hook | None:
    return hook_of(
        "advantage", "algorithm.advantage", config.algorithm.advantage, plugins=config.run.plugins
    )


def selection_hook(config: Config) -> Hook | None:
    dynamic_sampling = config.selection.dynamic_sampling
    return hook_of(
        "selection", "selection.dynamic_sampling", dynamic_sampling, plugins=config.run.plugins
    )


def scorer_hook(config: Config) -> Hook | None:
    return hook_of(
        "scorer", "validation.scorer", config.validation.scorer, plugins=config.run.plugins
    )


def environment_hook(config: Config) -> Hook | None:
    return hook_of(
        "environment",
        "environment.function",
        config.environment.function,
        plugins=config.run.plugins,
    )


def metric_hooks(config: Config) -> dict[str, Hook]:
    """The functions of `telemetry.metrics`, by the metric's name."""
    hooks = {}
    for entry in config.telemetry.metrics:
        name, equals, spec = entry.partition("=")
        setting = f"telemetry.metrics: {name}"
        plugins = tuple(config.run.plugins)
        hooks[name] = Hook("metric", spec if equals else name, setting, plugins=plugins)
    return hooks


def group_for_hooks(group: ScoredGroup) -> dict[str, Any]:
    """The fields of a `hooks.Group`."""
    return {
        "row": group.prompt.row,
        "texts": [completion.text for completion in group.completions],
        "tokens": [completion.n_sampled for completion in group.completions],
        "rewards": group.rewards,
        "correct": [score.correct for score in group.scores],
        "truncated": [completion.finish_reason == "length" for completion in group.completions],
    }
