"""Which files of a Hugging Face data set's folder hold its training rows.

Two kinds of folders are known: a repository as it was downloaded (`data/train-00000-of-00002.parquet`, ...), and what
`save_to_disk` left (`state.json` beside `data-00000-of-00001.arrow`, or a folder for each split).
"""

from __future__ import annotations

import re
from pathlib import Path

from rlmath.data.json_files import read_json_object

_SPLIT = "train"
_SUFFIXES = (".parquet", ".arrow", ".jsonl")
_SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?\.\w+")
"""train-00000-of-00002.parquet; with a hash behind where it was uploaded before 2024."""
_NUMBERED = re.compile(r"\d{4,}\.\w+")
"""0000.parquet, 0001.parquet: the shards of the split that is named by their folder."""


def files_of_folder(folder: Path) -> list[Path]:
    """Its training rows' files, in the order of their names. ValueError where that is not clear."""
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    if (folder / "dataset_dict.json").is_file():
        return files_of_folder(_saved_split(folder))
    for place in (folder, folder / "data", folder / _SPLIT):
        if found := _files(place):
            return _one_split(place, found)
    raise ValueError(
        f"{folder}: a folder without prompts; needed: {', '.join(_SUFFIXES)} files in it or in its data/, "
        f"as a downloaded data set has them, or what save_to_disk writes (state.json){_folders_below(folder)}"
    )


def _folders_below(folder: Path) -> str:
    """Names folders that do have prompts, as data sets of several configurations have them; "" without any."""
    files = [*_files(folder, "*/"), *_files(folder, "*/*/")]
    names = sorted({str(file.parent.relative_to(folder)) for file in files})
    return f". Give one of the folders in it that have some: {', '.join(names[:5])}" if names else ""


def _files(place: Path, below: str = "") -> list[Path]:
    """Files of rows in `place`, or in folders `below` it (a pattern), in the order of their names; no hidden ones."""
    found = (path for path in place.glob(f"{below}*") if path.suffix in _SUFFIXES and path.is_file())
    return sorted(
        path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts)
    )


def _saved_files(folder: Path) -> list[Path]:
    """Those that state.json names."""
    entries = read_json_object(folder / "state.json").get("_data_files")
    listed = entries if isinstance(entries, list) else []
    found = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    names = [name for name in found if isinstance(name, str) and Path(name).name == name]
    if not names or len(names) != len(found):
        raise ValueError(
            f"{folder / 'state.json'} does not name the data files (_data_files); save the data anew"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {missing[0]}, which state.json names, is not there; copy the whole folder"
        )
    return [folder / name for name in names]


def _saved_split(folder: Path) -> Path:
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if _SPLIT in splits or len(splits) == 1:
        return folder / (_SPLIT if _SPLIT in splits else splits[0])
    raise ValueError(f"{folder} has the splits {', '.join(splits) or 'none'}; give the folder of one of them")


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
    _check_shards(by_name[chosen[0]])
    return by_name[chosen[0]]


def _check_shards(files: list[Path]) -> None:
    shards = [shard for shard in (_SHARD.fullmatch(file.name) for file in files) if shard]
    counts = {int(shard["count"]) for shard in shards}
    if counts and counts != {len(files)}:
        raise ValueError(
            f"{files[0].parent}: {len(files)} of {max(counts)} files {shards[0]['name']}-...; download all of them"
        )
