"""Reads the index of a torch_dist checkpoint, which is a pickle, without executing what it names.

The unpickler allows only the classes of an index, and nothing else is imported or called. The
result is checked: plain file names, offsets within the files, chunks within their tensors, all
tensors stored whole. A few bytes could ask the unpickler for any amount of memory, so what they ask
for is checked before it starts. What a hostile index can still do is take memory and time in
proportion to MAX_INDEX_BYTES, and end the program.
"""

from __future__ import annotations

import gc
import importlib
import io
import math
import pickle
import pickletools
import re
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
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron puts the plans of all ranks beside; they are not used here.
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    # torch up to 2.2
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
}
"""Names that an index may hold, by module."""
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
    """The checked index of a torch_dist folder; ValueError that says what is wrong with it.

    File names are plain, offsets and lengths lie within the files, chunks lie within their tensors,
    and each of them is stored."""
    return read_index(Path(folder) / INDEX)


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with `read_metadata` in place of pickle.

    Reads an index once."""

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self._read: dict[Path, dcp.Metadata] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The checked index; with `rank` that rank's own index, as in torch.

        See `read_metadata` of this module."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        if path not in self._read:
            self._read[path] = read_index(path)
        metadata = self._read[path]
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        """Switch to another checkpoint, or read the same one again."""
        super().reset(checkpoint_id)
        self._read = {}


def read_index(path: Path) -> dcp.Metadata:
    """`read_metadata` of an index file of any name; the files that it names lie beside it."""
    try:
        content = read_regular(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a torch_dist checkpoint is a folder with "
            f"{INDEX}."
        ) from error
    was_on = gc.isenabled()
    # it would search a million small objects, none of them garbage: more than twice the time
    gc.disable()
    try:
        _check_memory(content)
        return _checked(_Unpickler(io.BytesIO(content)).load(), path.parent)
    except _Refused as error:
        raise ValueError(f"{path} is refused: {error}") from error
    except _DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(
            f"{path} is damaged, or not the index of a checkpoint ({reason}). Copy it again."
        ) from error
    finally:
        if was_on:
            gc.enable()


class _Refused(ValueError):
    """The index holds something that an index does not hold."""


_DAMAGED = (
    *(
        pickle.UnpicklingError,
        EOFError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
    ),
    *(MemoryError, RuntimeError, SystemError, TypeError, ValueError),
)
"""Errors that pickle and the classes' constructors raise if a file is no index, or is cut off."""

_ARGUMENT_BYTES = {
    ord(opcode.code): 0 if opcode.arg is None else opcode.arg.n for opcode in pickletools.opcodes
}
"""Bytes of an opcode's argument; negative if the argument says its length itself."""
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Number of bytes that say the length of an argument."""
_LINES = {ord("c"): 2, ord("i"): 2}
"""Arguments that end with a line, of opcodes that have more than one."""
_PUT = ord("p")
_LONG_BINPUT = ord("r")
_BYTEARRAY8 = 0x96
_STOP = ord(".")


def _harmless_opcodes() -> re.Pattern[bytes]:
    """A pattern of any number of harmless opcodes in a row.

    They end nothing, number nothing and have arguments of a fixed length."""
    by_length: dict[int, bytes] = {}
    for opcode, length in _ARGUMENT_BYTES.items():
        if length >= 0 and opcode not in (_LONG_BINPUT, _STOP):
            by_length[length] = by_length.get(length, b"") + bytes([opcode])
    choices = [b"[%b].{%d}" % (re.escape(opcodes), length) for length, opcodes in by_length.items()]
    return re.compile(b"(?:%b)*+" % b"|".join(choices), re.DOTALL)


_HARMLESS_OPCODES = _harmless_opcodes()


def _check_memory(content: bytes) -> None:
    """EOFError or _Refused if an opcode asks for more memory than the bytes around it account for.

    Such an opcode names a text that is longer than the file, numbers an object higher than there
    are bytes before it (the unpickler makes a list of as many), or makes a bytearray, which is
    allocated before it is read."""
    position = 0
    size = len(content)
    while (run := _HARMLESS_OPCODES.match(content, position)) is not None:
        position = run.end()
        opcode = content[position] if position < size else _STOP
        start = position + 1
        length = _ARGUMENT_BYTES.get(opcode)
        if opcode == _STOP or length is None:
            return  # the unpickler reports a missing or unknown opcode
        end = start + length
        if length == pickletools.UP_TO_NEWLINE:
            end = start
            for _ in range(_LINES.get(opcode, 1)):
                end = content.find(b"\n", end) + 1 or size + 1
        elif length < 0:
            end = start + _LENGTH_BYTES[length]
            end += int.from_bytes(content[start:end], "little")
        if end > size:
            raise EOFError("it ends within an entry")
        if opcode in (_PUT, _LONG_BINPUT):
            argument = content[start:end]
            number = int(argument) if opcode == _PUT else int.from_bytes(argument, "little")
            if number > position:
                raise _Refused(f"it numbers its object {number} after {position} bytes.")
        if opcode == _BYTEARRAY8:
            raise _Refused("it has a bytearray, which is no part of a checkpoint's index.")
        position = end


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _IN_PLACE_OF:
            return _IN_PLACE_OF[module, name]
        if name in _ALLOWED.get(module, "").split():
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _Refused(
            f"it names {module}.{name}, which is no part of a checkpoint's index and could run "
            "code."
        )


def _checked(index: Any, folder: Path) -> dcp.Metadata:
    """The used parts of an index, checked for consistency.

    Wrong attributes and types raise whatever Python raises."""
    tensors: dict[str, Any] = {}
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            tensors[key] = _tensor(key, entry)
        else:
            tensors[key] = dcp.BytesStorageMetadata()
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), _end(place))
    for name, end in ends.items():
        _check_file(folder, name, end)
    incomplete = [
        key for key, entry in tensors.items() if not _is_whole(key, entry, index.storage_data)
    ]
    if incomplete:
        raise _Refused(
            f"{len(incomplete)} tensors are not stored whole: {', '.join(incomplete[:5])}."
        )
    version = getattr(index, "version", None)
    return dcp.Metadata(tensors, None, index.storage_data, dcp.StorageMeta(), version=version)


def _tensor(key: str, entry: dcp.TensorStorageMetadata) -> dcp.TensorStorageMetadata:
    """The checked metadata of a tensor, with its number format as the only property."""
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise _Refused(f"{key} has no number format.")
    if math.prod(max(1, length) for length in entry.size) > 2**50:
        raise _Refused(f"{key} has more than 2^50 elements.")
    for chunk in entry.chunks:
        axes = list(zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
        if any(start < 0 or length < 0 or start + length > total for start, length, total in axes):
            raise _Refused(f"a part of {key} lies outside of the tensor.")
    properties = dcp.TensorProperties(dtype=entry.properties.dtype)
    return dcp.TensorStorageMetadata(properties, entry.size, entry.chunks)


def _end(place: Any) -> int:
    """The offset in its file at which a part ends (bytes)."""
    if getattr(place, "transform_descriptors", None):
        raise _Refused(
            f"{place.relative_path} is compressed or otherwise transformed, which is not supported."
        )
    if place.offset < 0 or place.length < 0:
        raise _Refused(f"a place in {place.relative_path} is negative.")
    return place.offset + place.length


def _check_file(folder: Path, name: str, end: int) -> None:
    """_Refused unless the file has a plain name, exists and has at least `end` bytes."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise _Refused(f"it names the file {name[:200]!r}; needed: one in the same folder.")
    if not (folder / name).is_file():
        raise _Refused(f"the file {name} is not beside it. Copy it there.")
    size = (folder / name).stat().st_size
    if end > size:
        raise _Refused(
            f"{name} has {size} bytes, at least {end} are needed: it was cut off. Copy it again."
        )


def _is_whole(key: str, entry: Any, places: dict[dcp.MetadataIndex, Any]) -> bool:
    """Whether all parts of a tensor are stored.

    They have a place, begin at different offsets, and together have as many elements as it."""
    if isinstance(entry, dcp.BytesStorageMetadata):
        return dcp.MetadataIndex(key) in places
    starts = {chunk.offsets for chunk in entry.chunks}
    elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    is_covered = len(starts) == len(entry.chunks) and elements == math.prod(entry.size)
    return is_covered and all(dcp.MetadataIndex(key, start) in places for start in starts)
