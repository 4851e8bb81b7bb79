"""Whole evaluations with real engines, over every benchmark file, by a model that guesses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.fault_tolerance.exit_codes import SAVED_AND_STOPPED, read_exit_status
from rlmath.evals.command import main
from rlmath.evals.plan import Plan
from tests.distributed.rank_pool import RankPool
from tests.evals.guessing_model import make_guessing_model
from tests.programs import ENVIRONMENT, REPOSITORY, end_family, run
from tests.selection import matrix

DATA = REPOSITORY.parent / "shared" / "data" / "benchmarks"
NAMES = (
    "aime24",
    "aime25",
    "amc23",
    "math_500",
    "gsm8k",
    "minerva_math",
    "olympiadbench",
    "gpqa_diamond",
)
PROGRAM = "launch/evaluate.py"
LIMIT = 3
SAMPLES = 8
NEW_TOKENS = 48
PROMPT_TOKENS = 700

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files are not there"),
]


def evaluate_in_pool(plan: Plan, max_num_seqs: int = 64, tensor_parallel: int = 1) -> Any:
    """What a rank of the program does; its table, on rank 0."""
    from rlmath.evals.runner import evaluate

    rollout = RolloutConfig(
        tensor_parallel=tensor_parallel,
        cpu_kv_cache_gib=0.1,
        max_num_seqs=max_num_seqs,
        cuda_graphs=False,
    )
    try:
        return evaluate(plan, rollout, reward_workers=1, reward_timeout=5.0, device_kind="cpu")
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def model(arithmetic: Path) -> Path:
    return make_guessing_model(arithmetic / "base", arithmetic / "guessing")


def plan_for(model: Path, output: Path, **changes: Any) -> Plan:
    limits = {
        "samples": SAMPLES,
        "max_new_tokens": NEW_TOKENS,
        "max_prompt_tokens": PROMPT_TOKENS,
        "limit": LIMIT,
    }
    return Plan(model, NAMES, DATA, output, **limits | changes)


def options(model: Path, output: Path) -> list[str]:
    """The same plan as arguments."""
    path_options = ["--model", str(model), "--data-dir", str(DATA), "--output", str(output)]
    benchmark_options = [
        "--benchmarks",
        ",".join(NAMES),
        "--limit",
        str(LIMIT),
        "--samples",
        str(SAMPLES),
    ]
    length_options = [
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--max-prompt-tokens",
        str(PROMPT_TOKENS),
    ]
    return [*path_options, *benchmark_options, *length_options, "--cpu-kv-cache-gib", "0.1"]


def completions(output: Path) -> list[str]:
    """Every line of every file, without who wrote it."""
    return sorted(
        line
        for path in output.glob("generations/*/*.jsonl")
        for line in path.read_text().splitlines()
    )


def tables(output: Path) -> list[bytes]:
    return [(output / f"results.{suffix}").read_bytes() for suffix in ("json", "csv", "md")]


@pytest.fixture(scope="module")
def evaluated(model: Path, ranks: RankPool) -> Path:
    """An evaluation by one process, never stopped."""
    output = model.parent / "one"
    ranks.run(1, evaluate_in_pool, plan_for(model, output))
    return output


@matrix
def test_every_benchmark_is_evaluated(evaluated: Path) -> None:
    benchmarks = json.loads((evaluated / "results.json").read_text())["benchmarks"]
    assert tuple(benchmarks) == NAMES
    rows = {name: benchmark["row"] for name, benchmark in benchmarks.items()}
    for row in rows.values():
        assert row["num_questions"] == LIMIT
        assert 0 < row["sample_length"] <= NEW_TOKENS and 0 <= row["sample_truncated"] <= 1
        assert row["sample_pass@1"] <= row["pass@2"] <= row["pass@4"] <= row["pass@8"]
        assert row["sample_pass@1_low"] <= row["sample_pass@1"] <= row["sample_pass@1_high"]
    right = {
        name: sum(p["right"] for p in benchmark["problems"])
        for name, benchmark in benchmarks.items()
    }
    assert right["gpqa_diamond"] > 0, "24 guesses, each a letter in 4 of 14 cases"
    assert sum(right.values()) < LIMIT * SAMPLES * len(NAMES) / 2
    assert 0 < sum(row["too_long"] for row in rows.values()) < LIMIT * len(NAMES), (
        "some prompts are too long"
    )


@pytest.mark.full
def test_two_engines_sample_the_same_texts(model: Path, evaluated: Path, ranks: RankPool) -> None:
    output = model.parent / "two"
    outputs = ranks.run(2, evaluate_in_pool, plan_for(model, output), 4)
    assert outputs[0] is not None and outputs[1] is None
    assert completions(output) == completions(evaluated)
    assert tables(output) == tables(evaluated)
    writers = {path.name for path in output.glob("generations/*/*.jsonl")}
    assert writers == {"rank-0000.jsonl", "rank-0001.jsonl"}


@pytest.mark.full
def test_stopped_half_way_twice_and_continued_it_gives_the_same_table(
    model: Path, evaluated: Path, ranks: RankPool
) -> None:
    """It is stopped by Ctrl-C, killed as one process, and refused with another plan.

    Then it is resumed on two ranks, and started once more."""
    output = model.parent / "stopped"
    command = [*options(model, output), "--max-num-seqs", "2"]
    first, status, console = stop_half_way(command, output, signal.SIGINT)
    assert status == read_exit_status(output).status == SAVED_AND_STOPPED, console
    assert console.splitlines()[-1].endswith("stopped by SIGINT (Ctrl-C): the same command resumes")
    assert "Traceback" not in console and "KeyboardInterrupt" not in console
    later, status, _ = stop_half_way(command, output, signal.SIGKILL)
    assert status == -signal.SIGKILL and set(first) < set(later)
    assert 0 < len(first) < len(later) < len(completions(evaluated)) / 2
    with next(iter(output.glob("generations/*/*.jsonl"))).open("a") as file:
        file.write('{"problem_id": "cut o')
    (refusal,) = ranks.run(1, evaluate_in_pool, plan_for(model, output, temperature=1.0))
    assert "temperature was 0.6, now it is 1.0" in refusal and "--output" in refusal
    ranks.run(2, evaluate_in_pool, plan_for(model, output))
    assert completions(output) == completions(evaluated) and set(later) <= set(completions(output))
    assert tables(output) == tables(evaluated)
    ranks.run(1, evaluate_in_pool, plan_for(model, output))  # nothing is missing
    assert tables(output) == tables(evaluated) and completions(output) == completions(evaluated)


def stop_half_way(
    arguments: list[str], output: Path, number: signal.Signals
) -> tuple[list[str], int, str]:
    """Send a signal to the program and what it has started, once it has written completions.

    Returns the whole lines that it has written by then, its exit status, and its output."""
    console = output.with_suffix(".txt")
    before = written_bytes(output)
    with console.open("w") as file:
        program = subprocess.Popen(
            [sys.executable, PROGRAM, *arguments],
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stdout=file,
            stderr=file,
            process_group=0,
        )
    try:
        until = time.monotonic() + 400
        while written_bytes(output) == before:
            assert program.poll() is None and time.monotonic() < until, console.read_text()
            time.sleep(0.02)
        os.killpg(program.pid, number)
        status = program.wait(300)
    finally:
        end_family(program)
    lines = [
        line
        for path in output.glob("generations/*/*.jsonl")
        for line in path.read_text().splitlines(True)
    ]
    return [line.rstrip("\n") for line in lines if line.endswith("\n")], status, console.read_text()


def written_bytes(output: Path) -> int:
    return sum(path.stat().st_size for path in output.glob("generations/*/*.jsonl"))


@matrix
def test_prompts_that_do_not_fit_the_model_are_reported(
    model: Path, ranks: RankPool, tmp_path: Path
) -> None:
    (too_long,) = ranks.run(1, evaluate_in_pool, plan_for(model, tmp_path, max_new_tokens=2000))
    assert "set --max-prompt-tokens 48" in too_long
    assert not (tmp_path / "settings.json").exists()


@matrix
def test_two_evaluations_are_put_side_by_side(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--compare", str(evaluated), str(evaluated / "results.json")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "gpqa_diamond" in line]
    gains = rows[:2]
    intervals = [row.split("|")[-3:-1] for row in rows[2:]]
    assert len(gains) == len(intervals) == 2
    for gain in gains:
        assert "+0.0" in gain and "-39.2 to +39.2" in gain and "clear" not in gain, (
            "three problems show little"
        )
    assert all(first.strip() == second.strip() != "" for first, second in intervals)


@matrix
def test_a_second_start_only_prints_the_table(model: Path, evaluated: Path) -> None:
    before = tables(evaluated)
    repeated = run(PROGRAM, *options(model, evaluated))
    assert tables(evaluated) == before
    lines = repeated.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if line.startswith("|"))
    first, second = [
        line.split("|") for line in lines if "num_questions" in line or "pass@2" in line
    ]
    assert [cell.strip() for cell in (*first[1:-1], *second[2:-1])] == [
        "dataset",
        "num_questions",
        "greedy_length",
        "sample_length",
        "greedy_acc",
        "sample_pass@1",
        "pass@2",
        "pass@4",
        "pass@8",
    ]
