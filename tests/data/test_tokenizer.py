import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlmath.data.tokenizer import load_tokenizer, stop_token_ids


def save_tokenizer(folder: Path, eos: str | None = "<eos>") -> None:
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>").save_pretrained(
        folder
    )


def test_a_saved_tokenizer_is_read(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("two one three")["input_ids"] == [3, 2, 1]
    assert tokenizer.eos_token_id == 0


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.* is not a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_name_of_the_hub_is_not_downloaded():
    with pytest.raises(ValueError, match="is not a folder"):
        load_tokenizer("Qwen/Qwen2.5-0.5B")


def test_a_folder_without_tokenizer_files_says_which_are_missing(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_file_is_reported(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_end_of_sequence_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["[]", "null", "{broken"])
def test_a_broken_generation_config_is_named(tmp_path, text):
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path)), 101)


@pytest.mark.parametrize(
    "named",
    [10**9, 101, -5, "</s>", [1, None], [[1]], {"a": 1}, 1.0, True],
    ids=lambda value: repr(value)[:12],
)
def test_ends_of_sequence_that_are_no_tokens_of_the_model_are_refused(tmp_path, named):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": named}))
        with pytest.raises(
            ValueError, match=rf'{name}: "eos_token_id" is .*; needed: .* from 0 to 100, or null'
        ):
            stop_token_ids(str(tmp_path), tokenizer, 101)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [100, 0]}')
    assert stop_token_ids(str(tmp_path), tokenizer, 101) == (0, 100)
