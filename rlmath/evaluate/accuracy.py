"""How often a model answers rightly: sampled by a fresh vLLM, judged as in training."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.config import RolloutConfig
from rlmath.data.loader import load_prompts
from rlmath.data.tokenizer import load_tokenizer
from rlmath.rewards.judge import judged_text
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.sampling import Request, request_seed, sample


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
    """Sample `rollout.group_size` completions of every prompt of a JSONL file and judge them.

    ValueError for an unreadable model or file.
    """
    tokenizer = load_tokenizer(model_path)
    prompts, _ = load_prompts(data_path, tokenizer, max_prompt_tokens)
    with VerifierPool(1, verifier_timeout_seconds) as pool:
        llm = open_standalone(model_path, rollout, max_prompt_tokens + rollout.max_new_tokens, device_kind)
        requests = [
            Request(
                (p, g),
                prompt.token_ids,
                request_seed(seed, 0, prompt.prompt_id, g),
                rollout.min_new_tokens,
                rollout.max_new_tokens,
            )
            for p, prompt in enumerate(prompts)
            for g in range(rollout.group_size)
        ]
        verdicts, tokens, truncated = [], 0, 0
        for generated in sample(llm, rollout, requests):
            prompt = prompts[generated.key[0]]
            text = str(tokenizer.decode(generated.token_ids, skip_special_tokens=True))
            verdicts.append(pool.submit(judged_text(prompt.text, text), prompt.solutions, prompt.task))
            tokens += len(generated.token_ids)
            truncated += generated.finish_reason == "length"
        right = sum(verdict.result().correct for verdict in verdicts)
    n = len(verdicts)
    return AccuracyReport(right / n, len(prompts), n, tokens / n, truncated / n)
