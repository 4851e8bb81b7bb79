"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlmath.data.files import read_json_object

_FILES = ("tokenizer_config.json", "tokenizer.json")
"""Both are needed, but that vocab.json with merges.txt may stand for the second."""


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The fast tokenizer in folder `path`; never from the network, and never code of the folder's own.

    Raises ValueError when the folder is missing, has no tokenizer, or has one that is not a fast tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path: {path!r} is not a folder; it must be the folder of a Hugging Face model"
        )
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        missing = [name for name in missing if name != "tokenizer.json"]
    if missing:
        raise ValueError(
            f"model.path: {path!r} has no {' and no '.join(missing)}; copy the tokenizer's files there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
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


def prompt_tokens(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Tokens of prompts, with the special tokens that the tokenizer adds by itself, but one beginning of sequence only:
    a template may write it, too."""
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    bos = tokenizer.bos_token_id
    return [
        _one_start(token_ids, bos if isinstance(bos, int) else None) for token_ids in encoded["input_ids"]
    ]


def _one_start(token_ids: list[int], bos: int | None) -> list[int]:
    extra = 0
    while bos is not None and token_ids[extra : extra + 2] == [bos, bos]:
        extra += 1
    return token_ids[extra:]


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Tokens that end a completion, as vLLM finds them: the tokenizer's end of sequence, and those that
    generation_config.json names, or config.json where there is none."""
    named = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            also = read_json_object(file).get("eos_token_id")
            named += also if isinstance(also, list) else [also]
            break
    return tuple(sorted({token for token in named if type(token) is int}))
