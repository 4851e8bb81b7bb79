"""The completions of an evaluation on disk, so that it can be stopped and resumed.

<output>/
  settings.json                       the model and the sampling settings; written before the first completion
  generations/aime24/rank-0000.jsonl  one line for each completion of engine 0, with the result of its verification

A process that is killed may leave an unfinished last line; it is removed when the folder is opened again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rlmath.evals.plan import GENERATIONS, GREEDY_INDEX

BATCH = 32
"""Most completions between two flushes."""
BATCH_SECONDS = 2.0
"""Longest time between two flushes."""
_TAIL_BYTES = 2**16

Key = tuple[str, int]
"""(problem id, index of the completion; `GREEDY_INDEX` for the greedy one)."""


@dataclass(frozen=True)
class CompletionRecord:
    """One verified completion; a line of a file."""

    problem_id: str
    mode: str
    """"greedy" or "sample"."""
    sample: int
    """Counted from 0; 0 for the greedy one."""
    seed: int
    prompt_hash: str
    """`Problem.prompt_hash`."""
    text: str
    tokens: int
    finish_reason: str
    """"stop" or "length" (truncated)."""
    correct: bool
    extracted: str
    """The answer that was compared, "" if none was found."""
    verdict: str
    """One of `answers.verifier.VERDICTS`."""


@dataclass(frozen=True)
class Outcome:
    """The part of a record that the tables are computed from."""

    prompt_hash: str
    tokens: int
    truncated: bool
    correct: bool
    answer: str
    verdict: str


def read_outcomes(folder: Path, benchmark: str) -> dict[Key, Outcome]:
    """All completions of a benchmark in an output folder. ValueError for a line that is not a completion."""
    found: dict[Key, Outcome] = {}
    for path in sorted((folder / GENERATIONS / benchmark).glob("*.jsonl")):
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
    record = CompletionRecord(**json.loads(line))
    index = GREEDY_INDEX if record.mode == "greedy" else int(record.sample)
    return (record.problem_id, index), Outcome(
        prompt_hash=record.prompt_hash,
        tokens=int(record.tokens),
        truncated=record.finish_reason == "length",
        correct=bool(record.correct),
        answer=record.extracted,
        verdict=record.verdict,
    )


def remove_unfinished_lines(folder: Path) -> int:
    """Remove unfinished last lines, which killed processes left; returns the number of files that had one."""
    return sum(_remove_unfinished_line(path) for path in sorted((folder / GENERATIONS).glob("*/*.jsonl")))


def _remove_unfinished_line(path: Path) -> bool:
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


class Writer:
    """Appends the completions of one engine, in batches."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / GENERATIONS
        self._name = f"rank-{rank:04d}.jsonl"
        self._files: dict[str, IO[bytes]] = {}
        self._waiting = 0
        self._written_at = time.monotonic()

    def add(self, benchmark: str, record: CompletionRecord) -> None:
        """Append a line. It is pure ASCII, so that any model's text can be shown on a terminal."""
        if benchmark not in self._files:
            (self._folder / benchmark).mkdir(parents=True, exist_ok=True)
            self._files[benchmark] = (self._folder / benchmark / self._name).open("ab")
        self._files[benchmark].write(json.dumps(asdict(record)).encode("ascii") + b"\n")
        self._waiting += 1
        self.tick()

    def tick(self) -> None:
        """Flush if a batch is full or old enough. Call it regularly."""
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
