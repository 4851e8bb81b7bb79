"""Reads and writes torch_dist checkpoints.

They are parts of tensors, saved by torch and concatenated; one part is in memory at a time."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlmath.checkpoint.directory import INDEX
from rlmath.checkpoint.safe_metadata import read_metadata
from rlmath.config.files import open_regular

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of metadata.json that Megatron expects."""
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""Contents of common.pt that Megatron-LM expects.

For versions before 2 it would reorder the rows of query, key and value."""

_OVERHEAD_BYTES = 2**16
"""Most of a saved part that is not its numbers: names and shapes."""


class StateReader:
    """The tensors of a torch_dist folder under `prefix`, by the rest of the key.

    Any rectangle of them is read on demand."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self._prefix = prefix
        metadata = read_metadata(folder)
        self._places = metadata.storage_data
        self._stacks: dict[str, dict[int, list[dcp.ChunkStorageMetadata]]] = {}
        """Parts by key and index on the first axis."""
        self.tensors: dict[str, dcp.TensorStorageMetadata] = {
            key.removeprefix(prefix): tensor_metadata
            for key, tensor_metadata in metadata.state_dict_metadata.items()
            if isinstance(tensor_metadata, dcp.TensorStorageMetadata) and key.startswith(prefix)
        }

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """A rectangle of a tensor; if one part has all of it, a view of that part.

        ValueError for a damaged file."""
        tensor_metadata = self.tensors[key]
        near = replace(tensor_metadata, chunks=self._chunks_near(key, offset, size))
        rectangle = dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        tensor = torch.empty(tuple(size), dtype=tensor_metadata.properties.dtype)
        elements = 0
        filled_bounds = list[list[tuple[int, int]]]()
        for read_item in create_read_items_for_chunk_list(key, near, [rectangle]):
            assert read_item.storage_index.index is not None
            part = self._part(key, near.chunks[read_item.storage_index.index])
            piece = part[_slices(read_item.storage_offsets, read_item.lengths)]
            if piece.shape == tensor.shape:
                return piece
            bounds = [
                (start, start + n)
                for start, n in zip(read_item.dest_offsets, read_item.lengths, strict=True)
            ]
            if any(_overlap(bounds, earlier_bounds) for earlier_bounds in filled_bounds):
                raise ValueError(
                    f"{self.folder / INDEX}: parts of {key} overlap. Save or copy it again."
                )
            filled_bounds.append(bounds)
            tensor[_slices(read_item.dest_offsets, read_item.lengths)] = piece
            elements += piece.numel()
        if elements != tensor.numel():
            raise ValueError(
                f"{self.folder / INDEX}: {key} is not stored whole. Save or copy it again."
            )
        return tensor

    def _chunks_near(
        self, key: str, offset: Sequence[int], size: Sequence[int]
    ) -> list[dcp.ChunkStorageMetadata]:
        """The parts that a rectangle may overlap.

        They are a few, while a model with experts has many thousands."""
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
        """Read a part of a tensor; ValueError if its file is damaged."""
        dtype = self.tensors[key].properties.dtype
        path = self.folder
        try:
            place = self._places[dcp.MetadataIndex(self._prefix + key, chunk.offsets)]
            path = self.folder / place.relative_path
            if place.length > math.prod(chunk.sizes) * dtype.itemsize + _OVERHEAD_BYTES:
                raise ValueError(f"it has {place.length} bytes")
            with open_regular(path) as file:
                file.seek(place.offset)
                content = file.read(place.length)
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if sum(member.file_size for member in archive.infolist()) > len(content):
                    raise ValueError("it is compressed")  # and could unpack to any size
                if archive.testzip() is not None:
                    raise ValueError("its checksum differs")
            part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if (part.shape, part.dtype) != (chunk.sizes, dtype):
                raise ValueError(f"it is no tensor of {tuple(chunk.sizes)} in {dtype}")
        except MemoryError:
            raise
        except Exception as error:  # of any other kind: whatever the file holds
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path} is damaged where {key} is stored ({reason}). Copy it again."
            ) from error
        return part


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length) for start, length in zip(offsets, lengths, strict=True)
    )


def _overlap(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(first, second, strict=True))


class StateWriter:
    """Writes a torch_dist folder part by part, into numbered files.

    It is a checkpoint only after `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.bytes = 0
        """Written so far."""

    def add(
        self,
        number: int,
        key: str,
        offset: Sequence[int],
        global_shape: Sequence[int],
        part: Tensor,
    ) -> None:
        """Write a part of the tensor `key`, with as many axes, into the file `number`."""
        tensor_size = torch.Size(global_shape)
        properties = dcp.TensorProperties(dtype=part.dtype)
        tensor_metadata = self._entries.setdefault(
            key, dcp.TensorStorageMetadata(properties, tensor_size, [])
        )
        assert (
            isinstance(tensor_metadata, dcp.TensorStorageMetadata)
            and tensor_metadata.size == tensor_size
        )
        assert tensor_metadata.properties.dtype == part.dtype
        chunk = dcp.ChunkStorageMetadata(torch.Size(offset), part.shape)
        tensor_metadata.chunks.append(chunk)
        self._append(number, dcp.MetadataIndex(key, chunk.offsets), _alone(part))

    def add_object(self, number: int, key: str) -> None:
        """Write an empty object of Megatron's."""
        self._entries[key] = dcp.BytesStorageMetadata()
        self._append(number, dcp.MetadataIndex(key), [None])

    def close(self) -> None:
        """Write the index and the small files beside it."""
        (self._folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
        torch.save(COMMON, self._folder / "common.pt")
        metadata = dcp.Metadata(
            self._entries, None, self._places, dcp.StorageMeta(), version="1.0.0"
        )
        with (self._folder / INDEX).open("wb") as file:
            pickle.dump(metadata, file)

    def _append(self, number: int, index: dcp.MetadataIndex, value: Any) -> None:
        path = self._folder / f"__{number}_0.distcp"
        with path.open("ab") as file:
            start = file.tell()
            torch.save(value, file)
            length = file.tell() - start
        self._places[index] = _StorageInfo(path.name, start, length)
        self.bytes += length


def _alone(part: Tensor) -> Tensor:
    """The tensor alone in its storage, as torch saves whole storages.

    Copies only what is not contiguous."""
    flat = part.detach().contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(part.dtype).view(part.shape)
