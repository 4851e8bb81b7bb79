"""The user's own reward function: `reward.function: package.module:name` or `path/to/file.py:name`.

    def reward(completion: str, solutions: list[str], row: dict) -> float | tuple[float, dict[str, float]]

`completion` is the model's text, `row` the prompt's row of the data file with all its columns. The number is the
reward, at most MAX_REWARD; the metrics are averaged over a step and logged as `reward/own/<name>`. It runs in the
workers that verify answers otherwise, with a time limit by the clock and the same memory limit.

`call_hook` calls functions of the other kinds (`rlmath.workers.hooks`) there.
"""

from __future__ import annotations

import errno
import json
import math
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.workers.hooks import Group

MAX_METRICS = 50
"""Most metrics of one completion; further ones are left out."""
MAX_NAME_CHARS = 100
MAX_REWARD = 1e30
"""Most of a reward's absolute value: its square, and a sum of many, is still a number."""
MAX_MESSAGE_CHARS = 500
MAX_TRACE_CHARS = 1500
"""Longest message with the last lines of its traceback."""
MAX_TRACE_FRAMES = 3
MAX_RESULT_CHARS = 12 * 2**20
"""Longest result, as JSON, of a function of another kind than rewards."""


@dataclass(frozen=True)
class FunctionResult:
    """The result of the reward function for one completion."""

    reward: float
    metrics: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    """"timeout" or "error" if it returned no reward; `reward` is then 0."""
    message: str = ""
    """The error message of a failure, and the last lines of its traceback."""
    exhausted: bool = False
    """It failed for want of memory, processes or open files, which earlier answers may have used up."""
    queue_seconds: float = 0.0
    """How long the answer waited for a worker."""


def call_function(function: Callable, completion: str, solutions: list[str], row: Mapping) -> FunctionResult:
    """Call the function; a failure if it raises or returns anything but finite numbers under names that can be
    logged."""
    try:
        returned = function(completion, solutions, row)
    except (Exception, SystemExit) as error:
        message = _with_trace(error)
        return FunctionResult(0.0, failure="error", message=message, exhausted=_is_exhausted(error))
    reward, numbers = 0.0, {}
    try:
        reward, metrics = returned if isinstance(returned, tuple) else (returned, {})
        numbers = {str(name): float(value) for name, value in list(metrics.items())[:MAX_METRICS]}
        reward = float(reward)
        problem = _problem(reward, numbers)
    except Exception as error:  # the conversions may be the user's, too
        problem = f"{type(error).__name__}: {error}; needed: a number, or a number and a dict of numbers"
    if problem is not None:
        message = f"{problem[:MAX_MESSAGE_CHARS]}; it returned {reprlib.repr(returned)}"[:MAX_MESSAGE_CHARS]
        return FunctionResult(0.0, failure="error", message=message)
    return FunctionResult(reward, tuple(numbers.items()))


def _with_trace(error: BaseException) -> str:
    """An exception of the function, and where it was raised; the call itself is left out."""
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    frames = traceback.extract_tb(error.__traceback__)[1:][-MAX_TRACE_FRAMES:]
    return "\n".join([message, *"".join(traceback.format_list(frames)).splitlines()])[:MAX_TRACE_CHARS]


def call_scorer(function: Callable, completion: str, solutions: list[str], row: Mapping) -> FunctionResult:
    """Call a function that says what is right, which returns one number."""
    result = call_function(function, completion, solutions, row)
    if result.metrics:
        message = "needed: true, false or a number; it returned metrics, too"
        return FunctionResult(0.0, failure="error", message=message)
    return result


def result_of(reply: Mapping[str, Any]) -> FunctionResult:
    """The result of `call_function` as it came from its process, or a failure of that process."""
    metrics = tuple((name, value) for name, value in reply.get("metrics", ()))
    return FunctionResult(
        reply.get("reward", 0.0),
        metrics,
        failure=reply["failure"],
        message=reply["message"],
        queue_seconds=reply["queue_seconds"],
    )


def _problem(reward: float, metrics: Mapping[str, float]) -> str | None:
    if not abs(reward) <= MAX_REWARD:
        return f"the reward must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}"
    for name, value in metrics.items():
        if not math.isfinite(value):
            return f"the metric {name!a} must be finite"
        # What can be printed is valid Unicode: no half of a surrogate pair, control or escape.
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            return f"the metric name {name[:MAX_NAME_CHARS]!a} must be 1 to {MAX_NAME_CHARS} printable characters"
    return None


def _is_exhausted(error: BaseException) -> bool:
    wanting = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in wanting)


# ---------------------------------------------------------------- functions of the other kinds


@dataclass(frozen=True)
class HookResult:
    """The result of one call of a function of another kind."""

    value: Any = None
    failure: str | None = None
    """"timeout" or "error" if it returned nothing that its kind may return."""
    message: str = ""
    """The error message of a failure, and the last lines of its traceback."""


def call_hook(kind: str, function: Callable, arguments: Sequence[Any]) -> dict[str, Any]:
    """Call a function in its worker; the reply to the pool."""
    given = [Group(**one) for one in arguments] if kind == "selection" else list(arguments)
    if kind == "metric":
        given = [[Group(**group) for group in arguments[0]]]
    try:
        returned = function(*given)
    except (Exception, SystemExit) as error:
        return {"failure": "error", "message": _with_trace(error), "exhausted": _is_exhausted(error)}
    try:
        value = checked_value(kind, returned, arguments)
        size = len(json.dumps(value))
        if size > MAX_RESULT_CHARS:
            raise ValueError(f"that is {size} characters as JSON, more than {MAX_RESULT_CHARS}")
    except Exception as error:  # the conversions may be the user's, too
        message = f"{error}; it returned {reprlib.repr(returned)}"
        return {"failure": "error", "message": message[:MAX_MESSAGE_CHARS]}
    return {"failure": None, "value": value}


def checked_value(kind: str, returned: Any, arguments: Sequence[Any]) -> Any:
    """What a function returned, as plain data; ValueError or TypeError where its kind returns something else."""
    if kind == "data_form":
        if returned is not None and not isinstance(returned, dict):
            raise ValueError('needed: None, or a dict with "prompt" and "solutions"')
        return returned
    if kind == "template":
        if not isinstance(returned, str) and not _are_messages(returned):
            raise ValueError('needed: a text, or a list of messages {"role": ..., "content": ...}')
        return returned
    if kind == "selection":
        if returned not in (True, False):
            raise ValueError("needed: True or False")
        return bool(returned)
    if kind == "advantage":
        rows = [[float(one) for one in row] for row in returned]
        shape, wanted = [len(row) for row in rows], [len(row) for row in arguments[0]]
        if shape != wanted:
            raise ValueError(f"needed: lists of {_lengths(wanted)} numbers, got {_lengths(shape)}")
        if not all(abs(one) <= MAX_REWARD for row in rows for one in row):
            raise ValueError(f"needed: numbers from -{MAX_REWARD:g} to {MAX_REWARD:g}")
        return rows
    assert kind == "metric", kind
    named = dict(returned) if isinstance(returned, dict) else {"value": returned}
    numbers = {str(name): float(value) for name, value in named.items()}
    if len(numbers) > MAX_METRICS:
        raise ValueError(f"needed: at most {MAX_METRICS} numbers, got {len(numbers)}")
    if (problem := _problem(0.0, numbers)) is not None:
        raise ValueError(problem)
    return numbers if isinstance(returned, dict) else numbers["value"]


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict)
            and one.keys() == {"role", "content"}
            and all(isinstance(text, str) for text in one.values())
            for one in value
        )
    )


def _lengths(found: Sequence[int]) -> str:
    """
    >>> _lengths([8, 8, 7])
    '8, 8, 7'
    """
    return ", ".join(map(str, found[:8])) + (" ..." if len(found) > 8 else "")


def hook_result_of(reply: Mapping[str, Any]) -> HookResult:
    """The result of `call_hook` as it came from its process, or a failure of that process."""
    return HookResult(reply.get("value"), reply["failure"], reply.get("message", ""))
