"""Calls of the user's functions in their workers, and their results.

See `rlmath.workers.hooks` for the kinds.

A reward function returns a number, at most MAX_REWARD, or a number and metrics, which are averaged
over a step and logged as `reward/own/<name>`; one that takes groups returns a list of these."""

from __future__ import annotations

import json
import math
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rlmath.workers.hooks import Group

GROUP_REWARD = "group_reward"
"""Name for the kind of a reward function that takes whole groups."""
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
"""Longest result as JSON."""
UNORDERED = (Set, Mapping, MappingView, str)
"""Types whose elements are in no order, or are none of ours."""


@dataclass(frozen=True)
class FunctionResult:
    """The result of the reward function for one completion."""

    reward: float
    metrics: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    """"timeout" or "error" if it returned no reward; `reward` is then 0."""
    message: str = ""
    """The error message of a failure, and the last lines of its traceback."""
    queue_seconds: float = 0.0
    """Time for which the answer waited for a worker."""


@dataclass(frozen=True)
class HookResult:
    """The result of one call of a function of another kind."""

    value: Any = None
    failure: str | None = None
    """"timeout" or "error" if it returned nothing that its kind may return."""
    message: str = ""


def result_of(reply: Mapping[str, Any]) -> FunctionResult:
    """The result of a reward function or a scorer, or a failure of its process.

    `reply` is as it came from that process."""
    failure = reply["failure"]
    message = reply.get("message", "")
    reward, metrics = (0.0, ()) if failure else reply["value"]
    metric_pairs = tuple((name, value) for name, value in metrics)
    return FunctionResult(
        reward, metric_pairs, failure, message=message, queue_seconds=reply["queue_seconds"]
    )


def group_result_of(reply: Mapping[str, Any], count: int) -> list[FunctionResult]:
    """The results of a reward function for the `count` completions of a group.

    Where the function fails, all of them have the failure."""
    if reply["failure"]:
        return [result_of(reply)] * count
    if len(reply["value"]) != count:
        raise ValueError("a reply for another group")
    return [result_of({**reply, "value": value}) for value in reply["value"]]


def hook_result_of(reply: Mapping[str, Any]) -> HookResult:
    """The result of a function of another kind, or a failure of its process."""
    return HookResult(reply.get("value"), reply["failure"], reply.get("message", ""))


# ---------------------------------------------------------------- in the worker


def call_function(kind: str, function: Callable, arguments: Sequence[Any]) -> dict[str, Any]:
    """Call a function, of a kind of `hooks` or a GROUP_REWARD; the reply to the pool."""
    call_arguments = (
        [Group(**group) for group in arguments] if kind == "selection" else list(arguments)
    )
    if kind == "metric":
        call_arguments = [[Group(**group) for group in arguments[0]]]
    shape: list[int] = []  # taken before the call, which may change the lists
    if kind == "advantage":
        shape = [len(row) for row in arguments[0]]
    elif kind == GROUP_REWARD:
        shape = [len(arguments[0])]
    try:
        returned = function(*call_arguments)
    except (Exception, SystemExit) as error:
        return {"failure": "error", "message": _with_trace(error)}
    try:
        value = checked_value(kind, returned, shape)
        size = len(json.dumps(value))
        if size > MAX_RESULT_CHARS:
            raise ValueError(f"that is {size} characters as JSON, more than {MAX_RESULT_CHARS}")
    except Exception as error:  # the conversions may be the user's, too
        message = f"{str(error)[:MAX_MESSAGE_CHARS]}; it returned {reprlib.repr(returned)}"
        return {"failure": "error", "message": message[:MAX_MESSAGE_CHARS]}
    return {"failure": None, "value": value}


def _with_trace(error: BaseException) -> str:
    """The message of an exception of the function, with the last lines of its traceback.

    The last line of the function's own file is among them; the call itself is left out."""
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    frames = traceback.extract_tb(error.__traceback__)[1:]
    last = frames[-MAX_TRACE_FRAMES:]
    of_user = [frame for frame in frames if frame.filename == frames[0].filename][-1:]
    shown_frames = last if of_user and of_user[0] in last else [*of_user, *last[1:]]
    return "\n".join([message, *"".join(traceback.format_list(shown_frames)).splitlines()])[
        :MAX_TRACE_CHARS
    ]


def checked_value(kind: str, returned: Any, shape: Sequence[int] = ()) -> Any:
    """The value that a function returned, as plain data.

    Raises an exception where its kind returns something else.

    `shape` has the lengths of the lists that an advantage returns, or the length of the list that a
    group's reward returns."""
    if kind == GROUP_REWARD:
        return _group_rewards(returned, count=shape[0])
    if kind in ("reward", "scorer"):
        return _reward(returned, with_metrics=kind == "reward")
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
        return _advantages(returned, list(shape))
    if kind == "environment":
        return _turn(returned)
    assert kind == "metric", kind
    named_values = dict(returned) if isinstance(returned, dict) else {"value": returned}
    numbers = {str(name): float(value) for name, value in named_values.items()}
    if len(numbers) > MAX_METRICS:
        raise ValueError(f"needed: at most {MAX_METRICS} numbers, got {len(numbers)}")
    _check_numbers(0.0, numbers)
    return numbers if isinstance(returned, dict) else numbers["value"]


def _reward(returned: Any, with_metrics: bool) -> tuple[float, list[tuple[str, float]]]:
    """(reward, metrics) as plain numbers; an exception where they are none."""
    reward, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if metrics and not with_metrics:
        raise ValueError("needed: true, false or a number; it returned metrics, too")
    try:
        numbers = {str(name): float(value) for name, value in list(metrics.items())[:MAX_METRICS]}
        reward = float(reward)
    except Exception as error:
        description = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{description}; needed: a number, or a number and a dict of numbers"
        ) from error
    _check_numbers(reward, numbers)
    return reward, list(numbers.items())


def _turn(returned: Any) -> tuple[str | None, list[tuple[str, float]]]:
    """(text or None, figures) as plain data; ValueError for anything else."""
    text, figures = returned if isinstance(returned, tuple) else (returned, {})
    if text is not None and not isinstance(text, str):
        raise ValueError("needed: a text, or None at the end, alone or with a dict of numbers")
    if text is not None:
        text.encode()  # half a surrogate pair is no text
    numbers = {str(name): float(value) for name, value in list(figures.items())[:MAX_METRICS]}
    _check_numbers(0.0, numbers)
    return text, list(numbers.items())


def _group_rewards(returned: Any, count: int) -> list[tuple[float, list[tuple[str, float]]]]:
    if isinstance(returned, UNORDERED) or not isinstance(returned, Iterable):
        raise ValueError("needed: a list of numbers, one for each completion, in their order")
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(
            f"needed: {count} rewards, one for each completion of the group, got {len(rewards)}"
        )
    return [_reward(reward, with_metrics=True) for reward in rewards]


def _advantages(returned: Any, shape: list[int]) -> list[list[float]]:
    """The lists of advantages as plain numbers; ValueError for lists of another shape."""
    groups = None if isinstance(returned, UNORDERED) else list(returned)
    if groups is None or any(isinstance(row, UNORDERED) for row in groups):
        raise ValueError("needed: a list of lists of numbers, in the order of the rewards")
    rows = [[float(number) for number in row] for row in groups]
    if (lengths := [len(row) for row in rows]) != shape:
        raise ValueError(f"needed: lists of {_lengths(shape)} numbers, got {_lengths(lengths)}")
    if not all(abs(number) <= MAX_REWARD for row in rows for number in row):
        raise ValueError(f"needed: numbers from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return rows


def _check_numbers(reward: float, metrics: Mapping[str, float]) -> None:
    """ValueError for numbers that are not finite, and for names that cannot be logged."""
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(f"the reward must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"the metric {name!a} must be finite")
        # What can be printed is valid Unicode: no half of a surrogate pair, control or escape.
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            shown_name = f"{name[:MAX_NAME_CHARS]!a}"
            raise ValueError(
                f"the metric name {shown_name} must be 1 to {MAX_NAME_CHARS} printable characters"
            )


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and {"role", "content"} <= message.keys()
            and all(isinstance(message[key], str) for key in ("role", "content"))
            for message in value
        )
    )


def _lengths(lengths: Sequence[int]) -> str:
    """The first lengths, separated by commas.

    >>> _lengths([8, 8, 7])
    '8, 8, 7'
    """
    return ", ".join(map(str, lengths[:8])) + (" ..." if len(lengths) > 8 else "")
