"""Prints how many tokens of an engine are others than those that their logits and their noise give.

    python -m tests.rollout.sampled_tokens MODEL

The engine's cache is too small for all its requests, so that some are preempted and resumed; a
third of them is greedy.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlmath.config.schema import RolloutConfig
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.running_completions import RunningCompletions
from rlmath.rollout.sampling import Request

NEW_TOKENS = 230
MODEL_LENGTH = 256
TEMPERATURE = 0.8
SETTINGS = RolloutConfig(cpu_kv_cache_gib=1.6 / 1024, max_num_seqs=8)
REQUESTS = [
    Request(
        (n, 0),
        (5, 6, 7 + n % 3),
        10**6 * n,
        NEW_TOKENS,
        NEW_TOKENS,
        temperature=TEMPERATURE * (n % 3 > 0),
    )
    for n in range(12)
]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    llm = open_standalone(folder, SETTINGS, MODEL_LENGTH, "cpu")
    from rlmath.rollout.cpu_worker import (
        noise_seeds,
    )  # vLLM reads the environment when it is imported

    preemptions = 0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counted(*arguments: object, **more: object) -> object:
        nonlocal preemptions
        preemptions += 1
        return preempt(*arguments, **more)

    scheduler._preempt_request = counted
    running = RunningCompletions(llm, SETTINGS)
    completions = {
        completed.request.key: completed.completion for completed in running.sample(REQUESTS)
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    counts = {"tokens": 0, "greedy": 0, "others": 0, "preemptions": preemptions}
    for request in REQUESTS:
        drawn_T = torch.tensor(completions[request.key].token_ids)
        whole = torch.tensor([[*request.token_ids, *drawn_T.tolist()]])
        prompt = len(request.token_ids)
        with torch.no_grad():
            logits_TV = model(whole).logits[0, prompt - 1 : -1]
        logits_TV[:, model.config.eos_token_id] = -torch.inf  # `min_new_tokens`
        if request.temperature:
            positions_T = prompt + np.arange(len(drawn_T))
            noise_T = noise_seeds(np.full(len(drawn_T), request.seed, np.uint64), positions_T)
            expected_T = torch.ops._C.fused_gumbel_argmax(
                logits_TV / TEMPERATURE, torch.from_numpy(noise_T)
            )
        else:
            expected_T = logits_TV.argmax(-1)
            counts["greedy"] += len(drawn_T)
        counts["tokens"] += len(drawn_T)
        counts["others"] += int((expected_T != drawn_T).sum())
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1])
