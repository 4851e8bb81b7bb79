"""The completions of an evaluation on disk, so that it can be stopped and resumed.

<output>/
  settings.json                       the model and the sampling settings; written before the first completion
  generations/aime24/rank-0000.jsonl  one line for each completion of engine 0, with the result of its verification

A process that is killed may leave an unfinished last line; it is removed when the folder is opened
again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rlmath.evals.plan import GENERATIONS, GREEDY_INDEX

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
    text: str
    tokens: int
    finish_reason: str
    """"stop", "length" (truncated) or "lost" (a tool gave no result)."""
    correct: bool
    extracted: str
    """The answer that was compared, "" if none was found."""
    verdict: str
    """One of `answers.verifier.VERDICTS`."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools, as `algorithms.types.ToolCall`; their outputs are not in the text."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_lost(self) -> bool:
        return self.finish_reason == "lost"


def read_completions(folder: Path, benchmark: str) -> dict[Key, CompletionRecord]:
    """All completions of a benchmark in a folder, without their texts.

    One that is lost gives way to another of its problem and index. ValueError for a line that is no
    completion."""
    records: dict[Key, CompletionRecord] = {}
    for path in sorted((folder / GENERATIONS / benchmark).glob("*.jsonl")):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = CompletionRecord(**{**json.loads(line), "text": ""})
                except (ValueError, TypeError, RecursionError) as error:
                    raise ValueError(
                        f"{path}, line {number}: no completion ({type(error).__name__}: {error}); "
                        "remove it, and "
                        "it is sampled again"
                    ) from error
                index = GREEDY_INDEX if record.mode == "greedy" else record.sample
                key = record.problem_id, index
                if key not in records or records[key].is_lost:
                    records[key] = record
    return records


def remove_unfinished_lines(folder: Path) -> int:
    """Remove unfinished last lines and return the number of files that had one.

    Killed processes left them."""
    count = 0
    for path in (folder / GENERATIONS).glob("*/*.jsonl"):
        content = path.read_bytes()
        ended_size = content.rfind(b"\n") + 1
        if ended_size < len(content):
            os.truncate(path, ended_size)
            count += 1
    return count


class Writer:
    """Appends the completions of one engine."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / GENERATIONS
        self._name = f"rank-{rank:04d}.jsonl"
        self._files: dict[str, IO[bytes]] = {}

    def add(self, benchmark: str, record: CompletionRecord) -> None:
        """Append a line.

        It is pure ASCII, so that any model's text can be shown on a terminal."""
        if benchmark not in self._files:
            (self._folder / benchmark).mkdir(parents=True, exist_ok=True)
            self._files[benchmark] = (self._folder / benchmark / self._name).open("ab")
        row = asdict(record)
        if not record.calls:
            del row["calls"]
        self._files[benchmark].write(json.dumps(row).encode("ascii") + b"\n")
        self._files[benchmark].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
