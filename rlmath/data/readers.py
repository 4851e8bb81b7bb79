"""Readers of prompt files. Each returns plain rows; lengths and order are the loader's business."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_BYTES = 8 * 2**20
"""Longest line that is read (bytes); the longest row of boba_106k is far below."""


_COLUMNS = ("prompt", "task", "query_id", "solutions")


@dataclass(frozen=True)
class PromptRow:
    """One line of an AReaL-boba file.

    >>> PromptRow("Compute 1+1.", "math", "q-1", ("\\\\boxed{2}",)).solutions
    ('\\\\boxed{2}',)
    """

    prompt: str
    """The text that the model continues, template included."""
    task: str
    """What kind of judge it needs, such as "math"."""
    query_id: str
    """Unique in the file."""
    solutions: tuple[str, ...]
    """At least one reference answer."""
    more_json: str = "{}"
    """The row's further columns, a JSON object."""


def read_boba(path: str) -> list[PromptRow]:
    """All rows of a JSONL file {"prompt", "task", "query_id", "solutions"}.

    Further keys are kept as they are, blank lines skipped. Raises ValueError naming file and line for whatever
    cannot be used. Holds one line at a time beside the rows.
    """
    rows: list[PromptRow] = []
    line_of_id: dict[str, int] = {}
    for number, line in _numbered_lines(_existing_file(path)):
        where = f"{path}, line {number}"
        row = _parse_row(line, where)
        if row.query_id in line_of_id:
            first = line_of_id[row.query_id]
            raise ValueError(
                f"{where}: query_id {row.query_id!r} is already used in line {first}; ids must be unique"
            )
        line_of_id[row.query_id] = number
        rows.append(row)
    if not rows:
        raise ValueError(
            f"{path}: no rows; the file needs at least one JSON line with prompt, task, query_id, solutions"
        )
    return rows


def _existing_file(path: str) -> Path:
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise ValueError(f"{path} is a folder; a JSONL file is needed")
    if not file.parent.is_dir():
        raise ValueError(f"{path}: no such file, and no folder {str(file.parent)!r} either")
    near = difflib.get_close_matches(
        file.name, [entry.name for entry in file.parent.iterdir()], n=1, cutoff=0.5
    )
    hint = f"; did you mean {str(file.parent / near[0])!r}?" if near else ""
    raise ValueError(f"{path}: no such file{hint}")


def _numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    with file.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{file}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB; is this a JSONL file?"
                    " One JSON object per line is needed"
                )
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: not UTF-8 (byte {error.start} is {line[error.start]:#04x});"
                    " save the file as UTF-8"
                ) from error
            if text.strip():
                yield number, text


def _parse_row(line: str, where: str) -> PromptRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); the line begins {line[:60]!r}") from error
    if type(row) is not dict:
        raise ValueError(f"{where}: got a JSON {type(row).__name__}, a JSON object is needed")
    missing = [key for key in _COLUMNS if key not in row]
    if missing:
        raise ValueError(
            f"{where}: missing {', '.join(missing)}; the row has {', '.join(map(repr, row)) or 'no keys'}"
        )
    solutions = row["solutions"]
    if not isinstance(solutions, list) or not solutions:
        raise ValueError(f"{where}: solutions must be a list of at least one string, got {_short(solutions)}")
    return PromptRow(
        prompt=_text(row["prompt"], "prompt", where),
        task=_text(row["task"], "task", where),
        query_id=_text(row["query_id"], "query_id", where),
        solutions=tuple(_text(solution, "each of solutions", where) for solution in solutions),
        more_json=json.dumps({key: value for key, value in row.items() if key not in _COLUMNS}),
    )


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name} must be a string that is not blank, got {_short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name} has half a surrogate pair at character {error.start}") from error
    return value


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
