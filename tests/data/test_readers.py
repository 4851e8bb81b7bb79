import json

import pytest

from rlmath.data import readers
from rlmath.data.readers import PromptRow, read_boba

GOOD = {"prompt": "1+1=", "task": "math", "query_id": "a", "solutions": ["\\boxed{2}", "two"]}


def write(tmp_path, *lines):
    path = tmp_path / "train.jsonl"
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return str(path)


def refused(tmp_path, *lines):
    with pytest.raises(ValueError) as caught:
        read_boba(write(tmp_path, *lines))
    return str(caught.value)


def test_rows_come_in_the_files_order_and_further_keys_are_kept(tmp_path):
    path = write(tmp_path, {**GOOD, "source": "x"}, b"\n", {**GOOD, "query_id": "b", "prompt": "π=?"})
    assert read_boba(path) == [
        PromptRow("1+1=", "math", "a", ("\\boxed{2}", "two"), '{"source": "x"}'),
        PromptRow("π=?", "math", "b", ("\\boxed{2}", "two")),
    ]


def test_a_last_line_without_newline_counts(tmp_path):
    assert len(read_boba(write(tmp_path, json.dumps(GOOD).encode()))) == 1


def test_what_is_not_json_is_named_with_its_line(tmp_path):
    message = refused(tmp_path, GOOD, b"\n", b"{'prompt': 1}\n")
    assert "train.jsonl, line 3: not JSON" in message
    assert "{'prompt': 1}" in message


def test_json_nested_too_deep_is_an_error_of_its_line(tmp_path):
    assert "line 1: not JSON" in refused(tmp_path, b"[" * 200_000 + b"\n")


def test_a_row_that_is_no_object_is_refused(tmp_path):
    assert "line 1: got a JSON list" in refused(tmp_path, [GOOD])


def test_missing_keys_are_named_beside_those_that_are_there(tmp_path):
    message = refused(tmp_path, GOOD, {"prompt": "x", "task": "math", "answer": "3"})
    assert "line 2: missing query_id, solutions; the row has 'prompt', 'task', 'answer'" in message


@pytest.mark.parametrize("solutions", [[], "\\boxed{2}", None, {}])
def test_solutions_must_be_a_list_with_something_in_it(tmp_path, solutions):
    assert "line 1: solutions must be a list of at least one" in refused(
        tmp_path, {**GOOD, "solutions": solutions}
    )


@pytest.mark.parametrize("change", [{"prompt": 5}, {"query_id": 17}, {"solutions": [2]}, {"prompt": "  "}])
def test_texts_must_be_strings_that_are_not_blank(tmp_path, change):
    message = refused(tmp_path, {**GOOD, **change})
    assert "line 1:" in message
    assert "must be a string that is not blank, got" in message


def test_a_query_id_used_twice_is_refused_with_both_lines(tmp_path):
    assert "line 3: query_id 'a' is already used in line 1" in refused(
        tmp_path, GOOD, {**GOOD, "query_id": "b"}, GOOD
    )


def test_what_is_not_utf8_is_named(tmp_path):
    assert "line 2: not UTF-8 (byte 1 is 0xe9)" in refused(tmp_path, GOOD, b"{\xe9}\n")


def test_half_a_surrogate_pair_is_refused_before_a_tokenizer_trips_over_it(tmp_path):
    line = json.dumps(GOOD).replace("1+1", "1\\ud8001").encode() + b"\n"
    assert "line 1: prompt has half a surrogate pair at character 1" in refused(tmp_path, line)


def test_an_endless_line_is_an_error_and_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2**20)
    assert "line 2: longer than 1 MiB" in refused(tmp_path, GOOD, b"x" * (2**20 + 1))


def test_a_line_of_exactly_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", len(json.dumps(GOOD)) + 1)
    assert len(read_boba(write(tmp_path, GOOD))) == 1


def test_a_file_without_rows_is_refused(tmp_path):
    assert "no rows" in refused(tmp_path, b"\n  \n")


def test_a_missing_file_is_named_with_the_nearest_name(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(ValueError, match=r"trian\.jsonl: no such file; did you mean '.*train\.jsonl'"):
        read_boba(str(tmp_path / "trian.jsonl"))
    with pytest.raises(ValueError, match="no such file, and no folder"):
        read_boba(str(tmp_path / "no" / "train.jsonl"))
    with pytest.raises(ValueError, match="is a folder"):
        read_boba(str(tmp_path))
