"""Files of somebody else: FIFOs and devices, deep nesting, aliases, numbers of thousands of digits."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from rlmath.config.files import (
    MAX_DEPTH,
    open_regular,
    parse_json,
    read_json_object,
    read_regular,
)


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


def test_json_is_as_deep_as_it_may_be():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for depth in (MAX_DEPTH + 2, 900, 100_000):
        with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
            parse_json('{"a":' * depth + "1" + "}" * depth)


def test_a_wide_text_is_not_deep():
    wide = {"rows": [{"a": [1, 2]} for _ in range(1000)], "text": "[[[[{{{{"}
    assert parse_json(json.dumps(wide)) == wide


def test_a_number_of_many_digits_is_named_by_its_key():
    digits = "9" * 6000
    with pytest.raises(ValueError, match='"vocab_size" is a number of 6000 digits, more than 400'):
        parse_json(f'{{"a": 1, "vocab_size": {digits}}}')
    with pytest.raises(ValueError, match='"ids" is a number of 6000 digits'):
        parse_json(f'{{"ids": [[-{digits}]]}}')
    with pytest.raises(ValueError, match="a number of 6000 digits"):
        parse_json(f"[1, {digits}]")
    assert parse_json(f'{{"a": "{digits}", "b": 12}}') == {"a": digits, "b": 12}


def test_a_json_file_is_named_with_what_is_wrong(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match=r'config\.json cannot be read: "hidden_size" is a number of 5000'):
        read_json_object(path)
