"""AReaL's two forms: whole prompts with their solutions, and whole prompts with the solutions in a file beside."""

from __future__ import annotations

from pathlib import Path

from rlmath.data.files import read_json_object
from rlmath.data.formats.columns import Form, Reader, checked_text, further_columns, text_of
from rlmath.data.rows import PromptRow, RowError, short

_COLUMNS = ("prompt", "task", "query_id", "solutions")
SOLUTIONS_FILE = "id2info.json"
_MAX_SOLUTIONS_BYTES = 2**30
"""The published file is far below."""


def _boba_row(columns: dict, number: int) -> PromptRow:
    missing = [key for key in _COLUMNS if key not in columns]
    if missing:
        shown = ", ".join(repr(key) for key in list(columns)[:20]) or "no keys"
        raise RowError(f"missing {', '.join(missing)}; the row has {shown}")
    return PromptRow(
        prompt=text_of(columns, "prompt"),
        task=text_of(columns, "task"),
        query_id=text_of(columns, "query_id"),
        solutions=_solutions(columns["solutions"]),
        more_json=further_columns(columns, _COLUMNS),
    )


def _solutions(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(f"solutions must be a list of at least one string, got {short(value)}")
    return tuple(checked_text(solution, "each of solutions") for solution in value)


def _v01_reader(place: Path) -> Reader:
    known = _read_solutions((place if place.is_dir() else place.parent) / SOLUTIONS_FILE, place)

    def read(columns: dict, number: int) -> PromptRow:
        query_id = text_of(columns, "query_id")
        info = known.get(query_id)
        if not isinstance(info, dict):
            raise RowError(f"{SOLUTIONS_FILE} has no solutions of query_id {query_id[:60]!r}")
        return PromptRow(
            prompt=text_of(columns, "prompt"),
            task=text_of(columns, "task") if "task" in columns else "math",
            query_id=query_id,
            solutions=_solutions(info.get("solutions")),
            more_json=further_columns(columns, _COLUMNS),
        )

    return read


def _read_solutions(file: Path, place: Path) -> dict:
    if not file.is_file():
        raise ValueError(
            f"{place}: its rows have prompts without solutions, as AReaL v0.1 has them; {file} with the solutions "
            "is needed beside it. Download it from the same data set"
        )
    return read_json_object(file, _MAX_SOLUTIONS_BYTES)


BOBA = Form(
    "boba",
    "prompt, task, query_id, solutions (AReaL-boba, ORZ)",
    lambda columns: "solutions" in columns and "prompt" in columns,
    lambda place: _boba_row,
)
V01 = Form(
    "areal_v01",
    f"prompt, query_id, with {SOLUTIONS_FILE} beside (AReaL v0.1)",
    lambda columns: {"prompt", "query_id"} <= set(columns) and not {"answer", "reward_model"} & set(columns),
    _v01_reader,
)
