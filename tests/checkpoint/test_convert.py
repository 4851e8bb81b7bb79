"""Conversion between Hugging Face and torch_dist: what is written where, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmath.checkpoint.convert.sources import find_megatron
from rlmath.checkpoint.directory import finish_partial, open_partial
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from tests.checkpoint.conversions import (
    EMBEDDING,
    QKV,
    assert_same,
    drop,
    put,
    resave,
    to_hf,
    to_megatron,
    torch_reads,
    weights,
)
from tests.tiny_models import make_model_folder

ALL = {
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen2-tied": ("Qwen2ForCausalLM", True),
    "qwen3": ("Qwen3ForCausalLM", False),
    "qwen3-moe": ("Qwen3MoeForCausalLM", False),
    "llama-tied": ("LlamaForCausalLM", True),
    "mistral": ("MistralForCausalLM", False),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model_folder(folder / name, tied, architecture=architecture)
        for name, (architecture, tied) in ALL.items()
    }


@pytest.fixture(scope="module")
def source(models: dict[str, Path]) -> Path:
    return models["qwen2"]


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        pytest.param(
            name, *layout, marks=() if name == "qwen2" or layout == (2, 3) else pytest.mark.full
        )
        for name in ALL
        for layout in ((1, 1), (2, 1), (1, 4), (2, 3))
    ],
)
def test_there_and_back_is_the_same_model(
    models: dict[str, Path], tmp_path: Path, name: str, tensor: int, pipeline: int
):
    state = to_megatron(models[name], tmp_path / "megatron", tensor, pipeline)
    assert len(list(state.glob("__*_0.distcp"))) == pipeline
    assert_same(weights(to_hf(state, models[name], tmp_path / "hf")), weights(models[name]))


def test_query_key_and_value_lie_group_by_group_and_layers_are_stacked(
    source: Path, tmp_path: Path
):
    state = to_megatron(source, tmp_path / "megatron", tensor=2)
    hf = weights(source)
    fused_weight = torch_reads(state)[QKV]
    heads = {
        letter: hf[f"model.layers.3.self_attn.{letter}_proj.weight"].split(32) for letter in "qkv"
    }  # 4 heads of 32 rows
    rows = [
        *heads["q"][:2],
        heads["k"][0],
        heads["v"][0],
        *heads["q"][2:],
        heads["k"][1],
        heads["v"][1],
    ]
    assert tuple(fused_weight.shape) == (4, 256, 128)
    assert torch.equal(fused_weight[3], torch.cat(rows))


def test_the_folder_is_what_megatron_lm_looks_for(source: Path, tmp_path: Path):
    to_megatron(source, tmp_path / "out")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    release = tmp_path / "out" / "release"
    assert json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert torch.load(release / "common.pt", weights_only=True)["checkpoint_version"] >= 2
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {
        path.name for path in (tmp_path / "out" / "hf").iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_number_formats(source: Path, tmp_path: Path, dtype: torch.dtype):
    state = to_megatron(source, tmp_path / "megatron", dtype=dtype)
    expected = {name: tensor.to(dtype) for name, tensor in weights(source).items()}
    back = to_hf(state, source, tmp_path / "auto")
    assert_same(weights(back), expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )
    as_float = to_hf(state, source, tmp_path / "float", torch.float32)
    assert_same(weights(as_float), {name: tensor.float() for name, tensor in expected.items()})


def test_the_way_back_loads_in_transformers_in_several_files(source: Path, tmp_path: Path):
    state = to_megatron(source, tmp_path / "megatron", tensor=2)
    back = to_hf(state, source, tmp_path / "hf", shard_bytes=500_000)
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 2
    ids = torch.tensor([[5, 6, 7, 8]])
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, back))
    assert torch.equal(before(ids).logits, after(ids).logits)
    assert AutoTokenizer.from_pretrained(back)("12+3=") == AutoTokenizer.from_pretrained(source)(
        "12+3="
    )


# ---------------------------------------------------------------- checkpoints of others


def by_layer(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if key.startswith("decoder.layers.")]:
        for layer, tensor in enumerate(tensors.pop(key)):
            tensors[key.replace("layers.", f"layers.{layer}.")] = tensor.clone()


def names_of_local_layers(tensors: dict[str, Tensor]) -> None:
    key = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    tensors["decoder.layers.input_layernorm.weight"] = tensors.pop(key)


def more_padding(tensors: dict[str, Tensor]) -> None:
    for key in (EMBEDDING, "output_layer.weight"):
        tensors[key] = torch.nn.functional.pad(tensors[key], (0, 0, 0, 27), value=3.0)


def with_optimizer(tensors: dict[str, Tensor]) -> None:
    for name in ("exp_avg", "fp32_param"):
        tensors[f"optimizer.state.{name}.{EMBEDDING}"] = torch.ones(4, 3)
        tensors[f"chained_0.optimizer.state.{name}.{EMBEDDING}"] = torch.ones(4, 3)
    tensors["random.cpu"] = torch.ones(2, 8)


@pytest.mark.parametrize("change", [by_layer, names_of_local_layers, more_padding, with_optimizer])
def test_other_ways_to_store_the_same_model_are_read(source: Path, tmp_path: Path, change: Any):
    state = resave(to_megatron(source, tmp_path / "megatron"), tmp_path / "other", change)
    assert_same(weights(to_hf(state, source, tmp_path / "hf")), weights(source))


def test_the_optimizers_numbers_are_not_read(source: Path, tmp_path: Path):
    state = resave(to_megatron(source, tmp_path / "megatron"), tmp_path / "other", with_optimizer)
    for index, storage in FileSystemReader(state).read_metadata().storage_data.items():
        if "optimizer" in index.fqn:
            with (state / storage.relative_path).open("r+b") as file:
                file.seek(storage.offset)
                file.write(b"\xff" * storage.length)
    assert_same(weights(to_hf(state, source, tmp_path / "hf")), weights(source))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop(QKV), ["4 tensors are missing", f"{QKV} [0]", f"{QKV} [3]"]),
        (drop("output_layer.weight"), ["1 tensors are missing: output_layer.weight"]),
        (
            put("decoder.layers.self_attention.q_layernorm.weight", 4, 32),
            ["1 tensors are unknown", "q_layernorm"],
        ),
        (put("mtp.layers.0.weight", 4), ["unknown to Qwen2ForCausalLM: mtp.layers.0.weight"]),
        (
            put(QKV, 5, 256, 128),
            ["1 tensors have another shape", "(5, 256, 128)", "makes it (4, 256, 128)"],
        ),
        (put(EMBEDDING, 100, 128), ["embedding.word_embeddings.weight has shape (100, 128)"]),
        (put(EMBEDDING, 101, 64), ["(101, 64), config.json makes it (101, 128)"]),
    ],
    ids=lambda parameter: parameter[0] if isinstance(parameter, list) else "",
)
def test_a_checkpoint_of_another_model_is_refused_with_a_list(
    source: Path, tmp_path: Path, change: Any, told: list[str]
):
    state = resave(to_megatron(source, tmp_path / "megatron"), tmp_path / "other", change)
    with pytest.raises(
        ValueError, match=r"as a checkpoint of the model that config\.json describes"
    ) as error:
        to_hf(state, source, tmp_path / "hf")
    assert all(part in str(error.value) for part in told), str(error.value)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("wrong", "dtype", "told"),
    [
        (
            torch.int32,
            torch.float32,
            "has numbers in float32, int32; needed: float32, bfloat16 or float16",
        ),
        (
            torch.bfloat16,
            None,
            "has numbers in bfloat16, float32; needed: one format. Choose it by --dtype",
        ),
    ],
)
def test_number_formats_that_are_no_models_or_several_are_told(
    source: Path, tmp_path: Path, wrong: torch.dtype, dtype: Any, told: str
):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].to(wrong)

    state = resave(to_megatron(source, tmp_path / "megatron"), tmp_path / "other", change)
    with pytest.raises(ValueError, match=told):
        to_hf(state, source, tmp_path / "hf", dtype)


# ---------------------------------------------------------------- which checkpoint


def our_checkpoint(root: Path, state: Path, step: int, model: Path) -> Path:
    """A checkpoint as a run of ours makes it."""
    partial = open_partial(root, step)
    shutil.copytree(state, partial / "state", dirs_exist_ok=True)
    for name, content in read_metadata_files(model).items():
        (partial / "hf" / name).write_bytes(content)
    for name in ("progress.json", "config.yaml"):
        (partial / name).write_text("{}")
    return finish_partial(partial, step, True, {}).folder


def test_checkpoints_are_found_by_any_of_their_folders(source: Path, tmp_path: Path):
    state = to_megatron(source, tmp_path / "megatron")
    older, newer = (
        our_checkpoint(tmp_path / "run" / "checkpoints", state, step, source) for step in (20, 40)
    )
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", newer, newer / "state"):
        assert find_megatron(path).state == newer / "state"
        assert find_megatron(path).metadata_files == newer / "hf"
    assert find_megatron(older).state == older / "state"
    for path in (tmp_path / "megatron", state):
        assert find_megatron(path).state == state
        assert find_megatron(path).metadata_files == tmp_path / "megatron" / "hf"
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("70\n")
    state.rename(tmp_path / "megatron" / "iter_0000070")
    assert find_megatron(tmp_path / "megatron").state.name == "iter_0000070"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("../../x", "needed: an iteration"),
        ("", "needed: an iteration"),
        ("7", "iter_0000007, which is no torch_dist"),
    ],
)
def test_a_note_that_names_no_checkpoint_is_told(tmp_path: Path, word: str, told: str):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(ValueError, match=told):
        find_megatron(tmp_path)


def test_a_folder_without_a_checkpoint_and_a_damaged_one_are_told(source: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="is no checkpoint; needed: "):
        find_megatron(tmp_path)
    state = to_megatron(source, tmp_path / "megatron")
    folder = our_checkpoint(tmp_path / "checkpoints", state, 20, source)
    (folder / "state" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"damaged: state/__0_0\.distcp has 0 bytes"):
        find_megatron(folder)
