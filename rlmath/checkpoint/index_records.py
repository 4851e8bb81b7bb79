"""A pickle read as data: the opcodes that make plain values are carried out, and every class that is named in it stands
for an inert record. Nothing is imported, called or made by it.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, ClassVar

import torch

_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Megatron puts the plans of all ranks beside; they are not used here.
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    # torch up to 2.2
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}

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


def read_records(content: bytes) -> Any:
    """What the pickle of an index holds: dicts, lists, strings, numbers, torch's number formats and `Record`s. Refused
    where something else is named or done in it; one of BROKEN where it is no pickle."""
    return _Unpickler(io.BytesIO(content)).load()


class Refused(ValueError):
    """The index holds something that has no place there."""


class Record:
    """What the pickle says of one object: what it would be made from, and its state."""

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
    for name in names
}


class _Dict(dict):
    """In place of an OrderedDict, which is made empty and filled afterwards."""

    def __new__(cls) -> _Dict:
        return super().__new__(cls)


class _Unpickler(pickle._Unpickler):
    """Python's unpickler written in Python, whose table of opcodes can be cut down to `_OPCODES`; that one's memory,
    too, only grows with the file. None of these copies what was read before, so little bytes stay little objects."""

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
