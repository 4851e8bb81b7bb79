"""Rows of prompt files, as they are read and as they are used, and why others are left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

START_CHARS = 60
"""Characters of a row that are shown where it cannot be used."""


class RowError(ValueError):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class RawRow:
    """A row as it lies in its file, before its form is known."""

    where: str
    """Its place, such as "train.jsonl, line 17", counted from 1."""
    columns: dict | None
    """The columns of the row; None where it cannot be read at all."""
    reason: str = ""
    """The reason why it cannot be read."""
    start: str = ""


@dataclass(frozen=True)
class PromptRow:
    """One problem of a file."""

    prompt: str
    """The problem; the text that the model continues, template included, where `whole`."""
    task: str
    """The check of its answer: "math", or "choice" for a letter of the question's options."""
    query_id: str
    """An id that is unique in the file."""
    solutions: tuple[str, ...]
    """Reference answers, at least one."""
    more_json: str = "{}"
    """The row's further columns, a JSON object."""
    whole: bool = True
    """Whether `prompt` is what the model continues, as it stands."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat that the file has (`columns.messages_of`), where it is no whole prompt."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that its model may call (`columns.tools_of`)."""


@dataclass(frozen=True)
class UnusableRow:
    """A row that is left out, and why."""

    where: str
    """Its place, such as "train.jsonl, line 17" or "train.parquet, row 17", counted from 1."""
    reason: str
    start: str


@dataclass(frozen=True)
class PromptFile:
    """The rows of a file or folder of prompts."""

    form: str
    """A word of data.format."""
    rows: list[PromptRow]
    unusable: list[UnusableRow]
    repeated: int = 0
    """Rows, left out, that repeat an earlier one."""


def grouped(reasons: Iterable[tuple[str, str]], most: int = 3) -> list[str]:
    """(reason, example) by kind, the most frequent first.

    Reasons that differ in numbers and quotations are one kind.

    >>> grouped([("2 tokens", "line 1"), ("blank", "line 4"), ("5 tokens", "line 7")])
    ['2: 2 tokens (line 1, line 7)', '1: blank (line 4)']
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for reason, example in reasons:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\d+", "", reason)
        kinds.setdefault(kind, []).append((reason, example))
    by_size = sorted(kinds.values(), key=len, reverse=True)
    lines = []
    for reasons_of_kind in by_size[:most]:
        ellipsis = ", ..." if len(reasons_of_kind) > most else ""
        lines.append(
            f"{len(reasons_of_kind)}: {reasons_of_kind[0][0]} "
            f"({', '.join(example for _, example in reasons_of_kind[:most])}{ellipsis})"
        )
    if other_reasons := sum(map(len, by_size[most:])):
        lines.append(f"{other_reasons} for other reasons")
    return lines


def unusable_lines(path: str, unusable: Iterable[UnusableRow]) -> list[str]:
    """Lines about a file's rows that are left out, by kinds of reason."""
    return grouped((row.reason, row.where.removeprefix(f"{path}, ")) for row in unusable)


def check_unusable(
    path: str, unusable: Collection[UnusableRow], rows: int, most: float, needed: str = ""
) -> None:
    """ValueError where too many of a file's `rows` are unusable.

    Allowed is the share `most` (0 to 1) of them."""
    if len(unusable) / max(1, rows) <= most:
        return
    reasons = "".join(f"\n    {line}" for line in unusable_lines(path, unusable))
    raise ValueError(
        f"{path}: {len(unusable)} of {rows} rows cannot be used, more than "
        f"data.max_unusable_share={most:g} of them. "
        f"Mend the file, or raise data.max_unusable_share.{needed} How many, and why:{reasons}"
    )


def short(value: object, limit: int = 60) -> str:
    """A value's type and first characters, whatever it is and however large.

    >>> short(17)
    "int '17'"
    """
    try:
        text = str(value)[:limit]
    except (ValueError, RecursionError):  # an integer of too many digits, a list that is too deep
        text = "..."
    return f"{type(value).__name__} {text!r}"
