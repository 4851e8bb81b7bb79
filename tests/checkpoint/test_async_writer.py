"""What the process beside a rank writes of the tensors that it is given."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from rlmath.checkpoint.async_writer import _copy, _lay_out, _write, lacks_memory
from rlmath.checkpoint.directory import file_entry

Bucket = tuple[Path, str, tuple[list[tuple[Any, io.BytesIO]], list[tuple[Any, Tensor]]]]
"""A file as Megatron's writer wants it: path, name, and its objects and tensors."""


def bucket_of(path: Path, objects: dict[str, bytes], tensors: dict[str, Tensor]) -> Bucket:
    object_items = []
    for name, content in objects.items():
        (write_item,) = _create_write_items(name, io.BytesIO(content))
        object_items.append((write_item, io.BytesIO(content)))
    tensor_items = []
    for name, tensor in tensors.items():
        (write_item,) = _create_write_items(name, tensor)
        tensor_items.append((write_item, tensor))
    return path, path.name, (object_items, tensor_items)


def write(buckets: list[Bucket], then_zero: dict[str, Tensor]) -> Any:
    """What is written where tensors change between the copy and the writing."""
    size, jobs = _lay_out(buckets)
    memory = os.memfd_create("checkpoint")
    os.posix_fallocate(memory, 0, max(size, 1))
    _copy(buckets, jobs, memory)
    for tensor in then_zero.values():
        tensor.zero_()
    return _write(jobs, memory)


def test_files_have_the_tensors_as_they_were_when_they_were_given(tmp_path: Path) -> None:
    """Sizes and number formats differ; one is empty, one a number, one not contiguous."""
    first = {
        "odd": torch.arange(5, dtype=torch.float32) + 1,
        "half": torch.full((3, 7), 2.5, dtype=torch.bfloat16),
    }
    second = {
        "empty": torch.empty(0, 4),
        "turned": torch.arange(12.0).view(3, 4).T + 1,
        "number": torch.tensor(7, dtype=torch.int64),
    }
    expected = {name: tensor.clone() for name, tensor in (first | second).items()}
    buckets = [
        bucket_of(tmp_path / "__0_0.distcp", {"words": b"some words"}, first),
        bucket_of(tmp_path / "__0_1.distcp", {}, second),
    ]
    written = write(buckets, then_zero=first | second)
    assert written.error is None
    assert written.files == {
        name: file_entry(tmp_path / name) for name in ("__0_0.distcp", "__0_1.distcp")
    }
    contents = {}
    for result in written.results:
        place = result.storage_data
        content = (tmp_path / place.relative_path).read_bytes()
        contents[result.index.fqn] = content[place.offset : place.offset + place.length]
    assert contents.pop("words") == b"some words"
    assert list(contents) == list(expected)
    for name, tensor in expected.items():
        stored = torch.load(io.BytesIO(contents[name]))
        assert stored.dtype == tensor.dtype and torch.equal(stored, tensor), name


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3)}
    places = (tmp_path / "first.distcp", tmp_path / "missing" / "second.distcp")
    written = write([bucket_of(place, {}, tensors) for place in places], then_zero={})
    assert (written.results, written.files) == ([], {})
    assert written.error.startswith(f"{places[1]} was not written: FileNotFoundError")


def test_copies_of_all_ranks_of_a_machine_must_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(n_bytes: int, ranks: int) -> str | None:
        """What is told of a checkpoint of so many bytes on each of a machine's ranks."""
        tensor = torch.empty(n_bytes, dtype=torch.uint8, device="meta")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return lacks_memory([(tmp_path / "a", "a", ([], [(None, tensor)]))])

    assert room(2**20, 1) is None
    assert "that 1 ranks of this machine save" in (room(2**50, 1) or "")
    assert f"that {2**30} ranks of this machine save" in (room(2**20, 2**30) or "")
