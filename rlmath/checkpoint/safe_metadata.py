"""Reads the index of a torch_dist checkpoint, which is a pickle, without executing what it names.

The unpickler allows only the classes of an index, and nothing else is imported or called. What a hostile index can
still do is take memory and time in proportion to MAX_INDEX_BYTES, and end the program.
"""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan

from rlmath.checkpoint.directory import INDEX
from rlmath.config.files import read_regular

MAX_INDEX_BYTES = 256 * 2**20
"""A larger index is refused; one entry takes some 200 bytes."""

_ALLOWED = {
    "collections": "OrderedDict",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron puts the plans of all ranks beside; they are not used here.
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    # torch up to 2.2
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
}
"""By module, the names that an index may hold."""
_IN_PLACE_OF = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): dcp.Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
} | {
    (module, name): PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
"""Classes that are read as another one."""


def read_metadata(folder: Path | str) -> dcp.Metadata:
    """The index of a torch_dist folder. ValueError where it is unreadable, no plain index, or names files elsewhere."""
    return _read_index(Path(folder) / INDEX)


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with `read_metadata` of this module in place of pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """With `rank` the index of one rank's own, as in torch."""
        metadata = _read_index(Path(self._get_metadata_path(kwargs.get("rank"))))
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _read_index(path: Path) -> dcp.Metadata:
    try:
        content = read_regular(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a torch_dist checkpoint is a folder with {INDEX}."
        ) from error
    try:
        index = _Unpickler(io.BytesIO(content)).load()
        version = getattr(index, "version", None)
        tensors, places = dict(index.state_dict_metadata), dict(index.storage_data)
        outside = [
            one.relative_path for one in places.values() if Path(one.relative_path).name != one.relative_path
        ]
        if outside:
            raise ValueError(f"it names the file {outside[0]!r:.200}; needed: one in the same folder")
    except Exception as error:  # of any kind: whatever the file holds instead of an index
        raise ValueError(
            f"{path} is damaged, or not the index of a checkpoint ({type(error).__name__}: {error!s:.200}). "
            "Copy it again."
        ) from error
    return dcp.Metadata(tensors, None, places, dcp.StorageMeta(), version=version)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _IN_PLACE_OF:
            return _IN_PLACE_OF[module, name]
        if name in _ALLOWED.get(module, "").split():
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"it names {module}.{name}, which could run code")
