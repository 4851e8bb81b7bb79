"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The fast tokenizer in folder `path`; never from the network.

    Raises ValueError when the folder is missing, has no tokenizer, or has one that is not a fast tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path: {path!r} is not a folder; it must be the folder of a Hugging Face model"
        )
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"model.path: {path!r} has no {' and no '.join(missing)}; copy the tokenizer's files there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        raise ValueError(f"model.path: the tokenizer in {path!r} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise ValueError(
            f"model.path: {path!r} has a slow tokenizer ({kind}); a fast one (tokenizer.json) is needed"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path: the tokenizer in {path!r} has no eos_token; set it in tokenizer_config.json"
        )
    return tokenizer
