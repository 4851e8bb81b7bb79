"""The tokens that end a completion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.config.files import read_json_object
from rlmath.data import chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def stop_token_ids(
    path: str, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> tuple[int, ...]:
    """Tokens that end a completion.

    These are the tokenizer's end of sequence, the end of a turn in its chat template, and those
    that generation_config.json, else config.json, names. ValueError for an id that is no token of
    the model."""
    end = tokenizer.eos_token_id
    of_turn = chat.chat_end(tokenizer)
    assert isinstance(end, int), end  # `load_tokenizer` refuses others
    stop_ids = {end} if of_turn is None else {end, of_turn}
    file, configured = ends_in_config(Path(path))
    configured_ids = (
        configured if isinstance(configured, list) else [] if configured is None else [configured]
    )
    if not all(type(token) is int and 0 <= token < vocab_size for token in configured_ids):
        raise ValueError(
            f'{file}: "eos_token_id" is {repr(configured)[:80]}; needed: tokens of the model, '
            f"whole numbers from 0 to {vocab_size - 1}, or null"
        )
    return tuple(sorted(stop_ids.union(configured_ids)))


def ends_in_config(folder: Path) -> tuple[Path, Any]:
    """(the file that counts of the two, its "eos_token_id" as it stands).

    The second is None where there is neither file."""
    files = (folder / "generation_config.json", folder / "config.json")
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return folder, None
    return file, read_json_object(file).get("eos_token_id")
