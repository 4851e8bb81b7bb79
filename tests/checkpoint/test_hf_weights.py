import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlmath.checkpoint.hf import weights
from rlmath.checkpoint.hf.headers import EMBEDDING, HEAD, unexpected_tensors, weight_problems
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.weights import HFReader, write_hf_folder
from tests.disks import files_no_larger_than
from tests.tiny_models import make_model_folder, shape_of

WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.full((4, 4), 7.0),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "source")


def sharded_folder(folder: Path) -> Path:
    """WEIGHTS in two files and an index, as the Hub has them."""
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    names["c"] = names["b"]
    folder.mkdir()
    for file in set(names.values()):
        save_file({name: WEIGHTS[name] for name in names if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def single_folder(folder: Path) -> Path:
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def stream_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    reader = HFReader(folder)
    return ((name, reader.tensor(name)) for name in sorted(reader.files.keys()))


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_output_layer_beside_tied_embeddings_is_refused_where_it_is_another(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path / "tied", tied=True)
    shape = shape_of(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    output_layer = tensors[EMBEDDING].clone()
    save_file(tensors | {HEAD: output_layer}, file)
    assert weight_problems(folder, shape) == []
    output_layer[-1, -1] += 1
    save_file(tensors | {HEAD: output_layer}, file)
    (problem,) = weight_problems(folder, shape)
    assert f"{HEAD} is another tensor than {EMBEDDING}" in problem


def test_tensors_that_nobody_expects_are_named(source: Path) -> None:
    names = set(HFReader(source).files)
    odd = ["model.layers.0.self_attn.o_proj.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert unexpected_tensors(shape_of(source), [*names, *odd]) == odd[:1]
    assert unexpected_tensors(shape_of(source), names) == []


@pytest.mark.parametrize("make", [single_folder, sharded_folder])
def test_one_file_and_an_index_read_alike(tmp_path: Path, make):
    reader = HFReader(make(tmp_path / "model"))
    assert reader.files.keys() == {"a", "b", "c"}
    assert {name: tuple(reader.tensor(name).shape) for name in "abc"} == {
        "a": (2, 3),
        "b": (2,),
        "c": (4, 4),
    }
    for name, tensor in WEIGHTS.items():
        assert reader.tensor(name).dtype == tensor.dtype
        assert torch.equal(reader.tensor(name), tensor)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        HFReader(tmp_path)


def test_of_two_sets_of_weights_the_one_that_transformers_reads_is_read(
    tmp_path: Path, source: Path
):
    folder = tmp_path / "both"
    write_hf_folder(
        stream_of(source), read_metadata_files(source), folder, torch.float32, writes=True
    )
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(zeros, folder / "stale.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(zeros, "stale.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(HFReader(folder).tensor("model.norm.weight"), loaded["model.norm.weight"])


def test_configuration_and_tokenizer_come_along_and_old_weights_do_not(
    tmp_path: Path, source: Path
):
    for path in source.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in (
        "model-00001-of-00009.safetensors",
        "model.safetensors.index.json",
        "optimizer.pt",
    ):
        (tmp_path / name).write_text("stale")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "merges.txt").write_text("a b")
    (tmp_path / "original").mkdir()
    write_hf_folder(
        iter(WEIGHTS.items()),
        read_metadata_files(tmp_path),
        tmp_path / "out",
        torch.float32,
        writes=True,
    )
    assert files_in(tmp_path / "out") == {
        "model.safetensors",
        "chat_template.jinja",
        "merges.txt",
        *(path.name for path in source.glob("*.json")),
    }
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")]
)
def test_the_number_format_is_that_of_weights_and_config(
    tmp_path: Path, source: Path, dtype: torch.dtype, word: str
):
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    write_hf_folder(
        iter(WEIGHTS.items()), read_metadata_files(tmp_path), tmp_path / "out", dtype, writes=True
    )
    reader = HFReader(tmp_path / "out")
    assert {reader.tensor(name).dtype for name in WEIGHTS} == {dtype}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == word
    assert written.get("torch_dtype", word) == word
    assert {**written, "dtype": 0, "torch_dtype": 0} == {**config, "dtype": 0, "torch_dtype": 0}


def test_large_models_are_written_in_several_files(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    # as float32: a 24 bytes, b 8, c 64, d 16; a file holds 32
    monkeypatch.setattr(weights, "SHARD_BYTES", 32)
    tensors = WEIGHTS | {"d": torch.ones(4)}
    output = tmp_path / "deep" / "out"
    write_hf_folder(
        iter(tensors.items()), read_metadata_files(source), output, torch.float32, writes=True
    )
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 8 + 64 + 16
    parts = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {"a": parts[0], "b": parts[0], "c": parts[1], "d": parts[2]}
    assert {name for name in files_in(output) if "safetensors" in name} == {
        *parts,
        "model.safetensors.index.json",
    }
    reader = HFReader(output)
    assert all(torch.equal(reader.tensor(name), tensors[name].float()) for name in tensors)
    with safe_open(output / parts[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def broken_stream() -> Iterator[tuple[str, Tensor]]:
    yield "a", WEIGHTS["a"]
    yield "b", WEIGHTS["b"]
    raise RuntimeError("a rank died")


def test_a_stream_that_breaks_leaves_no_folder_that_looks_whole(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "SHARD_BYTES", 16)
    output = tmp_path / "out"
    with pytest.raises(RuntimeError, match="a rank died"):
        write_hf_folder(
            broken_stream(), read_metadata_files(source), output, torch.float32, writes=True
        )
    assert not output.exists()
    assert not any((folder / "config.json").exists() for folder in tmp_path.iterdir())
    write_hf_folder(
        iter(WEIGHTS.items()), read_metadata_files(source), output, torch.float32, writes=True
    )
    assert HFReader(output).files.keys() == {"a", "b", "c"}
    assert files_in(tmp_path) == {"out"}


def test_a_disk_that_refuses_is_told_with_the_folder(tmp_path: Path, source: Path):
    output = tmp_path / "model"
    with (
        files_no_larger_than(4096),
        pytest.raises(OSError, match=f"File too large: '{output}.partial'"),
    ):
        write_hf_folder(
            iter(WEIGHTS.items()), read_metadata_files(source), output, torch.float32, writes=True
        )
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_breaks_keeps_the_model_that_was_there(tmp_path: Path, source: Path):
    output = tmp_path / "out"
    write_hf_folder(
        iter(WEIGHTS.items()), read_metadata_files(source), output, torch.float32, writes=True
    )
    with pytest.raises(RuntimeError, match="a rank died"):
        write_hf_folder(
            broken_stream(), read_metadata_files(source), output, torch.float32, writes=True
        )
    assert HFReader(output).files.keys() == {"a", "b", "c"}


def test_a_new_export_replaces_the_old_one_whole(tmp_path: Path, source: Path):
    output = tmp_path / "out"
    write_hf_folder(
        iter(WEIGHTS.items()), read_metadata_files(source), output, torch.float32, writes=True
    )
    (output / "left.txt").write_text("over")
    write_hf_folder(
        iter({"a": WEIGHTS["c"]}.items()),
        read_metadata_files(source),
        output,
        torch.float32,
        writes=True,
    )
    assert tuple(load_file(output / "model.safetensors")["a"].shape) == (4, 4)
    assert "left.txt" not in files_in(output)


def test_a_death_while_the_old_model_is_removed_leaves_no_half_of_one(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "out"
    write_hf_folder(
        iter(WEIGHTS.items()), read_metadata_files(source), output, torch.float32, writes=True
    )

    def die(folder: Path, **_: object) -> None:
        if folder.is_dir():
            (folder / "model.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(weights, "remove", die)
    with pytest.raises(KeyboardInterrupt):
        write_hf_folder(
            iter({"a": WEIGHTS["c"]}.items()),
            read_metadata_files(source),
            output,
            torch.float32,
            writes=True,
        )
    assert tuple(load_file(output / "model.safetensors")["a"].shape) == (4, 4)
    assert all(name == "out" or name.endswith(".partial") for name in files_in(tmp_path))


def test_a_rank_that_does_not_write_consumes_the_stream_alone(tmp_path: Path, source: Path):
    stream = iter(WEIGHTS.items())
    write_hf_folder(
        stream, read_metadata_files(source), tmp_path / "out", torch.float32, writes=False
    )
    assert list(stream) == []
    assert files_in(tmp_path) == set()
