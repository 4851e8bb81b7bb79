from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from rlmath.cli.api import Run
from rlmath.evals.benchmarks import check_head_dim, find_benchmark, model_positions
from rlmath.evals.model_source import resolve_model
from tests.checkpoint.conversions import assert_same, to_megatron, weights
from tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def checkpoint(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch_dist checkpoint of the model, with its config and tokenizer beside."""
    return to_megatron(untied_model, tmp_path_factory.mktemp("megatron") / "model").parent


def test_a_hugging_face_folder_is_used_as_it_is(untied_model: Path, tmp_path: Path) -> None:
    model = resolve_model(untied_model, tmp_path)
    assert model.folder == untied_model and list(tmp_path.iterdir()) == []
    model_copy = shutil.copytree(untied_model, tmp_path / "copy")
    assert resolve_model(model_copy, tmp_path).fingerprint == model.fingerprint
    (model_copy / "tokenizer.json").write_text((model_copy / "tokenizer.json").read_text() + " ")
    assert resolve_model(model_copy, tmp_path).fingerprint != model.fingerprint
    assert model_positions(model_copy) == 256


def test_a_checkpoint_is_converted_once(
    untied_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    model = resolve_model(checkpoint, tmp_path)
    assert model.folder == tmp_path / "converted_model"
    assert_same(weights(model.folder), weights(untied_model))
    written_at = (model.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(checkpoint, tmp_path) == model
    assert (model.folder / "model.safetensors").stat().st_mtime_ns == written_at
    other = make_model_folder(tmp_path / "other", seed=6)
    with pytest.raises(ValueError, match="Give another --output"):
        resolve_model(to_megatron(other, tmp_path / "other_megatron").parent, tmp_path)


def test_a_checkpoint_whose_file_has_another_size_is_another(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The checkpoint has no checksums, and the file has the time that it had."""
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    resolve_model(changed, tmp_path)
    (index,) = changed.rglob(".metadata")
    times = index.stat().st_atime_ns, index.stat().st_mtime_ns
    index.write_bytes(index.read_bytes() + b" ")
    os.utime(index, ns=times)
    with pytest.raises(ValueError, match="Give another --output"):
        resolve_model(changed, tmp_path)


def test_a_conversion_that_was_killed_is_made_again(checkpoint: Path, tmp_path: Path) -> None:
    model = resolve_model(checkpoint, tmp_path)
    (tmp_path / "converted_from.json").unlink()
    (model.folder / "model.safetensors").write_bytes(b"half")
    assert resolve_model(checkpoint, tmp_path) == model
    assert torch.isfinite(weights(model.folder)["model.norm.weight"]).all()


def test_a_runs_folder_stands_for_its_newest_model(
    untied_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """A run that is done has a summary.

    Without one, its checkpoints are newer than a model that it exported."""
    run = tmp_path / "run"
    shutil.copytree(untied_model, run / "hf_model")
    assert resolve_model(run, tmp_path / "out").folder == run / "hf_model"
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint"):
        resolve_model(run, tmp_path / "out")
    (run / "summary.json").write_text("{}")
    assert resolve_model(run, tmp_path / "out").folder == run / "hf_model"


def test_what_is_no_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model: there is no folder"):
        resolve_model(tmp_path / "nothing", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint"):
        resolve_model(tmp_path / "empty", tmp_path)


def test_adapters_without_their_model_are_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "hf_model" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    for folder in (adapter, adapter.parent):
        with pytest.raises(
            ValueError,
            match=r'adapter" has adapters .* without their model; .* folder of their run',
        ):
            resolve_model(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=r"only its adapters \(save.merged=false\)"):
        _ = Run(tmp_path).model


def test_a_model_that_cannot_be_loaded_is_refused(untied_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(untied_model, tmp_path / "copy"))
    os.truncate(copy / "model.safetensors", 5000)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        resolve_model(copy, tmp_path / "out")


def test_benchmarks_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text("{}")
    (tmp_path / "math_500").mkdir()
    assert find_benchmark("aime24", tmp_path) == tmp_path / "aime24.jsonl"
    assert find_benchmark("math_500", tmp_path) == tmp_path / "math_500"
    with pytest.raises(ValueError, match="Did you mean") as error:
        find_benchmark("aime_24", tmp_path)
    assert "aime24, math_500" in str(error.value)
    for name in ("../aime24", "", "a/b", ".", "x" * 200):
        with pytest.raises(ValueError, match="no name of a benchmark"):
            find_benchmark(name, tmp_path)
    with pytest.raises(ValueError, match="--data-dir"):
        find_benchmark("aime24", tmp_path / "nowhere")


def test_heads_that_config_does_not_say_are_not_judged(tmp_path: Path) -> None:
    for values in (
        {},
        {"hidden_size": 64},
        {"hidden_size": 64, "num_attention_heads": 0},
        {"head_dim": 64},
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        check_head_dim(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    with pytest.raises(ValueError, match="--model: the model's head dim is 16"):
        check_head_dim(tmp_path)


def test_positions_that_config_does_not_say_are_unknown(tmp_path: Path) -> None:
    for value in (None, "512", True, -1):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
        assert model_positions(tmp_path) is None


def test_a_name_of_the_hub_is_told_how_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"--local-dir models/Qwen3-0\.6B.*and give --model models/Qwen3-0\.6B"
    ):
        resolve_model(Path("Qwen/Qwen3-0.6B"), tmp_path / "out")
