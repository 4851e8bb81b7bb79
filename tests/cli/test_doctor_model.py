"""`rlmath doctor --model`: all bytes of models, and what a run started from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.checkpoint.directory import Progress, finish_partial, open_partial, write_progress
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.checkpoint.hf.metadata_files import (
    read_metadata_files,
    with_chat_template,
    with_stop_tokens,
)
from rlmath.checkpoint.hf.weights import write_files
from rlmath.cli.doctor import main
from rlmath.config.load import config_as_yaml, load_config
from rlmath.data.chat import chat_settings
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer
from tests.tiny_models import VOCAB, make_model_folder

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def copied(model: Path, name: str) -> Path:
    return Path(shutil.copytree(model, model.with_name(name)))


def checkpoint(run: Path, model: Path, *overrides: str) -> None:
    settings = (
        f"run.output_dir={run}",
        f"model.path={model}",
        "data.train_path=t.jsonl",
        *overrides,
    )
    config = load_config([], settings)
    tokenizer = load_tokenizer(str(model), settings=chat_settings(config.data))
    files = with_chat_template(
        read_metadata_files(model), chat_settings(config.data).named_template(tokenizer)
    )
    files = with_stop_tokens(files, stop_token_ids(str(model), tokenizer, VOCAB))
    partial = open_partial(run / "checkpoints", 3)
    progress = Progress(3, 0, 24, 6, 3, "TP1", 1, (), (), model_fingerprint(model), "data", {})
    write_progress(partial, progress)
    (partial / "config.yaml").write_text(config_as_yaml(config))
    (partial / "state" / ".metadata").write_text("index")
    write_files(partial / "hf", files)
    finish_partial(partial, 3, kept=False, known={})


def test_one_byte_of_any_tensor_is_seen(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identical = copied(model, "same")
    other = copied(model, "other")
    tensors = load_file(other / "model.safetensors")
    flat = tensors[NAME].view(torch.uint8).view(-1)
    position = 3 * flat.numel() // 8  # neither begin, middle nor end
    flat[position] = flat[position] ^ 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(model) == model_fingerprint(other)
    assert main(["--model", str(model), "--model", str(identical)]) == 0
    assert f"beside {model}: all tensors are the same" in capsys.readouterr().out
    assert main(["--model", str(model), "--model", str(other)]) == 1
    assert f"! beside {model}: 1 tensors differ: {NAME}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_model_is_compared_with_what_a_run_started_from(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = model.with_name("run")
    checkpoint(run, model)
    assert main(["--model", str(model), "--run", str(run)]) == 0
    assert "tokenizer and stop tokens are those of that checkpoint" in capsys.readouterr().out
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert main(["--model", str(model), "--run", str(run)]) == 1
    output = capsys.readouterr().out
    assert f"has the fingerprint {model_fingerprint(model)}, not" in output
    assert "with the tokens 1 there, and do with 1, 7 now" in output


def test_a_run_with_a_chat_template_of_its_own_is_compared_with_the_stop_tokens_of_that(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": ["9"]})
    tokenizer.save_pretrained(str(model))
    template = model.with_name("own.jinja")
    template.write_text("{% for message in messages %}{{ message.content }}9{% endfor %}")
    run = model.with_name("run")
    checkpoint(run, model, f"data.chat_template={template}")
    generation_config = json.loads(
        (run / "checkpoints" / "step-000003" / "hf" / "generation_config.json").read_text()
    )
    assert len(generation_config["eos_token_id"]) == 2
    assert main(["--model", str(model), "--run", str(run)]) == 0
    assert "tokenizer and stop tokens are those of that checkpoint" in capsys.readouterr().out


def test_what_is_no_model_or_no_run_is_a_mistake(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(model.with_name("none"))]) == 2
    assert "has neither model.safetensors nor" in capsys.readouterr().err
    assert main(["--model", str(model), "--run", str(model)]) == 2
    assert "has no whole checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--run", str(model)])
