"""The records that readers make: a row that can be used, one that cannot, and the file of both."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE_BYTES = 8 * 2**20
"""Longest line that is read (bytes), and longest text of a column; the longest row of boba_106k is far below."""


class RowError(ValueError):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class RawRow:
    """A row as it lies in its file, before its form is known."""

    where: str
    """Such as "train.jsonl, line 17", counted from 1."""
    number: int
    """Counted from 1 over all files of a folder."""
    columns: dict | None
    """None where it cannot be read at all."""
    reason: str = ""
    """Why not."""
    start: str = ""


@dataclass(frozen=True)
class PromptRow:
    """One problem of a file.

    >>> PromptRow("Compute 1+1.", "math", "q-1", ("\\\\boxed{2}",)).solutions
    ('\\\\boxed{2}',)
    """

    prompt: str
    """The problem; the text that the model continues, template included, where `whole`."""
    task: str
    """What kind of judge it needs: "math", or "choice" for a letter of the question's options."""
    query_id: str
    """Unique in the file."""
    solutions: tuple[str, ...]
    """At least one reference answer."""
    more_json: str = "{}"
    """The row's further columns, a JSON object."""
    whole: bool = True
    """Whether `prompt` is what the model continues, as it stands."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of the chat that the file has, where it is no whole prompt."""


@dataclass(frozen=True)
class UnusableRow:
    """A row that is left out."""

    where: str
    """Such as "train.jsonl, line 17" or "train.parquet, row 17", counted from 1."""
    reason: str
    start: str
    """Its first characters."""


@dataclass(frozen=True)
class PromptFile:
    """What a file or folder of prompts holds."""

    form: str
    """A word of data.format."""
    rows: list[PromptRow]
    unusable: list[UnusableRow]
    repeated: int = 0
    """Rows, left out, that say once more what an earlier one says."""

    @property
    def unusable_share(self) -> float:
        """Of all rows (0 to 1)."""
        return len(self.unusable) / max(1, len(self.rows) + self.repeated + len(self.unusable))


def short(value: object, limit: int = 60) -> str:
    """A value's type and first characters, whatever it is and however large.

    >>> short(17)
    "int '17'"
    """
    text = value[:limit] if isinstance(value, str) else _start_of(value, limit)
    return f"{type(value).__name__} {text!r}"


def _start_of(value: object, limit: int) -> str:
    try:
        return str(value)[:limit]
    except (ValueError, RecursionError):  # an integer of too many digits, a list that is too deep
        return "..."
