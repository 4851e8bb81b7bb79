"""Every completion of an evaluation on disk, so that it can be stopped and goes on.

<output>/
  settings.json                       what was sampled from, and how; written before the first completion
  generations/aime24/rank-0000.jsonl  one line for each completion that engine rank 0 sampled and judged

A line is written whole or, by a process that is killed, cut off; a cut line is removed when the folder is opened again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rlmath.evals.plan import GREEDY_INDEX

GENERATIONS = "generations"
SETTINGS = "settings.json"
BATCH = 32
"""Completions that are written to the system at once, at most."""
BATCH_SECONDS = 2.0
"""Longest that a judged completion waits for that."""
_TAIL_BYTES = 2**16

Key = tuple[str, int]
"""(problem id, index of the completion; `GREEDY_INDEX` for the greedy one)."""


@dataclass(frozen=True)
class Record:
    """One completion, judged; a line of a file."""

    problem_id: str
    mode: str
    """"greedy" or "sample"."""
    sample: int
    """Counted from 0; 0 for the greedy one."""
    seed: int
    prompt_hash: str
    """Of the prompt's tokens, the solutions and the task."""
    text: str
    tokens: int
    finish_reason: str
    """"stop" or "length": ended by itself, or cut off."""
    correct: bool
    extracted: str
    """The answer that was judged, "" where none was found."""
    verdict: str
    """How it was judged: one of `rewards.verify.VERDICTS`."""


@dataclass(frozen=True)
class Outcome:
    """What the tables need of a completion: all but its text."""

    prompt_hash: str
    tokens: int
    truncated: bool
    correct: bool
    answer: str
    verdict: str


def read_outcomes(folder: Path, benchmark: str) -> dict[Key, Outcome]:
    """All completions of a benchmark in an output folder. ValueError for a line that is none."""
    found: dict[Key, Outcome] = {}
    for path in _files(folder, benchmark):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    key, outcome = _parse(line)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ValueError(
                        f"{path}, line {number}: no completion ({type(error).__name__}: {error}); remove it, and "
                        "it is sampled again"
                    ) from error
                found.setdefault(key, outcome)
    return found


def _parse(line: bytes) -> tuple[Key, Outcome]:
    record = Record(**json.loads(line))
    index = GREEDY_INDEX if record.mode == "greedy" else int(record.sample)
    truncated = record.finish_reason == "length"
    outcome = Outcome(
        record.prompt_hash,
        int(record.tokens),
        truncated,
        bool(record.correct),
        record.extracted,
        record.verdict,
    )
    return (record.problem_id, index), outcome


def cut_unfinished_lines(folder: Path) -> int:
    """Remove what a killed process wrote of a line; the number of files where there was something."""
    return sum(_cut(path) for path in sorted((folder / GENERATIONS).glob("*/*.jsonl")))


def _cut(path: Path) -> bool:
    """Whether the file's last line was unfinished."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = end = size
        while start > 0:
            start = max(0, start - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                start += newline + 1
                break
            end = start
        file.truncate(start)
    return start < size


def _files(folder: Path, benchmark: str) -> list[Path]:
    return sorted((folder / GENERATIONS / benchmark).glob("*.jsonl"))


class Writer:
    """Appends the completions of one engine, a few at a time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / GENERATIONS
        self._name = f"rank-{rank:04d}.jsonl"
        self._files: dict[str, IO[bytes]] = {}
        self._waiting = 0
        self._written_at = time.monotonic()

    def add(self, benchmark: str, record: Record) -> None:
        """The line is pure ASCII: whatever the model wrote, it can be shown on a terminal."""
        if benchmark not in self._files:
            (self._folder / benchmark).mkdir(parents=True, exist_ok=True)
            self._files[benchmark] = (self._folder / benchmark / self._name).open("ab")
        self._files[benchmark].write(json.dumps(asdict(record)).encode("ascii") + b"\n")
        self._waiting += 1
        self.tick()

    def tick(self) -> None:
        """Write what has waited for long enough. Call it now and then."""
        late = time.monotonic() - self._written_at > BATCH_SECONDS
        if self._waiting >= BATCH or (self._waiting and late):
            self.flush()

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()
        self._waiting, self._written_at = 0, time.monotonic()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def agree_on_settings(folder: Path, common: Mapping[str, Any], sampled: Mapping[str, Any] | None) -> None:
    """Write settings.json, or see that what is there says the same. ValueError that names the differences.

    `common` holds for every completion, `sampled` for those that are not greedy (None: none are asked for). Keys that
    begin with "about_" only inform.
    """
    path = folder / SETTINGS
    earlier = _read_settings(path)
    differences = list(_differences(earlier.get("common") or {}, common))
    differences += _differences(earlier.get("sampled") or {}, sampled or {})
    if differences:
        raise ValueError(
            f'--output "{folder}" holds completions of another evaluation: {"; ".join(differences)}. '
            "Give another --output, or the same model and settings."
        )
    content = {"common": dict(common), "sampled": dict(sampled) if sampled else earlier.get("sampled")}
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_settings(folder: Path) -> dict[str, Any]:
    """What settings.json says, all keys on one level."""
    content = _read_settings(folder / SETTINGS)
    return {**(content.get("common") or {}), **(content.get("sampled") or {})}


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); give another --output") from error
    parts = content.values() if isinstance(content, dict) else [content]
    if not all(part is None or isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} was not written by an evaluation; give another --output")
    return content


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        if name in before and before[name] != value and not name.startswith("about_"):
            yield f"{name} was {before[name]!r}, now it is {value!r}"
