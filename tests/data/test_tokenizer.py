import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlmath.data import tokenizer as tokenizer_module
from rlmath.data.files import CHARACTERS_PER_TOKEN
from rlmath.data.loader import load_prompts
from rlmath.data.sft_sequences import load_sequences
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import PromptText, load_tokenizer, prompt_tokens
from tests.tiny_models import make_model_folder


def save_tokenizer(folder: Path, eos: str | None = "<eos>") -> None:
    tokenizer = Tokenizer(
        models.WordLevel({"<eos>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>"
    ).save_pretrained(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.* is not a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


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


def test_tokenizer_json_alone_suffices_where_the_model_names_the_end(tmp_path):
    save_tokenizer(tmp_path)
    whole = load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for named, reason in ((None, "no eos_token"), (10**6, "no eos_token")):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": named}))
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [whole.eos_token_id]}))
    reloaded = load_tokenizer(str(tmp_path))
    assert (
        reloaded.eos_token == whole.eos_token
        and reloaded.chat_template == "{{ messages[0].content }}"
    )
    assert reloaded("one two").input_ids == whole("one two").input_ids


@pytest.mark.parametrize("text", ["[]", "null", "{broken"])
def test_a_broken_generation_config_is_named(tmp_path, text):
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path)), 101)


@pytest.mark.parametrize(
    "named", [101, -5, "</s>", [1, None], True], ids=lambda value: repr(value)[:12]
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


@pytest.mark.parametrize("load", ["prompts", "sequences"])
def test_a_row_that_is_far_too_long_is_never_tokenized(tmp_path: Path, load: str):
    """Seven million characters: half a minute and gigabytes, were they tokenized."""
    tokenizer = load_tokenizer(str(make_model_folder(tmp_path / "model")))
    longest = 0

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text, *args, **kwargs):
            nonlocal longest
            longest = max(longest, *map(len, text))
            return super().__call__(text, *args, **kwargs)

    tokenizer.__class__ = Watched
    limit = 16
    texts = ["1+1=", "7" * 7_000_000, "2" * (CHARACTERS_PER_TOKEN * limit - 1)]
    rows = [
        {"prompt": text, "task": "math", "query_id": str(n), "solutions": ["2"]}
        for n, text in enumerate(texts)
    ]
    rows = rows if load == "prompts" else [{"prompt": text, "completion": "2"} for text in texts]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if load == "prompts":
        usable, report = load_prompts(str(file), tokenizer, limit, max_unusable_share=0.5)
        assert report.dropped_too_long == 1
    else:
        usable, report = load_sequences(str(file), tokenizer, "raw", limit, 0.5)
        assert report.dropped == 1
    (unusable,) = report.unusable
    assert unusable.where.endswith("rows.jsonl, line 2")
    assert re.match("its text has 700000[01] characters, more than 2048", unusable.reason)
    assert len(usable) == 1 and 0 < longest <= CHARACTERS_PER_TOKEN * limit


def test_texts_are_tokenized_some_million_characters_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = load_tokenizer(str(make_model_folder(tmp_path / "model")))
    texts = [PromptText(text) for text in ("12", "345", "6", "7890123", "")]
    whole = prompt_tokens(texts, real)
    monkeypatch.setattr(tokenizer_module, "_CHARACTERS_AT_ONCE", 5)
    assert prompt_tokens(texts, real) == whole and prompt_tokens([], real) == []


def test_a_folder_without_a_tokenizer_is_told_by_the_option_that_names_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--model: .* has no tokenizer\.json"):
        load_tokenizer(str(tmp_path), "--model")
