import gzip
import json
import os

import pytest

from rlmath.data import files
from rlmath.data.formats import PromptRow, read_prompts

GOOD = {"prompt": "1+1=", "task": "math", "query_id": "a", "solutions": ["\\boxed{2}", "two"]}
B = {**GOOD, "query_id": "b"}
DEEP = b'{"prompt": "x", "solutions": ' + b"[" * 200_000 + b"\n"


def write(tmp_path, *lines, name="train.jsonl"):
    path = tmp_path / name
    path.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
        )
    )
    return str(path)


def unusable(tmp_path, *lines):
    """The one unusable row among good ones."""
    file = read_prompts(write(tmp_path, GOOD, *lines))
    (row,) = file.unusable
    return row


def refused(path, form="auto"):
    with pytest.raises(ValueError) as caught:
        read_prompts(str(path), form)
    return str(caught.value)


def test_rows_come_in_the_files_order_and_further_keys_are_kept(tmp_path):
    file = read_prompts(write(tmp_path, {**GOOD, "source": "x"}, b"\n", {**B, "prompt": "π=?"}))
    assert file.form == "boba" and file.unusable == [] and file.repeated == 0
    assert file.rows == [
        PromptRow("1+1=", "math", "a", ("\\boxed{2}", "two"), '{"source": "x"}'),
        PromptRow("π=?", "math", "b", ("\\boxed{2}", "two")),
    ]


def test_what_is_not_json_is_named_with_its_line(tmp_path):
    row = unusable(tmp_path, b"\n", b"{'prompt': 1}\n")
    assert row.where.endswith("train.jsonl, line 3")
    assert row.reason.startswith("not JSON (")
    assert row.start == "{'prompt': 1}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (DEEP, "not JSON"),
        (b"[1]\n", "a JSON list, where a JSON object is needed"),
        (
            b'{"prompt": "x",  \n',
            "not JSON (Expecting property name enclosed in double quotes at character 16)",
        ),
        (b"{\xe9}\n", "not UTF-8 (byte 1 is 0xe9)"),
        (
            json.dumps({**B, "prompt": "1\0+1"}).encode() + b"\n",
            "prompt has a NUL character at character 1",
        ),
        (
            json.dumps(B).replace("1+1", "1\\ud8001").encode() + b"\n",
            "half a surrogate pair at character 1",
        ),
        (b'{"n": ' + b"7" * 5000 + b"}\n", "not JSON (Exceeds the limit"),
        (
            b'{"prompt": "x", "solutions": ["1"], "prompt": "y"}\n',
            "not JSON (the key 'prompt' stands twice)",
        ),
        (
            {"prompt": "x", "task": "math", "answer": "3"},
            "missing query_id, solutions; the row has 'prompt', 'task'",
        ),
        ({**B, "solutions": []}, "solutions must be a list of at least one"),
        ({**B, "query_id": 17}, "query_id must be a string that is not blank, got int '17'"),
        ({**GOOD, "prompt": "other"}, "query_id 'a' is already used in "),
    ],
)
def test_a_row_that_cannot_be_used_is_left_out_with_its_line_and_reason(tmp_path, line, reason):
    row = unusable(tmp_path, line)
    assert row.where.endswith("line 2")
    assert reason in row.reason
    assert len(row.reason) < 500


def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2**20)
    file = read_prompts(write(tmp_path, GOOD, b"x" * (5 * 2**20) + b"\n", B))
    assert [row.query_id for row in file.rows] == ["a", "b"]
    assert [(row.where[-6:], row.reason[:17]) for row in file.unusable] == [
        ("line 2", "longer than 1 MiB")
    ]


def test_a_line_of_exactly_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", len(json.dumps(GOOD)) + 1)
    assert len(read_prompts(write(tmp_path, GOOD)).rows) == 1


def test_a_file_without_rows_is_refused(tmp_path):
    assert "has no rows: its lines are blank, or it has none." in refused(
        write(tmp_path, b"\n  \n")
    )


def test_a_file_of_unknown_form_is_refused_with_what_it_has_and_the_forms_there_are(tmp_path):
    message = refused(write(tmp_path, {"text": "x", "label": 3}))
    assert "line 1: it has the columns 'text', 'label'" in message
    for form in ("boba", "areal_v01", "simplerl", "dapo", "question_answer"):
        assert f'"{form}": ' in message
    message = refused(write(tmp_path, b"\n", b"<html>\n" * 3))
    assert "line 2: not JSON (Expecting value at character 1); it begins '<html>'." in message
    assert "columns" not in message and "boba" not in message


@pytest.mark.parametrize(
    ("beginning", "what"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "it begins 'version https://git-lfs",
        ),
        (gzip.compress(json.dumps(GOOD).encode()), "not UTF-8 (byte 1 is 0x8b), or compressed"),
        (json.dumps(GOOD).encode("utf-16"), "not UTF-8 (byte 0 is 0xff)"),
        (json.dumps([GOOD], indent=1).encode(), "it begins '['"),
        (json.dumps([GOOD]).encode(), "a JSON list, where a JSON object is needed"),
        (b"question,answer\n1+1,2\n", "it begins 'question,answer'"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_how_it_begins(tmp_path, beginning, what):
    message = refused(write(tmp_path, beginning))
    assert what in message and "Needed: JSON lines, parquet or Arrow" in message


def test_a_byte_order_mark_costs_no_row(tmp_path):
    file = read_prompts(write(tmp_path, b"\xef\xbb\xbf", GOOD, B))
    assert [row.query_id for row in file.rows] == ["a", "b"] and file.unusable == []


def test_another_form_than_the_one_asked_for_is_refused(tmp_path):
    path = write(tmp_path, GOOD)
    assert len(read_prompts(path, "boba").rows) == 1
    message = refused(path, "question_answer")
    assert (
        'has rows of the form "boba"; data.format is "question_answer"' in message
        and "'query_id'" in message
    )


def test_a_file_none_of_whose_rows_can_be_used_is_refused(tmp_path):
    message = refused(write(tmp_path, {**GOOD, "solutions": []}, {**B, "prompt": 3}))
    assert 'none of its 2 rows can be used as "boba"' in message
    assert "\n    1: solutions must be" in message and "(line 1)" in message


def test_the_form_is_found_behind_rows_that_cannot_be_read(tmp_path):
    assert read_prompts(write(tmp_path, b"# a comment\n", GOOD)).form == "boba"


def test_a_missing_file_is_named_with_the_nearest_name(tmp_path):
    write(tmp_path, GOOD)
    assert 'trian.jsonl": no such file. There is' in refused(tmp_path / "trian.jsonl")
    assert 'train.jsonl": no such file.' in refused(tmp_path / "no" / "train.jsonl")


def test_areal_v01_takes_solutions_from_the_file_beside(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "p", "query_id": "q1"},
        {"prompt": "r", "query_id": "q2"},
        name="prompts.jsonl",
    )
    assert "id2info.json with the solutions is needed beside it" in refused(path)
    (tmp_path / "id2info.json").write_text(
        json.dumps({"q1": {"solutions": ["\\boxed{1}"]}, "q3": {}})
    )
    file = read_prompts(path)
    assert file.form == "areal_v01"
    assert file.rows == [PromptRow("p", "math", "q1", ("\\boxed{1}",))]
    assert "id2info.json has no solutions of query_id 'q2'" in file.unusable[0].reason
    (tmp_path / "id2info.json").write_text("[1, 2]")
    assert "needed: a JSON object" in refused(path)
    (tmp_path / "id2info.json").write_text('{"q1": ')
    assert "id2info.json cannot be read: " in refused(path)


def test_a_place_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "x" * 5000, ""):
        assert "no such file" in refused(place)
