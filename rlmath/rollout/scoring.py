"""Log-probs of given tokens from a vLLM engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

_NAMES = itertools.count()


def score(llm: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of every token but the first of each sequence, given those before it, at temperature 1 (nats)."""
    from vllm import SamplingParams

    # vLLM gives the log-probs of prompts only with completions.
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    engine, index_of = llm.llm_engine, {}
    for index, token_ids in enumerate(sequences):
        name = f"score-{next(_NAMES)}"
        index_of[name] = index
        engine.add_request(name, {"prompt_token_ids": list(token_ids)}, parameters)
    found: dict[int, list[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[index_of[output.request_id]] = _of_prompt(output)
    return [found[index] for index in range(len(sequences))]


def _of_prompt(output: Any) -> list[float]:
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]
