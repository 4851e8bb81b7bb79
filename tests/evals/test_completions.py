from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.evals.completions import (
    CompletionRecord,
    Writer,
    read_completions,
    remove_unfinished_lines,
)
from rlmath.evals.plan import GREEDY_INDEX, Plan, check_settings, completion_seed, read_settings


def record(
    problem_id: str, sample: int = 0, mode: str = "sample", text: str = "so \\boxed{7}"
) -> CompletionRecord:
    return CompletionRecord(
        problem_id, mode, sample, 11, "abcd", text, 9, "stop", True, "7", "string"
    )


def write(folder: Path, *records: CompletionRecord, rank: int = 0) -> Path:
    writer = Writer(folder, rank)
    for completion in records:
        writer.add("aime24", completion)
    writer.close()
    return folder / "generations" / "aime24" / f"rank-{rank:04d}.jsonl"


def test_what_was_written_is_read_from_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, record("60"), record("60", 1), rank=0)
    write(tmp_path, record("60", mode="greedy"), record("61", 3), rank=7)
    completions = read_completions(tmp_path, "aime24")
    assert completions.keys() == {("60", 0), ("60", 1), ("60", GREEDY_INDEX), ("61", 3)}
    assert completions["61", 3] == record("61", 3, text="")
    assert read_completions(tmp_path, "aime25") == {}


def test_hostile_text_is_one_line_of_ascii_and_comes_back(tmp_path: Path) -> None:
    text = '\x1b[2J\r\n\u2028\ud800 \x00 {"problem_id": "61"}\n'
    path = write(tmp_path, record("60\n\u202e", text=text))
    (line,) = path.read_bytes().splitlines()
    assert line.isascii() and json.loads(line)["text"] == text
    assert read_completions(tmp_path, "aime24").keys() == {("60\n\u202e", 0)}


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_cut_line_is_removed_and_its_file_goes_on(tmp_path: Path, kept: int) -> None:
    long = record("60", 0, text="x" * 200_000)
    path = write(tmp_path, record("59"), long)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1 + kept])
    assert remove_unfinished_lines(tmp_path) == (kept > 0)
    assert read_completions(tmp_path, "aime24").keys() == {("59", 0)}
    write(tmp_path, long)
    assert path.read_bytes() == whole
    assert remove_unfinished_lines(tmp_path) == 0 and path.read_bytes() == whole


def test_a_file_with_nothing_but_a_cut_line_becomes_empty(tmp_path: Path) -> None:
    path = write(tmp_path, record("60", text="y" * 300_000))
    path.write_bytes(path.read_bytes()[:250_000])
    assert remove_unfinished_lines(tmp_path) == 1 and path.read_bytes() == b""
    assert read_completions(tmp_path, "aime24") == {}


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "nonsense", "[" * 100_000, '{"problem_id": "60"}', "\x00"]
)
def test_a_broken_line_is_reported(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, record("60"))
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(ValueError, match=r"rank-0000\.jsonl, line 1"):
        read_completions(tmp_path, "aime24")


COMMON = {"about_model": "a/b", "model": "1234", "template": "auto", "max_new_tokens": 64}
SAMPLED = {"temperature": 0.6, "top_p": 0.95, "seed": 1}


def test_the_same_settings_agree_and_more_modes_are_no_difference(tmp_path: Path) -> None:
    check_settings(tmp_path, COMMON, None)
    write(tmp_path, record("60"))
    check_settings(tmp_path, COMMON | {"about_model": "elsewhere"}, SAMPLED)
    check_settings(tmp_path, COMMON, None)
    check_settings(tmp_path, COMMON, SAMPLED)
    assert read_settings(tmp_path) == COMMON | SAMPLED


@pytest.mark.parametrize(
    ("common", "sampled", "message"),
    [
        ({"model": "5678", "about_model": "c"}, {}, "model was 'a/b' (1234), now it is 'c' (5678)"),
        ({"max_new_tokens": 32}, {}, "max_new_tokens was 64, now it is 32"),
        ({"answer_from": "number"}, {}, "answer_from was 'boxed', now it is 'number'"),
        ({}, {"temperature": 1.0}, "temperature was 0.6, now it is 1.0"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, common: dict, sampled: dict, message: str
) -> None:
    check_settings(tmp_path, COMMON, SAMPLED)
    write(tmp_path, record("60"))
    with pytest.raises(ValueError, match="Give another --output") as error:
        check_settings(tmp_path, COMMON | common, SAMPLED | sampled)
    assert message in str(error.value)
    assert read_settings(tmp_path) == COMMON | SAMPLED


def test_settings_of_an_evaluation_that_failed_at_its_start_are_replaced(tmp_path: Path) -> None:
    check_settings(tmp_path, COMMON, SAMPLED)
    other = COMMON | {"model": "5678"}
    check_settings(tmp_path, other, None)
    assert read_settings(tmp_path) == other


def test_seeds_differ_by_all_that_a_completion_is(tmp_path: Path) -> None:
    seeds = {
        completion_seed(seed, benchmark, problem, index)
        for seed in (1, 2)
        for benchmark in ("aime24", "aime25")
        for problem in ("0", "1")
        for index in range(8)
    }
    assert len(seeds) == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"samples": -1}, "--samples is -1"),
        ({"temperature": 0.0}, "For temperature 0 there is greedy"),
        ({"template": "chatml"}, "--template"),
        ({"benchmarks": ()}, "--benchmarks"),
        ({"samples": 1001}, "--samples is 1001"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"limit": 0}, "--limit is 0"),
        ({"greedy": False, "samples": 0}, "--no-greedy with --samples 0"),
        ({"template": "nowhere.py:write"}, "--template"),
        ({"scorer": "nowhere.py:judge"}, "--scorer"),
        ({"plugins": ("nowhere.py",)}, "--plugin"),
    ],
)
def test_impossible_plans_are_refused(tmp_path: Path, values: dict, message: str) -> None:
    arguments = {
        "model": tmp_path,
        "benchmarks": ("aime24",),
        "data_dir": tmp_path,
        "output": tmp_path,
    } | values
    with pytest.raises(ValueError, match="evaluation") as error:
        Plan(**arguments)
    assert message in str(error.value)
