"""`rlmath doctor --model DIR [--model DIR] [--run DIR]`: all bytes of models compared with each
other, and a model with what a run started from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlmath.config.run_files import CHECKPOINTS_FOLDER

MOST_NAMED = 3
"""Tensors that are named of those that differ."""


def model_lines(models: Sequence[Path], run: Path | None) -> Iterator[tuple[bool, str]]:
    """Whether all is well, and what is said, of each model, of the others beside the first, and of
    the run. ValueError where one cannot be read."""
    from rlmath.checkpoint.hf.headers import content_digests  # safetensors, when it is needed

    first: dict[str, str] = {}
    for model in models:
        started = time.perf_counter()
        digests = content_digests(model)
        whole = hashlib.sha256(
            "".join(f"{name}:{digest}" for name, digest in digests.items()).encode()
        )
        seconds = time.perf_counter() - started
        yield (
            True,
            f"{model}: {len(digests)} tensors, SHA-256 of all their bytes {whole.hexdigest()} "
            f"({seconds:.1f} s)",
        )
        if model != models[0]:
            names = sorted(
                name
                for name in first.keys() | digests.keys()
                if first.get(name) != digests.get(name)
            )
            more = ", ..." if len(names) > MOST_NAMED else ""
            others = f"{len(names)} tensors differ: {', '.join(names[:MOST_NAMED])}{more}"
            yield (
                not names,
                f"  beside {models[0]}: {others if names else 'all tensors are the same'}",
            )
        first = first or digests
        if run is not None:
            yield from _beside_run(model, run)


def _beside_run(model: Path, run: Path) -> Iterator[tuple[bool, str]]:
    """Whether the run's newest checkpoint would go on with the model: its fingerprint, tokenizer
    and stop tokens."""
    from rlmath.checkpoint.directory import SETTINGS, complete_checkpoints, read_progress
    from rlmath.checkpoint.hf.config_json import read_model_shape
    from rlmath.checkpoint.hf.headers import fingerprint_to_compare, model_fingerprint
    from rlmath.checkpoint.hf.metadata_files import read_metadata_files
    from rlmath.config.load import load_config
    from rlmath.data.chat import chat_settings
    from rlmath.data.tokenizer import load_tokenizer, stop_token_ids
    from rlmath.run.recovery.tokenizer_changes import tokenizer_changes

    checkpoints, notes = complete_checkpoints(run / CHECKPOINTS_FOLDER)
    if not checkpoints:
        raise ValueError(f'--run: "{run}" has no whole checkpoint. {" ".join(notes)}'.rstrip())
    folder = checkpoints[0].folder
    recorded = read_progress(folder).model_fingerprint
    now = fingerprint_to_compare(recorded, model_fingerprint(model), model)
    if now == recorded:
        yield True, f"  has the fingerprint of the model that the run started from ({folder})"
    else:
        yield (
            False,
            f"  has the fingerprint {now}, not {recorded}, that of the model that the run started "
            f"from ({folder})",
        )
    settings = load_config([folder / SETTINGS], [], saved=True)
    tokenizer = load_tokenizer(str(model), "--model", chat_settings(settings.data))
    vocabulary = read_model_shape(model, "--model").vocab_size
    stops = stop_token_ids(str(model), tokenizer, vocabulary)
    changes = list(tokenizer_changes(model, read_metadata_files(model), folder, stops))
    for change in changes:
        yield False, f"  {change}"
    if not changes:
        yield True, "  tokenizer and stop tokens are those of that checkpoint"
