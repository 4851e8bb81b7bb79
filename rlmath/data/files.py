"""Rows of prompt files as they lie on disk: JSON lines, parquet, Arrow and folders of data sets.

The reader of parquet and Arrow is in `tables`. What a row's columns mean is in `formats`.
"""

from __future__ import annotations

import codecs
import importlib.util
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from rlmath.config.files import open_regular, parse_json, read_json_object
from rlmath.config.help import nearest_path
from rlmath.data.rows import START_CHARS, RawRow

MAX_LINE_BYTES = 8 * 2**20
"""Longest line that is read (bytes), and longest text of a column; the longest row of boba_106k is
far below."""
CHARACTERS_PER_TOKEN = 128
"""Longest token of common vocabularies, a run of spaces. A text with more for each token that it
may have is not tokenized: a tokenizer takes seconds and hundreds of MB for every million
characters."""
MAX_TEXT_CHARACTERS = 2**20
"""Longest problem, where there is no limit of tokens."""
_SPLIT = "train"
_SUFFIXES = (".parquet", ".arrow", ".jsonl")
_SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?\.\w+")
"""train-00000-of-00002.parquet; with a hash behind where it was uploaded before 2024."""
_NUMBERED = re.compile(r"\d{4,}\.\w+")
"""0000.parquet, 0001.parquet: the shards of the split that is named by their folder."""


# ---------------------------------------------------------------- files and folders


def existing_place(path: str) -> Path:
    """The file or folder.

    ValueError naming the nearest name where it is not there."""
    place = Path(path)
    if path and (os.path.isfile(place) or os.path.isdir(place)):
        return place
    near = nearest_path(place) if path else ""
    raise ValueError(f'"{path}": no such file.{near} Needed: a file or a folder of prompts')


def files_of_folder(folder: Path) -> list[Path]:
    """The files with a folder's training rows, in the order of their names.

    ValueError where it is not clear which they are."""
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        if _SPLIT not in splits and len(splits) != 1:
            raise ValueError(
                f"{folder} has the splits {', '.join(splits) or 'none'}; give the folder of one "
                "of them"
            )
        return files_of_folder(folder / (_SPLIT if _SPLIT in splits else splits[0]))
    for place in (folder, folder / "data", folder / _SPLIT):
        if files_in_place := _files(place):
            return _one_split(place, files_in_place)
    # Data sets of several configurations have folders with prompts below.
    files = [*_files(folder, "*/"), *_files(folder, "*/*/")]
    names = sorted({str(file.parent.relative_to(folder)) for file in files})
    hint = (
        f". Give one of the folders in it that have some: {', '.join(names[:5])}" if names else ""
    )
    raise ValueError(
        f"{folder}: a folder without prompts; needed: {', '.join(_SUFFIXES)} files in it or in "
        "its data/, "
        f"as a downloaded data set has them, or what save_to_disk writes (state.json){hint}"
    )


def folder_line(path: str) -> str:
    """A line for the console that names the files of a folder that are read; "" for a file."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    names = [str(file.relative_to(folder)) for file in files_of_folder(folder)]
    further = f" and {len(names) - 5} more" if names[5:] else ""
    return f"{path} is a folder; read: {', '.join(names[:5])}{further}."


def _files(place: Path, below: str = "") -> list[Path]:
    """Files of rows in `place`, or in folders `below` it (a pattern), in the order of their names.

    Hidden files are left out."""
    paths = (
        path for path in place.glob(f"{below}*") if path.suffix in _SUFFIXES and path.is_file()
    )
    return sorted(
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(place).parts)
    )


def _saved_files(folder: Path) -> list[Path]:
    """The data files that state.json names."""
    entries = read_json_object(folder / "state.json").get("_data_files")
    listed = entries if isinstance(entries, list) else []
    filenames = [data_file.get("filename") for data_file in listed if isinstance(data_file, dict)]
    names = [name for name in filenames if isinstance(name, str) and Path(name).name == name]
    missing = [name for name in names if not (folder / name).is_file()]
    if not names or missing or len(names) != len(filenames):
        raise ValueError(
            f"{folder / 'state.json'} does not name the data files (_data_files), or they are not "
            "there "
            f"({', '.join(missing) or 'none named'}); copy the whole folder, or save the data again"
        )
    return [folder / name for name in names]


def _one_split(folder: Path, files: list[Path]) -> list[Path]:
    """Files of one split: "train" where there is one."""
    if all(_NUMBERED.fullmatch(file.name) for file in files):
        return files
    by_name: dict[str, list[Path]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        by_name.setdefault(f"{shard['name']}-...{file.suffix}" if shard else file.name, []).append(
            file
        )
    train = [name for name in by_name if _SPLIT in re.split(r"[^a-z]+", name.lower())]
    chosen = train or list(by_name)
    if len(chosen) > 1:
        raise ValueError(
            f"{folder} has several files of prompts ({', '.join(chosen[:5])}); give one of them"
        )
    shards = by_name[chosen[0]]
    matches = [match for match in (_SHARD.fullmatch(file.name) for file in shards) if match]
    counts = {int(match["count"]) for match in matches}
    if counts and counts != {len(shards)}:
        raise ValueError(
            f"{folder}: {len(shards)} of {max(counts)} files {matches[0]['name']}-...; download "
            "all of them"
        )
    return shards


# ---------------------------------------------------------------- rows of a file


def raw_rows(path: str) -> Iterator[RawRow]:
    """All rows of a file or of a data set's folder, without blank lines.

    ValueError for a file that cannot be read, or has none."""
    place = existing_place(path)
    rows = chain.from_iterable(
        map(_rows_of_file, files_of_folder(place) if place.is_dir() else [place])
    )
    if (first := next(rows, None)) is None:
        raise ValueError(
            f"{path} has no rows: its lines are blank, or it has none. Needed: one problem a row"
        )
    return chain([first], rows)


def _rows_of_file(file: Path) -> Iterator[RawRow]:
    """The rows of one file: JSON lines, or a table of parquet or Arrow."""
    try:
        with open_regular(file) as stream:
            magic = stream.read(6)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    is_parquet = magic[:4] == b"PAR1" or file.suffix == ".parquet"
    if not is_parquet and magic != b"ARROW1" and file.suffix != ".arrow":
        return _json_rows(file)
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"{file} is a table of parquet or Arrow, for which the package pyarrow is not "
            "installed: rlmath install "
            "cpu (or gpu) brings it. Or write the rows as JSON lines, or give rlmath plan their "
            "number by --prompts"
        )
    # Imported here, because pyarrow is not part of every installation.
    from rlmath.data.tables import table_rows

    return table_rows(file, is_parquet)


# ---------------------------------------------------------------- JSON lines


def _json_rows(file: Path) -> Iterator[RawRow]:
    """The rows of a file of JSON lines; blank lines are left out."""
    with open_regular(file) as stream:
        for number, line in enumerate(_lines(stream), start=1):
            location = f"{file}, line {number}"
            if line is not None and number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line is None:
                reason = (
                    f"longer than {MAX_LINE_BYTES // 2**20} MiB; one JSON object per line is needed"
                )
                yield RawRow(location, None, reason)
            elif line.strip():
                yield _parsed(location, line)


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Lines; None for one that is too long, of which no more than a part is held at a time."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None


def _parsed(place: str, line: bytes) -> RawRow:
    """The row of one line, or the reason why the line is none."""
    start = line[: 4 * START_CHARS].decode("utf-8", "replace").strip()[:START_CHARS]
    try:
        row = parse_json(line.decode("utf-8"), unique_keys=True)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start} is {line[error.start]:#04x}), or compressed"
        return RawRow(place, None, reason, start)
    except ValueError as error:
        return RawRow(place, None, f"not JSON ({error})", start)
    if type(row) is not dict:
        return RawRow(
            place, None, f"a JSON {type(row).__name__}, where a JSON object is needed", start
        )
    return RawRow(place, row, start=start)
