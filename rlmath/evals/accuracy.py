"""How often a model answers rightly: one file of prompts, sampled by a fresh vLLM of this process, judged as in
training, and nothing kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlmath.config.schema import RolloutConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.evals.benchmarks import Problem, load_benchmark
from rlmath.evals.completions import Record
from rlmath.evals.plan import completion_seed
from rlmath.evals.sampling import Judging
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.sampling import Request, sample


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracy of one model on one file of prompts."""

    accuracy: float
    """Share of completions that are right (0 to 1)."""
    prompts: int
    samples: int
    """Completions, over all prompts."""
    mean_tokens: float
    """Mean length of a completion (tokens)."""
    truncated: float
    """Share of completions cut off at the limit (0 to 1)."""


def measure_accuracy(
    model_path: str,
    data_path: str,
    rollout: RolloutConfig,
    max_prompt_tokens: int,
    seed: int,
    device_kind: str,
    verifier_timeout_seconds: float = 5.0,
) -> AccuracyReport:
    """Sample `rollout.group_size` completions of every prompt of a file that has at most `max_prompt_tokens`.

    ValueError for an unreadable model or file, and where every prompt is longer.
    """
    tokenizer = load_tokenizer(model_path)
    found = load_benchmark(Path(data_path).stem, Path(data_path), tokenizer, "auto").problems
    problems = [problem for problem in found if len(problem.token_ids) <= max_prompt_tokens]
    if not problems:
        raise ValueError(
            f"{data_path}: all {len(found)} prompts have more than {max_prompt_tokens} tokens; raise that"
        )
    records: list[Record] = []
    with VerifierPool(1, verifier_timeout_seconds) as pool:
        llm = open_standalone(model_path, rollout, max_prompt_tokens + rollout.max_new_tokens, device_kind)
        requests = {one.key: one for one in _requests(problems, rollout, seed)}
        judging = Judging(
            pool, tokenizer, dict(enumerate(problems)), lambda _, record: records.append(record)
        )
        for generated in sample(llm, rollout, list(requests.values())):
            judging.ask(requests[generated.key], generated)
        judging.finish()
    n = len(records)
    return AccuracyReport(
        accuracy=sum(record.correct for record in records) / n,
        prompts=len(problems),
        samples=n,
        mean_tokens=sum(record.tokens for record in records) / n,
        truncated=sum(record.finish_reason == "length" for record in records) / n,
    )


def _requests(problems: list[Problem], rollout: RolloutConfig, seed: int) -> list[Request]:
    return [
        Request(
            (number, index),
            problem.token_ids,
            completion_seed(seed, problem.benchmark, problem.problem_id, index),
            rollout.min_new_tokens,
            rollout.max_new_tokens,
        )
        for number, problem in enumerate(problems)
        for index in range(rollout.group_size)
    ]
