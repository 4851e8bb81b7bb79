"""Reads the index of a torch_dist checkpoint, which is a pickle, without executing it.

1. Unpickle to inert records. `find_class` allows the classes of an index and returns a `Record` for each of them;
   nothing is imported or called. Opcodes are restricted, too: without that an index of a few bytes could allocate any
   amount of memory (a memo slot of 4 billion, 1 TiB of promised bytes) or crash the interpreter (hashing a deeply
   nested key). The unpickler in C cannot be restricted so, hence `pickle._Unpickler`.
2. Check the records and build torch's classes from them: plain file names, offsets within the files, chunks within
   their tensors, all tensors stored whole.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from rlmath.config.files import read_regular, require_regular

INDEX = ".metadata"
MAX_INDEX_BYTES = 256 * 2**20
"""A larger index is refused; one entry takes some 200 bytes."""
_MAX_AXES = 16

_CLASSES = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron puts the plans of all ranks beside; they are not used here.
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # torch up to 2.2
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
    "pathlib": "PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "PosixPath PurePosixPath WindowsPath PureWindowsPath",
}
"""By module, the names that an index may hold."""

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    *(pickle.SETITEM, pickle.SETITEMS),
)

BROKEN = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What pickle raises where a file is not one, or is cut off."""


def read_metadata(folder: Path | str) -> dcp.Metadata:
    """The index of a torch_dist folder, checked: plain file names, offsets and lengths within the files, chunks within
    their tensors and each of them stored. ValueError that names what is wrong."""
    return read_index(Path(folder) / INDEX)


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with `read_metadata` in place of pickle. Reads an index once."""

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self._read: dict[Path, dcp.Metadata] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """See `read_metadata` of this module; with `rank` the index of one rank's own, as in torch."""
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
        size = require_regular(path)
        if size > MAX_INDEX_BYTES:
            raise ValueError(f"{path} has {size} bytes; an index has {MAX_INDEX_BYTES} at most.")
        content = read_regular(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a torch_dist checkpoint is a folder with {INDEX}."
        ) from error
    was_on = gc.isenabled()
    gc.disable()  # it would search a million small objects, none of them garbage: more than twice the time
    try:
        return _Builder(read_records(content), path.parent, len(content)).metadata()
    except Refused as error:
        raise ValueError(f"{path} is refused: {error}") from error
    except BROKEN as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(
            f"{path} is damaged, or not the index of a checkpoint ({reason}). Copy it again."
        ) from error
    finally:
        if was_on:
            gc.enable()


# ---------------------------------------------------------------- 1. to records


def read_records(content: bytes) -> Any:
    """What the pickle of an index holds: dicts, lists, strings, numbers, torch's number formats and `Record`s. Refused
    where it names or does anything else; one of BROKEN where it is not a pickle."""
    return _Unpickler(io.BytesIO(content)).load()


class Refused(ValueError):
    """The index holds something that an index does not hold."""


class Record:
    """An object of the pickle: the arguments of its constructor, and its state."""

    __slots__ = ("args", "state")

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS = {
    (module, name): type(name, (Record,), {"__slots__": ()})
    for module, names in _CLASSES.items()
    for name in names.split()
}


class _Dict(dict):
    """In place of an OrderedDict, which is created empty and filled afterwards."""

    def __new__(cls) -> _Dict:
        return super().__new__(cls)


class _Unpickler(pickle._Unpickler):
    """Python's unpickler written in Python, restricted to `_OPCODES`. None of these copies what was read before, so
    memory grows with the size of the file only."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        record = _RECORDS.get((module, name))
        if record is None:
            raise Refused(
                f"it names {module}.{name}, which is no part of a checkpoint's index and could run code."
            )
        return record

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(target, dict):
            raise Refused(f"it sets items of a {type(target).__name__}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Record):  # nested tuples would be hashed without end
                raise Refused(f"a key is a {type(key).__name__}.")
            target[key] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {op[0]: pickle._Unpickler.dispatch[op[0]] for op in _OPCODES}  # type: ignore[attr-defined]
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


# ---------------------------------------------------------------- 2. to torch's classes


class _Builder:
    """Builds torch's classes from records. `budget` bounds the number of entries: one for each byte that was read, so
    that an entry which is referenced a thousand times does not become a million."""

    def __init__(self, root: Any, folder: Path, budget: int) -> None:
        self._root = root
        self._folder = folder
        self._budget = budget
        self._sizes: dict[str, int] = {}

    def metadata(self) -> dcp.Metadata:
        fields = _fields(self._root, "Metadata", "MCoreMetadata")
        entries = _checked(fields.get("state_dict_metadata"), dict, "the table of tensors")
        places = _checked(fields.get("storage_data"), dict, "the table of places")
        tensors = {_checked(key, str, "a name"): self._entry(key, entry) for key, entry in entries.items()}
        storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        for key, place in places.items():
            index = self._index(key)
            if index in storage:
                raise Refused(f"a part of {index.fqn} is stored twice.")
            storage[index] = self._place(place)
        _all_stored(tensors, storage)
        version = fields.get("version") if isinstance(fields.get("version"), str) else None
        return dcp.Metadata(tensors, None, storage, dcp.StorageMeta(), version=version)

    def _spend(self) -> None:
        self._budget -= 1
        if self._budget < 0:
            raise Refused("it names the same entries again and again.")

    def _entry(self, key: str, entry: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        self._spend()
        if type(entry).__name__ == "BytesStorageMetadata":
            return dcp.BytesStorageMetadata()
        fields = _fields(entry, "TensorStorageMetadata")
        size = _size(fields.get("size"), key)
        chunks = [self._chunk(chunk, size, key) for chunk in _checked(fields.get("chunks"), list, "chunks")]
        properties = dcp.TensorProperties(dtype=_dtype(fields.get("properties"), key))
        return dcp.TensorStorageMetadata(properties, size, chunks)

    def _chunk(self, chunk: Any, whole: torch.Size, key: str) -> dcp.ChunkStorageMetadata:
        self._spend()
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets"), key), _size(fields.get("sizes"), key)
        if len(offsets) != len(whole) or len(sizes) != len(whole):
            raise Refused(f"a part of {key} has other axes than the tensor.")
        if any(start + length > end for start, length, end in zip(offsets, sizes, whole, strict=True)):
            raise Refused(f"a part of {key} lies outside of the tensor.")
        return dcp.ChunkStorageMetadata(offsets, sizes)

    def _index(self, key: Any) -> dcp.MetadataIndex:
        self._spend()
        fields = _fields(key, "MetadataIndex")
        name, offset = _checked(fields.get("fqn"), str, "a name"), fields.get("offset")
        return dcp.MetadataIndex(name, None if offset is None else _size(offset, name))

    def _place(self, place: Any) -> _StorageInfo:
        fields = _fields(place, "_StorageInfo")
        name = _checked(fields.get("relative_path"), str, "a file's name")
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise Refused(f"it names the file {name[:200]!r}; needed: one in the same folder.")
        offset, length = (_natural(fields.get(field), f"{field} in {name}") for field in ("offset", "length"))
        if fields.get("transform_descriptors"):
            raise Refused(f"{name} is compressed or otherwise transformed, which is not supported.")
        if offset + length > self._file_size(name):
            raise Refused(
                f"{name} has {self._file_size(name)} bytes, at least {offset + length} are needed: it was cut off. "
                "Copy it again."
            )
        return _StorageInfo(name, offset, length)

    def _file_size(self, name: str) -> int:
        if name not in self._sizes:
            path = self._folder / name
            if not path.is_file():
                raise Refused(f"the file {name} is not beside it. Copy it there.")
            self._sizes[name] = path.stat().st_size
        return self._sizes[name]


def _fields(record: Any, *names: str) -> dict[str, Any]:
    if not isinstance(record, Record) or type(record).__name__ not in names:
        raise Refused(f"a {type(record).__name__} is where a {names[0]} should be.")
    return _checked({} if record.state is None else record.state, dict, f"the state of a {names[0]}")


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise Refused(f"{what} is a {type(value).__name__}; needed: a {kind.__name__}.")
    return value


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise Refused(f"{what} is not a natural number.")
    return value


def _size(value: Any, key: str) -> torch.Size:
    axes: Any = value.args[0] if type(value).__name__ == "Size" and len(value.args) == 1 else value
    if not isinstance(axes, tuple | list) or len(axes) > _MAX_AXES:
        raise Refused(f"a size of {key} is not a list of up to {_MAX_AXES} numbers.")
    numbers = [_natural(x, f"a size of {key}") for x in axes]
    if math.prod(max(1, x) for x in numbers) > 2**50:
        raise Refused(f"{key} has more than 2^50 elements.")
    return torch.Size(numbers)


def _dtype(record: Any, key: str) -> torch.dtype:
    state = record.state if type(record).__name__ == "TensorProperties" else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"{key} has no number format.")
    return dtype


def _all_stored(tensors: dict[str, Any], storage: Iterable[dcp.MetadataIndex]) -> None:
    """Every tensor's parts have a place, begin at places of their own, and have as many elements as the tensor."""
    places = set(storage)
    lost = []
    for key, entry in tensors.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            whole = dcp.MetadataIndex(key) in places
        else:
            whole = all(dcp.MetadataIndex(key, chunk.offsets) in places for chunk in entry.chunks)
            whole &= len({chunk.offsets for chunk in entry.chunks}) == len(entry.chunks)
            whole &= sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)
        if not whole:
            lost.append(key)
    if lost:
        raise Refused(f"{len(lost)} tensors are not stored whole: {', '.join(lost[:5])}.")
