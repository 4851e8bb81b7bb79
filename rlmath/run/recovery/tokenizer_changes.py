"""Whether the model's folder still has the tokenizer and the stop tokens of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.checkpoint.directory import METADATA_FILES
from rlmath.checkpoint.hf.metadata_files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    read_metadata_files,
)
from rlmath.config.files import parse_json
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OF_NO_TOKENIZER = ("config.json", GENERATION_CONFIG, CHAT_TEMPLATE)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")
"""Parts of a tokenizer as the tokenizers library writes it."""
_ANY_TOKEN = 2**31


def tokenizer_changes(
    model: Path, model_files: Mapping[str, bytes], checkpoint: Path, stops: Sequence[int]
) -> Iterator[str]:
    """Differences between the tokenizer in the folder `model` and the checkpoint's own files.

    `model_files` are the model's metadata files, `stops` the run's stop tokens. A change that
    changes no token, such as another indentation or chat template, is no difference; a checkpoint
    without a tokenizer is not compared. Only files whose bytes differ are parsed."""
    checkpoint_files = checkpoint / METADATA_FILES
    files = read_metadata_files(checkpoint_files) if checkpoint_files.is_dir() else {}
    if not any(name in files for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        return
    restore = f'Copy the files of "{checkpoint_files}" into "{model}"'
    if _say_other_tokenizers(files, model_files):
        recorded_tokenizer = load_tokenizer(str(checkpoint_files), "the checkpoint")
        model_tokenizer = load_tokenizer(str(model))
        if difference := _difference(recorded_tokenizer, model_tokenizer):
            yield (
                f"model.path: its tokenizer is another than the checkpoint's own: {difference}. "
                f"{restore}"
            )
            return
    if _said_stops(files) != {*stops}:
        tokenizer = load_tokenizer(str(checkpoint_files), "the checkpoint")
        recorded_stops = stop_token_ids(str(checkpoint_files), tokenizer, _ANY_TOKEN)
        if {*recorded_stops} != {*stops}:
            yield (
                f"model.path: completions ended with the tokens {_listed(recorded_stops)} there, "
                f"and do with {_listed(stops)} "
                f"now ({GENERATION_CONFIG}, or the chat template). {restore}"
            )


def _listed(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(tokens))) or "none"


def _say_other_tokenizers(
    checkpoint_files: Mapping[str, bytes], model_files: Mapping[str, bytes]
) -> bool:
    """Whether the files of two models' folders say different things of their tokenizers."""
    names = (checkpoint_files.keys() | model_files.keys()) - {*_OF_NO_TOKENIZER}
    changed = [name for name in names if checkpoint_files.get(name) != model_files.get(name)]
    return any(_parsed(name, checkpoint_files) != _parsed(name, model_files) for name in changed)


def _parsed(name: str, files: Mapping[str, bytes]) -> Any:
    """The values of a tokenizer's file without its chat template.

    A file that is no JSON gives its bytes, a missing file None."""
    content = files.get(name)
    if content is None or not name.endswith(".json"):
        return content
    with suppress(ValueError):
        values = parse_json(content.decode())
        if name == TOKENIZER_CONFIG and isinstance(values, dict):
            values.pop("chat_template", None)
        return values
    return content


def _said_stops(files: Mapping[str, bytes]) -> set[Any]:
    stop_tokens = parse_json(files.get(GENERATION_CONFIG, b"{}").decode()).get("eos_token_id")
    return {*(stop_tokens if isinstance(stop_tokens, list) else [stop_tokens])}


def _difference(recorded: PreTrainedTokenizerFast, current: PreTrainedTokenizerFast) -> str | None:
    """The first thing that gives other tokens or texts."""
    recorded_ids = recorded.get_vocab()
    current_ids = current.get_vocab()
    changed = sorted(
        (recorded_ids.get(token, -1), token)
        for token in recorded_ids.keys() | current_ids.keys()
        if recorded_ids.get(token) != current_ids.get(token)
    )
    if changed:
        _, token = changed[0]
        places = (f"{ids.get(token, 'none')}" for ids in (recorded_ids, current_ids))
        return f"{len(changed)} tokens have other ids, {token!r} {' there and '.join(places)} now"
    for name in _SPECIAL_TOKENS:
        if getattr(recorded, name) != getattr(current, name):
            return f"{name} is {getattr(recorded, name)} there and {getattr(current, name)} now"
    descriptions = [
        json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (recorded, current)
    ]
    for part in _PARTS:
        if descriptions[0].get(part) != descriptions[1].get(part):
            return f"its {part} differs"
    name = "clean_up_tokenization_spaces"
    return (
        f"{name} differs" if getattr(recorded, name, None) != getattr(current, name, None) else None
    )
