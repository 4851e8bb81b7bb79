"""Plain rows of problems and answers, and the benchmark files that have them."""

import json
from pathlib import Path

import pytest

from rlmath.answers.verifier import check_tasks, verify
from rlmath.data.formats import PromptRow, read_prompts

BENCHMARKS = Path(__file__).resolve().parents[3] / "shared" / "data" / "benchmarks"


def read(tmp_path, *rows):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(str(path), "question_answer")


@pytest.mark.parametrize(
    ("columns", "solutions"),
    [
        ({"answer": "It is 9 * 2 = 18.\n#### 18"}, ("18",)),
        ({"answer": "so\n#### 2,125"}, ("2125",)),
        ({"answer": -0.5}, ("-0.5",)),
        ({"answer": 10**400}, ("1" + "0" * 400,)),
        ({"answer": ["1/2", 0.5]}, ("1/2", "0.5")),
        ({"answer": "$\\frac{1}{2}$"}, ("\\frac{1}{2}",)),
        ({"final_answer": ["$1$", "$3$"], "is_multiple_answer": True}, ("1, 3",)),
        ({"final_answer": ["2"], "unit": "km"}, ("2",)),
        ({"solution": "hence \\boxed{1.6} \\mathrm{~cm}"}, ("1.6",)),
        ({"solution": "hence \\boxed{\\frac{1}{2}}", "answer": None}, ("\\frac{1}{2}",)),
    ],
)
def test_answers_are_found_where_benchmarks_have_them(tmp_path, columns, solutions):
    (row,) = read(tmp_path, {"question": "How many?", **columns}).rows
    assert row.solutions == solutions and row.task == "math" and not row.whole


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": None}, "no answer in answer, final_answer, solution"),
        ({"answer": []}, "answer is an empty list"),
        ({"answer": {"x": 1}}, "answer must be a string or a number, got dict"),
        ({"answer": float("nan")}, "answer is nan, which is no answer"),
        ({"answer": "thoughts ####  "}, "nothing behind #### in answer"),
        (
            {"answer": [str(n) for n in range(1001)]},
            "it has 1001 solutions; at most 1000 are compared with",
        ),
    ],
)
def test_rows_without_a_usable_answer_are_left_out(tmp_path, columns, reason):
    good = {"question": "1+1?", "answer": "2"}
    (row,) = read(tmp_path, good, {"question": "How many?", **columns}).unusable
    assert row.reason.startswith(reason)


def test_ids_and_further_columns(tmp_path):
    file = read(
        tmp_path,
        {"problem": "a", "answer": "1", "id": 60, "url": "u"},
        {"problem": "b", "answer": "1", "unique_id": "test/807.json"},
        {"problem": "c", "answer": "1"},
        {"problem": "c", "answer": "2", "idx": 7, "context": "Let x be 1."},
    )
    assert [row.query_id for row in file.rows] == ["60", "test/807.json", "2", "7"]
    assert json.loads(file.rows[0].more_json) == {"answer": "1", "id": 60, "url": "u"}
    assert file.rows[3].prompt == "Let x be 1.\nc"


def test_letters_of_options_are_choices(tmp_path):
    row = {"question": "Which?\n\nA. 1\nB. 2", "options": ["1", "2"], "answer": "B"}
    file = read(tmp_path, row, {**row, "question": "How many?", "answer": "2"})
    assert [row.task for row in file.rows] == ["choice", "math"]
    check_tasks(row.task for row in file.rows)
    assert verify("I choose \\boxed{(B)}", file.rows[0].solutions, "choice").correct
    assert not verify("I choose \\boxed{A}", file.rows[0].solutions, "choice").correct


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmark files are not there")
@pytest.mark.parametrize(
    ("name", "rows", "unusable", "query_id", "solution"),
    [
        ("aime24", 30, 0, "60", "204"),
        ("aime25", 30, 0, "0", "70"),
        ("amc23", 40, 0, "0", "27"),
        ("gpqa_diamond", 198, 0, "0", "D"),
        ("gsm8k", 1317, 1, "0", "18"),  # the last line of that copy is cut off
        ("math_500", 500, 0, "test/precalculus/807.json", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("minerva_math", 272, 0, "0", "1.6"),
        ("olympiadbench", 675, 0, "1606", "2"),
    ],
)
def test_every_benchmark_file_is_read(name, rows, unusable, query_id, solution):
    file = read_prompts(str(BENCHMARKS / f"{name}.jsonl"))
    assert (file.form, len(file.rows), len(file.unusable)) == ("question_answer", rows, unusable)
    assert (file.rows[0].query_id, file.rows[0].solutions) == (query_id, (solution,))
    assert {row.task for row in file.rows} == {"choice" if name == "gpqa_diamond" else "math"}
    assert file.repeated == 0


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmark files are not there")
def test_a_reference_answer_in_a_box_is_right():
    rows = [
        row
        for name in ("olympiadbench", "minerva_math", "gpqa_diamond", "amc23")
        for row in read_prompts(str(BENCHMARKS / f"{name}.jsonl")).rows
    ]

    def is_right(row: PromptRow) -> bool:
        return verify(f"\\boxed{{{row.solutions[0]}}}", row.solutions, row.task).correct

    assert [row.query_id for row in rows if not is_right(row)] == []
