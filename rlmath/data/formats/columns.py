"""What the forms share: the checks of single columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from rlmath.data.rows import MAX_LINE_BYTES, PromptRow, RowError, short

Reader = Callable[[dict, int], PromptRow]
"""(columns, number of the row) to the row; RowError where it cannot be used."""


@dataclass(frozen=True)
class Form:
    """One form of prompt files."""

    name: str
    """Its word of data.format."""
    columns: str
    """What its rows have, for people."""
    fits: Callable[[dict], bool]
    """Whether a row is of this form, as far as its columns tell."""
    reader_of: Callable[[Path], Reader]
    """The reader for a file or folder; ValueError where a file that belongs to it is missing."""


def text_of(columns: dict, key: str) -> str:
    """A column that must be a text with something in it."""
    return checked_text(columns.get(key), key)


def checked_text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name} must be a string that is not blank, got {short(value)}")
    if len(value) > MAX_LINE_BYTES:
        raise RowError(f"{name} has {len(value)} characters, more than {MAX_LINE_BYTES}")
    if "\0" in value:
        raise RowError(f"{name} has a NUL character at character {value.index(chr(0))}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{name} has half a surrogate pair at character {error.start}") from error
    return value


def answer_text(value: object, name: str) -> str:
    """An answer as the judge reads it: numbers without an empty fraction.

    >>> answer_text(27.0, "answer"), answer_text(0.5, "answer"), answer_text(" 3 ", "answer")
    ('27', '0.5', '3')
    """
    if isinstance(value, str):
        return checked_text(value, name).strip()
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowError(f"{name} must be a string or a number, got {short(value)}")
    if not isinstance(value, int) and not math.isfinite(value):
        raise RowError(f"{name} is {value}, which is no answer")
    try:
        number = Decimal(repr(value) if isinstance(value, float) else value)
        text = f"{number:f}" if number != number.to_integral_value() else f"{number.to_integral_value():f}"
    except (ArithmeticError, ValueError) as error:
        raise RowError(f"{name} is a number of too many digits") from error
    return "0" if text == "-0" else text


def id_of(columns: dict, keys: Collection[str], number: int) -> str:
    """The first of the columns that names the row; its number, from 0, where none does."""
    for key in keys:
        value = columns.get(key)
        if isinstance(value, str) and value.strip():
            return checked_text(value, key)
        if isinstance(value, int) and not isinstance(value, bool):
            return answer_text(value, key)
    return str(number - 1)


def further_columns(columns: dict, used: Collection[str]) -> str:
    """The others as a JSON object; what JSON has no word for, such as a date, as its text."""
    try:
        return json.dumps({key: value for key, value in columns.items() if key not in used}, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"its further columns cannot be written as JSON ({str(error)[:100]})") from error


def columns_of(value: object) -> dict:
    """A column of columns; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}
