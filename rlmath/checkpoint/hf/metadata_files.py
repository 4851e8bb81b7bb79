"""The small files beside a model's weights: configuration and tokenizer.

They are read here, and get the chat template and stop tokens of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmath.config.files import read_regular
from rlmath.config.run_files import ADAPTER_CONFIG

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps further chat templates, by name."""
MAX_METADATA_BYTES = 2**29


def read_metadata_files(source: str | Path) -> dict[str, bytes]:
    """Configuration and tokenizer files of a Hugging Face folder, by path in it.

    Small: some MB at most. That of adapters is none of the model's."""
    folder = Path(source)
    return {
        str(file.relative_to(folder)): read_regular(file, MAX_METADATA_BYTES)
        for file in (*sorted(folder.iterdir()), *sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja")))
        if file.is_file()
        and file.suffix in (".json", ".txt", ".model", ".jinja")
        and "safetensors" not in file.name
        and file.name != ADAPTER_CONFIG
    }


def with_chat_template(
    metadata_files: Mapping[str, bytes], template: str | None
) -> dict[str, bytes]:
    """The files of an export with `template` as default chat template (None: as they are).

    It stands in a file of its own, and in tokenizer_config.json for earlier transformers."""
    if template is None:
        return dict(metadata_files)
    config = json.loads(metadata_files.get(TOKENIZER_CONFIG, b"{}")) | {"chat_template": template}
    return {
        **metadata_files,
        TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        CHAT_TEMPLATE: template.encode(),
    }


def with_stop_tokens(
    metadata_files: Mapping[str, bytes], stop_token_ids: Sequence[int]
) -> dict[str, bytes]:
    """The files of an export with the tokens that end a completion in generation_config.json.

    With them vLLM and transformers stop where the run stopped. Files that name these tokens already
    are unchanged."""
    content = metadata_files.get(GENERATION_CONFIG, b"{}")
    config = json.loads(content)
    stop_tokens = config.get("eos_token_id")
    if {*stop_token_ids} == {*(stop_tokens if isinstance(stop_tokens, list) else [stop_tokens])}:
        return dict(metadata_files)
    config["eos_token_id"] = sorted(stop_token_ids)
    config.pop("_from_model_config", None)  # with it transformers 4 takes config.json's again
    return {**metadata_files, GENERATION_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
