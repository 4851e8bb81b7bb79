"""Print the accuracy of a Hugging Face model on one file of prompts, as one JSON line.

For benchmarks, several samples and intervals, and to keep what was sampled: launch/evaluate.py.

python tools/measure_accuracy.py --model DIR --data heldout.jsonl [--samples 1] [--temperature 1.0]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.device import resolve_kind
from rlmath.evals.accuracy import measure_accuracy
from rlmath.trainer.telemetry.console import setup_logging


def main() -> int:
    """Exit status 0, or 2 on a mistake of the user's."""
    parser = argparse.ArgumentParser(description="Accuracy of a Hugging Face model, sampled by vLLM.")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--data", required=True, help="file of prompts, in any form of docs/data.md")
    parser.add_argument("--samples", type=int, default=1, help="completions per prompt (default: 1)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature; 0 is greedy (default: 1)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out (default: 1024)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="longest completion (default: 1024)")
    parser.add_argument(
        "--kv-cache-gib", type=float, default=0.5, help="KV cache on CPU, in GiB (default: 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="sampling seed (default: 0)")
    arguments = parser.parse_args()
    setup_logging(0)
    rollout = RolloutConfig(
        group_size=arguments.samples,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        cpu_kv_cache_gib=arguments.kv_cache_gib,
    )
    try:
        report = measure_accuracy(
            arguments.model,
            arguments.data,
            rollout,
            arguments.max_prompt_tokens,
            arguments.seed,
            resolve_kind("auto"),
        )
    except ValueError as error:
        print(f"measure_accuracy: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
