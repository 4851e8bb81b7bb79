"""Evaluations of a few problems by a small random model, as far as they need no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.device import Device
from rlmath.evals.completions import CompletionRecord, Writer
from rlmath.evals.plan import GREEDY_INDEX, Plan
from rlmath.evals.runner import _prepare, _Prepared
from rlmath.workers.worker_pool import WorkerPool
from tests.data.chat_templates import chat_tokenizer
from tests.tiny_models import make_model_folder

NO_POOL = cast(WorkerPool, None)
"""Only a scorer's trial asks the pool."""
ROLLOUT = RolloutConfig(cuda_graphs=False, max_num_seqs=2)
POSITIONS = 512
LONG_PROMPT = "1+" * 100
PROMPTS = {"quiz": ("1+1", LONG_PROMPT, "1+2"), "exam": ("2+2",)}
"""Problems by benchmark. The solution of each is its number."""


def make_chat_model(folder: Path, seed: int = 5, **changes: int) -> Path:
    """A random model whose tokenizer has the bytes, and Qwen's chat template."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 1, "max_position_embeddings": POSITIONS}
    make_model_folder(folder, seed=seed, **sizes | changes)
    chat_tokenizer("qwen3").save_pretrained(folder)
    return folder


def small_plan(model: Path, folder: Path) -> Plan:
    """The evaluation of PROMPTS, whose files and output are in the folder."""
    for name, texts in PROMPTS.items():
        rows = [
            {"question": text, "answer": str(number), "id": f"{name}-{number}"}
            for number, text in enumerate(texts)
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return Plan(
        model,
        tuple(PROMPTS),
        data_dir=folder,
        output=folder / "out",
        samples=2,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=40,
        seed=9,
    )


def prepared_of(
    plan: Plan, rollout: RolloutConfig = ROLLOUT, pool: WorkerPool = NO_POOL, kind: Any = "cpu"
) -> _Prepared:
    """What is read before completions are sampled."""
    device = Device(kind, torch.device("cpu"), "gloo", torch.float32)
    return _prepare(plan, rollout, pool, device)


def write_missing(
    prepared: _Prepared,
    plan: Plan,
    right: Callable[[str, int], bool] = lambda problem_id, index: False,
    **changes: Any,
) -> None:
    """Write a completion for each that is missing, as if it had been sampled."""
    writer = Writer(plan.output, 0)
    for problem, indices in prepared.missing:
        for index in indices:
            record = CompletionRecord(
                problem_id=problem.prompt_id,
                mode="greedy" if index == GREEDY_INDEX else "sample",
                sample=max(index, 0),
                seed=1,
                prompt_hash=problem.prompt_hash,
                text="",
                tokens=10 + index,
                finish_reason="stop",
                correct=right(problem.prompt_id, index),
                extracted="7",
                verdict="string",
            )
            writer.add(problem.benchmark, replace(record, **changes))
    writer.close()
