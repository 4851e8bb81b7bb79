"""Safetensors files written as tensors come: what the format's own library reads in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rlmath.checkpoint.hf import weights
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.weights import SafetensorsWriter, write_hf_folder


def test_formats_shapes_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "_BLOCK", 5)
    large = torch.arange(24.0).view(4, 6)
    tensors = {
        "rows of a larger one": large[1:3],
        "columns of it": large[:, ::2],
        "matrix": torch.arange(12.0).view(3, 4),
        "turned": torch.arange(12.0).view(3, 4).T,
        "number": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "half": torch.arange(7.0),
    }
    formats = dict.fromkeys(tensors, torch.float32) | {"half": torch.float16}
    with SafetensorsWriter(tmp_path, 10**6) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor, formats[name])
    written = load_file(tmp_path / "model.safetensors")
    assert writer.bytes == 48 + 48 + 48 + 48 + 4 + 0 + 14
    for name, tensor in tensors.items():
        assert written[name].dtype == formats[name] and torch.equal(
            written[name], tensor.to(formats[name])
        )
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_wide_numbers_do_not_begin_in_the_middle_of_their_width(tmp_path: Path):
    with SafetensorsWriter(tmp_path, 10**6) as writer:
        writer.add("three", torch.ones(3), torch.bfloat16)
        writer.add("wide", torch.ones(3), torch.float32)  # at byte 6
    written = {
        name: tensor
        for path in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert torch.equal(written["wide"], torch.ones(3)) and written["three"].dtype == torch.bfloat16


def test_adapters_beside_a_model_leave_nothing_in_its_exports(tmp_path: Path):
    for name in ("config.json", "adapter_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert read_metadata_files(tmp_path).keys() == {"config.json", "tokenizer.json"}


def test_a_header_that_is_full_begins_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "HEADER_BYTES", 1024)
    names = [f"a.name.of.some.length.{number}" for number in range(40)]
    with SafetensorsWriter(tmp_path, 10**6) as writer:
        for number, name in enumerate(names):
            writer.add(name, torch.tensor([float(number)]), torch.float32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == names and len(set(index["weight_map"].values())) > 2
    for number, name in enumerate(names):
        assert load_file(tmp_path / index["weight_map"][name])[name].item() == number


def add_and_fail(writer: SafetensorsWriter) -> None:
    writer.add("a", torch.ones(3), torch.float32)
    raise KeyError


def test_a_file_that_was_not_finished_is_none(tmp_path: Path):
    with pytest.raises(KeyError), SafetensorsWriter(tmp_path, 10**6) as writer:
        add_and_fail(writer)
    (path,) = tmp_path.iterdir()
    with pytest.raises(SafetensorError):
        load_file(path)


def test_a_folder_takes_the_place_of_files_that_have_its_names(tmp_path: Path):
    for name in ("model", "model.partial"):
        (tmp_path / name).write_text("what else used this name")
    tensors = iter([("a", torch.ones(2, 3))])
    write_hf_folder(tensors, {"config.json": b"{}"}, tmp_path / "model", torch.float32, writes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_an_export_of_adapters_alone_has_no_file_of_weights(tmp_path: Path):
    write_hf_folder(
        iter([]), {"adapter/a.json": b"{}"}, tmp_path / "model", torch.float32, writes=True
    )
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["adapter"]
