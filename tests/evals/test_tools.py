"""Evaluations whose completions call a tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.config.load import config_as_yaml
from rlmath.config.schema import Config, DataConfig, ModelConfig, RunConfig, ToolsConfig
from rlmath.evals.benchmarks import Benchmark, LengthLimits, Problem, check_lengths
from rlmath.evals.command import parse, plan_of
from rlmath.evals.completions import CompletionRecord, Writer, read_completions
from rlmath.evals.plan import Plan
from rlmath.evals.runner import _missing as missing_of
from rlmath.evals.runner import check_records
from tests.distributed.rank_pool import RankPool
from tests.evals.test_evaluation import evaluate_in_pool
from tests.tool_models import CODES, PROMPT, make_script_model

TOOLS = ToolsConfig(format="fence", max_calls=3, max_output_tokens=64)


def test_outputs_leave_less_room_for_a_completion() -> None:
    problem = Problem("q", "?", (1,) * 100, solutions=("1",), task="math", benchmark="quiz")
    limits = check_lengths([problem], 500, None, None, default_new_tokens=999, tool_tokens=240)
    assert limits == LengthLimits(100, 160)
    told = (
        "100, --max-new-tokens is 170: together 10 tokens more than the 500 positions of the model"
    )
    with pytest.raises(ValueError, match=told) as error:
        check_lengths([problem], 500, 170, None, default_new_tokens=9, tool_tokens=240)
    assert "less 240 for outputs of tools" in str(error.value)
    assert "Set --max-new-tokens 160" in str(error.value)


@pytest.mark.parametrize(
    ("options", "of_run", "expected"),
    [
        ([], None, ToolsConfig()),
        (["--tools", "fence"], None, ToolsConfig(format="fence")),
        ([], TOOLS, TOOLS),
        (["--tools", "fence"], ToolsConfig(max_calls=2), ToolsConfig(format="fence", max_calls=2)),
        (["--tools", "chat"], TOOLS, ToolsConfig("chat", max_calls=3, max_output_tokens=64)),
        (["--tools", "none"], TOOLS, ToolsConfig(max_calls=3, max_output_tokens=64)),
    ],
)
def test_the_tool_is_that_of_the_command_or_of_the_models_run(
    tmp_path: Path, options: list[str], of_run: ToolsConfig | None, expected: ToolsConfig
) -> None:
    if of_run is not None:
        run = RunConfig(output_dir=str(tmp_path))
        data = DataConfig(train_path="t", template="raw")
        config = Config(run=run, model=ModelConfig("m"), data=data, tools=of_run)
        (tmp_path / "config.yaml").write_text(config_as_yaml(config), encoding="utf-8")
    paths = ["--model", str(tmp_path), "--data-dir", "d", "--output", str(tmp_path / "o")]
    assert plan_of(parse([*paths, "--benchmarks", "quiz", *options])).tools == expected


PROBLEM = Problem("q", "?", (1,), solutions=("1",), task="math", benchmark="quiz")


def record_of(index: int, finish_reason: str) -> CompletionRecord:
    return CompletionRecord(
        problem_id="q",
        mode="sample",
        sample=index,
        seed=index,
        prompt_hash=PROBLEM.prompt_hash,
        text="",
        tokens=3,
        finish_reason=finish_reason,
        correct=False,
        extracted="",
        verdict="error",
        calls=[{"code": "1", "output": "killed", "status": "lost"}],
    )


def test_lost_completions_are_sampled_again_and_many_end_the_evaluation(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    for index in range(5):
        writer.add("quiz", record_of(index, "lost"))
    with pytest.raises(RuntimeError, match=r"5 of 5 completions with calls are lost.*killed"):
        check_records(list(read_completions(tmp_path, "quiz").values()))
    for index in range(4):
        writer.add("quiz", record_of(index, "stop"))
    writer.close()
    records = read_completions(tmp_path, "quiz")
    assert [record.is_lost for record in records.values()] == [False] * 4 + [True]
    check_records(list(records.values()))
    plan = Plan(tmp_path, ("quiz",), tmp_path, output=tmp_path, samples=5, greedy=False)
    (gap,) = missing_of(Benchmark("quiz", (PROBLEM,), 0), plan, LengthLimits(9, 9))
    assert gap.indices == (4,)


@pytest.mark.distributed
def test_an_evaluation_calls_tools(tmp_path: Path, ranks: RankPool) -> None:
    """Outputs are kept beside the text, not in it, and do not count as tokens."""
    model = make_script_model(tmp_path / "model")
    rows = [{"question": PROMPT, "answer": "42"}, {"question": "6x8:", "answer": "48"}]
    (tmp_path / "quiz.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    plan = Plan(
        model,
        ("quiz",),
        tmp_path,
        output=tmp_path / "output",
        samples=8,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=30,
        template="raw",
        tools=TOOLS,
    )
    (results,) = ranks.run(1, evaluate_in_pool, plan)
    assert not isinstance(results, str), results
    (path,) = (tmp_path / "output").glob("generations/quiz/*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 18
    calls = [call for record in records for call in record.get("calls", [])]
    assert {call["status"] for call in calls} == {"ok", "error"}
    for call in calls:
        assert call["code"] != CODES[0] or call["output"] == "42\n"
    for record in records:
        assert record["tokens"] <= 30 and "output" not in record["text"]
        assert record["correct"] == (
            "\\boxed{42}" in record["text"] and record["problem_id"] == "0"
        )
    assert any(record["correct"] and record.get("calls") for record in records)
    settings = json.loads((tmp_path / "output" / "settings.json").read_text())
    assert settings["common"]["tools"]["max_calls"] == 3
