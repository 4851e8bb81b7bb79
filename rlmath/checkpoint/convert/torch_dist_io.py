"""Reads and writes the files of a torch_dist checkpoint: parts of tensors, each saved by torch, concatenated. One part
is in memory at a time."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from rlmath.checkpoint.directory import INDEX
from rlmath.checkpoint.safe_metadata import read_metadata

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron expects in metadata.json."""
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM expects in common.pt: for versions before 2 it would reorder the rows of query, key and value."""
_OVERHEAD_BYTES = 2**16
"""Most of a saved part that is not its numbers: names and shapes."""
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile)


class StateReader:
    """The tensors of a torch_dist folder whose keys begin with `prefix`, by the rest of the key; any rectangle of them
    is read on demand."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self._prefix = folder, prefix
        metadata = read_metadata(folder)
        self._places = metadata.storage_data
        self._stacks: dict[str, dict[int, list[dcp.ChunkStorageMetadata]]] = {}
        """Parts by key and place on the first axis."""
        self.tensors: dict[str, dcp.TensorStorageMetadata] = {
            key.removeprefix(prefix): entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata) and key.startswith(prefix)
        }

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """A rectangle of a tensor. Where one part has all of it, that part as it was read, without a copy. ValueError
        where a file is damaged."""
        entry = self.tensors[key]
        whole: Tensor | None = None
        found: list[list[tuple[int, int]]] = []
        for chunk in self._chunks_near(key, offset, size):
            common = _common(chunk, offset, size)
            if common is None:
                continue
            if any(_overlap(common, other) for other in found):
                raise ValueError(f"{self.folder / INDEX}: parts of {key} overlap. Save or copy it again.")
            found.append(common)
            part = self._part(key, chunk)[_slices(chunk.offsets, common)]
            if part.shape == torch.Size(size):
                return part
            if whole is None:
                whole = torch.empty(tuple(size), dtype=entry.properties.dtype)
            whole[_slices(offset, common)] = part
        if whole is None or sum(math.prod(b - a for a, b in one) for one in found) != whole.numel():
            raise ValueError(f"{self.folder / INDEX}: {key} is not stored whole. Save or copy it again.")
        return whole

    def _chunks_near(
        self, key: str, offset: Sequence[int], size: Sequence[int]
    ) -> list[dcp.ChunkStorageMetadata]:
        """The parts that a rectangle may overlap. Of a stack of layers these are a few, where a model with experts has
        many thousands."""
        chunks = self.tensors[key].chunks
        if not size or size[0] != 1:
            return chunks
        if key not in self._stacks:
            stack: dict[int, list[dcp.ChunkStorageMetadata]] = {}
            for chunk in chunks:
                for number in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    stack.setdefault(number, []).append(chunk)
            self._stacks[key] = stack
        return self._stacks[key].get(offset[0], [])

    def _part(self, key: str, chunk: dcp.ChunkStorageMetadata) -> Tensor:
        place = self._places[dcp.MetadataIndex(self._prefix + key, chunk.offsets)]
        path = self.folder / place.relative_path
        expected = math.prod(chunk.sizes) * self.tensors[key].properties.dtype.itemsize
        try:
            with path.open("rb", buffering=0) as file:
                view = _Span(file, place.offset, place.length)
                with zipfile.ZipFile(view) as archive:  # a small archive could unpack to any size
                    size = sum(member.file_size for member in archive.infolist())
                    if size <= expected + _OVERHEAD_BYTES and archive.testzip() is not None:
                        raise ValueError("its checksum differs")
                if size > expected + _OVERHEAD_BYTES:
                    raise ValueError(f"it unpacks to {size} bytes, {expected} are needed")
                view.seek(0)
                part = torch.load(view, map_location="cpu", weights_only=True)
            if not isinstance(part, Tensor) or part.shape != chunk.sizes:
                raise ValueError(f"it is no tensor of {tuple(chunk.sizes)}")
            if part.dtype != self.tensors[key].properties.dtype:
                raise ValueError(f"its numbers are {part.dtype}")
        except _UNREADABLE as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is damaged where {key} is stored ({reason}). Copy it again.") from error
        return part


class _Span(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        got = 0
        while got < len(room) and (more := self._file.readinto(room[got:])):  # 2 GiB at a time at most
            got += more
        self._at += got
        return got


def _common(
    chunk: dcp.ChunkStorageMetadata, offset: Sequence[int], size: Sequence[int]
) -> list[tuple[int, int]] | None:
    """(start, stop) on every axis of what a chunk and a rectangle have in common."""
    bounds = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(chunk.offsets, chunk.sizes, offset, size, strict=True)
    ]
    return None if any(start >= stop for start, stop in bounds) else bounds


def _overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _slices(origin: Sequence[int], bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start - o, stop - o) for o, (start, stop) in zip(origin, bounds, strict=True))


class StateWriter:
    """Writes a torch_dist folder part by part, into the files that ranks would have written. It is a checkpoint only
    after `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.bytes = 0
        """Written so far."""

    def add(
        self, rank: int, key: str, offset: Sequence[int], global_shape: Sequence[int], part: Tensor
    ) -> None:
        """Write a part of the tensor `key`, of as many axes as the tensor, into the file of `rank`."""
        whole = torch.Size(global_shape)
        properties = dcp.TensorProperties(dtype=part.dtype)
        entry = self._entries.setdefault(key, dcp.TensorStorageMetadata(properties, whole, []))
        assert isinstance(entry, dcp.TensorStorageMetadata) and entry.size == whole
        assert entry.properties.dtype == part.dtype
        chunk = dcp.ChunkStorageMetadata(torch.Size(offset), part.shape)
        entry.chunks.append(chunk)
        self._append(rank, dcp.MetadataIndex(key, chunk.offsets), _alone(part))

    def add_object(self, rank: int, key: str) -> None:
        """Write an empty object of Megatron's."""
        self._entries[key] = dcp.BytesStorageMetadata()
        self._append(rank, dcp.MetadataIndex(key), [None])

    def close(self) -> None:
        """Write the index and the small files beside it."""
        (self._folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
        torch.save(COMMON, self._folder / "common.pt")
        metadata = dcp.Metadata(self._entries, None, self._places, dcp.StorageMeta(), version="1.0.0")
        with (self._folder / INDEX).open("wb") as file:
            pickle.dump(metadata, file)

    def _append(self, rank: int, index: dcp.MetadataIndex, value: Any) -> None:
        path = self._folder / f"__{rank}_0.distcp"
        with path.open("ab") as file:
            start = file.tell()
            torch.save(value, file)
            length = file.tell() - start
        self._places[index] = _StorageInfo(path.name, start, length)
        self.bytes += length


def _alone(part: Tensor) -> Tensor:
    """The same numbers as a tensor that has no others in its storage: torch saves whole storages. Copies only what is
    not contiguous."""
    flat = part.detach().contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(part.dtype).view(part.shape)
