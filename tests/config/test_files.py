"""Files of somebody else: FIFOs and devices, deep nesting, numbers of thousands of digits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlmath.config.files import open_regular, parse_json, read_json_object, read_regular


@pytest.mark.parametrize("kind", ["FIFO", "socket", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str):
    path = tmp_path / "index.json"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    # A socket cannot even be opened.
    with pytest.raises((ValueError, OSError), match=rf"is a {kind}|No such device or address"):
        open_regular(path)
    with pytest.raises(ValueError, match=rf"index\.json.*(is a {kind}|No such device)"):
        read_json_object(path)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(ValueError, match="100 bytes, more than 99"):
        read_regular(path, 99)


def test_json_that_is_too_deep_is_told():
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json('{"a":' * 100_000 + "1" + "}" * 100_000)


def test_a_json_file_is_named_with_what_is_wrong(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: .*5000 digits"):
        read_json_object(path)
