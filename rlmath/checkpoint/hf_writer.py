"""Safetensors files written as the tensors come: each goes to disk at once, block by block, and the header is written
last, into room that was left for it. So memory holds one block, whatever the size of the model or of a tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

HEADER_BYTES = 2**18
"""Room for the header of one file, some 2,000 tensors; then the next file begins. Filled up with spaces, as the format
allows."""

_BLOCK = 2**22
"""Elements converted and written at a time."""

WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH = struct.Struct("<Q")


class SafetensorsWriter:
    """Writes the weights of one model into a folder, in files of bounded size, named as the Hub does."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._files: list[list[str]] = []
        self._open: _File | None = None
        self.bytes = 0
        """Of the numbers written so far."""

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append one tensor, as `dtype`; float32, bfloat16 or float16, on any device."""
        size = tensor.numel() * dtype.itemsize
        if self._open is None or not self._open.has_room(name, tensor, dtype, self._shard_bytes):
            self._close_file()
            self._open = _File(self._folder / f"part-{len(self._files)}")
            self._files.append([])
        self._open.add(name, tensor, dtype)
        self._files[-1].append(name)
        self.bytes += size

    def close(self) -> None:
        """Complete the last file, name all, and write the index where there are several."""
        self._close_file()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2), encoding="utf-8"
            )

    def abandon(self) -> None:
        """Let go of the open file, unfinished."""
        if self._open is not None:
            self._open.file.close()
            self._open = None

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class _File:
    """One safetensors file in the making."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb", buffering=0)
        self.file.seek(_LENGTH.size + HEADER_BYTES)
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._size = 0

    def has_room(self, name: str, tensor: Tensor, dtype: torch.dtype, most: int) -> bool:
        """For a tensor; one of wider numbers may not begin in the middle of them."""
        size = tensor.numel() * dtype.itemsize
        entry = len(json.dumps({name: self._entry(tensor, dtype, size)}))
        fits = self._size + size <= most and self._header_bytes + entry <= HEADER_BYTES
        return fits and self._size % dtype.itemsize == 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entry = self._entry(tensor, dtype, tensor.numel() * dtype.itemsize)
        for block in tensor.detach().contiguous().view(-1).split(_BLOCK):
            _write(self.file, memoryview(block.to("cpu", dtype).view(torch.uint8).numpy()))
        self._header[name] = entry
        self._header_bytes += len(json.dumps({name: entry}))
        self._size += tensor.numel() * dtype.itemsize

    def _entry(self, tensor: Tensor, dtype: torch.dtype, size: int) -> dict[str, object]:
        offsets = [self._size, self._size + size]
        return {"dtype": WORDS[dtype], "shape": list(tensor.shape), "data_offsets": offsets}

    def close(self) -> None:
        header = json.dumps(self._header).encode().ljust(HEADER_BYTES)
        self.file.seek(0)
        _write(self.file, memoryview(_LENGTH.pack(len(header)) + header))
        self.file.close()


def _write(file: BinaryIO, content: memoryview) -> None:
    """All of it: one call may write less."""
    while content:
        content = content[file.write(content) :]
