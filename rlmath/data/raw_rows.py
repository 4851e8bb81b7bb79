"""Rows of JSONL, parquet and Arrow files and of data set folders, before anybody asks what they mean.

All are read in order and a part at a time. A row that cannot be read is a row with a reason; a file that cannot be
read is a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from rlmath.data.folders import files_of_folder
from rlmath.data.places import existing_place
from rlmath.data.rows import MAX_LINE_BYTES, RawRow

_BATCH_ROWS = 256
_MAX_BATCH_BYTES = 2**30
"""A batch of rows that takes more memory is refused (bytes)."""
_START_CHARS = 60
_ONE_A_LINE = "; jq -c '.[]' writes an array's objects one per line"
_BOM = b"\xef\xbb\xbf"
_OTHER_KINDS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; run git lfs pull in its folder",
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it with unzstd",
    b"\xfd7zXZ": "is compressed by xz; unpack it with unxz",
    b"PK\x03\x04": "is a zip archive; unpack it with unzip",
    b"\xff\xfe": "is text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is text in UTF-16; save it as UTF-8",
}
"""How files begin that users take for prompts, and what to say of them."""


def raw_rows(path: str) -> Iterator[RawRow]:
    """All rows of a file or of a data set's folder, without blank lines. ValueError for a file that cannot be read."""
    place = existing_place(path)
    number = 0
    for file in files_of_folder(place) if place.is_dir() else [place]:
        for where, columns, reason, start in _rows_of_file(file):
            number += 1
            yield RawRow(where, number, columns, reason, start)


_Row = tuple[str, dict | None, str, str]
"""where, columns, reason, start."""


def _rows_of_file(file: Path) -> Iterator[_Row]:
    try:
        with file.open("rb") as stream:
            magic = stream.read(max(map(len, _OTHER_KINDS)))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    for beginning, what in _OTHER_KINDS.items():
        if magic.startswith(beginning):
            raise ValueError(f"{file} {what}")
    if magic[:4] == b"PAR1" or file.suffix == ".parquet":
        return _table_rows(file, _parquet_batches)
    if magic[:6] == b"ARROW1" or file.suffix == ".arrow":
        return _table_rows(file, _arrow_batches)
    return _json_rows(file)


# ---------------------------------------------------------------- JSON lines


def _json_rows(file: Path) -> Iterator[_Row]:
    with file.open("rb") as stream:
        for number, line in enumerate(_lines(stream), start=1):
            where = f"{file}, line {number}"
            if line is not None and number == 1:
                line = line.removeprefix(_BOM)
            if line is None:
                reason = f"longer than {MAX_LINE_BYTES // 2**20} MiB; one JSON object per line is needed"
                yield where, None, reason, ""
            elif line.strip():
                yield (where, *_parse(line))


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Lines; None for one that is too long, of which no more than a part is held at a time."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None


def _parse(line: bytes) -> tuple[dict | None, str, str]:
    start = line[: 4 * _START_CHARS].decode("utf-8", "replace").strip()[:_START_CHARS]
    if start == "[":
        return None, f"the beginning of a JSON array{_ONE_A_LINE}", start
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 (byte {error.start} is {line[error.start]:#04x}); save the file as UTF-8"
        return None, wrong, start
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})", start
    if type(row) is not dict:
        hint = _ONE_A_LINE if type(row) is list else ""
        return None, f"a JSON {type(row).__name__}, where a JSON object is needed{hint}", start
    return row, "", start


# ---------------------------------------------------------------- parquet and Arrow


def _table_rows(file: Path, batches_of: Callable[[Path], Iterator[pa.RecordBatch]]) -> Iterator[_Row]:
    number = 0
    try:
        for batch in batches_of(file):
            if batch.nbytes > _MAX_BATCH_BYTES:
                raise ValueError(
                    f"{file}: {batch.num_rows} rows from row {number + 1} on take {batch.nbytes / 2**30:.1f} GiB; "
                    "prompts of a few KiB are needed"
                )
            for columns, reason in _columns_of(batch):
                number += 1
                start = "" if columns is None else _start(columns)
                yield f"{file}, row {number}", columns, reason, start
    except (pa.ArrowException, UnicodeError, OSError, EOFError, MemoryError) as error:
        kind = file.suffix.lstrip(".") or "data"
        raise ValueError(
            f"{file}: no {kind} file, or a damaged one, behind row {number}: {str(error)[:300]}; download it anew"
        ) from error


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as parquet:
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Of both of Arrow's formats: `save_to_disk` writes streams."""
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


def _columns_of(batch: pa.RecordBatch) -> Iterable[tuple[dict | None, str]]:
    """Row by row where the batch as a whole has a value that Python does not take, such as text that is not UTF-8."""
    pieces = (batch.slice(start, _BATCH_ROWS) for start in range(0, batch.num_rows, _BATCH_ROWS))
    for piece in pieces:
        try:
            yield from ((row, "") for row in piece.to_pylist())
        except (pa.ArrowException, ValueError, OverflowError):
            yield from (_one_row(piece.slice(index, 1)) for index in range(piece.num_rows))


def _one_row(row: pa.RecordBatch) -> tuple[dict | None, str]:
    try:
        return row.to_pylist()[0], ""
    except (pa.ArrowException, ValueError, OverflowError) as error:
        return None, f"a value that cannot be read ({str(error)[:100]})"


def _start(columns: dict) -> str:
    """The first characters of the row's first text."""
    texts = (value for value in columns.values() if isinstance(value, str))
    return next(texts, str(list(columns))[:_START_CHARS])[:_START_CHARS]
