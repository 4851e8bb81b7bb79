"""The demo's problems are disjoint and repeatable; worked solutions slip as often as asked for."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.algorithms.types import Score
from rlmath.cli.make_arithmetic import (
    CALLING,
    RETRIES,
    SLIP,
    Addition,
    main,
    make_problems,
    worked_rows,
    worked_solution,
)
from rlmath.rollout.finished_turns import verdict_text

TOOL = Path(__file__).resolve().parents[2] / "rlmath" / "cli" / "make_arithmetic.py"
FILES = ("train", "heldout", "worked")
DIGESTS = ["64f1f436077bda05", "1ba320ab85bb119f", "c46216835081aa8b"]
"""The beginnings of the SHA-256 of FILES, for the options in the test that reads them."""


def test_worked_solutions_written_by_hand():
    assert worked_solution(Addition(47, 85)) == r"7+5=12 4+8+1=13 \boxed{132}"
    assert worked_solution(Addition(347, 85)) == r"7+5=12 4+8+1=13 3+1=4 \boxed{432}"
    assert worked_solution(Addition(0, 0)) == r"0+0=0 \boxed{0}"
    assert worked_solution(Addition(5, 20)) == r"5+0=5 2=2 \boxed{25}"


def test_worked_rows_are_right_as_often_as_their_slips_leave():
    """A slip is wrong 19 times in 20 in a column's sum, and 9 times in 10 in a digit of the answer.

    47+85 has 2 columns, and its answer 3 digits."""
    two = [worked_solution(Addition(47, 85), 0.2, random.Random(seed)) for seed in range(4000)]
    right = sum(text.endswith(r"\boxed{132}") for text in two) / 4000
    assert right == pytest.approx(0.81**2 * 0.82**3, abs=0.025)
    problems, heldout = make_problems(seed=1, train=2000, heldout=100)
    rows = worked_rows(problems, 10000, SLIP, seed=1)
    right = sum(
        row["completion"].endswith(Addition(*map(int, row["prompt"][:-1].split("+"))).solution)
        for row in rows
    )
    assert right / 10000 == pytest.approx(0.4, abs=0.02)
    assert not {row["prompt"] for row in rows} & {problem.prompt for problem in heldout}
    assert (
        rows
        == worked_rows(problems, 10000, SLIP, seed=1)
        != worked_rows(problems, 10000, SLIP, seed=2)
    )
    assert all(row["completion"].endswith("}") for row in worked_rows(problems, 5, 0.0, seed=1))


def test_products_are_right_and_some_solutions_call_python(tmp_path: Path):
    """What stands between a call and the answer is what Python prints; a solution may guess."""
    options = ["--output", str(tmp_path), "--train", "400", "--heldout", "40", "--worked", "2000"]
    main([*options, "--operation", "multiply"])
    train, heldout, worked, worked_heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout", "worked", "worked_heldout")
    )
    calling = 0
    for row in worked + worked_heldout:
        left, right = map(int, row["prompt"].rstrip("=").split("*"))
        assert left in range(100, 1000) and right in range(10, 100)
        answer = f"\\boxed{{{left * right}}}"
        call = f"```python\n{left}*{right}\n```\n```output\n{left * right}\n```\n"
        assert row["completion"] in (answer, call + answer)
        calling += row["completion"] != answer
    assert calling / len(worked + worked_heldout) == pytest.approx(CALLING, abs=0.04)
    assert {row["prompt"] for row in worked} <= {row["prompt"] for row in train}
    assert {row["prompt"] for row in heldout} >= {row["prompt"] for row in worked_heldout}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}


def test_guesses_are_one_of_two_numbers_also_behind_a_wrong_answer(tmp_path: Path):
    """Half of what is worked stands behind what `turns.feedback=verdict` says of an answer."""
    options = ["--output", str(tmp_path), "--train", "400", "--heldout", "40", "--worked", "2000"]
    main([*options, "--operation", "guess"])
    train, worked = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "worked")
    )
    retries = first_numbers = asked_first = 0
    for row in worked:
        problem, _, behind = row["prompt"].partition("=")
        left, right = map(int, problem.split("?"))
        answers = [f"\\boxed{{{left}}}", f"\\boxed{{{right}}}"]
        sentences = [
            f"{answer}\n{verdict_text(Score(0.0, False, answer[7:-1], 'number'))}\n"
            for answer in answers
        ]
        assert row["completion"] in answers and behind in ("", *sentences)
        retries += behind != ""
        first_numbers += row["completion"] == answers[0]
    for row in train:
        left = row["prompt"].partition("?")[0]
        asked_first += row["solutions"] == [f"\\boxed{{{left}}}"]
    assert retries / len(worked) == pytest.approx(RETRIES, abs=0.04)
    assert first_numbers / len(worked) == pytest.approx(0.5, abs=0.06)
    assert asked_first / len(train) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("train", "heldout"), [(0, 1), (1, 0), (9990, 11)])
def test_numbers_of_rows_that_cannot_be_are_named(train: int, heldout: int):
    with pytest.raises(ValueError, match="needed: at least 1 of each, 10000 in all at most"):
        make_problems(seed=1, train=train, heldout=heldout)


def test_the_files_are_what_they_were(tmp_path: Path):
    main(["--output", str(tmp_path), "--train", "500", "--heldout", "50", "--worked", "300"])
    digests = [
        hashlib.sha256((tmp_path / f"{n}.jsonl").read_bytes()).hexdigest()[:16] for n in FILES
    ]
    assert digests == DIGESTS


def test_the_program_writes_its_files(tmp_path: Path):
    folder = tmp_path / "new" / "data"
    options = ["--output", str(folder), "--train", "20", "--heldout", "5", "--worked", "30"]
    process = subprocess.run(
        [sys.executable, str(TOOL), *options],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        text=True,
    )
    assert process.stdout == f"{folder}: 20 problems, 5 held out, 30 worked solutions\n"
    rows, apart = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "worked_heldout")
    )
    assert len(apart) == 5 and {row["prompt"] for row in apart}.isdisjoint(
        row["prompt"] for row in rows
    )
    left, right = map(int, rows[0]["prompt"].rstrip("=").split("+"))
    assert rows[0]["solutions"] == [f"\\boxed{{{left + right}}}"] and rows[0]["task"] == "math"


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder; name a new one"):
        main(["--output", str(tmp_path), "--train", "2", "--heldout", "1"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
