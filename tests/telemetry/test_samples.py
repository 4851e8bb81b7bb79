import json
import math

import pytest

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup, Segment
from rlmath.config.terminal import visible
from rlmath.telemetry.samples import SampleWriter, completion_facts


def group(prompt_id: str = "q1", text: str = "so \\boxed{132}") -> ScoredGroup:
    return ScoredGroup(
        Prompt(prompt_id, "47+85=", (1, 2), ("\\boxed{132}",), "math"),
        (
            Completion(
                0,
                (3, 4, 5),
                (-0.1, -0.2, -0.3),
                text,
                "stop",
                7,
                (Segment(1, 6, 2), Segment(1, 7, 3), Segment(1, 7, 4)),
            ),
            Completion(1, (3,), (-0.5,), "hm", "length", 7),
        ),
        (Score(5.0, True, "132", "string", True), Score(-5.0, False, "", "no_answer")),
    )


def write(tmp_path, groups, advantages, groups_per_step=2, step=1):
    SampleWriter(str(tmp_path), groups_per_step).write(step, groups, advantages)


def test_a_row_holds_a_group_whole(tmp_path):
    write(tmp_path, [group()], [[1.0, -1.0]])
    (line,) = (tmp_path / "samples" / "step-000001.jsonl").read_text().splitlines()
    row = json.loads(line)
    second = row["completions"].pop()
    assert (second["correct"], second["segments"], second["text"]) == (False, [], "hm")
    assert row == {
        "prompt_id": "q1",
        "prompt": "47+85=",
        "solutions": ["\\boxed{132}"],
        "completions": [
            {
                "reward": 5.0,
                "advantage": 1.0,
                "correct": True,
                "verdict": "string",
                "extracted": "132",
                "boxed": True,
                "length": 3,
                "finish_reason": "stop",
                "policy_version": 7,
                "segments": [[1, 6], [2, 7]],
                "text": "so \\boxed{132}",
            }
        ],
    }


def test_only_the_first_groups_of_a_step_are_kept(tmp_path):
    groups = [group(f"q{number}") for number in range(5)]
    write(tmp_path, groups, [[0.0, 0.0]] * 5, groups_per_step=2, step=12)
    rows = [
        json.loads(line)
        for line in (tmp_path / "samples" / "step-000012.jsonl").read_text().splitlines()
    ]
    assert [row["prompt_id"] for row in rows] == ["q0", "q1"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000012.jsonl"]


def test_a_group_that_could_not_be_judged_is_kept_whatever_its_place(tmp_path):
    late = ScoredGroup(
        group("late").prompt, group().completions, (Score(-5.0, False, "x", "timeout"),) * 2
    )
    path = SampleWriter(str(tmp_path), 0).write_failure(3, [group("q0"), late], [[0.0, 0.0]] * 2)
    assert path == tmp_path / "samples" / "failure-000003.jsonl"
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["prompt_id"] == "late"


def test_no_groups_wanted_writes_nothing(tmp_path):
    write(tmp_path, [group()], [[0.0, 0.0]], groups_per_step=0)
    assert not (tmp_path / "samples").exists()


def test_a_step_written_again_is_replaced(tmp_path):
    write(tmp_path, [group("old"), group("old too")], [[0.0, 0.0]] * 2)
    write(tmp_path, [group("new")], [[0.0, 0.0]])
    (line,) = (tmp_path / "samples" / "step-000001.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt_id"] == "new"


@pytest.mark.parametrize(
    "nasty", ["\x1b[2J\x1b]0;pwned\x07", "\ud800", "\u202eabc", "\x00\r\x9b31m\u2028", "汉字"]
)
def test_the_file_is_plain_ascii_and_gives_the_text_back(tmp_path, nasty):
    write(tmp_path, [group(text=nasty)], [[0.0, 0.0]])
    raw = (tmp_path / "samples" / "step-000001.jsonl").read_bytes()
    assert all(byte == 10 or 32 <= byte < 127 for byte in raw)
    assert json.loads(raw)["completions"][0]["text"] == nasty


def test_an_advantage_that_is_not_finite_does_not_break_the_file(tmp_path):
    write(tmp_path, [group()], [[math.nan, math.inf]])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(
        (tmp_path / "samples" / "step-000001.jsonl").read_text(), parse_constant=refuse
    )
    assert [completion["advantage"] for completion in row["completions"]] == ["NaN", "Infinity"]
    assert "advantage +nan" in completion_facts(row["completions"][0])


def test_visible_escapes_what_moves_the_cursor_or_hides():
    assert visible("a\tb\nπ") == "a\tb\nπ"
    assert visible("\r\x1b[1m\x7f\x9b\u200b\u202e\u2028\ud800\U000e0041") == (
        "\\x0d\\x1b[1m\\x7f\\x9b\\u200b\\u202e\\u2028\\ud800\\U000e0041"
    )
