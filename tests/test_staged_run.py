"""A run of three stages with validation.

Its validation is that of the models it leaves, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.forked_ranks import run_ranks
from tests.programs import TRAIN, rows, run, small_run
from tests.selection import two_ranks

STAGES = ("stages.steps=[2,2,1]", "stages.max_new_tokens=[8,16,24]")
COMMON = """
reward.function=shortness:reward optimizer.decay=constant optimizer.min_lr=0 optimizer.lr=0.002
algorithm.loss_normalisation=constant save.ckpt_freq_steps=1 save.keep_last=5
""".split()
FUNCTION = """
def reward(completion, solutions, row):
    return -float(len(completion)), {"correct": len(completion) < 10}


def short(completion, solutions, row):
    return len(completion) < 10
"""
"""The random model is never right, but it can learn to be short."""


class StagedRun(NamedTuple):
    """An undisturbed run."""

    folder: Path
    console: str
    ranks: int


def train(place: Path, folder: Path, ranks: int, *overrides: str) -> str:
    """What the console said."""
    settings = [*small_run(place, folder), f"parallel.tensor={ranks}", *COMMON, *overrides]
    return run_ranks(ranks, [*TRAIN, *settings], path=place / "shortness").stderr


def staged(place: Path) -> tuple[str, ...]:
    """Greedy validation every two steps on 20 problems, and on three of which one is too long."""
    paths = f"validation.paths=[{place}/data/heldout.jsonl,{place}/odd.jsonl]"
    validation_settings = (
        "validation.every_steps=2",
        "validation.temperature=0",
        "validation.batch_size=8",
    )
    validation_settings += ("validation.scorer=shortness:short",)
    budgets = "stages.max_tokens_per_microbatch=[256,512,1024]"
    return (
        *STAGES,
        budgets,
        "run.total_steps=null",
        paths,
        *validation_settings,
        "validation.keep_best=true",
    )


@pytest.fixture(scope="module", params=[1, two_ranks(pytest.mark.full)])
def whole(
    arithmetic: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> StagedRun:
    (arithmetic / "shortness").mkdir(exist_ok=True)
    (arithmetic / "shortness" / "shortness.py").write_text(FUNCTION)
    odd = [
        {"prompt": prompt, "task": "math", "query_id": f"odd-{number}", "solutions": ["3"]}
        for number, prompt in enumerate(("1+2=", "2+1=", "0+" * 30 + "3="))
    ]
    (arithmetic / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    folder = tmp_path_factory.mktemp("staged") / "whole"
    console = train(arithmetic, folder, request.param, *staged(arithmetic))
    return StagedRun(folder, console, request.param)


def test_validations_are_those_of_the_weights_that_were_kept(
    arithmetic: Path, whole: StagedRun
) -> None:
    folder = whole.folder
    rows_by_step = {row["step"]: row for row in rows(folder, "validation.jsonl")}
    assert list(rows_by_step) == [0, 2, 4, 5]
    for row in rows_by_step.values():
        accuracies = [row["validation/heldout/accuracy"], row["validation/odd/accuracy"]]
        assert (
            row["validation/accuracy"] == pytest.approx(sum(accuracies) / 2)
            and accuracies[1] <= 2 / 3
        )
    assert "Validation odd: 3 problems, 1 of them too long for the context" in whole.console
    account = json.loads((folder / "best_model" / "validation.json").read_text())
    best = max(row["validation/accuracy"] for row in rows_by_step.values())
    assert best > rows_by_step[0]["validation/accuracy"]
    first = next(step for step, row in rows_by_step.items() if row["validation/accuracy"] == best)
    assert (account["step"], account["accuracy"]) == (first, best)
    stage = {2: 1, 4: 2, 5: 3}[first]
    best_weights, stage_weights = (
        load_file(folder / f / "model.safetensors") for f in ("best_model", f"models/stage-{stage}")
    )
    assert all(torch.equal(best_weights[name], stage_weights[name]) for name in stage_weights)
    assert greedy(arithmetic, folder / "best_model") == pytest.approx(
        (
            rows_by_step[first]["validation/heldout/accuracy"],
            rows_by_step[first]["validation/heldout/mean_tokens"],
        )
    )


def greedy(place: Path, model: Path) -> tuple[float, float]:
    """(share of answers that are short, mean tokens) by a fresh vLLM."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (place / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    console = run("-m", "tests.greedy_answers", str(model), "24", json.dumps(prompts)).stdout
    answers = json.loads(console.strip().splitlines()[-1])
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return sum(len(text) < 10 for text in texts) / len(texts), sum(map(len, answers)) / len(answers)


def test_the_first_stage_is_a_plain_run_and_validation_changes_nothing(
    arithmetic: Path, whole: StagedRun, tmp_path: Path
) -> None:
    lengths = (
        "rollout.max_new_tokens=8",
        "policy.max_tokens_per_microbatch=256",
        "run.total_steps=2",
    )
    train(arithmetic, tmp_path / "plain", whole.ranks, *lengths)
    staged_names = ("stage", "rollout/max_new_tokens")
    stage = [
        {key: metric for key, metric in row.items() if key not in staged_names}
        for row in rows(whole.folder)[:2]
    ]
    assert rows(tmp_path / "plain") == stage
    stage_model = whole.folder / "models" / "stage-1"
    plain_model = tmp_path / "plain" / "hf_model"
    assert (stage_model / "model.safetensors").read_bytes() == (
        plain_model / "model.safetensors"
    ).read_bytes()
