"""Requests to a vLLM engine, and what comes of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.config import RolloutConfig

_NAMES = itertools.count()
"""Names of requests, never used twice in a process: an engine may still hold the last ones of the step before."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    key: tuple[int, int]
    """(position of the prompt in the step's batch, sample index)."""
    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int


@dataclass(frozen=True)
class Generated:
    """What came of a request."""

    key: tuple[int, int]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def request_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one completion, the same whichever engine samples it (0 to 2**63 - 1)."""
    text = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def sample(llm: Any, settings: RolloutConfig, requests: Sequence[Request]) -> Iterator[Generated]:
    """Sample all requests with a vLLM `LLM` of this process; yields each completion as soon as it is finished.

    The log-probs are of the distribution that was sampled from, temperature included.
    """
    engine = llm.llm_engine
    pending = {}
    for request in requests:
        name = str(next(_NAMES))
        pending[name] = request.key
        prompt = {"prompt_token_ids": list(request.token_ids)}
        engine.add_request(name, prompt, _parameters(settings, request.seed))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield _generated(pending.pop(output.request_id), output.outputs[0])
    assert not pending, f"vLLM did not return requests {sorted(pending)}"


def _parameters(settings: RolloutConfig, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_new_tokens,
        min_tokens=settings.min_new_tokens,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generated(key: tuple[int, int], output: Any) -> Generated:
    token_ids = tuple(output.token_ids)
    logprobs = tuple(output.logprobs.logprobs)
    assert len(logprobs) == len(token_ids), "vLLM returned another number of log-probs than tokens"
    return Generated(key, token_ids, logprobs, output.finish_reason)
