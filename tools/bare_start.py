"""The baseline of tools/bench_start.py, a rank of it: imports, a process group, vLLM's engine, one token.

Prints one JSON object: when each part was done (seconds since 1970). The libraries are imported here as any program of
theirs would, without rlmath.
"""

from __future__ import annotations

import json
import os
import sys
import time

KV_CACHE_BYTES = 2**28


def main(model: str) -> None:
    """`model` is a Hugging Face folder, whose weights are not read."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from megatron.core import optimizer  # noqa: F401
    from megatron.core.distributed import DistributedDataParallel  # noqa: F401
    from megatron.core.models.gpt import GPTModel  # noqa: F401

    times = {"megatron": time.time()}
    from vllm import LLM, SamplingParams

    times["vllm"] = time.time()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    llm = LLM(
        model,
        max_model_len=64,
        dtype="float32",
        enforce_eager=True,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        load_format="dummy",
        distributed_executor_backend="external_launcher",
    )
    times["engine"] = time.time()
    llm.generate([{"prompt_token_ids": [3, 4]}], SamplingParams(max_tokens=1), use_tqdm=False)
    times["token"] = time.time()
    print(json.dumps(times), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
