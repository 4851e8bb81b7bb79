"""Parts of tensors in the files of a torch_dist checkpoint.

They are written, read by rectangles, and refused where they are damaged."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo

from rlmath.checkpoint.convert.torch_dist_io import StateReader, StateWriter
from tests.checkpoint.conversions import Call, write_index


def grid(folder: Path) -> torch.Tensor:
    """[4, 6] in four parts of [2, 3], written by us."""
    whole = torch.arange(24.0).view(4, 6)
    folder.mkdir()
    writer = StateWriter(folder)
    for row in (0, 2):
        for column in (0, 3):
            part = whole[row : row + 2, column : column + 3]
            writer.add(0, "grid", (row, column), (4, 6), part)
    writer.close()
    return whole


@pytest.mark.parametrize(
    ("offset", "size"), [((0, 0), (4, 6)), ((2, 3), (2, 3)), ((1, 2), (2, 2)), ((3, 0), (1, 6))]
)
def test_any_rectangle_of_what_was_written_in_parts(
    tmp_path: Path, offset: tuple[int, int], size: tuple[int, int]
):
    whole = grid(tmp_path / "g")
    (row, column), (height, width) = offset, size
    expected = whole[row : row + height, column : column + width]
    assert torch.equal(StateReader(tmp_path / "g").read("grid", offset, size), expected)


def test_torch_loads_what_was_written_in_parts(tmp_path: Path):
    whole = grid(tmp_path / "g")
    into = {"grid": torch.zeros(4, 6)}
    dcp.load(into, checkpoint_id=tmp_path / "g", no_dist=True)
    assert torch.equal(into["grid"], whole)


def test_a_part_takes_its_own_numbers_on_disk_and_not_the_whole_tensor_it_was_cut_from(
    tmp_path: Path,
):
    tmp_path.joinpath("s").mkdir()
    writer = StateWriter(tmp_path / "s")
    writer.add(0, "t", (0,), (10,), torch.zeros(1_000_000)[:10])
    assert writer.bytes < 5_000


def test_files_that_were_damaged_are_told(tmp_path: Path):
    grid(tmp_path / "g")
    path = tmp_path / "g" / "__0_0.distcp"
    content = path.read_bytes()
    whole = 2 * len(content) // 3  # of four parts the first two
    path.write_bytes(content[:whole] + b"\xff" * (len(content) - whole))
    reader = StateReader(tmp_path / "g")
    reader.read("grid", (0, 0), (2, 6))
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged where grid is stored"):
        reader.read("grid", (0, 0), (4, 6))
    path.unlink()
    with pytest.raises(ValueError, match=r"damaged where grid is stored .*__0_0\.distcp"):
        reader.read("grid", (0, 0), (4, 6))


def test_one_flipped_bit_among_the_numbers_is_found(tmp_path: Path):
    whole = grid(tmp_path / "g")
    path = tmp_path / "g" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(whole[2, :3].contiguous().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged where grid is stored .*checksum"):
        StateReader(tmp_path / "g").read("grid", (2, 0), (2, 3))


@pytest.mark.parametrize(
    ("start", "size", "told"), [(3, 1, "not stored whole: t"), (1, 2, "parts of t overlap")]
)
def test_parts_that_leave_a_gap_are_refused(tmp_path: Path, start: int, size: int, told: str):
    """Parts that overlap are refused too, although they have as many numbers as the tensor."""
    writer = StateWriter(tmp_path)
    writer.add(0, "t", (0,), (4,), torch.zeros(2))
    writer.add(0, "t", (start,), (4,), torch.ones(size))
    writer.close()
    with pytest.raises(ValueError, match=told):
        StateReader(tmp_path).read("t", (0,), (4,))


def replace_part(folder: Path, content: bytes) -> None:
    """Put other bytes in the place of an index's one part."""
    metadata = FileSystemReader(folder).read_metadata()
    (index,) = metadata.storage_data
    (folder / "__0_0.distcp").write_bytes(content)
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 0, len(content))
    write_index(folder, metadata)


@pytest.mark.parametrize("kind", ["bomb", "code", "other shape", "other numbers"])
def test_a_part_that_is_not_the_tensor_it_should_be_is_refused(tmp_path: Path, kind: str):
    writer = StateWriter(tmp_path)
    writer.add(0, "t", (0,), (4,), torch.zeros(4))
    writer.close()
    file = io.BytesIO()
    if kind == "bomb":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/0", b"\0" * 10_000_000)
    else:
        wrong: Any = {"code": Call(os.mkdir, str(tmp_path / "ran")), "other shape": torch.zeros(5)}
        torch.save(wrong.get(kind, torch.zeros(4, dtype=torch.int32)), file)
    replace_part(tmp_path, file.getvalue())
    messages = {
        "bomb": "compressed",
        "code": "damaged",
        "other shape": "no tensor of",
        "other numbers": "no tensor of",
    }
    with pytest.raises(ValueError, match=messages[kind]):
        StateReader(tmp_path).read("t", (0,), (4,))
    assert not (tmp_path / "ran").exists()
