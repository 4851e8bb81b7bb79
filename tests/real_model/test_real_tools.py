"""A real chat model calls Python in its chat: supervised training, GRPO, validation and evaluation.

SmolLM2's own chat template has no tools; here it has one of Qwen2.5's kind, in which 48 worked
conversations teach it to let Python compute."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rlmath import load_config, train
from rlmath.cli.api import Run
from rlmath.config.load import config_as_yaml
from rlmath.data.chat import assistant, user
from rlmath.data.tool_chats import DESCRIPTION, PYTHON
from rlmath.report.results_file import GREEDY, read_results
from tests.data.tool_chat_templates import TOOL_CHATS
from tests.programs import run, torchrun_command
from tests.real_model.test_real_model import BOXED, MEAN_APART, MOST_APART

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(1800)]

STEPS = 2
PROMPTS = 8
GROUP = 2
HELD_OUT = 24
"""Problems of validation and evaluation."""


def remainders(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Two factors and a divisor, whose remainder no model of this size knows."""
    draw = random.Random(seed)
    return [
        (draw.randint(120, 980), draw.randint(12, 98), draw.randint(60, 98)) for _ in range(count)
    ]


def question(first: int, second: int, divisor: int) -> str:
    return f"What is the remainder of {first} * {second} divided by {divisor}?"


def conversation(first: int, second: int, divisor: int) -> dict[str, Any]:
    """A worked conversation: the call, its output, and the answer."""
    remainder = first * second % divisor
    arguments = {"code": f"print({first} * {second} % {divisor})"}
    call = {"type": "function", "function": {"name": "python", "arguments": arguments}}
    messages = [
        user(question(first, second, divisor) + BOXED),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{remainder}\n"},
        assistant(f"\\boxed{{{remainder}}}"),
    ]
    return {"messages": messages, "tools": [PYTHON]}


def problem(first: int, second: int, divisor: int) -> dict[str, str]:
    remainder = first * second % divisor
    return {"question": question(first, second, divisor), "answer": str(remainder)}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def trained(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """GRPO with the tool after supervised training on calls, compared with transformers."""
    folder = tmp_path_factory.mktemp("real_tools")
    write_rows(folder / "worked.jsonl", [conversation(*numbers) for numbers in remainders(0, 48)])
    write_rows(
        folder / "train.jsonl", [problem(*numbers) for numbers in remainders(1, STEPS * PROMPTS)]
    )
    write_rows(
        folder / "remainders.jsonl", [problem(*numbers) for numbers in remainders(2, HELD_OUT)]
    )
    (folder / "tools.jinja").write_text(TOOL_CHATS["qwen2.5"], encoding="utf-8")
    common = {"policy": {"max_tokens_per_microbatch": 1024}, "save": {"ckpt_freq_secs": None}}
    supervised = load_config(
        run={"output_dir": folder / "sft"},
        model={"path": real_model},
        data={
            "train_path": folder / "worked.jsonl",
            "chat_template": folder / "tools.jinja",
            "prompts_per_step": 8,
        },
        sft={"max_sequence_tokens": 384, "held_out_share": 0, "eval_every_steps": None},
        optimizer={"lr": 1e-4, "warmup_steps": 2},
        **common,
    )
    train(supervised, ranks=2, program="sft")
    grpo = load_config(
        run={"output_dir": folder / "grpo", "total_steps": STEPS},
        model={"path": folder / "sft" / "hf_model"},
        data={
            "train_path": folder / "train.jsonl",
            "prompts_per_step": PROMPTS,
            "max_prompt_tokens": 256,
        },
        optimizer={"lr": 3e-6, "warmup_steps": 1},
        rollout={"group_size": GROUP, "max_new_tokens": 96},
        algorithm={"entropy_coef": 0.01},  # an update, though all of a step may be right
        tools={"format": "chat", "max_calls": 2, "max_output_tokens": 64},
        validation={
            "every_steps": STEPS,
            "paths": [str(folder / "remainders.jsonl")],
            "temperature": 0,
        },
        telemetry={"sample_groups_per_step": PROMPTS},
        **common,
    )
    (folder / "grpo.yaml").write_text(config_as_yaml(grpo))
    program = ("-m", "tests.real_model.checked_run", "--config", str(folder / "grpo.yaml"))
    run(*torchrun_command(2, *program), timeout=1200)
    return Run(folder / "grpo")


def test_it_calls_python_and_answers_with_what_was_printed(trained: Run) -> None:
    completions = trained.samples()
    assert len(completions) == STEPS * PROMPTS * GROUP
    for completion in completions:
        assert DESCRIPTION in completion["prompt"]
        called = re.findall(r"print\((\d+) \* (\d+) % (\d+)\)", completion["text"])
        printed = [call["output"] for call in completion.get("calls", ())]
        remainders_called = [int(a) * int(b) % int(divisor) for a, b, divisor in called]
        assert printed == [f"{remainder}\n" for remainder in remainders_called[: len(printed)]]
        if completion["correct"] and printed:
            assert f"\\boxed{{{printed[-1].strip()}}}" in completion["text"]
    assert sum(completion["correct"] for completion in completions) > len(completions) / 2
    assert min(row["tools/calls_per_completion"] for row in trained.metrics()) > 0.5


def test_log_probs_are_those_of_transformers_also_behind_outputs(trained: Run) -> None:
    lines = (trained.folder / "compared.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["most"] < MOST_APART and row["mean"] < MEAN_APART for row in rows), rows
    metrics = trained.metrics()
    assert all(0 < row["train/behaviour_logprob_diff"] < MEAN_APART for row in metrics)
    assert all(row["tools/given_tokens"] > 0 for row in metrics)


def test_it_is_right_with_the_tool_and_wrong_without(trained: Run) -> None:
    folder = trained.folder.parent
    lines = (trained.folder / "validation.jsonl").read_text().splitlines()
    before, after = (json.loads(line)["validation/accuracy"] for line in lines)
    assert min(before, after) > 0.7
    accuracies = {}
    for tools in ("chat", "none"):
        output = folder / f"eval-{tools}"
        words = f"-m rlmath.cli.main eval --benchmarks remainders --samples 0 --tools {tools}"
        folders = f"--model {trained.folder} --data-dir {folder} --output {output}"
        run(*words.split(), *folders.split())
        accuracies[tools] = read_results(output).accuracies["remainders"][GREEDY].mean
    assert accuracies["chat"] == pytest.approx(after) and accuracies["none"] < 0.2
