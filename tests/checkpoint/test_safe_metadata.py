"""The index of a torch_dist checkpoint.

An honest one is read as torch reads it, any other is refused."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rlmath.checkpoint import safe_metadata
from rlmath.checkpoint.safe_metadata import SafeReader, read_metadata
from rlmath.distributed.device import most_resident_bytes
from tests.checkpoint.conversions import Call, write_index

TENSORS = {
    "weights": torch.arange(12.0).view(3, 4),
    "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "steps": torch.tensor([7], dtype=torch.int64),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that torch wrote: tensors, and an object."""
    dcp.save(TENSORS | {"note": {"a": 1}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def honest(folder: Path) -> Metadata:
    """The index of one tensor, [2, 3] floats in two rows, in a file of 100 bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"0" * 100)
    rows = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in (0, 1)]
    tensor_metadata = TensorStorageMetadata(
        TensorProperties(dtype=torch.float16), torch.Size([2, 3]), rows
    )
    places = {
        MetadataIndex("t", row.offsets, number): _StorageInfo("__0_0.distcp", 50 * number, 50)
        for number, row in enumerate(rows)
    }
    return Metadata({"t": tensor_metadata}, {"t": ("t",)}, places, version="1.0.0")


# ---------------------------------------------------------------- honest ones


def test_torchs_own_index_is_read_as_torch_reads_it(saved: Path):
    metadata = read_metadata(saved)
    expected = FileSystemReader(saved).read_metadata()
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data
    assert metadata.version == expected.version


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_index_of_any_protocol_with_the_plans_that_megatron_adds_is_read(
    tmp_path: Path, protocol: int
):
    metadata = honest(tmp_path)
    chunk = metadata.state_dict_metadata["t"].chunks[0]
    write_data = TensorWriteData(chunk, TensorProperties(), torch.Size([2, 3]))
    write_item = WriteItem(MetadataIndex("t", (0, 0)), WriteItemType.SHARD, tensor_data=write_data)
    metadata.all_local_plans = [SavePlan([write_item])]
    write_index(tmp_path, pickle.dumps(metadata, protocol=protocol))
    read_back = read_metadata(tmp_path)
    assert read_back.state_dict_metadata == metadata.state_dict_metadata
    assert read_back.storage_data == metadata.storage_data


def test_torch_loads_through_the_safe_reader(saved: Path):
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    reader = SafeReader(saved)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert all(torch.equal(into[name], TENSORS[name]) for name in TENSORS)
    assert reader.read_metadata() is reader.read_metadata()
    assert reader.read_metadata().storage_meta.load_id == reader.load_id


def test_the_safe_reader_refuses_what_would_run(saved: Path, tmp_path: Path):
    write_index(saved, Call(os.mkdir, str(tmp_path / "ran")))
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        dcp.load({"weights": torch.zeros(3, 4)}, storage_reader=SafeReader(saved), no_dist=True)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- hostile ones


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (Call(os.system, "touch ran"), "posix.system"),
        (Call(eval, "open('ran', 'w')"), "builtins.eval"),
        (Call(getattr, torch.Size, "__doc__"), "builtins.getattr"),
        (Call(torch.load, "ran"), "torch.serialization.load"),
        (Call(bytearray, 10**12), "builtins.bytearray"),
        (Call(torch.hub.load, "a/b", "c"), "torch.hub.load"),
    ],
    ids=lambda parameter: parameter if isinstance(parameter, str) else "",
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_is_refused_by_its_name_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, told: str, protocol: int
):
    monkeypatch.chdir(tmp_path)
    metadata = honest(tmp_path)
    metadata.planner_data = call
    write_index(tmp_path, pickle.dumps(metadata, protocol=protocol))
    # Protocol 2 has the names of Python 2.
    with pytest.raises(ValueError, match=re.escape(told if protocol == 4 else told.split(".")[-1])):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_class_in_the_right_module_that_is_no_part_of_an_index_is_refused(tmp_path: Path):
    content = b"ctorch.distributed.checkpoint.filesystem\nos.system\n."
    with pytest.raises(
        ValueError, match=r"names torch\.distributed\.checkpoint\.filesystem\.os\.system"
    ):
        read_metadata(write_index(tmp_path, content))


@pytest.mark.parametrize(
    "place", ["/etc/passwd", "../outside", "folder/inside", "..", "", "C:\\windows"]
)
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, place: str):
    metadata = honest(tmp_path / "in")
    (tmp_path / "outside").write_bytes(b"0" * 1000)
    index, storage = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(storage, relative_path=place)
    with pytest.raises(ValueError, match="needed: one in the same folder"):
        read_metadata(write_index(tmp_path / "in", metadata))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offset": 51}, "has 100 bytes, at least 101 are needed: it was cut off"),
        ({"offset": -1}, "a place in __0_0.distcp is negative"),
        ({"relative_path": "__1_0.distcp"}, "the file __1_0.distcp is not beside it"),
        ({"relative_path": 3}, "is damaged"),
        ({"transform_descriptors": ["zstd"]}, "compressed"),
    ],
    ids=str,
)
def test_places_that_are_not_in_the_file_are_refused(
    tmp_path: Path, change: dict[str, Any], told: str
):
    metadata = honest(tmp_path)
    index = MetadataIndex("t", (1, 0))
    metadata.storage_data[index] = replace(metadata.storage_data[index], **change)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_metadata(write_index(tmp_path, metadata))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"size": torch.Size([1, 3])}, "a part of t lies outside of the tensor"),
        ({"size": torch.Size([3, 3])}, "1 tensors are not stored whole: t"),
        ({"size": torch.Size([2, 3, 1])}, "is damaged"),
        ({"size": torch.Size([2**40, 2**40])}, "more than 2^50 elements"),
        ({"chunks": []}, "not stored whole"),
        ({"properties": None}, "is damaged"),
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], told: str):
    metadata = honest(tmp_path)
    metadata.state_dict_metadata["t"] = replace(metadata.state_dict_metadata["t"], **change)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_metadata(write_index(tmp_path, metadata))


def test_a_part_without_a_place_is_told(tmp_path: Path):
    metadata = honest(tmp_path)
    del metadata.storage_data[MetadataIndex("t", (1, 0))]
    with pytest.raises(ValueError, match="1 tensors are not stored whole: t"):
        read_metadata(write_index(tmp_path, metadata))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle at all",
        b"\x80\x04N.",
        b"cos\nsystem\n(Vtouch ran\ntR.",
        b"(Vtouch ran\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"Pposition\n.",
        b"\x82\x01.",
    ],
    ids=lambda content: f"{content[:12]!r}",
)
def test_what_is_no_index_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\.metadata is (damaged|refused)"):
        read_metadata(write_index(tmp_path, content))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x80\x02Nr\xff\xff\xff\x07.", "numbers its object 134217727 after 3 bytes"),
        (b"Np134217727\n.", "numbers its object 134217727 after 1 bytes"),
        (b"\x80\x05\x96\x02" + bytes(7) + b"ab.", "has a bytearray"),
        (b"\x80\x05\x96" + (2**33).to_bytes(8, "little") + b"ab.", "ends within an entry"),
        (b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"ab.", "ends within an entry"),
    ],
    ids=["LONG_BINPUT", "PUT", "BYTEARRAY8", "a long bytearray", "a long text"],
)
def test_a_few_bytes_that_ask_for_much_memory_are_refused(
    tmp_path: Path, content: bytes, told: str
):
    write_index(tmp_path, content)
    before = most_resident_bytes()
    with pytest.raises(ValueError, match=told):
        read_metadata(tmp_path)
    assert most_resident_bytes() - before < 2**26


def test_what_the_classes_of_an_index_raise_is_damage(tmp_path: Path):
    content = pickle.dumps(honest(tmp_path), protocol=2)
    encoding = rb"ctorch[^\n]*\n_MEM_FORMAT_ENCODING\nq.K\x00\x85q.Rq."
    changed_bytes, places = re.subn(encoding, b"K\xff", content, flags=re.DOTALL)
    assert places == 1
    with pytest.raises(ValueError, match=r"\.metadata is damaged.*RuntimeError.*encoding: 255"):
        read_metadata(write_index(tmp_path, changed_bytes))


def test_every_way_to_cut_an_index_off_is_refused(tmp_path: Path):
    whole = pickle.dumps(honest(tmp_path))
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"\.metadata is (damaged|refused)"):
            read_metadata(write_index(tmp_path, whole[:length]))


def test_a_huge_index_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_index(tmp_path, honest(tmp_path))
    monkeypatch.setattr(safe_metadata, "MAX_INDEX_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        read_metadata(tmp_path)


def test_a_folder_without_an_index_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"torch_dist checkpoint is a folder with \.metadata"):
        read_metadata(tmp_path)
