"""What became of the rows of a file of prompts, for the console and for data_report.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rlmath.data.rows import UnusableRow

REPORT_NAME = "data_report.json"
UNUSABLE_NAME = "unusable_rows.jsonl"
EXAMPLES = 3
"""Dropped prompts that are shown."""


@dataclass(frozen=True)
class DroppedPrompt:
    """An example of what a filter drops."""

    prompt_id: str
    tokens: int
    reason: str
    """Either "too long" or "empty"."""
    start: str
    """The first characters of its text."""


@dataclass(frozen=True)
class FilterReport:
    """What became of the rows of one file. Lengths are tokens, never characters."""

    read: int
    """Rows that could be used, each once."""
    kept: int
    dropped_too_long: int
    longest_dropped_tokens: int
    """0 when nothing was dropped."""
    max_prompt_tokens: int
    dropped_empty: int = 0
    """Prompts of which the tokenizer makes no token at all."""
    path: str = ""
    form: str = ""
    """A word of data.format."""
    repeated: int = 0
    """Rows that an earlier one equals."""
    unusable: tuple[UnusableRow, ...] = ()
    examples: tuple[DroppedPrompt, ...] = ()

    @property
    def dropped(self) -> int:
        return self.dropped_too_long + self.dropped_empty

    def line(self) -> str:
        """One line for the console: what the filter did."""
        name = f"Prompts of {self.path}" if self.path else "Prompts"
        if not self.dropped:
            return (
                f"{name}: {self.read} read, all kept; none is longer than"
                f" data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in tokens)."
            )
        share = 100 * self.dropped_too_long / self.read
        empty = f" {self.dropped_empty} dropped because without any token." if self.dropped_empty else ""
        return (
            f"{name}: {self.read} read, {self.kept} kept, {self.dropped_too_long} dropped ({share:.1f}%)"
            f" because longer than data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in"
            f" tokens, not characters; the longest has {self.longest_dropped_tokens} tokens).{empty}"
        )

    def lines(self) -> tuple[str, ...]:
        """All that the console should say."""
        form = (f'{self.path} has the form "{self.form}".',) if self.form else ()
        shown = tuple(
            f"  dropped, {one.reason} ({one.tokens} tokens): {one.prompt_id!r}, which begins {one.start!r}"
            for one in self.examples
        )
        return (*form, self.line(), *shown, *self._left_out_lines())

    def _left_out_lines(self) -> tuple[str, ...]:
        lines = []
        if self.repeated:
            lines.append(f"  {self.repeated} further rows repeat earlier ones and are left out.")
        if self.unusable:
            first = self.unusable[0]
            lines.append(
                f"  {len(self.unusable)} rows cannot be used and are left out; all are listed in {UNUSABLE_NAME}. The"
                f" first: {first.where}: {first.reason}"
            )
        return tuple(lines)

    def record(self) -> dict:
        """The file's part of data_report.json."""
        rows = self.read + self.repeated + len(self.unusable)
        counts = {
            "kept": self.kept,
            "too_long": self.dropped_too_long,
            "empty": self.dropped_empty,
            "repeated": self.repeated,
            "unusable": len(self.unusable),
        }
        return {
            "path": self.path,
            "format": self.form,
            "rows": rows,
            **counts,
            "shares": {name: count / rows for name, count in counts.items()},
            "max_prompt_tokens": self.max_prompt_tokens,
            "longest_dropped_tokens": self.longest_dropped_tokens,
            "examples_dropped": [asdict(one) for one in self.examples],
        }


class RowReport(Protocol):
    """What a report tells to data_report.json and unusable_rows.jsonl."""

    @property
    def read(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def unusable(self) -> tuple[UnusableRow, ...]: ...
    def record(self) -> dict: ...


def dropped_share(reports: Sequence[RowReport]) -> float:
    """Share of the prompts that could be used and that a filter dropped (0 to 1)."""
    return sum(report.dropped for report in reports) / max(1, sum(report.read for report in reports))


def write_report(folder: str | Path, reports: Sequence[RowReport]) -> None:
    """data_report.json and unusable_rows.jsonl (empty where all rows are used) in a folder that is there."""
    whole = {
        "prompts": sum(report.kept for report in reports),
        "dropped_share": dropped_share(reports),
        "files": [report.record() for report in reports],
    }
    _write(Path(folder) / REPORT_NAME, [json.dumps(whole, indent=2)])
    rows = (json.dumps(asdict(row)) for report in reports for row in report.unusable)
    _write(Path(folder) / UNUSABLE_NAME, rows)


def _write(file: Path, lines: Iterable[str]) -> None:
    scratch = file.with_name(f".{file.name}.tmp")
    with scratch.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
    os.replace(scratch, file)
