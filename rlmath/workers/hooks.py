"""Code of the user's at eight places of a run: types, names, loading and checks.

    from rlmath.workers import hooks

    @hooks.advantage("best_only")
    def best_only(rewards: list[list[float]], tokens: list[list[int]]) -> list[list[float]]:
        return [[float(one == max(row)) for one in row] for row in rewards]

A setting names a function, "package.module:name" or "path/to/file.py:name", or by the name under
which one of `run.plugins` registers it. See docs/hooks.md.

| kind | setting | type |
|---|---|---|
| data_form | data.format | `DataForm` |
| template | data.template, validation.template | `Template` |
| reward | reward.function, reward.rewards | `Reward`, `GroupReward` |
| selection | selection.dynamic_sampling | `Selection` |
| advantage | algorithm.advantage | `Advantage` |
| scorer | validation.scorer | `Scorer` |
| environment | environment.function | `Environment` |
| metric | telemetry.metrics | `Metric` |

All are called in worker processes (`workers.user_functions`), with limits of time and memory: a
module of the user's is never imported by a rank.

    python -m rlmath.workers.hooks reward package.module:name reward.function      prints whether it can be loaded
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar

from rlmath.config.help import all_settings, nearest_path, nearest_word
from rlmath.config.shipped_files import PACKAGE

REWARD_WORDS = ("correctness", "format", "length")
"""Entries of `reward.rewards` that are no functions of the user's."""
CHECK_SECONDS = 300
CAN_BE_LOADED = "the function can be loaded"
"""The last line of a check; a module that ends the process while it is imported does not print
it."""
NEEDED = '"package.module:name" or "path/to/file.py:name"'
_SPEC = re.compile(r"(?P<module>[A-Za-z_][\w.]*(?<!\.py)|(?P<file>.+\.py)):(?P<name>[A-Za-z_]\w*)")
_PLUGIN = re.compile(r"[A-Za-z_][\w.]*(?<!\.py)|(?P<file>.+\.py)")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


# ---------------------------------------------------------------- types


class Problem(TypedDict):
    """The problem that a data form makes of a row."""

    prompt: str
    """The problem; `data.template` is put around it."""
    solutions: Sequence[str | int | float]
    """Reference answers, at least one; a completion that equals any of them is right."""
    query_id: NotRequired[str | int]
    """An id that is unique in the file. Without it, the row's number, from 0."""
    task: NotRequired[str]
    """The check of answers: "math" (without it) or "choice"."""


@dataclass(frozen=True)
class Group:
    """A prompt with its completions and their scores.

    The lists have an entry for each completion."""

    row: dict[str, Any]
    """The prompt's row of the data file, as a reward function gets it."""
    texts: list[str]
    tokens: list[int]
    """Lengths, the end of sequence included."""
    rewards: list[float]
    correct: list[bool]
    truncated: list[bool]
    """Whether it was cut off at `rollout.max_new_tokens`."""


class DataForm(Protocol):
    """Maps a row of a data file (its columns) to the problem; None leaves the row out.

    A row that is left out counts as unusable. So does a row on which it raises, or for which it
    returns something else; more of them than `data.max_unusable_share` are refused, by file and
    line."""

    def __call__(self, row: dict[str, Any], /) -> Problem | None: ...


class Template(Protocol):
    """Maps a problem and its row to the text that the model continues, or to messages.

    The row has `prompt`, `solutions`, `query_id`, `task`, the chat that the file has as `messages`,
    and further columns. Messages ({"role": ..., "content": ...}) are for the tokenizer's chat
    template."""

    def __call__(self, problem: str, row: dict[str, Any], /) -> str | list[dict[str, str]]: ...


class Reward(Protocol):
    """Maps a completion, the prompt's reference answers and its row to the reward.

    It may return metrics, too."""

    def __call__(
        self, completion: str, solutions: list[str], row: dict[str, Any], /
    ) -> float | tuple[float, dict[str, float]]: ...


class GroupReward(Protocol):
    """Maps all completions of a prompt, its reference answers and its row to a reward of each.

    Each may be a reward and metrics; they are in the order of the completions. It is a reward
    function with `reward.function_takes=group`."""

    def __call__(
        self, completions: list[str], solutions: list[str], row: dict[str, Any], /
    ) -> Sequence[float | tuple[float, dict[str, float]]]: ...


class Selection(Protocol):
    """Decides whether a group is learned from.

    The completions that length filters leave out are not in it."""

    def __call__(self, group: Group, /) -> bool: ...


class Advantage(Protocol):
    """Maps rewards and lengths (tokens), by group, to the advantage of each completion.

    The groups are those of all completions that a step learns from."""

    def __call__(
        self, rewards: list[list[float]], tokens: list[list[int]], /
    ) -> list[list[float]]: ...


class Scorer(Protocol):
    """Decides whether a completion counts as right in validation and evaluation.

    It does where the function returns true, or a number above 0."""

    def __call__(
        self, completion: str, solutions: list[str], row: dict[str, Any], /
    ) -> bool | float: ...


class Environment(Protocol):
    """Maps a completion so far, the prompt's row and the number of its turn to what follows.

    The texts are what the model sampled and what it was shown of what the function returned, in
    turn; the last one is of the turn that has ended, of which the first is number 1. It returns the text that the model
    reads next, or None where the completion is over, and may return figures for the metrics."""

    def __call__(
        self, texts: list[str], row: dict[str, Any], turn: int, /
    ) -> str | tuple[str | None, dict[str, float]] | None: ...


class Metric(Protocol):
    """Maps the groups that a step sampled to a number, or to numbers by key.

    They are logged as `own/<name>`, or as `own/<name>/<key>`."""

    def __call__(self, groups: list[Group], /) -> float | dict[str, float]: ...


_ARGUMENTS = {
    "data_form": ("row",),
    "template": ("problem", "row"),
    "reward": ("completion", "solutions", "row"),
    "selection": ("group",),
    "advantage": ("rewards", "tokens"),
    "scorer": ("completion", "solutions", "row"),
    "environment": ("texts", "row", "turn"),
    "metric": ("groups",),
}


@dataclass(frozen=True)
class Hook:
    """A function of the user's, as a setting names it."""

    kind: str
    spec: str
    """ "package.module:name", "path/to/file.py:name", or a name that one of `plugins` registers."""
    setting: str
    """Its name in messages, "algorithm.advantage"."""
    plugins: tuple[str, ...] = ()
    """Modules and files that register functions."""
    takes: Literal["completion", "group"] = "completion"
    """The argument of one call, for a reward."""

    def __str__(self) -> str:
        return self.spec


def hook_of(kind: str, setting: str, value: str | None, plugins: Iterable[str] = ()) -> Hook | None:
    """The function that a setting's value names; None for a word of ours, and for null."""
    return (
        None
        if value is None or value in taken_words(kind)
        else Hook(kind, value, setting, plugins=tuple(plugins))
    )


def as_hook(function: str | Hook) -> Hook:
    """A reward function where it is only named."""
    return function if isinstance(function, Hook) else Hook("reward", function, "reward.function")


def taken_words(kind: str) -> set[str]:
    """Words of the settings that take functions of this kind."""
    words = {
        word
        for setting in all_settings().values()
        if setting.takes_function == kind
        for word in setting.words
    }
    return words | set(REWARD_WORDS if kind == "reward" else ())


# ---------------------------------------------------------------- names


_registered: dict[str, dict[str, Callable]] = {kind: {} for kind in _ARGUMENTS}
"""Functions by kind and name."""
F = TypeVar("F", bound=Callable)


def _decorator(kind: str) -> Callable[[str], Callable[[F], F]]:
    """The decorator that registers functions of a kind by name."""

    def named(name: str) -> Callable[[F], F]:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"hooks.{kind}({name!r}): a name is a small letter, then at most 39 small "
                "letters, digits and "
                "underscores"
            )
        if name in taken_words(kind):
            raise ValueError(f"hooks.{kind}({name!r}): that is a word of ours; take another name")

        def register(function: F) -> F:
            if name in _registered[kind]:
                raise ValueError(
                    f"hooks.{kind}({name!r}) is there twice; take another name for one of them"
                )
            _registered[kind][name] = function
            return function

        return register

    return named


data_form = _decorator("data_form")
template = _decorator("template")
reward = _decorator("reward")
selection = _decorator("selection")
advantage = _decorator("advantage")
scorer = _decorator("scorer")
environment = _decorator("environment")
metric = _decorator("metric")


# ---------------------------------------------------------------- loading


def load(hook: Hook) -> Callable:
    """The function of a setting, imported into this process.

    ValueError if that fails, or if it cannot be called as its kind is; rewards are tried with a
    completion instead."""
    if hook.plugins and not _SPEC.fullmatch(hook.spec):
        plugins_setting = _plugins_setting(hook.setting)
        for plugin in dict.fromkeys(hook.plugins):
            import_plugin(plugin, plugins_setting)
        registered = _registered[hook.kind]
        if hook.spec not in registered:
            raise ValueError(
                f"{hook.setting} is {hook.spec!r}, and {plugins_setting} registers no such "
                f"hooks.{hook.kind}; there is "
                f"{', '.join(registered) or 'none'}."
                f"{nearest_word(hook.spec, [*registered, *taken_words(hook.kind)])}"
            )
        function = registered[hook.spec]
    else:
        function = load_function(hook.spec, hook.setting)
    if hook.kind != "reward":
        _check_signature(function, hook)
    return function


def _check_signature(function: Callable, hook: Hook) -> None:
    """ValueError for a function that cannot be called with the arguments of its kind."""
    names = _ARGUMENTS[hook.kind]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # nothing is known of some that are written in C
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(
            f"{hook.setting}: {hook.spec} cannot be called as it is, with {', '.join(names)} "
            f"({error}); it is written "
            f"as {signature!s:.200}"
        ) from None


def load_function(spec: str, setting: str = "reward.function") -> Callable:
    """Import the function "package.module:name" or "path/to/file.py:name".

    Raises ValueError if that fails."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{setting} is {spec!r}; needed: {NEEDED}")
    module_name = match["module"]
    name = match["name"]
    module = _import(module_name, match["file"], setting)
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest_word(
            name, [other for other in vars(module) if callable(getattr(module, other))]
        )
        raise ValueError(f"{setting}: {module_name!r} has no function {name!r}.{near}")
    return function


def _plugins_setting(setting: str) -> str:
    """The name of the plugins' setting beside the `setting` of a function.

    An option of a command has an option beside it."""
    return "--plugin" if setting.startswith("--") else "run.plugins"


def import_plugin(plugin: str, setting: str) -> None:
    """Import a module or file that `setting` names, for what it registers.

    Raises ValueError if that fails."""
    match = _PLUGIN.fullmatch(plugin)
    if not match:
        raise ValueError(f'{setting} has {plugin!r}; needed: "package.module" or "path/to/file.py"')
    _import(plugin, match["file"], setting)


def _import(module_name: str, file: str | None, setting: str) -> ModuleType:
    """The module, or the file's module; ValueError where importing it fails."""
    if file is not None and not os.path.exists(file):
        raise ValueError(f'{setting}: there is no file "{file}".{nearest_path(Path(file))}')
    if os.getcwd() not in sys.path:
        # Last, so that no file there takes the place of a library's.
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name) if file is None else _import_file(Path(file))
    # Whatever the user's module raises, or a program's sys.exit().
    except (Exception, SystemExit) as error:
        hint = (
            "; modules are looked for in the current folder and in PYTHONPATH"
            if file is None
            else ""
        )
        line = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        line_text = f": {line}" if line else ""
        raise ValueError(
            f"{setting}: importing {module_name!r} failed ({type(error).__name__}: "
            f"{error}{line_text}){hint}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    """The module of a file, imported once, under the file's own name where that is free.

    It finds modules beside it."""
    for loaded_module in list(sys.modules.values()):
        file = getattr(loaded_module, "__file__", None)
        if isinstance(file, str) and os.path.exists(file) and path.samefile(file):
            return loaded_module
    sys.path.append(str(path.parent.absolute()))
    name = (
        path.stem
        if path.stem.isidentifier() and path.stem not in sys.modules
        else f"hooks_{path.stem}"
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# ---------------------------------------------------------------- fingerprints


def hooks_fingerprint(hooks: Iterable[Hook]) -> str:
    """A short name for the contents of the files of several functions; "" where there is none."""
    codes = {hook.setting: code_fingerprint(hook.spec, hook.plugins) for hook in hooks}
    return hashlib.sha256(json.dumps(codes).encode()).hexdigest()[:16] if codes else ""


def code_fingerprint(spec: str | None, plugins: Sequence[str] = ()) -> str:
    """A short name for the contents of a function's file, or of all plugins where it is registered.

    "" without a function."""
    if spec is not None and plugins and not _SPEC.fullmatch(spec):
        paths = [_file_of(f"{plugin}:any") for plugin in plugins]
        content = b"".join(b"" if path is None else path.read_bytes() for path in paths)
        return hashlib.sha256(content).hexdigest()[:16]
    path = _file_of(spec)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def is_same_function(
    saved_spec: str | None, current_spec: str | None, saved_code: str = ""
) -> bool:
    """Whether two spellings name one function: a module or a file, a relative or an absolute path.

    They do where the file is the same, which may have changed since, or the content is the same;
    `saved_code` is the first one's fingerprint."""
    names = [
        match["name"]
        for spec in (saved_spec, current_spec)
        if (match := _SPEC.fullmatch(spec or ""))
    ]
    if saved_spec == current_spec or len(names) < 2 or names[0] != names[1]:
        return saved_spec == current_spec
    files = _file_of(saved_spec), _file_of(current_spec)
    if files[0] is not None and files[1] is not None and files[0].samefile(files[1]):
        return True
    return (saved_code or code_fingerprint(saved_spec)) == code_fingerprint(current_spec) != ""


def _file_of(spec: str | None) -> Path | None:
    """The file of a function; None where there is none."""
    match = _SPEC.fullmatch(spec or "")
    if match is None:
        return None
    path = Path(match["file"] or _module_file(match["module"]) or "")
    return path if path.is_file() else None


def _module_file(module: str) -> str | None:
    """The file of a module, found without importing it; None where there is none."""
    folders: list[str] | None = [
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        *sys.path,
        os.getcwd(),
    ]
    names = module.split(".")
    file = None
    for depth in range(1, len(names) + 1):
        module_spec = PathFinder.find_spec(".".join(names[:depth]), folders)
        if module_spec is None:
            return None
        file = module_spec.origin
        folders = module_spec.submodule_search_locations
    return file


# --------------------------------------------------------------- the check, in a process of its own


def function_problem(function: str | Hook) -> str | None:
    """Why a function cannot be loaded, checked in a separate process; None if it can."""
    hook = as_hook(function)
    setting = hook.setting
    spec = hook.spec
    # A file, not a pipe: processes that the module starts may hold a pipe open for ever.
    with tempfile.TemporaryFile() as errors:
        check = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "rlmath.workers.hooks",
                hook.kind,
                spec,
                setting,
                *hook.plugins,
            ],
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = check.wait(CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{setting}: importing {spec!r} took more than {CHECK_SECONDS} s"
        finally:  # also processes that the module has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(check.pid, signal.SIGKILL)
            check.wait()
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 10_000))
        text = errors.read().decode("utf-8", "replace")
    last = (text.strip().splitlines() or ["no message"])[-1]
    if status == 0:
        problem = f"{setting}: importing {spec!r} ended the process; guard its program by __name__"
        return None if last == CAN_BE_LOADED else problem
    is_ours = last.startswith((setting, _plugins_setting(setting)))
    return last if is_ours else f"{setting}: importing {spec!r} failed ({last})"


def plugin_problem(plugin: str, setting: str = "run.plugins") -> str | None:
    """The reason why a plugin that `setting` names cannot be imported; None if it can.

    It is checked in a separate process."""
    return function_problem(Hook("plugin", plugin, setting))


def worker_environment() -> dict[str, str]:
    """The environment of reward workers: this package can be imported."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    """Load the function that the arguments name.

    Returns 0 with CAN_BE_LOADED on stderr, or 2 with the reason there."""
    kind, spec, setting, *plugins = sys.argv[1:]
    try:
        if kind == "plugin":
            import_plugin(spec, setting)
        else:
            load(Hook(kind, spec, setting, plugins=tuple(plugins)))
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2
    print(f"\n{CAN_BE_LOADED}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    # Plugins import this module by its name, of which there must be one.
    # Exits at once: threads of the user's module may run for ever.
    os._exit(importlib.import_module("rlmath.workers.hooks").main())
