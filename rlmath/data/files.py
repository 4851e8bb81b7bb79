"""Rows of prompt files as they lie on disk: JSON lines, parquet, Arrow, and the folders of downloaded data sets.

The choice of a folder's files stands first, then the reader of JSON lines; the reader of parquet and Arrow is in
`tables`. What a row's columns mean is in `formats`.
"""

from __future__ import annotations

import codecs
import importlib.util
import os
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from rlmath.config.files import open_regular, parse_json, read_json_object
from rlmath.config.help import nearest_path
from rlmath.data.rows import START_CHARS, RawRow

MAX_LINE_BYTES = 8 * 2**20
"""Longest line that is read (bytes), and longest text of a column; the longest row of boba_106k is far below."""
CHARACTERS_PER_TOKEN = 128
"""Longest token of common vocabularies, a run of spaces. A text with more for each token that it may have is not
tokenized: a tokenizer takes seconds and hundreds of MB for every million characters."""
MAX_TEXT_CHARACTERS = 2**20
"""Longest problem, where there is no limit of tokens."""
_SPLIT = "train"
_SUFFIXES = (".parquet", ".arrow", ".jsonl")
_SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?\.\w+")
"""train-00000-of-00002.parquet; with a hash behind where it was uploaded before 2024."""
_NUMBERED = re.compile(r"\d{4,}\.\w+")
"""0000.parquet, 0001.parquet: the shards of the split that is named by their folder."""
_ONE_A_LINE = "; jq -c '.[]' writes an array's objects one per line"
_OTHER_KINDS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; run git lfs pull in its folder",
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it with unzstd",
    b"\xfd7zXZ": "is compressed by xz; unpack it with unxz",
    b"PK\x03\x04": "is a zip archive; unpack it with unzip (an .xlsx: save its table as CSV, and convert that)",
    b"\xd0\xcf\x11\xe0": "is an Excel or Word file; save its table as CSV, and convert that to JSON lines",
    b"\xff\xfe": "is text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is text in UTF-16; save it as UTF-8",
}
"""How files begin that users take for prompts, and the message for each."""


# ---------------------------------------------------------------- files and folders


def existing_place(path: str) -> Path:
    """The file or folder. ValueError naming the nearest name where it is not there."""
    if not path:
        raise ValueError("a path of prompts is empty; name a file or a folder")
    place = Path(path)
    if os.path.isfile(place) or os.path.isdir(place):
        return place
    if os.path.lexists(place):
        raise ValueError(f"{path}: neither a file nor a folder, or a link to nothing; needed: one of them")
    raise ValueError(f"{path}: no such file.{nearest_path(place)}")


def files_of_folder(folder: Path) -> list[Path]:
    """Its training rows' files, in the order of their names. ValueError where that is not clear."""
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        if _SPLIT not in splits and len(splits) != 1:
            raise ValueError(
                f"{folder} has the splits {', '.join(splits) or 'none'}; give the folder of one of them"
            )
        return files_of_folder(folder / (_SPLIT if _SPLIT in splits else splits[0]))
    for place in (folder, folder / "data", folder / _SPLIT):
        if found := _files(place):
            return _one_split(place, found)
    # Data sets of several configurations have folders with prompts below.
    files = [*_files(folder, "*/"), *_files(folder, "*/*/")]
    names = sorted({str(file.parent.relative_to(folder)) for file in files})
    hint = f". Give one of the folders in it that have some: {', '.join(names[:5])}" if names else ""
    tables = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in (".csv", ".tsv"))
    hint += f". {tables[0]} is a CSV file; give it alone to be told how it is converted" if tables else ""
    raise ValueError(
        f"{folder}: a folder without prompts; needed: {', '.join(_SUFFIXES)} files in it or in its data/, "
        f"as a downloaded data set has them, or what save_to_disk writes (state.json){hint}"
    )


def folder_line(path: str) -> str:
    """Which of a folder's files are read, and which are not, for the console; "" for a file."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    used = files_of_folder(folder)
    every = [*_files(folder), *_files(folder, "*/"), *_files(folder, "*/*/")]
    is_used = {*used}
    others = [file for file in every if file not in is_used]
    read = f"{path} is a folder; read: {_names(folder, used)}"
    return f"{read}. Not read: {_names(folder, others)}." if others else f"{read}."


def _names(folder: Path, files: list[Path]) -> str:
    names = [str(file.relative_to(folder)) for file in files]
    return f"{', '.join(names[:5])} and {len(names) - 5} more" if names[5:] else ", ".join(names)


def _files(place: Path, below: str = "") -> list[Path]:
    """Files of rows in `place`, or in folders `below` it (a pattern), in the order of their names; no hidden ones."""
    found = (path for path in place.glob(f"{below}*") if path.suffix in _SUFFIXES and path.is_file())
    return sorted(
        path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts)
    )


def _saved_files(folder: Path) -> list[Path]:
    """The data files that state.json names."""
    entries = read_json_object(folder / "state.json").get("_data_files")
    listed = entries if isinstance(entries, list) else []
    found = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    names = [name for name in found if isinstance(name, str) and Path(name).name == name]
    if not names or len(names) != len(found):
        raise ValueError(
            f"{folder / 'state.json'} does not name the data files (_data_files); save the data again"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {missing[0]}, which state.json names, is not there; copy the whole folder"
        )
    return [folder / name for name in names]


def _one_split(folder: Path, files: list[Path]) -> list[Path]:
    """Files of one split: "train" where there is one."""
    if all(_NUMBERED.fullmatch(file.name) for file in files):
        return files
    by_name: dict[str, list[Path]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        by_name.setdefault(f"{shard['name']}-...{file.suffix}" if shard else file.name, []).append(file)
    train = [name for name in by_name if _SPLIT in re.split(r"[^a-z]+", name.lower())]
    chosen = train or list(by_name)
    if len(chosen) > 1:
        raise ValueError(f"{folder} has several files of prompts ({', '.join(chosen[:5])}); give one of them")
    shards = by_name[chosen[0]]
    matches = [match for match in (_SHARD.fullmatch(file.name) for file in shards) if match]
    counts = {int(match["count"]) for match in matches}
    if counts and counts != {len(shards)}:
        raise ValueError(
            f"{folder}: {len(shards)} of {max(counts)} files {matches[0]['name']}-...; download all of them"
        )
    return shards


# ---------------------------------------------------------------- rows of a file


def raw_rows(path: str) -> Iterator[RawRow]:
    """All rows of a file or of a data set's folder, without blank lines. ValueError for a file that cannot be read."""
    place = existing_place(path)
    return chain.from_iterable(map(_rows_of_file, files_of_folder(place) if place.is_dir() else [place]))


def _rows_of_file(file: Path) -> Iterator[RawRow]:
    try:
        with open_regular(file) as stream:
            magic = stream.read(max(map(len, _OTHER_KINDS)))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    for beginning, what in _OTHER_KINDS.items():
        if magic.startswith(beginning):
            raise ValueError(f"{file} {what}")
    is_parquet = magic[:4] == b"PAR1" or file.suffix == ".parquet"
    if not is_parquet and magic[:6] != b"ARROW1" and file.suffix != ".arrow":
        return _json_rows(file)
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"{file} is a table of parquet or Arrow, which the package pyarrow reads, and it is not installed. "
            "rlmath install cpu (or gpu) brings it; or write the rows as JSON lines where it is; or, for "
            "rlmath plan, give the number of rows by --prompts"
        )
    from rlmath.data.tables import table_rows  # here, because pyarrow is no part of every installation

    return table_rows(file, is_parquet)


# ---------------------------------------------------------------- JSON lines
_HEADER = re.compile(
    r'"?[A-Za-z_][\w .-]*"?(?P<separator>[,;\t])"?[A-Za-z_][\w .-]*"?(?:(?P=separator)"?[\w .-]+"?)*'
)
"""The first line of a table as text: names of columns."""


def _raise_if_csv(file: Path, stream: IO[bytes]) -> None:
    first = stream.readline(MAX_LINE_BYTES).removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").strip()
    stream.seek(0)
    found = _HEADER.fullmatch(first)
    if found is None and file.suffix.lower() not in (".csv", ".tsv"):
        return
    separator = found["separator"] if found else "\t" if "\t" in first else ","
    delimiter = "" if separator == "," else f", delimiter={separator!r}"
    target = file.with_suffix(".jsonl" if file.suffix != ".jsonl" else ".converted.jsonl")
    raise ValueError(
        f"{file} is a CSV file (it begins {first[:START_CHARS]!r}); needed: JSON lines or parquet. Convert it:\n"
        '    $ python -c "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(open(sys.argv[1], '
        f"newline='', encoding='utf-8-sig'){delimiter})]\" {shlex.quote(str(file))} > {shlex.quote(str(target))}\n"
        "  Its columns must have the names of a form (docs/data.md), such as question and answer"
    )


def _json_rows(file: Path) -> Iterator[RawRow]:
    with open_regular(file) as stream:
        _raise_if_csv(file, stream)
        for number, line in enumerate(_lines(stream), start=1):
            where = f"{file}, line {number}"
            if line is not None and number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line is None:
                reason = f"longer than {MAX_LINE_BYTES // 2**20} MiB; one JSON object per line is needed"
                yield RawRow(where, None, reason)
            elif line.strip():
                yield _parsed(where, line)


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Lines; None for one that is too long, of which no more than a part is held at a time."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None


def _parsed(where: str, line: bytes) -> RawRow:
    start = line[: 4 * START_CHARS].decode("utf-8", "replace").strip()[:START_CHARS]
    if start == "[":
        return RawRow(where, None, f"the beginning of a JSON array{_ONE_A_LINE}", start)
    try:
        row = parse_json(line.decode("utf-8"), unique_keys=True)
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 (byte {error.start} is {line[error.start]:#04x}); save the file as UTF-8"
        return RawRow(where, None, wrong, start)
    except ValueError as error:
        return RawRow(where, None, f"not JSON ({error})", start)
    if type(row) is not dict:
        hint = _ONE_A_LINE if type(row) is list else ""
        return RawRow(where, None, f"a JSON {type(row).__name__}, where a JSON object is needed{hint}", start)
    return RawRow(where, row, start=start)
