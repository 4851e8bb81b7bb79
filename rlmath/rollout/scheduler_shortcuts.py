"""What vLLM's scheduler does in Python for every request and token, and a rollout does without.

With 256 requests that is half of the scheduler's time in a step, and while the host takes longer
for a step than the GPU, of the rollout's. What is scheduled, allocated, cached and sampled stays
the same. A module of its own, as vLLM may be imported only after `engine.prepare_environment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


def take_shortcuts(llm: Any) -> None:
    """Let a vLLM `LLM` skip what is needless.

    Its `generate` then returns no log-probs: use `RunningCompletions`."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return_plain_logprobs(scheduler)
    skip_needless_blocks(scheduler)


@dataclass(frozen=True)
class SampledLogprobs:
    """Log-probs of a step's sampled tokens; the scheduler takes each request's part."""

    values_R: list[float]

    def slice_request(self, row: int, tokens: int) -> list[float]:
        return self.values_R[row : row + tokens]


def return_plain_logprobs(scheduler: Any) -> None:
    """Give every request its log-probs as a list, from one conversion a step.

    vLLM gives it three slices of arrays."""
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        if (logprobs := output.logprobs) is not None:
            assert logprobs.cu_num_generated_tokens is None, "a request has one token in a step"
            output.logprobs = SampledLogprobs(
                logprobs.logprobs[:, 0].tolist()
            )  # the sampled token's comes first
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output


def skip_needless_blocks(scheduler: Any) -> None:
    """Skip work on blocks of the KV cache that changes nothing.

    A request that decodes one more token into a block that it has needs no allocation, and a block
    that is not full is not looked up in the prefix cache."""
    manager = scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return
    blocks_by_request = managers[0].req_to_blocks
    block_size = managers[0].block_size
    allocate = manager.allocate_slots
    cache = manager.cache_blocks
    no_blocks = manager.empty_kv_cache_blocks

    def allocate_slots(
        request: Any,
        num_new_tokens: int,
        *arguments: Any,
        num_lookahead_tokens: int = 0,
        **more: Any,
    ) -> Any:
        if num_new_tokens == 1 and not (arguments or more or num_lookahead_tokens):
            tokens = request.num_computed_tokens + 1
            # vLLM makes a full block known to its prefix cache.
            if (
                tokens % block_size
                and len(blocks_by_request.get(request.request_id, ())) * block_size >= tokens
            ):
                return no_blocks
        return allocate(
            request, num_new_tokens, *arguments, num_lookahead_tokens=num_lookahead_tokens, **more
        )

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        """Cache full blocks only; prompts are cached by their allocation.

        vLLM calls it for every token where it schedules asynchronously."""
        if num_computed_tokens % block_size == 0:
            cache(request, num_computed_tokens)

    manager.allocate_slots = allocate_slots
    manager.cache_blocks = cache_blocks
