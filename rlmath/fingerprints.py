"""Short names for what a run is made of, to tell whether a resumed one is made of the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from rlmath.types import Prompt

_SAMPLE_BYTES = 2**20


def model_fingerprint(folder: str | Path) -> str:
    """Of a Hugging Face folder: its config.json, and names, sizes, first and last MiB of its weight files. A model that
    was trained on has another one; the same model in another place has the same."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def data_fingerprint(prompts: Sequence[Prompt], sizes: Sequence[int] = ()) -> str:
    """Of the prompts that are used, in order: their tokens, solutions and names; and of the number of prompts in each
    file, where that matters."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = (prompt.prompt_id, prompt.token_ids, prompt.solutions, prompt.task, prompt.more_json)
        digest.update(json.dumps(row).encode())
    if sizes:
        digest.update(json.dumps(list(sizes)).encode())
    return digest.hexdigest()[:16]
