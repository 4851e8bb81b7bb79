"""The evaluated model as a Hugging Face folder: given as one, or converted from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.convert.convert import megatron_to_hf
from rlmath.checkpoint.convert.sources import MegatronSource, find_megatron
from rlmath.checkpoint.directory import MANIFEST, file_entry
from rlmath.checkpoint.hf.config_json import (
    check_loadable,
    missing_folder_problem,
    read_model_shape,
)
from rlmath.checkpoint.hf.headers import model_fingerprint, older_model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.config.files import read_json_object
from rlmath.config.run_files import CHECKPOINTS_FOLDER, EXPORT_FOLDER, SUMMARY_FILE, adapter_alone

logger = logging.getLogger(__name__)

CONVERTED = "converted_model"
"""Folder of the converted checkpoint in the output folder.

No run's folder has this name, so a partial one can be removed."""
_SOURCE = "converted_from.json"


@dataclass(frozen=True)
class EvaluatedModel:
    """A folder that vLLM loads, and its hash.

    The hash is that of its weights, config, tokenizer and generation config."""

    folder: Path
    fingerprint: str
    """The same for the same weights, tokenizer and settings in any folder."""
    older_fingerprint: str
    """The fingerprint that earlier releases made."""
    source: Path
    """The folder of the model or the checkpoint, whole, before any conversion."""

    def named_as(self, recorded: object) -> str:
        """Its fingerprint, in the older form where an earlier release recorded that."""
        return self.older_fingerprint if recorded == self.older_fingerprint else self.fingerprint


def resolve_model(path: Path, output: Path) -> EvaluatedModel:
    """The model at `path`: a Hugging Face folder, a run's folder or a checkpoint.

    In a run's folder it is the last model of a finished run and the newest checkpoint of an
    unfinished one. A checkpoint is converted once, into `output`/converted_model. ValueError if it
    is none of these, or has weights or a tokenizer that cannot be loaded."""
    if not path.is_dir():
        raise ValueError(missing_folder_problem(path, "--model"))
    if (adapter := adapter_alone(path)) is not None:
        raise ValueError(
            f'--model: "{adapter}" has adapters (LoRA) without their model; needed: a whole '
            "model. Give the folder of "
            "their run or a checkpoint of it, which is merged at once, or merge them (PEFT: "
            "merge_and_unload)."
        )
    hugging_face = _hugging_face(path)
    source = hugging_face or find_megatron(path).state
    folder = hugging_face or _convert(path, output)
    check_loadable(folder)
    metadata_files = read_metadata_files(folder)
    fingerprint, older = (
        _with_metadata(weights, metadata_files)
        for weights in (model_fingerprint(folder), older_model_fingerprint(folder))
    )
    return EvaluatedModel(folder, fingerprint, older, source=source.resolve())


def _with_metadata(fingerprint: str, metadata_files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for name, content in metadata_files.items():
        digest.update(f"{name}:{len(content)}".encode() + content)
    return digest.hexdigest()[:16]


def _hugging_face(path: Path) -> Path | None:
    if (path / "config.json").is_file():
        return path
    export_folder = path / EXPORT_FOLDER
    exported = (export_folder / "config.json").is_file()
    running = (path / CHECKPOINTS_FOLDER).is_dir() and not (path / SUMMARY_FILE).is_file()
    return export_folder if exported and not running else None


def _convert(path: Path, output: Path) -> Path:
    """Convert a checkpoint into the output folder, unless that is done already."""
    source = find_megatron(path)
    if source.metadata_files is None:
        raise ValueError(
            f"--model: {source.state} has no config.json beside it (hf/config.json), so its model "
            "is unknown; convert "
            "it by rlmath convert to-hf --config, and evaluate the result"
        )
    folder = output / CONVERTED
    note = output / _SOURCE
    origin = {"state": str(source.state.resolve()), "content": _content(source)}
    if folder.is_dir() and note.is_file():
        earlier = read_json_object(note)
        if earlier.get("content") != origin["content"]:
            raise ValueError(
                f'--output "{output}" belongs to the checkpoint {earlier.get("state")}, and '
                "--model is now "
                f"{origin['state']}. Give another --output."
            )
        return folder
    if folder.is_dir():  # a partial one, left by a process that was killed
        shutil.rmtree(folder)
    logger.info("Converting %s to %s", source.state, folder)
    shape = read_model_shape(source.metadata_files)
    metadata_files = read_metadata_files(source.metadata_files)
    megatron_to_hf(source.state, shape, metadata_files=metadata_files, output=folder, dtype=None)
    note.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    return folder


def _content(source: MegatronSource) -> str:
    """Hash of a checkpoint's manifest, which has checksums.

    Without one, hash of its files' names, sizes and times."""
    manifest = source.state.parent / MANIFEST
    if manifest.is_file():
        return file_entry(manifest).sha256[:16]
    stats = [(file.name, file.stat()) for file in sorted(source.state.iterdir())]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
