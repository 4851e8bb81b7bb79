"""Rows of tables as they lie on disk, parquet and Arrow, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from rlmath.data.rows import START_CHARS, RawRow

_BATCH_ROWS = 256
_MAX_BATCH_BYTES = 2**30
"""A batch of rows that takes more memory is refused (bytes)."""


def table_rows(file: Path, is_parquet: bool) -> Iterator[RawRow]:
    """All rows of a parquet file, or of one of Arrow's.

    ValueError for a file that is neither, or damaged."""
    number = 0
    batches = _parquet_batches(file) if is_parquet else _arrow_batches(file)
    try:
        for batch in batches:
            if batch.nbytes > _MAX_BATCH_BYTES:
                raise ValueError(
                    f"{file}: {batch.num_rows} rows from row {number + 1} on take "
                    f"{batch.nbytes / 2**30:.1f} GiB; "
                    "prompts of a few KiB are needed"
                )
            for columns, reason in _columns_of(batch):
                number += 1
                start = "" if columns is None else _start(columns)
                yield RawRow(f"{file}, row {number}", columns, reason, start)
    except (pa.ArrowException, UnicodeError, OSError, EOFError, MemoryError) as error:
        kind = file.suffix.lstrip(".") or "data"
        raise ValueError(
            f"{file}: no {kind} file, or a damaged one, behind row {number}: {str(error)[:300]}; "
            "download it again"
        ) from error


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as parquet:
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a file in either of Arrow's formats: `save_to_disk` writes streams."""
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            batch.validate(full=True)  # else wrong offsets in a damaged file would be followed
            yield batch


def _columns_of(
    batch: pa.RecordBatch, at_once: int = _BATCH_ROWS
) -> Iterator[tuple[dict | None, str]]:
    """(columns of a row, reason why it has none) of every row of a batch.

    Where a piece as a whole has a value that Python does not take, such as text that is not UTF-8,
    its rows are read one by one."""
    narrow = [field for field in batch.schema if "float" in str(field.type)]
    lists = [field.name for field in batch.schema if _has_structs(field.type)]
    for start in range(0, batch.num_rows, at_once):
        piece = batch.slice(start, at_once)
        try:
            for row in piece.to_pylist():
                row |= {field.name: _shortest(row[field.name], field.type) for field in narrow}
                yield row | {name: _without_nulls(row[name]) for name in lists}, ""
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if at_once == 1:
                yield None, f"a value that cannot be read ({str(error)[:100]})"
            else:
                yield from _columns_of(piece, at_once=1)


def _shortest(value: Any, kind: pa.DataType) -> Any:
    """The value with the numbers that its shortest text says.

    0.1 of a column of float32 is 0.1, not 0.10000000149011612."""
    if value is None:
        return None
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return value if value.is_integer() else float(str(kind.to_pandas_dtype()(value)))
    if pa.types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    return [_shortest(member, kind.value_type) for member in value] if _is_list(kind) else value


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _has_structs(kind: pa.DataType) -> bool:
    """Whether a column has lists of structs, such as messages."""
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def _without_nulls(value: Any, kept_key: str | None = "content") -> Any:
    """A list of structs without what is null in them: in a table each has the keys of all.

    The null of `kept_key` stays in the list's own structs: messages with calls of tools have a null
    content."""
    if isinstance(value, list):
        return [_without_nulls(part, kept_key) for part in value]
    if isinstance(value, dict):
        parts = {key: part for key, part in value.items() if part is not None or key == kept_key}
        return {key: _without_nulls(part, kept_key=None) for key, part in parts.items()}
    return value


def _start(columns: dict) -> str:
    """The first characters of the row's first text."""
    texts = (column for column in columns.values() if isinstance(column, str))
    return next(texts, str(list(columns))[:START_CHARS])[:START_CHARS]
