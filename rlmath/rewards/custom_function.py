"""The user's own reward function: `reward.function: package.module:name`.

    def reward(completion: str, solutions: list[str], row: dict) -> float | tuple[float, dict[str, float]]

`completion` is the model's text, `row` the prompt's row of the data file with all its columns. The number is the
reward, at most MAX_REWARD; the metrics are averaged over a step and logged as `reward/own/<name>`. It runs in the
workers that verify answers otherwise, with the same time and memory limits.

    python -m rlmath.rewards.custom_function package.module:name      prints whether it can be loaded
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlmath
from rlmath.rewards.verifier import FAILURES

MAX_METRICS = 50
"""Most metrics of one completion; further ones are left out."""
MAX_NAME_CHARS = 100
MAX_REWARD = 1e30
"""Most of a reward's absolute value: its square, and a sum of many, is still a number."""
MAX_MESSAGE_CHARS = 500
CHECK_SECONDS = 300
CAN_BE_LOADED = "reward.function can be loaded"
"""The last line of a check; a module that ends the process while it is imported does not print it."""
_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class FunctionResult:
    """The result of the reward function for one completion."""

    reward: float
    metrics: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    """"timeout" or "error" if it returned no reward; `reward` is then 0."""
    message: str = ""
    """The error message of a failure."""
    exhausted: bool = False
    """It failed for want of memory, processes or open files, which earlier answers may have used up."""


def load_function(spec: str) -> Callable:
    """Import the function "package.module:name". Raises ValueError if that fails."""
    if not _SPEC.fullmatch(spec):
        raise ValueError(f'reward.function is {spec!r}; needed: "package.module:name"')
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises, or a program's sys.exit()
        raise ValueError(
            f"reward.function: importing {module_name!r} failed ({type(error).__name__}: {error}); modules are looked"
            " for in the current folder and in PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward.function: {module_name!r} has no function {name!r}")
    return function


def call_function(function: Callable, completion: str, solutions: list[str], row: Mapping) -> FunctionResult:
    """Call the function; a failure if it raises or returns anything but finite numbers under names that can be
    logged."""
    try:
        returned = function(completion, solutions, row)
        reward, metrics = returned if isinstance(returned, tuple) else (returned, {})
        numbers = {str(name): float(value) for name, value in list(metrics.items())[:MAX_METRICS]}
        reward = float(reward)
        problem = _problem(reward, numbers)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
        return FunctionResult(0.0, failure="error", message=message, exhausted=_is_exhausted(error))
    if problem is not None:
        message = f"{problem}; it returned {returned!r}"[:MAX_MESSAGE_CHARS]
        return FunctionResult(0.0, failure="error", message=message)
    return FunctionResult(reward, tuple(numbers.items()))


def checked_result(reply: Mapping[str, Any]) -> FunctionResult:
    """A result as it came from a process in which the function ran. ValueError, TypeError or KeyError unless it is one
    that `call_function` returns, or a failure of that process."""
    failure, message = reply["failure"], str(reply["message"])[:MAX_MESSAGE_CHARS]
    if failure in FAILURES:
        return FunctionResult(0.0, failure=failure, message=message)
    if failure is not None:
        raise ValueError("another failure than there are")
    pairs = [(name, value) for name, value in reply["metrics"][:MAX_METRICS]]
    numbers = {name: float(value) for name, value in pairs if isinstance(name, str)}
    reward = float(reply["reward"])
    if len(numbers) < len(pairs) or _problem(reward, numbers) is not None:
        raise ValueError("numbers or names that the function's own process lets through none of")
    return FunctionResult(reward, tuple(numbers.items()))


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


def function_problem(spec: str) -> str | None:
    """Why a function cannot be loaded, checked in a separate process; None if it can."""
    # A file, not a pipe: what the module has started may hold the pipe open for ever.
    with tempfile.TemporaryFile() as errors:
        check = subprocess.Popen(
            [sys.executable, "-m", "rlmath.rewards.custom_function", spec],
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = check.wait(CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            return f"reward.function: importing {spec!r} took more than {CHECK_SECONDS} s"
        finally:  # with what the module has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(check.pid, signal.SIGKILL)
            check.wait()
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 10_000))
        text = errors.read().decode("utf-8", "replace")
    last = (text.strip().splitlines() or ["no message"])[-1]
    if status == 0:
        ended = f"reward.function: importing {spec!r} ended the process; guard its program by __name__"
        return None if last == CAN_BE_LOADED else ended
    is_ours = last.startswith("reward.function")
    return last if is_ours else f"reward.function: importing {spec!r} failed ({last})"


def worker_environment() -> dict[str, str]:
    """The environment of reward workers: this package and the current folder can be imported."""
    source = str(Path(rlmath.__file__).parent.parent)
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    """0 with CAN_BE_LOADED on stderr, or 2 with the reason there."""
    try:
        load_function(sys.argv[1])
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    print(f"\n{CAN_BE_LOADED}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main())  # at once: threads of the user's module may run for ever
