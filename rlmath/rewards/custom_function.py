"""The user's own reward function: `reward.function: package.module:name` or `path/to/file.py:name`.

    def reward(completion: str, solutions: list[str], row: dict) -> float | tuple[float, dict[str, float]]

`completion` is the model's text, `row` the prompt's row of the data file with all its columns. The number is the
reward, at most MAX_REWARD; the metrics are averaged over a step and logged as `reward/own/<name>`. It runs in the
workers that verify answers otherwise, with a time limit by the clock and the same memory limit.

    python -m rlmath.rewards.custom_function package.module:name      prints whether it can be loaded
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import math
import os
import re
import reprlib
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import rlmath
from rlmath.config.help import nearest_path, nearest_word
from rlmath.rewards.verifier import FAILURES

MAX_METRICS = 50
"""Most metrics of one completion; further ones are left out."""
MAX_NAME_CHARS = 100
MAX_REWARD = 1e30
"""Most of a reward's absolute value: its square, and a sum of many, is still a number."""
MAX_MESSAGE_CHARS = 500
MAX_TRACE_CHARS = 1500
"""Of a message with the last lines of its traceback."""
MAX_TRACE_FRAMES = 3
CHECK_SECONDS = 300
CAN_BE_LOADED = "reward.function can be loaded"
"""The last line of a check; a module that ends the process while it is imported does not print it."""
NEEDED = '"package.module:name" or "path/to/file.py:name"'
_SPEC = re.compile(r"(?P<module>[A-Za-z_][\w.]*(?<!\.py)|(?P<file>.+\.py)):(?P<name>[A-Za-z_]\w*)")


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


def load_function(spec: str) -> Callable:
    """Import the function "package.module:name" or "path/to/file.py:name". Raises ValueError if that fails."""
    found = _SPEC.fullmatch(spec)
    if not found:
        raise ValueError(f"reward.function is {spec!r}; needed: {NEEDED}")
    module_name, file, name = found["module"], found["file"], found["name"]
    if file is not None and not os.path.exists(file):
        raise ValueError(f'reward.function: there is no file "{file}".{nearest_path(Path(file))}')
    try:
        module = importlib.import_module(module_name) if file is None else _import_file(Path(file))
    except (Exception, SystemExit) as error:  # whatever the user's module raises, or a program's sys.exit()
        where = "; modules are looked for in the current folder and in PYTHONPATH" if file is None else ""
        line = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        shown = f": {line}" if line else ""
        raise ValueError(
            f"reward.function: importing {module_name!r} failed ({type(error).__name__}: {error}{shown}){where}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest_word(name, [other for other in vars(module) if callable(getattr(module, other))])
        raise ValueError(f"reward.function: {module_name!r} has no function {name!r}.{near}")
    return function


def _import_file(path: Path) -> ModuleType:
    """The module of a file, under the file's own name where that is free; it finds modules beside it."""
    sys.path.append(str(path.parent.absolute()))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_fingerprint(spec: str | None) -> str:
    """Of the file in which a reward function is looked for, without importing anything; "" where there is none."""
    path = _file_of(spec)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def is_same_function(there: str | None, here: str | None, code_there: str = "") -> bool:
    """Whether two spellings (a module or a file, a relative or an absolute path) name one function: of the same file,
    which may have changed since, or of files of the same content. `code_there` is the fingerprint that was noted of
    the first."""
    names = [found["name"] for spec in (there, here) if (found := _SPEC.fullmatch(spec or ""))]
    if there == here or len(names) < 2 or names[0] != names[1]:
        return there == here
    files = _file_of(there), _file_of(here)
    if files[0] is not None and files[1] is not None and files[0].samefile(files[1]):
        return True
    return (code_there or code_fingerprint(there)) == code_fingerprint(here) != ""


def _file_of(spec: str | None) -> Path | None:
    found = _SPEC.fullmatch(spec or "")
    if found is None:
        return None
    path = Path(found["file"] or _module_file(found["module"]) or "")
    return path if path.is_file() else None


def _module_file(module: str) -> str | None:
    folders: list[str] | None = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    names, file = module.split("."), None
    for depth in range(1, len(names) + 1):
        found = PathFinder.find_spec(".".join(names[:depth]), folders)
        if found is None:
            return None
        file, folders = found.origin, found.submodule_search_locations
    return file


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


def checked_result(reply: Mapping[str, Any]) -> FunctionResult:
    """A result as it came from a process in which the function ran. ValueError, TypeError or KeyError unless it is one
    that `call_function` returns, or a failure of that process."""
    failure, message = reply["failure"], str(reply["message"])[:MAX_TRACE_CHARS]
    waited = float(reply.get("queue_seconds", 0.0))
    if failure in FAILURES:
        return FunctionResult(0.0, failure=failure, message=message, queue_seconds=waited)
    if failure is not None:
        raise ValueError("another failure than there are")
    pairs = [(name, value) for name, value in reply["metrics"][:MAX_METRICS]]
    numbers = {name: float(value) for name, value in pairs if isinstance(name, str)}
    reward = float(reply["reward"])
    if len(numbers) < len(pairs) or _problem(reward, numbers) is not None:
        raise ValueError("numbers or names that the function's own process lets through none of")
    return FunctionResult(reward, tuple(numbers.items()), queue_seconds=waited)


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
