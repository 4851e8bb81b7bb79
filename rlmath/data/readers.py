"""Readers of prompt files: plain rows of any published form. Lengths and order are the loader's business."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from rlmath.data.files import raw_rows
from rlmath.data.formats import FORMS, form_of
from rlmath.data.formats.columns import Form, Reader
from rlmath.data.rows import PromptFile, PromptRow, RawRow, RowError, UnusableRow

__all__ = ["PromptFile", "PromptRow", "UnusableRow", "read_prompts"]

_LOOKED_AT = 100
"""Rows in which the form is looked for."""


def read_prompts(path: str, form: str = "auto") -> PromptFile:
    """All rows of a file or folder of prompts, in its order; `form` is a word of data.format.

    Rows that cannot be used are listed with their reasons, and rows that an earlier one equals are counted. ValueError
    where the file cannot be read, has another form or none, or has no row that can be used. Holds a part of the file at
    a time beside the rows.
    """
    rows = raw_rows(path)
    first: list[RawRow] = []
    for row in rows:
        first.append(row)
        if len(first) == _LOOKED_AT or (row.columns is not None and form_of(row.columns)):
            break
    found = _form(path, form, first)
    return _read(path, found, chain(first, rows))


def _form(path: str, form: str, first: list[RawRow]) -> Form:
    """The form that the first rows have; ValueError where it is none, or not the one that is asked for."""
    if not first:
        raise ValueError(f"{path}: no rows; one problem per row is needed. {_forms_there_are()}")
    row = next((row for row in first if row.columns is not None), first[0])
    if row.columns is None:
        shown = f"{row.reason}; it begins {row.start!r}"
    else:
        shown = f"it has the columns {', '.join(map(repr, list(row.columns)[:20])) or 'none'}"
    told = f"{row.where}: {shown}"
    found = next((one for row in first if row.columns is not None and (one := form_of(row.columns))), None)
    if form != "auto" and found is not FORMS[form] and (found is not None or row.columns is None):
        is_what = f'is of the form "{found.name}"' if found else "has no rows of any form"
        raise ValueError(f'{path} {is_what}, data.format says "{form}". {told}. {_forms_there_are()}')
    if form != "auto":
        return FORMS[form]
    if found is None:
        raise ValueError(f"{path}: rows of an unknown form. {told}. {_forms_there_are()}")
    return found


def _forms_there_are() -> str:
    return "Forms there are: " + "; ".join(f'"{form.name}": {form.columns}' for form in FORMS.values())


def _read(path: str, form: Form, raw: Iterable[RawRow]) -> PromptFile:
    read = form.reader_of(Path(path))
    rows: list[PromptRow] = []
    unusable: list[UnusableRow] = []
    repeated = 0
    first_of_id: dict[str, tuple[int, str]] = {}
    for one in raw:
        try:
            row = _usable(one, read)
            if row.query_id not in first_of_id:
                first_of_id[row.query_id] = len(rows), one.where
                rows.append(row)
                continue
            index, where = first_of_id[row.query_id]
            if not _same(rows[index], row):
                raise RowError(
                    f"query_id {row.query_id[:60]!r} is already used in {where} with other contents"
                )
            repeated += 1
        except RowError as error:
            unusable.append(UnusableRow(one.where, str(error), one.start))
    if not rows:
        raise ValueError(
            f'{path}: none of its {len(unusable)} rows can be used as "{form.name}" ({form.columns}). '
            f"{said(unusable[:1])}"
        )
    return PromptFile(form.name, rows, unusable, repeated)


def _usable(one: RawRow, read: Reader) -> PromptRow:
    if one.columns is None:
        raise RowError(one.reason)
    try:
        return read(one.columns, one.number)
    except RecursionError as error:
        raise RowError("nested too deep") from error


def _same(one: PromptRow, other: PromptRow) -> bool:
    return (one.prompt, one.task, one.solutions, one.messages) == (
        other.prompt,
        other.task,
        other.solutions,
        other.messages,
    )


def said(unusable: Iterable[UnusableRow]) -> str:
    """What is wrong with rows, in one line."""
    return "; ".join(_lines(unusable))


def _lines(unusable: Iterable[UnusableRow]) -> Iterator[str]:
    for row in unusable:
        yield f"{row.where}: {row.reason}" + (f", it begins {row.start!r}" if row.start else "")
