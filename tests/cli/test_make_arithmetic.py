"""The demo's problems: disjoint, repeatable, worked right, and slipping as often as the closed form says."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.cli.make_arithmetic import (
    Addition,
    main,
    make_problems,
    worked_rows,
    worked_solution,
)

TOOL = Path(__file__).resolve().parents[2] / "rlmath" / "cli" / "make_arithmetic.py"
FILES = ("train", "heldout", "worked")
DIGESTS = ["64f1f436077bda05", "1ba320ab85bb119f", "c46216835081aa8b"]
"""Of the files of the options in the test that has them."""


def test_worked_solutions_written_by_hand():
    assert worked_solution(Addition(47, 85)) == r"7+5=12 4+8+1=13 \boxed{132}"
    assert worked_solution(Addition(347, 85)) == r"7+5=12 4+8+1=13 3+1=4 \boxed{432}"
    assert worked_solution(Addition(0, 0)) == r"0+0=0 \boxed{0}"
    assert worked_solution(Addition(5, 20)) == r"5+0=5 2=2 \boxed{25}"


def test_worked_rows_are_right_as_often_as_asked():
    problems, heldout = make_problems(seed=1, train=2000, heldout=100)
    rows = worked_rows(problems, 10000, accuracy=0.35, seed=1)
    right = sum(
        row["completion"].endswith(Addition(*map(int, row["prompt"][:-1].split("+"))).solution)
        for row in rows
    )
    assert right / 10000 == pytest.approx(0.35, abs=0.02)
    assert not {row["prompt"] for row in rows} & {problem.prompt for problem in heldout}
    assert rows == worked_rows(problems, 10000, 0.35, seed=1) != worked_rows(problems, 10000, 0.35, seed=2)
    assert all(row["completion"].endswith("}") for row in worked_rows(problems, 5, accuracy=1.0, seed=1))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="only 100 distinct problems"):
        make_problems(seed=1, train=100, heldout=1, digits=1)
    with pytest.raises(ValueError, match="digits is 0"):
        make_problems(seed=1, train=1, heldout=1, digits=0)
    with pytest.raises(ValueError, match="both must be at least 1"):
        make_problems(seed=1, train=0, heldout=1)
    with pytest.raises(ValueError, match="needs rng"):
        worked_solution(Addition(1, 2), slip=0.5)


def is_long(problem: Addition, digits: int) -> bool:
    """Both numbers have so many digits; where they have not, neither has more than two."""
    lengths = {len(str(problem.left)), len(str(problem.right))}
    assert lengths == {digits} or max(lengths) <= 2
    return lengths == {digits}


@pytest.mark.parametrize("digits", [3, 6])
def test_a_share_of_the_problems_is_long(digits: int):
    train, heldout = make_problems(1, 700, 100, long_share=0.15, long_digits=digits)
    assert [len(train), len(heldout)] == [700, 100]
    longs = [[is_long(problem, digits) for problem in rows] for rows in (train, heldout)]
    assert [sum(rows) for rows in longs] == [105, 15]
    assert 0 < sum(longs[0][:350]) < 105, "they are mixed"
    assert len({*train, *heldout}) == 800, "distinct, and none in both"
    assert (train, heldout) == make_problems(1, 700, 100, long_share=0.15, long_digits=digits)
    assert train != make_problems(2, 700, 100, long_share=0.15, long_digits=digits)[0]
    worked = worked_rows(train, 4000, accuracy=0.4, seed=1)
    drawn = [Addition(*map(int, str(row["prompt"])[:-1].split("+"))) for row in worked]
    assert sum(is_long(problem, digits) for problem in drawn) / 4000 == pytest.approx(0.15, abs=0.02)


def test_without_long_problems_the_files_are_what_they_were(tmp_path: Path):
    """Of the program before it had long problems, with these options."""
    options = [
        "--train",
        "500",
        "--heldout",
        "50",
        "--worked",
        "300",
        "--long-share",
        "0",
        "--long-digits",
        "3",
    ]
    main(["--output", str(tmp_path), *options])
    digests = [hashlib.sha256((tmp_path / f"{n}.jsonl").read_bytes()).hexdigest()[:16] for n in FILES]
    assert digests == DIGESTS


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((1, 10, 10, 2, 1.0), "long-share is 1.0; it must be at least 0 and below 1"),
        ((1, 10, 10, 2, math.nan), "long-share is nan; it must be"),
        ((1, 10, 10, 2, 0.5, 2), "long-digits is 2; it must be above digits, 2, and at most 6"),
        ((1, 200, 2, 1, 0.5), r"held-out rows asked, 101 of them short, but .* only 100 distinct"),
    ],
)
def test_mistakes_about_long_problems_are_named(sizes, text: str):
    with pytest.raises(ValueError, match=text):
        make_problems(*sizes)


def test_the_program_writes_its_files(tmp_path: Path):
    folder = tmp_path / "new" / "data"
    options = ["--output", str(folder), "--train", "20", "--heldout", "5", "--worked", "30"]
    subprocess.run([sys.executable, str(TOOL), *options], check=True, capture_output=True, cwd=tmp_path)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert len((folder / "heldout.jsonl").read_text().splitlines()) == 5
    worked = [json.loads(line) for line in (folder / "worked.jsonl").read_text().splitlines()]
    assert len(worked) == 30 and worked[0].keys() == {"prompt", "completion"}
    assert {row["prompt"] for row in worked} <= {row["prompt"] for row in rows}
    left, right = map(int, rows[0]["prompt"].rstrip("=").split("+"))
    assert rows[0]["solutions"] == [f"\\boxed{{{left + right}}}"]
    assert rows[0]["task"] == "math"
    assert rows[0]["query_id"] == f"add-{left}-{right}"


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder; name a new one"):
        main(["--output", str(tmp_path), "--train", "2", "--heldout", "1"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
