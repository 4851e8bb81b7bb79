"""vLLM's schedulers do the same with our shortcuts and without.

They are the synchronous one and a GPU's asynchronous one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlmath.rollout.engine import prepare_environment

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from rlmath.rollout.running_completions import _Decoding  # noqa: E402
from rlmath.rollout.sampling import Request as OurRequest  # noqa: E402
from rlmath.rollout.scheduler_shortcuts import take_shortcuts  # noqa: E402

BLOCK = 4
LENGTHS = [(5, 11), (8, 8), (3, 30), (6, 2), (7, 9), (4, 20)]
"""Tokens of prompts and completions: 29 blocks in all; the second ends where a block is full."""


def scheduler_of(folder: Path, is_async: bool, blocks: int) -> Scheduler:
    config = EngineArgs(
        str(folder), max_model_len=64, max_num_seqs=8, dtype="float32"
    ).create_engine_config()
    config.cache_config.num_gpu_blocks, config.scheduler_config.async_scheduling = blocks, is_async
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    kind = AsyncScheduler if is_async else Scheduler
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)


def run(scheduler: Scheduler, is_async: bool, add: Any) -> list[Any]:
    """What is scheduled, step by step, and what is sampled.

    Then the lengths of which prefixes are cached."""
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    history: list[Any] = []
    decodings = {
        str(n): _Decoding(OurRequest((n, 0), (n + 1,), 0, 0, 99)) for n in range(len(LENGTHS))
    }
    for n, (prompt, new) in enumerate(LENGTHS):
        params = SamplingParams(max_tokens=new, logprobs=0, detokenize=False)
        scheduler.add_request(Request(str(n), [n + 1] * prompt, params, None, block_hasher=hasher))
    waiting: deque[Any] = deque()
    while scheduler.requests:
        scheduled = scheduler.schedule()
        cached = scheduled.scheduled_cached_reqs
        history.append((dict(scheduled.num_scheduled_tokens), cached.req_ids, cached.new_block_ids))
        history.append(scheduled.preempted_req_ids or set())
        waiting.append(scheduled)
        if len(waiting) > is_async:  # a GPU's scheduler does not know the last step's tokens yet
            for output in finish(scheduler, waiting.popleft()):
                add(decodings[output.request_id], output)
    history += [
        (decoding.token_ids.tolist(), decoding.logprobs.tolist()) for decoding in decodings.values()
    ]
    for n, decoding in decodings.items():
        follow_up = Request(
            f"{n} again",
            [int(n) + 1] * LENGTHS[int(n)][0] + decoding.token_ids.tolist() + [99],
            params,
            None,
        )
        follow_up.block_hashes = hasher(follow_up)
        history.append(scheduler.kv_cache_manager.get_computed_blocks(follow_up)[1])
    return history


def finish(scheduler: Scheduler, scheduled: Any) -> list[Any]:
    """The end of a step, whose tokens and log-probs follow from request and step."""
    names = list(scheduled.num_scheduled_tokens)
    rows = [
        int(name) * 7 + scheduler.requests[name].num_tokens if name in scheduler.requests else 0
        for name in names
    ]
    tokens = np.array(rows, np.int32).reshape(-1, 1) % 50 + 3
    output = ModelRunnerOutput(
        names, {name: row for row, name in enumerate(names)}, tokens.tolist()
    )
    output.logprobs = LogprobsLists(tokens, -tokens / np.float32(7), np.ones(len(names), np.int64))
    return [
        request_output
        for of_client in scheduler.update_from_output(scheduled, output).values()
        for request_output in of_client.outputs
    ]


def add_plainly(one: _Decoding, output: Any) -> None:
    one.token_ids.extend(output.new_token_ids)
    one.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("blocks", [12, 40])
def test_what_is_scheduled_sampled_and_cached_is_the_same(
    untied_model: Path, is_async: bool, blocks: int
) -> None:
    expected = run(scheduler_of(untied_model, is_async, blocks), is_async, add_plainly)
    shortened = scheduler_of(untied_model, is_async, blocks)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=shortened))
    take_shortcuts(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert run(shortened, is_async, _Decoding.add) == expected
    some_are_preempted = any(isinstance(outcome, set) and outcome for outcome in expected)
    assert some_are_preempted == (blocks == 12)
