"""`rlmath doctor --model DIR [--model DIR] [--run DIR]`: compares models.

All bytes of models are compared with each other, and a model with the one that a run started
from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlmath.config.run_files import CHECKPOINTS_FOLDER

MOST_NAMED = 3
"""Tensors that are named of those that differ."""


def model_lines(models: Sequence[Path], run: Path | None) -> Iterator[tuple[bool, str]]:
    """Lines about each model, its difference from the first one, and the run.

    Each line has whether all is well before it. ValueError if a model or the run cannot be read."""
    from rlmath.checkpoint.hf.headers import content_digests  # safetensors, when it is needed

    first: dict[str, str] = {}
    for model in models:
        started = time.perf_counter()
        digests = content_digests(model)
        digest_of_all = hashlib.sha256(
            "".join(f"{name}:{digest}" for name, digest in digests.items()).encode()
        )
        seconds = time.perf_counter() - started
        yield (
            True,
            f"{model}: {len(digests)} tensors, SHA-256 of all their bytes "
            f"{digest_of_all.hexdigest()} ({seconds:.1f} s)",
        )
        if model != models[0]:
            names = sorted(
                name
                for name in first.keys() | digests.keys()
                if first.get(name) != digests.get(name)
            )
            ending = ", ..." if len(names) > MOST_NAMED else ""
            differences = f"{len(names)} tensors differ: {', '.join(names[:MOST_NAMED])}{ending}"
            yield (
                not names,
                f"  beside {models[0]}: {differences if names else 'all tensors are the same'}",
            )
        first = first or digests
        if run is not None:
            yield from _beside_run(model, run)


def _beside_run(model: Path, run: Path) -> Iterator[tuple[bool, str]]:
    """Lines on whether the run's newest checkpoint can go on with the model.

    Compared are fingerprint, tokenizer and stop tokens."""
    from rlmath.checkpoint.directory import SETTINGS, complete_checkpoints, read_progress
    from rlmath.checkpoint.hf.config_json import read_model_shape
    from rlmath.checkpoint.hf.headers import fingerprint_to_compare, model_fingerprint
    from rlmath.checkpoint.hf.metadata_files import read_metadata_files
    from rlmath.config.load import load_config
    from rlmath.data.stop_tokens import stop_token_ids
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.data.tool_chats import run_chat_settings
    from rlmath.run.recovery.tokenizer_changes import tokenizer_changes

    checkpoints, notes = complete_checkpoints(run / CHECKPOINTS_FOLDER)
    if not checkpoints:
        raise ValueError(f'--run: "{run}" has no whole checkpoint. {" ".join(notes)}'.rstrip())
    folder = checkpoints[0].folder
    recorded = read_progress(folder).model_fingerprint
    fingerprint = fingerprint_to_compare(recorded, model_fingerprint(model), model)
    if fingerprint == recorded:
        yield True, f"  has the fingerprint of the model that the run started from ({folder})"
    else:
        yield (
            False,
            f"  has the fingerprint {fingerprint}, not {recorded}, that of the model that the run "
            f"started from ({folder})",
        )
    settings = load_config([folder / SETTINGS], [], saved=True)
    tokenizer = load_tokenizer(str(model), "--model", run_chat_settings(settings))
    vocabulary = read_model_shape(model, "--model").vocab_size
    stops = stop_token_ids(str(model), tokenizer, vocabulary)
    changes = list(tokenizer_changes(model, read_metadata_files(model), folder, stops))
    for change in changes:
        yield False, f"  {change}"
    if not changes:
        yield True, "  tokenizer and stop tokens are those of that checkpoint"
