"""Greedy completions of a model by a fresh vLLM in a process of its own.

It prints a JSON list of token id lists.

python -m tests.greedy_answers MODEL MAX_NEW_TOKENS '[[5, 6], [7]]'
"""

from __future__ import annotations

import json
import sys

from rlmath.config.schema import RolloutConfig
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.running_completions import RunningCompletions
from rlmath.rollout.sampling import Request


def main() -> None:
    model = sys.argv[1]
    max_new_tokens = int(sys.argv[2])
    prompts = json.loads(sys.argv[3])
    settings = RolloutConfig(temperature=0.0, cpu_kv_cache_gib=0.1)
    llm = open_standalone(model, settings, 128, "cpu")
    requests = [
        Request((p, 0), tuple(tokens), 0, 0, max_new_tokens) for p, tokens in enumerate(prompts)
    ]
    answers = {
        completed.request.key[0]: list(completed.completion.token_ids)
        for completed in RunningCompletions(llm, settings).sample(requests)
    }
    print(json.dumps([answers[p] for p in range(len(prompts))]))


if __name__ == "__main__":
    main()
