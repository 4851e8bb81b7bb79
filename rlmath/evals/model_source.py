"""The model that is evaluated, as a Hugging Face folder: given as one, or converted from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.convert.convert import megatron_to_hf
from rlmath.checkpoint.convert.sources import MegatronSource, find_megatron
from rlmath.checkpoint.directory import CHECKPOINTS, MANIFEST
from rlmath.checkpoint.hf.weights import read_metadata_files
from rlmath.config.help import nearest_path
from rlmath.data.files import read_json_object
from rlmath.models.hf_config import read_model_shape
from rlmath.trainer.resume import model_fingerprint
from rlmath.trainer.run_dir import EXPORT_FOLDER, SUMMARY_NAME

logger = logging.getLogger(__name__)

CONVERTED = "converted_model"
"""Where a converted checkpoint is kept under the output folder. No run has anything of that name: what a killed process
left there is removed, even where a run's folder was given as the output."""
_SOURCE = "converted_from.json"
_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class EvaluatedModel:
    """Where vLLM finds it, and what tells it from others."""

    folder: Path
    fingerprint: str
    """The same for the same weights, tokenizer and settings, wherever they lie."""


def resolve_model(path: Path, output: Path) -> EvaluatedModel:
    """The model at `path`: a Hugging Face folder; a run's folder, which stands for its last model where the run is done
    and for its newest checkpoint where it is not; or a checkpoint. A checkpoint is converted once, into
    `output`/converted_model. ValueError where it is none of these."""
    if not path.is_dir():
        raise ValueError(f'--model: there is no folder "{path}".{nearest_path(path)}')
    folder = _hugging_face(path)
    if folder is None:
        folder = _convert(path, output)
    return EvaluatedModel(folder, _fingerprint(folder))


def _hugging_face(path: Path) -> Path | None:
    if (path / "config.json").is_file():
        return path
    last = path / EXPORT_FOLDER
    exported = (last / "config.json").is_file()
    running = (path / CHECKPOINTS).is_dir() and not (path / SUMMARY_NAME).is_file()
    return last if exported and not running else None


def _fingerprint(folder: Path) -> str:
    """Of weights, config, tokenizer, and what ends a completion."""
    digest = hashlib.sha256(model_fingerprint(folder).encode())
    for name, content in read_metadata_files(folder).items():
        digest.update(f"{name}:{len(content)}".encode() + content)
    return digest.hexdigest()[:16]


def _convert(path: Path, output: Path) -> Path:
    source = find_megatron(path)
    if source.metadata_files is None:
        raise ValueError(
            f"--model: {source.state} has no config.json beside it (hf/config.json), so its model is unknown; convert "
            "it by tools/convert_megatron_to_hf.py --config, and evaluate the result"
        )
    folder, note = output / CONVERTED, output / _SOURCE
    origin = {"state": str(source.state.resolve()), "content": _content(source)}
    if folder.is_dir() and note.is_file():
        earlier = read_json_object(note)
        if earlier.get("content") != origin["content"]:
            raise ValueError(
                f'--output "{output}" belongs to the checkpoint {earlier.get("state")}, and --model is now '
                f"{origin['state']}. Give another --output."
            )
        return folder
    if folder.is_dir():  # left by a process that was killed before it could say what this is
        shutil.rmtree(folder)
    logger.info("Converting %s to %s", source.state, folder)
    shape, metadata_files = (
        read_model_shape(source.metadata_files),
        read_metadata_files(source.metadata_files),
    )
    megatron_to_hf(source.state, shape, metadata_files, folder, None, _SHARD_BYTES)
    note.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    return folder


def _content(source: MegatronSource) -> str:
    """A short name for a checkpoint's content: by its manifest, which has a checksum of every file, or else by names,
    sizes and times of its files."""
    manifest = source.state.parent / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(source.state.iterdir())
    ]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
