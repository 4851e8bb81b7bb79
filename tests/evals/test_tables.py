from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.algorithms.intervals import accuracy_interval, wilson_interval
from rlmath.evals.benchmarks import (
    Benchmark,
    LengthLimits,
    Problem,
    benchmark_warnings,
    check_lengths,
)
from rlmath.evals.compare import comparison_text, differences
from rlmath.evals.completions import CompletionRecord, Key
from rlmath.evals.plan import GREEDY_INDEX, Plan
from rlmath.evals.results import BenchmarkResult, result_of
from rlmath.evals.tables import boxed_tables, first_table, second_table, write_results
from rlmath.report.results_file import read_results
from tests.data.chat_templates import chat_tokenizer


def plan_for(folder: Path, **changes: object) -> Plan:
    return Plan(folder, ("quiz",), folder, folder, **{"samples": 4, "max_new_tokens": 64} | changes)  # type: ignore


def problem(name: str, tokens: int = 5) -> Problem:
    return Problem(name, "?", tuple(range(tokens)), ("7",), "math", benchmark="quiz")


def completion(
    answer: str, tokens: int = 10, truncated: bool = False, verdict: str = "string"
) -> CompletionRecord:
    finish = "length" if truncated else "stop"
    right = answer in ("7", "7.0")
    return CompletionRecord("", "", 0, 1, "abcd", "", tokens, finish, right, answer, verdict)


def quiz(folder: Path, **changes: object) -> BenchmarkResult:
    """Three problems, the third with a prompt that is too long."""
    rows = {
        "a": [
            completion("7", 2),
            completion("7"),
            completion("7.0", verdict="number"),
            completion("3"),
        ],
        "b": [
            completion("1", 6, truncated=True),
            completion("7"),
            completion("3"),
            completion("3"),
            completion("4"),
        ],
    }
    rows["a"].append(completion("", 40, truncated=True))
    rows["b"][4] = completion("4", verdict="timeout")
    records: dict[Key, CompletionRecord] = {
        (name, index): record
        for name, row in rows.items()
        for index, record in zip((GREEDY_INDEX, 0, 1, 2, 3), row, strict=True)
    }
    benchmark = Benchmark("quiz", (problem("a"), problem("b"), problem("c", tokens=99)), unusable=2)
    return result_of(benchmark, records, plan_for(folder, **changes), max_prompt_tokens=50)


def test_a_row_by_hand(tmp_path: Path) -> None:
    row = quiz(tmp_path).row
    assert (
        row["num_questions"] == 3
        and row["too_long"] == 1
        and row["unusable"] == 2
        and row["not_judged"] == 1
    )
    assert (
        row["greedy_acc"] == pytest.approx(1 / 3)
        and row["greedy_length"] == 4
        and row["greedy_truncated"] == 0.5
    )
    # 2 of 4, 1 of 4 and 0 of 4 are right
    assert row["sample_pass@1"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert row["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6) + 0) / 3)
    assert row["pass@4"] == pytest.approx(2 / 3) and "pass@8" not in row
    # votes of a: 7 and 7.0 are one answer, against one 3; of b: two 3s win
    assert row["maj@4"] == pytest.approx(1 / 3)
    # Of the 6 pairs of a one has two right votes, two have one beside a 3, two one beside a blank;
    # of b three have one vote of two.
    assert row["maj@2"] == pytest.approx(((1 + 2 / 2 + 2) / 6 + (3 / 2) / 6 + 0) / 3)
    assert row["sample_length"] == pytest.approx((10 + 10 + 10 + 40 + 4 * 10) / 8)
    assert row["sample_truncated"] == pytest.approx(1 / 8)
    # Wilson's of 1 of 3, by hand: (1/3 + z2/6 -+ z sqrt(2/27 + z2/36)) / (1 + z2/3), z2 = 3.8415.
    assert (row["greedy_acc_low"], row["greedy_acc_high"]) == pytest.approx(
        (0.0615, 0.7923), abs=1e-4
    )
    # Samples of one problem are alike: 3 problems tell what 4.07 answers would, and not 12. With
    # two problems more that are right and two that are wrong, shares vary by 138/784, answers with
    # their mean 11/28 by 187/784.
    assert (row["sample_pass@1_low"], row["sample_pass@1_high"]) == pytest.approx(
        wilson_interval(0.25, 3 * 187 / 138), abs=1e-12
    )


def test_the_second_table_has_intervals_majorities_and_what_went_wrong(tmp_path: Path) -> None:
    """A benchmark that was sampled less has no majorities of more samples."""
    result = quiz(tmp_path)
    less = BenchmarkResult(quiz(tmp_path, samples=2).row | {"dataset": "less"}, ())
    intervals = [
        "{:.1f} - {:.1f}".format(*(100 * result.row[f"{name}_{end}"] for end in ("low", "high")))  # type: ignore
        for name in ("greedy_acc", "sample_pass@1")
    ]
    header, row, shorter = second_table([result, less])
    assert dict(zip(header, row, strict=True)) == {
        "dataset": "quiz",
        "greedy_acc 95%": intervals[0],
        "sample_pass@1 95%": intervals[1],
        "maj@2": "30.6",
        "maj@4": "33.3",
        "greedy_truncated": "50.0",
        "sample_truncated": "12.5",
        "too_long": "1",
        "unusable": "2",
        "not_judged": "1",
    }
    # Of two samples of each, a has two right ones and b one right beside a 3; none is truncated.
    assert shorter[:2] == ["less", intervals[0]]
    assert shorter[3:] == ["50.0", "-", "50.0", "0.0", "1", "2", "0"]
    assert first_table([result, less])[2] == [
        *("less", "3", "4.0", "10.0", "33.3", "50.0"),
        *("66.7", "-"),
    ]


@pytest.mark.parametrize(
    ("right", "problems", "low", "high"),
    [(0, 12, 0.0, 0.2425), (12, 12, 0.7575, 1.0), (500, 500, 0.9924, 1.0)],
)
@pytest.mark.parametrize("samples", [1, 4])
def test_answers_that_are_all_alike_are_no_certainty(
    tmp_path: Path, right: int, problems: int, low: float, high: float, samples: int
) -> None:
    """Wilson's interval of 0 of n is 0 to z2 / (n + z2), with z2 = 3.8415.

    More answers to each problem change nothing."""
    names = [str(number) for number in range(problems)]
    answer = "7" if right else "3"
    records = {
        (name, index): completion(answer)
        for name in names
        for index in (GREEDY_INDEX, *range(samples))
    }
    benchmark = Benchmark("quiz", tuple(map(problem, names)), unusable=0)
    row = result_of(
        benchmark, records, plan_for(tmp_path, samples=samples), max_prompt_tokens=50
    ).row
    for name in ("greedy_acc", "sample_pass@1"):
        assert row[name] == right / problems
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx((low, high), abs=1e-4)


def test_modes_that_were_not_asked_for_stay_empty(tmp_path: Path) -> None:
    greedy = first_table([quiz(tmp_path, samples=0)])[1]
    assert greedy == ["quiz", "3", "4.0", "-", "33.3", "-"]
    sampled = first_table([quiz(tmp_path, greedy=False)])[1]
    assert sampled == ["quiz", "3", "-", "13.8", "-", "25.0", "44.4", "66.7"]
    assert second_table([quiz(tmp_path, samples=0)])[0][:4] == [
        "dataset",
        "greedy_acc 95%",
        "sample_pass@1 95%",
        "greedy_truncated",
    ]


def test_a_missing_completion_is_no_wrong_answer(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        result_of(Benchmark("quiz", (problem("z"),), 0), {}, plan_for(tmp_path), 50)


def test_no_box_is_wider_than_a_terminal_of_80_columns(tmp_path: Path) -> None:
    row = quiz(tmp_path).row | {"dataset": "olympiadbench"}
    row |= {f"{name}@{2**i}": 1.0 for i in range(1, 8) for name in ("pass", "maj")}
    wide_result = BenchmarkResult(row, ())
    for table in (first_table([wide_result]), second_table([wide_result])):
        lines = boxed_tables(table).splitlines()
        assert max(map(len, lines)) <= 80
        headers = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1::5]]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3::5]]
        assert {row[0] for row in rows} == {"olympiadbench"} and {
            header[0] for header in headers
        } == {"dataset"}
        assert ["dataset", *(name for header in headers for name in header[1:])] == table[0]
        assert ["olympiadbench", *(cell for row in rows for cell in row[1:])] == table[1]


def test_a_box_is_as_wide_as_the_terminal_and_wider_only_with_one_column() -> None:
    """Two columns of 26 characters beside one of 18 take 80 with their frames."""

    def lines_of(*widths: int) -> list[str]:
        row = [letter * width for letter, width in zip("nab", widths, strict=True)]
        return boxed_tables([row, ["1"] * len(row)]).splitlines()

    assert {len(line) for line in lines_of(18, 26, 26)} == {80}
    for widths in ((18, 26, 27), (18, 90, 27)):
        assert [line.count("|") for line in lines_of(*widths) if "n" in line] == [3, 3]


def test_what_was_not_sampled_and_problems_that_there_are_none_of_take_no_room(
    tmp_path: Path,
) -> None:
    none = {"too_long": 0, "unusable": 0, "not_judged": 0}
    benchmark_result = BenchmarkResult(quiz(tmp_path, greedy=False).row | none, ())
    assert "greedy" not in boxed_tables(first_table([benchmark_result])) + boxed_tables(
        second_table([benchmark_result])
    )
    assert second_table([benchmark_result])[0][-1] == "sample_truncated"
    assert (
        second_table([BenchmarkResult(benchmark_result.row | {"unusable": 1}, ())])[0][-1]
        == "unusable"
    )


def test_files_hold_the_table_and_are_the_same_each_time(tmp_path: Path) -> None:
    benchmark_result = quiz(tmp_path)
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        write_results(folder, {"about_model": "m\x1b[31m", "seed": 1}, [benchmark_result])
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["results.csv", "results.json", "results.md"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    (row,) = csv.DictReader((tmp_path / "one" / "results.csv").open())
    assert float(row["maj@4"]) == pytest.approx(1 / 3) and row["dataset"] == "quiz"
    benchmark = json.loads((tmp_path / "one" / "results.json").read_text())["benchmarks"]["quiz"]
    assert benchmark["problems"][1] == {
        "problem_id": "b",
        "greedy": False,
        "right": 1,
        "samples": 4,
    }
    markdown = (tmp_path / "one" / "results.md").read_text()
    assert (
        "| quiz | 3 | 4.0 | 13.8 | 33.3 | 25.0 | 44.4 | 66.7 |" in markdown
        and "\x1b" not in markdown
    )


def results_folder(
    folder: Path, right: list[int], dataset: str = "quiz", **settings: object
) -> Path:
    """An evaluation of some problems with 4 samples each, of which so many are right."""
    folder.mkdir()
    problems = [
        {"problem_id": str(i), "greedy": count > 1, "right": count, "samples": 4}
        for i, count in enumerate(right)
    ]
    content = {
        "format": 1,
        "settings": {"seed": 1} | settings,
        "benchmarks": {dataset: {"problems": problems}},
    }
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_a_difference_in_pairs_is_clearer_than_two_intervals(tmp_path: Path) -> None:
    """Every problem gains one sample of four: the difference is 25 points without any doubt."""
    before = [0, 1, 2, 3] * 3
    first = read_results(results_folder(tmp_path / "a", before))
    second = read_results(
        results_folder(tmp_path / "b", [count + 1 for count in before], about_model="late")
    )
    sampled = next(
        difference
        for difference in differences(first, second)
        if difference.measure == "sample_pass@1"
    )
    # 12 differences of 1/4, with half a problem more of each of 0, 0, 1 and -1: 3/14 -+ z
    # sqrt(0.0791 / 14).
    assert (
        sampled.difference == pytest.approx((0.25, 0.0670, 0.3616), abs=1e-4) and sampled.is_clear
    )
    assert sampled.first[0] == pytest.approx(0.375) and sampled.second[0] == pytest.approx(0.625)
    assert sampled.first[2] > sampled.second[1], "their own intervals overlap"
    unchanged = differences(first, first)[0]
    assert unchanged.difference[0] == 0 and not unchanged.is_clear


def test_a_difference_on_few_problems_is_not_clear(tmp_path: Path) -> None:
    """Both wrong on the same 12: the difference may be 14 points either way.

    Two that were won are no proof."""
    twelve = read_results(results_folder(tmp_path / "twelve", [0] * 12))
    for difference in differences(twelve, twelve):
        assert (
            difference.difference == pytest.approx((0, -0.14, 0.14), abs=1e-3)
            and not difference.is_clear
        )
        assert difference.first == difference.second == pytest.approx((0, 0, 0.2425), abs=1e-4)
    before = read_results(results_folder(tmp_path / "before", [0, 0]))
    after = read_results(results_folder(tmp_path / "after", [4, 4]))
    for difference in differences(before, after):
        assert difference.difference[0] == 1 and not difference.is_clear


def test_only_common_problems_are_compared_and_differences_are_reported(tmp_path: Path) -> None:
    first = read_results(results_folder(tmp_path / "a", [0, 1, 2], temperature=0.6, model="12"))
    second = read_results(
        results_folder(tmp_path / "b", [4, 1], temperature=1.0, model="34") / "results.json"
    )
    text = comparison_text(first, second)
    assert max(len(line) for line in text.splitlines() if line.startswith(("|", "+"))) <= 80
    assert "temperature is 0.6 in the first and 1.0 in the second" in text
    assert "sample_pass@1: 1 problem is in one of the two only" in text and "model is" not in text
    sampled = next(
        difference
        for difference in differences(first, second)
        if difference.measure == "sample_pass@1"
    )
    assert (sampled.problems, sampled.left_out) == (2, 1)
    assert sampled.difference[0] == pytest.approx(0.5)
    assert sampled.first == pytest.approx((0.125, *accuracy_interval([0.0, 0.25], samples=4)))
    assert sampled.second == pytest.approx((0.625, *accuracy_interval([1.0, 0.25], samples=4)))
    cells = [line.strip("| ").split("|") for line in text.splitlines() if "| sample_pass@1" in line]
    assert [[cell.strip() for cell in row] for row in cells] == [
        [
            "quiz",
            "sample_pass@1",
            "12.5",
            "62.5",
            "+50.0",
            _range(sampled.difference, "+"),
            "",
            "2",
        ],
        ["quiz", "sample_pass@1", _range(sampled.first), _range(sampled.second)],
    ]


def _range(mean_and_interval: tuple[float, float, float], sign: str = "") -> str:
    """Both ends in percent, as a table has them."""
    _, low, high = mean_and_interval
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 9}',
        '{"format": 1, "settings": {}, "benchmarks": {"a": {"problems": [1]}}}',
    ],
)
def test_a_broken_results_file_is_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match="--compare"):
        read_results(tmp_path)


def test_problems_that_either_evaluation_lacks_are_counted(tmp_path: Path) -> None:
    """The first has three problems; the second has two of them and three others."""
    first = read_results(results_folder(tmp_path / "a", [0, 1, 2]))
    second = read_results(results_folder(tmp_path / "b", [4, 1, 3, 0, 2]))
    shares = second.accuracies["quiz"]["sample_pass@1"].shares
    shares["elsewhere"] = shares.pop("0")
    sampled = next(row for row in differences(first, second) if row.measure == "sample_pass@1")
    assert (sampled.problems, sampled.left_out) == (2, 4)
    assert sampled.first[0] == pytest.approx((1 + 2) / 8)
    assert sampled.second[0] == pytest.approx((1 + 3) / 8)


def test_benchmarks_of_one_evaluation_alone_are_named(tmp_path: Path) -> None:
    evaluations = []
    for name, benchmark in (("a", "early"), ("b", "late")):
        folder = results_folder(tmp_path / name, [1])
        content = json.loads((folder / "results.json").read_text())
        content["benchmarks"][benchmark] = content["benchmarks"]["quiz"]
        (folder / "results.json").write_text(json.dumps(content))
        evaluations.append(read_results(folder))
    first, second = evaluations
    assert "In one of the two only: early, late." in comparison_text(first, second)
    assert "In one of the two only" not in comparison_text(first, first)


def test_a_prompt_that_is_as_long_as_allowed_is_answered(tmp_path: Path) -> None:
    benchmark = Benchmark("quiz", (problem("a", tokens=50), problem("b", tokens=51)), unusable=0)
    records: dict[Key, CompletionRecord] = {("a", GREEDY_INDEX): completion("7")}
    plan = plan_for(tmp_path, samples=0)
    row = result_of(benchmark, records, plan, max_prompt_tokens=50).row
    assert (row["too_long"], row["greedy_acc"]) == (1, 0.5)


def test_nothing_in_common_is_reported(tmp_path: Path) -> None:
    first = read_results(results_folder(tmp_path / "a", [1]))
    second = read_results(results_folder(tmp_path / "b", [1], dataset="other"))
    with pytest.raises(ValueError, match="a benchmark in common"):
        differences(first, second)
    with pytest.raises(ValueError, match="there is no"):
        read_results(tmp_path / "c")


def test_references_that_no_answer_equals_are_reported() -> None:
    good = problem("good")
    bad = replace(good, prompt_id="bad", solutions=("see solution",))
    algebra = replace(good, prompt_id="algebra", solutions=("x^2+1",))
    benchmarks = [Benchmark("fine", (good, algebra), 0), Benchmark("quiz", (good, bad), 0)]
    tokenizer = chat_tokenizer("mistral")
    (warning,) = benchmark_warnings(benchmarks, tokenizer, verified=True)
    assert benchmark_warnings(benchmarks, tokenizer, verified=False) == ()
    assert "1 of 2 quiz prompts have no usable reference" in warning and "'bad'" in warning


def test_lengths_that_do_not_fit_the_model_say_what_to_set() -> None:
    problems = [problem("short", 10), problem("long", 100)]
    for positions, new_tokens, most_prompt, limits in (
        (164, 64, None, LengthLimits(100, 64)),
        (None, 64, None, LengthLimits(100, 64)),
        (100, 64, 36, LengthLimits(36, 64)),
        (164, None, None, LengthLimits(100, 64)),  # what the longest prompt leaves
        (500, None, None, LengthLimits(100, 77)),  # the default
        (500, None, 440, LengthLimits(440, 60)),
        (None, None, None, LengthLimits(100, 77)),
    ):
        assert check_lengths(problems, positions, new_tokens, most_prompt, 77) == limits
    with pytest.raises(ValueError, match=r"'long'.* has 100") as error:
        check_lengths(problems, 150, 64, None, 77)
    assert "--max-new-tokens 50" in str(error.value) and "--max-prompt-tokens 86" in str(
        error.value
    )
    with pytest.raises(ValueError, match="Set --max-new-tokens 1 or less; or set"):
        check_lengths(problems, 101, 64, None, default_new_tokens=77)
    with pytest.raises(ValueError, match=r"\. set --max-prompt-tokens 36, and longer prompts"):
        check_lengths(problems, 100, 64, None, default_new_tokens=77)
    with pytest.raises(ValueError, match="--max-prompt-tokens is 90"):
        check_lengths(problems, 150, 64, 90, 77)
    with pytest.raises(ValueError, match="set --max-prompt-tokens 99, and longer"):
        check_lengths(problems, 100, None, None, 77)
