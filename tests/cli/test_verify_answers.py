"""rlmath verify as a user runs it."""

import json
from pathlib import Path

import pytest

from rlmath.cli.api import verify
from rlmath.cli.verify_answers import main
from tests.answers.attacks import HANG_SOLUTIONS, boxed, hanging
from tests.programs import REPOSITORY, run

TOOL = ("-m", "rlmath.cli.verify_answers")
GOOD = [
    {"id": "a", "completion": "so \\boxed{\\sqrt{4}}", "solutions": ["2"]},
    {"id": 2, "completion": "\\boxed{3}", "solutions": ["\\boxed{2}"], "task": "math"},
    {"id": "c", "completion": "no box", "solutions": ["2"]},
    {"id": "d", "completion": boxed(hanging(0)), "solutions": list(HANG_SOLUTIONS)},
    {"id": "\ud800", "completion": "\\boxed{\ud800\u0000}", "solutions": ["x"]},
    {"id": None, "completion": "\\boxed{50\\%}", "solutions": ["7", "\\frac{1}{2}"]},
]


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_every_line_gets_its_verdict_in_order(tmp_path):
    source = write(tmp_path / "cases.jsonl", *GOOD, b"")
    target = tmp_path / "verdicts.jsonl"
    process = run(
        *TOOL, "--input", str(source), "--output", str(target), "--workers", "2", "--timeout", "1.5"
    )
    verdicts = rows(target)
    assert [row["id"] for row in verdicts] == [case["id"] for case in GOOD]
    assert [row["correct"] for row in verdicts] == [True, False, False, False, False, True]
    assert [row["verdict"] for row in verdicts] == [
        "symbolic",
        "number",
        "no_answer",
        "timeout",
        "string",
        "symbolic",
    ]
    assert verdicts[0]["extracted"] == "\\sqrt{4}"
    assert all(
        row.keys() == {"id", "correct", "extracted", "verdict", "seconds"} for row in verdicts
    )
    assert verdicts[3]["seconds"] >= 1.5 and verdicts[0]["seconds"] > 0
    assert "6 verified, 2 of them correct" in process.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{broken", "not JSON"),
        (b"[1]", "a JSON object is needed"),
        ({"id": 1, "completion": "x"}, "missing solutions"),
        ({"id": 1, "completion": 5, "solutions": ["x"]}, "completion must be a string"),
        (
            {"id": 1, "completion": "x", "solutions": ["x"], "question": 5},
            "question must be a string",
        ),
        ({"id": 1, "completion": "x", "solutions": []}, "it has 0 solutions; needed: 1 to 1000"),
        ({"id": 1, "completion": "x", "solutions": [2]}, "solutions must be a list of strings"),
        (
            {"id": 1, "completion": "x", "solutions": ["x"] * 1001},
            "it has 1001 solutions; needed: 1 to 1000",
        ),
    ],
)
def test_parsing_tells_what_is_broken(line, told):
    from rlmath.cli.verify_answers import _parse_case

    with pytest.raises(ValueError, match=told):
        _parse_case(line if isinstance(line, bytes) else json.dumps(line).encode())


def test_broken_lines_are_told_by_number_and_skipped(tmp_path, capsys):
    """A byte order mark costs no line, and a question reaches the judge."""
    case = {"completion": "\\boxed{7 apples}", "solutions": ["7"]}
    cases = [{"id": 1} | case, {"id": 2, "question": "How many apples?"} | case]
    source = write(tmp_path / "cases.jsonl", GOOD[2], b"{broken", b"", {"id": 1}, *cases)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    target = tmp_path / "verdicts.jsonl"
    assert main(["--input", str(source), "--output", str(target), "--workers", "1"]) == 1
    assert [(row["id"], row["correct"]) for row in rows(target)] == [
        ("c", False),
        (1, False),
        (2, True),
    ]
    stderr = capsys.readouterr().err
    assert "line 2: not JSON" in stderr
    assert "line 4: missing completion, solutions" in stderr
    assert "2 broken lines were skipped" in stderr


def test_a_question_reaches_the_judge_of_the_public_function():
    """A process of its own runs it: the worker that the function keeps ends with that process."""
    code = (
        "from rlmath import verify\n"
        "print(verify('7 apples', '7').correct)\n"
        "print(verify('7 apples', '7', question='How many apples?').correct)"
    )
    assert run("-c", code).stdout.split() == ["False", "True"]


def test_a_question_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="needed: a text"):
        verify("7", "7", question=None)


def test_options_reach_the_judge(tmp_path):
    cases = [{"id": 1, "completion": "The answer is 3.14", "solutions": ["\\pi"]}]
    source = write(tmp_path / "cases.jsonl", *cases)
    target = tmp_path / "verdicts.jsonl"
    options = ["--workers", "1", "--answer-from", "phrase", "--loose"]
    assert main(["--input", str(source), "--output", str(target), *options]) == 0
    assert rows(target)[0]["correct"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--input", "nowhere.jsonl", "--output", "out.jsonl"],
            "--input nowhere.jsonl: no such file",
        ),
        (["--input", "setup.py", "--output", "setup.py"], "choose another file"),
        (
            ["--input", "setup.py", "--output", "outputs.jsonl", "--workers", "0"],
            "reward.workers is 0",
        ),
    ],
)
def test_what_cannot_begin_is_told(arguments, told, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
