"""Rewards by a function of the user's: `reward.function: package.module:name`.

    def reward(completion: str, solutions: list[str], row: dict) -> float | tuple[float, dict[str, float]]

`completion` is the model's text, `row` the prompt's row of the data file with all its columns. The number is the
reward; the metrics are averaged over a step and logged as `reward/own/<name>`. It runs in the same workers, under the
same limits of time and memory, as the judging of answers.

    python -m rlmath.rewards.custom_function package.module:name      says what is wrong with it, if anything
"""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import rlmath

MAX_METRICS = 50
CHECK_SECONDS = 300
_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class FunctionResult:
    """What a reward function said of one completion."""

    reward: float
    metrics: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    """"timeout" or "error", when it gave no reward; `reward` is then 0."""
    message: str = ""
    """What went wrong, for people."""


def load_function(spec: str) -> Callable:
    """The function that "package.module:name" names. Raises ValueError when there is none."""
    if not _SPEC.fullmatch(spec):
        raise ValueError(f'reward.function is {spec!r}; needed: "package.module:name"')
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"reward.function: importing {module_name!r} failed ({type(error).__name__}: {error}); modules are looked"
            " for in the current folder and in PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward.function: {module_name!r} has no function {name!r}")
    return function


def call_function(function: Callable, completion: str, solutions: list[str], row: Mapping) -> FunctionResult:
    """What the function says; a failure when it raises, or says something that is no finite number."""
    try:
        said = function(completion, solutions, row)
        reward, metrics = said if isinstance(said, tuple) else (said, {})
        numbers = tuple((str(name), float(value)) for name, value in list(metrics.items())[:MAX_METRICS])
        reward = float(reward)
    except Exception as error:
        return FunctionResult(0.0, failure="error", message=f"{type(error).__name__}: {error}"[:500])
    if not all(math.isfinite(number) for number in (reward, *(value for _, value in numbers))):
        return FunctionResult(0.0, failure="error", message=f"it returned {said!r}"[:500])
    return FunctionResult(reward, numbers)


def function_problem(spec: str) -> str | None:
    """What is wrong with a function, found in a process of its own; None when it can be loaded."""
    try:
        found = subprocess.run(
            [sys.executable, "-m", "rlmath.rewards.custom_function", spec],
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"reward.function: importing {spec!r} took more than {CHECK_SECONDS} s"
    if found.returncode == 0:
        return None
    last = (found.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        last if last.startswith("reward.function") else f"reward.function: importing {spec!r} failed ({last})"
    )


def worker_environment() -> dict[str, str]:
    """The environment of processes that judge: this package and the current folder can be imported."""
    source = str(Path(rlmath.__file__).parent.parent)
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    try:
        load_function(sys.argv[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
