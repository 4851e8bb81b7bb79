"""Safetensors files written as tensors come: what the format's own library reads in them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlmath.checkpoint.hf.weights import SafetensorsWriter, write_hf_folder


def test_formats_and_shapes(tmp_path: Path):
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
    writer = SafetensorsWriter(tmp_path, 10**6)
    for name, tensor in tensors.items():
        writer.add(name, tensor, formats[name])
    writer.close()
    found = load_file(tmp_path / "model.safetensors")
    assert writer.bytes == 48 + 48 + 48 + 48 + 4 + 0 + 14
    for name, tensor in tensors.items():
        assert found[name].dtype == formats[name] and torch.equal(found[name], tensor.to(formats[name]))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_of_adapters_alone_has_no_file_of_weights(tmp_path: Path):
    write_hf_folder(iter([]), {"adapter/a.json": b"{}"}, tmp_path / "model", torch.float32, writes=True)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["adapter"]


def test_a_folder_takes_the_place_of_files_that_have_its_names(tmp_path: Path):
    for name in ("model", "model.partial"):
        (tmp_path / name).write_text("what else used this name")
    tensors = iter([("a", torch.ones(2, 3))])
    write_hf_folder(tensors, {"config.json": b"{}"}, tmp_path / "model", torch.float32, writes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").is_file()
