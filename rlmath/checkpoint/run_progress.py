"""Where a run stands, as every checkpoint says it in `progress.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlmath.checkpoint.directory import PROGRESS


@dataclass(frozen=True)
class Progress:
    """All of a run's state that is not a tensor. The rest follows from it: the order of prompts, what dynamic sampling
    draws beyond them and every request's seed depend on nothing but `run.seed` and the step."""

    step: int
    """Steps done; the next one has this number, counted from 0."""
    epoch: int
    """Epoch of the next step, from 0."""
    position: int
    """Prompts of that epoch's order that were used."""
    updates: int
    """Optimizer steps done: the version of the weights, and where the learning-rate schedule stands."""
    syncs: int
    """Weight syncs that the steps done needed: one each, none where there are no engines."""
    layout: str
    """Ranks and layout it was made with, in words."""
    world_size: int
    optimizer_tensors: tuple[str, ...]
    """Names of the optimizer's tensors beside each parameter."""
    random_states: tuple[str, ...]
    """Names of the random generators whose states are there, one row for each rank."""
    model_fingerprint: str
    """Of the model that the run started from."""
    data_fingerprint: str
    """Of the prompts, in order, as they were tokenized."""
    versions: dict[str, str]
    """Of the libraries that matter."""


def write_progress(folder: Path, progress: Progress) -> None:
    (folder / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """ValueError where the file cannot be used."""
    path = folder / PROGRESS
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: values[field.name] for field in fields(Progress)}
        for name, value in known.items():
            if not _KINDS[_kind(name)](value):
                raise ValueError(f'"{name}" is {value!r:.80}; needed: {_kind(name)}')
        for name in _LISTS:
            known[name] = tuple(known[name])
        return Progress(**known)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


_LISTS = ("optimizer_tensors", "random_states")
_TEXTS = ("layout", "model_fingerprint", "data_fingerprint")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number": lambda value: type(value) is int and 0 <= value < 2**63,
    "a text": lambda value: isinstance(value, str),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "texts by name": lambda value: (
        isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    ),
}


def _kind(name: str) -> str:
    """Of a field of `Progress`."""
    if name == "versions":
        return "texts by name"
    return "a list of texts" if name in _LISTS else "a text" if name in _TEXTS else "a whole number"
