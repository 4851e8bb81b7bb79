"""The evaluated model as a Hugging Face folder: given as one, or converted from a checkpoint.

Adapters (LoRA) stay beside the model that they belong to: merged and rounded, they may lose most of
what they learned."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.convert.adapters import base_model, check_base, lora_run
from rlmath.checkpoint.convert.convert import adapters_to_hf, megatron_to_hf
from rlmath.checkpoint.convert.sources import MegatronSource, find_megatron
from rlmath.checkpoint.convert.torch_dist_io import StateReader
from rlmath.checkpoint.directory import (
    MANIFEST,
    METADATA_FILES,
    complete_checkpoints,
    file_entry,
)
from rlmath.checkpoint.hf.config_json import (
    check_loadable,
    missing_folder_problem,
    read_model_shape,
)
from rlmath.checkpoint.hf.headers import (
    ADAPTER_FILE,
    model_fingerprint,
    older_model_fingerprint,
)
from rlmath.checkpoint.hf.metadata_files import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    read_metadata_files,
)
from rlmath.checkpoint.hf.peft import base_folder, engine_problems
from rlmath.config.files import read_json_object
from rlmath.config.help import raise_problems
from rlmath.config.hub import cached_folder, is_hub_id
from rlmath.config.load import load_config
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EXPORT_FOLDER,
    SUMMARY_FILE,
    adapter_alone,
    adapter_in,
)
from rlmath.evals.plan import read_settings

logger = logging.getLogger(__name__)

CONVERTED = "converted_model"
"""Folder of the converted checkpoint in the output folder.

No run's folder has this name, so a partial one can be removed."""
_SOURCE = "converted_from.json"
_NAME_BASE = f'Name the folder of that model as "base_model_name_or_path" in {ADAPTER_CONFIG}.'
_GOES_ON = "%s was begun with merged adapters, and goes on with the model in %s"


@dataclass(frozen=True)
class EvaluatedModel:
    """A folder that vLLM loads, and its hash.

    The hash is that of its weights and adapters, config, tokenizer and generation config."""

    folder: Path
    """The model's folder; with adapters, that of the model that they belong to."""
    fingerprint: str
    """The same for the same weights, tokenizer and settings in any folder."""
    older_fingerprint: str
    """The fingerprint that earlier releases made."""
    source: Path
    """The folder of the model, adapters or checkpoint, whole, before any conversion."""
    tokenizer: Path
    """The folder with the tokenizer, its chat template and the stop tokens."""
    adapter: Path | None = None
    """The PEFT folder of the adapters, which are not merged; None: there are none."""

    @property
    def stop_tokens(self) -> Path:
        """The folder whose generation_config.json, else config.json, names the stop tokens."""
        return self.tokenizer if (self.tokenizer / GENERATION_CONFIG).is_file() else self.folder

    def named_as(self, recorded: object) -> str:
        """Its fingerprint, in the older form where an earlier release recorded that."""
        return self.older_fingerprint if recorded == self.older_fingerprint else self.fingerprint


def resolve_model(path: Path, output: Path) -> EvaluatedModel:
    """The model at `path`: a Hugging Face or PEFT folder, a run's folder or a checkpoint.

    In a run's folder it is the last model of a finished run and the newest checkpoint of an
    unfinished one, with its adapters (LoRA) as they are. A checkpoint is converted once, into
    `output`/converted_model. ValueError if it is none of these, or has weights, adapters or a
    tokenizer that cannot be loaded."""
    if not path.is_dir():
        raise ValueError(missing_folder_problem(path, "--model"))
    if (path / "config.json").is_file():
        return _whole(path, source=path)
    if (adapter := adapter_alone(path)) is not None:
        return _with_adapter(base_folder(adapter), adapter, source=adapter)
    running = (path / CHECKPOINTS_FOLDER).is_dir() and not (path / SUMMARY_FILE).is_file()
    export = path / EXPORT_FOLDER
    adapter = adapter_in(export)
    is_merged = (export / "config.json").is_file()
    if running or not (is_merged or adapter):
        return _of_checkpoint(path, output)
    if adapter is None:
        return _whole(export, source=export)
    recorded = read_settings(output).get("model")
    if is_merged and recorded is not None:
        merged = _whole(export, source=export)
        if merged.named_as(recorded) == recorded:
            logger.warning(_GOES_ON, output, export)
            return merged
    try:
        checkpoints, _ = complete_checkpoints(path / CHECKPOINTS_FOLDER)
        newest = checkpoints[0].folder if checkpoints else None
        base = _base_of_run(path, adapter, newest)
    except ValueError as error:
        if not is_merged:
            raise
        logger.warning("The model in %s is evaluated, with its adapters merged: %s", export, error)
        return _whole(export, source=export)
    metadata = None if newest is None else newest / METADATA_FILES
    return _with_adapter(base, adapter, source=adapter, metadata=metadata)


def _whole(folder: Path, source: Path) -> EvaluatedModel:
    check_loadable(folder)
    metadata_files = read_metadata_files(folder)
    fingerprint, older = (
        _with_metadata(weights, metadata_files)
        for weights in (model_fingerprint(folder), older_model_fingerprint(folder))
    )
    return EvaluatedModel(folder, fingerprint, older, source=source.resolve(), tokenizer=folder)


def _with_adapter(
    base: Path, adapter: Path, source: Path, metadata: Path | None = None
) -> EvaluatedModel:
    """The model in `base` with the adapters of a PEFT folder.

    The tokenizer is that of the adapters, of the merged model beside them, of their run (in
    `metadata`) or, with a warning, of the base."""
    shape = read_model_shape(base, "--model")
    raise_problems("the adapters of --model", list(engine_problems(adapter, shape)))
    check_loadable(base)
    beside = adapter.parent if adapter.name == ADAPTER_FOLDER else adapter
    with_tokenizer = (place for place in (adapter, beside) if (place / TOKENIZER_CONFIG).is_file())
    tokenizer = next(with_tokenizer, metadata)
    if tokenizer is None:
        tokenizer = base
        logger.warning(
            "The adapters in %s have no tokenizer: prompts follow the chat template of %s",
            adapter,
            base,
        )
    files = read_metadata_files(tokenizer)
    files.pop("config.json", None)
    config = read_json_object(adapter / ADAPTER_CONFIG)
    weights = file_entry(adapter / ADAPTER_FILE).sha256
    parts = f"{model_fingerprint(base)} {weights} {config['r']} {config['lora_alpha']}"
    fingerprint = _with_metadata(parts, files)
    return EvaluatedModel(
        base,
        fingerprint,
        older_fingerprint=fingerprint,
        source=source.resolve(),
        tokenizer=tokenizer,
        adapter=adapter,
    )


def _base_of_run(run: Path, adapter: Path, checkpoint: Path | None) -> Path:
    """The model that a run began with, where it is on this machine.

    ValueError where it is not, or is another one than a checkpoint of the run was made with."""
    settings = run / CONFIG_FILE
    place = load_config([settings], [], saved=True).model.path if settings.is_file() else ""
    base = cached_folder(place, "model.path") if is_hub_id(place) else None
    if base is None or not (base / "config.json").is_file():
        base = base_folder(adapter)
    if checkpoint is not None:
        check_base(checkpoint, base, _NAME_BASE)
    return base


def _with_metadata(fingerprint: str, metadata_files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for name, content in metadata_files.items():
        digest.update(f"{name}:{len(content)}".encode() + content)
    return digest.hexdigest()[:16]


def _of_checkpoint(path: Path, output: Path) -> EvaluatedModel:
    """The model of a checkpoint, or its adapters beside the model that they belong to."""
    source = find_megatron(path)
    if source.metadata_files is None:
        raise ValueError(
            f"--model: {source.state} has no config.json beside it (hf/config.json), so its model "
            "is unknown; convert "
            "it by rlmath convert to-hf --config, and evaluate the result"
        )
    shape = read_model_shape(source.metadata_files)
    reader = StateReader(source.state)
    run = lora_run(reader)
    folder = _convert(source, shape, output, is_adapter=run is not None)
    if run is not None and (folder / "config.json").is_file():
        logger.warning(_GOES_ON, output, folder)
    elif run is not None:
        base = base_model(reader, run, shape, base=None, fetches=False)
        return _with_adapter(base, folder, source=source.state, metadata=source.metadata_files)
    return _whole(folder, source=source.state)


def _convert(source: MegatronSource, shape: ModelShape, output: Path, is_adapter: bool) -> Path:
    """Convert a checkpoint into the output folder, unless that is done already."""
    assert source.metadata_files is not None
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
    if is_adapter:
        adapters_to_hf(source.state, shape, folder, dtype=None, card={})
    else:
        metadata_files = read_metadata_files(source.metadata_files)
        megatron_to_hf(
            source.state, shape, metadata_files=metadata_files, output=folder, dtype=None
        )
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
