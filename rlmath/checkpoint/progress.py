"""Where a run stands, as every checkpoint says it in `progress.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PROGRESS = "progress.json"


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
    """Weight syncs done, which `sync.checksum_every` and `sync.probe_every` count."""
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
        for name in ("optimizer_tensors", "random_states"):
            known[name] = tuple(str(one) for one in known[name])
        for name in ("step", "epoch", "position", "updates", "syncs", "world_size"):
            if type(known[name]) is not int or known[name] < 0:
                raise ValueError(f'"{name}" is {known[name]!r}; needed: a whole number')
        return Progress(**known)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
