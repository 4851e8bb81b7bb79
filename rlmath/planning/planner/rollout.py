"""The seconds of sampling: prefill, decoding with full engines, and the tail of the longest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.data.micro_batches import forward_cost
from rlmath.planning.memory_estimate import engine_of_run
from rlmath.planning.memory_formulas import BLOCK_TOKENS, EngineBytes, kv_bytes_per_token
from rlmath.planning.planner.training import StepInputs
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters


@dataclass(frozen=True)
class PlannedRollout:
    """Work of an engine in a step."""

    requests: int
    """Completions that it samples."""
    slots: int
    """Completions that it samples at a time."""
    steps: int
    """Engine steps from the first token to the last."""
    seconds: float
    tail_seconds: float
    """Part of `seconds` in which it has more places than completions are left."""
    waiting_seconds: float
    """Part of `seconds` in which it only waits for calls of tools."""


def plan_rollout(inputs: StepInputs) -> PlannedRollout:
    """The rollout of a step, by engines on all ranks or on the `rollout.ranks` last ones.

    With all places taken, an engine needs mean x requests / places steps. Where it waits for every
    completion of its step, it takes as many more steps as the longest has more tokens than the
    mean. Partial rollouts, tail batching and engines on ranks of their own spread these over the
    steps that a completion may take, and have the requests of as many steps in their places.

    Calls of tools run beside the engine, `tools.cores` at a time. It waits for what they take
    longer than sampling does, at least for those of the last completion."""
    rollout = inputs.config.rollout
    batch = inputs.batch
    lengths = inputs.batch.lengths
    engines = max(1, (rollout.ranks or inputs.cluster.ranks) // rollout.tensor_parallel)
    requests = -(-batch.sequences // engines)
    spread = steps_of_a_completion(inputs)
    slots = slots_of(inputs, requests * spread)
    full_steps = batch.sequences * lengths.mean / engines / slots
    tail = lengths.at(1 - 0.5 / batch.sequences) - lengths.mean
    steps = max(full_steps, (max(full_steps, lengths.mean) + tail) / spread)
    coefficients = inputs.cluster.coefficients
    step_seconds = coefficients.decode_step_seconds + inputs.cluster.memory_seconds(
        engine_of(inputs).weights
    )
    step_seconds += _exchange_seconds(inputs, tokens=0, messages=1)
    step_seconds += adapted_layers(inputs) * coefficients.adapter_seconds
    sampling_seconds = _token_seconds(inputs, engines) + steps * step_seconds
    call_seconds = batch.calls * coefficients.call_seconds
    all_calls_seconds = call_seconds * batch.sequences / engines / inputs.config.tools.cores
    waiting_seconds = max(all_calls_seconds - sampling_seconds, call_seconds / spread)
    return PlannedRollout(
        requests,
        slots=slots,
        steps=math.ceil(steps),
        seconds=sampling_seconds + waiting_seconds,
        tail_seconds=(steps - full_steps) * step_seconds,
        waiting_seconds=waiting_seconds,
    )


def steps_of_a_completion(inputs: StepInputs) -> int:
    """Steps of the run within which the longest completion is finished."""
    rollout = inputs.config.rollout
    if rollout.ranks:
        return 1 if rollout.on_new_weights == "finish" else max(1, rollout.max_staleness)
    return {"wait": 1, "defer": 2, "carry": rollout.max_staleness + 1}[rollout.tail]


def slots_of(inputs: StepInputs, requests: int) -> int:
    """Sequences that an engine decodes at a time.

    They are as many as its KV cache holds of the mean length of a running one. That is more than
    half of the mean: a long one runs long, and is half done on average."""
    rollout = inputs.config.rollout
    lengths = inputs.batch.lengths
    max_sequences = (
        rollout.max_concurrent_sequences if rollout.ranks else None
    ) or rollout.max_num_seqs
    unsampled = inputs.batch.prompt_tokens + inputs.batch.given_tokens / 2
    running = unsampled + lengths.moment(2) / (2 * lengths.mean)
    token = kv_bytes_per_token(inputs.shape, rollout.tensor_parallel, inputs.target.itemsize)
    return max(
        1,
        min(
            max_sequences,
            rollout.max_num_seqs,
            requests,
            int(engine_of(inputs).kv_cache / token / running),
        ),
    )


def adapted_layers(inputs: StepInputs) -> int:
    """Linear layers in which the engine adds the product with a LoRA adapter; 0 where merged.

    Each takes two more kernels in every engine step, whatever its batch. vLLM publishes no such
    time for its present kernels; others measured it (docs/planning.md)."""
    adapters = engine_adapters(inputs.shape, inputs.config.lora)
    return inputs.shape.num_layers * len(adapters) // 2


def engine_of(inputs: StepInputs) -> EngineBytes:
    """The memory of an engine rank."""
    return engine_of_run(inputs.config, inputs.shape, inputs.target)


def _token_seconds(inputs: StepInputs, engines: int) -> float:
    """Seconds that a rank spends on the tokens of its engine.

    Every token passes through the model and its adapters, and the host handles it. A sampled one
    reads the keys and values of all before it, half of the given ones on average; those, like
    prompts, are computed many at a time. A group's prompt is computed once, as far as it fills
    blocks of the KV cache."""
    batch = inputs.batch
    cluster = inputs.cluster
    ranks = inputs.config.rollout.tensor_parallel
    count = max(1.0, batch.sequences / engines)
    tokens = count * batch.lengths.mean
    prompt = batch.prompt_tokens
    tool_tokens = batch.given_tokens
    read = tokens * (prompt + tool_tokens / 2) + count * batch.lengths.moment(2) / 2
    read_by_given = count * tool_tokens * (prompt + (tool_tokens + batch.lengths.mean) / 2)
    block = BLOCK_TOKENS[inputs.target.kind]
    shared = prompt // block * block
    prefilled = count * (prompt - shared + shared / batch.group)
    decoded_or_given = tokens + count * tool_tokens
    computed = decoded_or_given + prefilled
    cost = forward_cost(inputs.shape)
    flops = computed * cost.linear
    flops += cost.quadratic * (2 * (read + read_by_given) + prefilled * prompt)
    adapters = engine_of(inputs).adapters / inputs.target.itemsize
    token_bytes = kv_bytes_per_token(inputs.shape, ranks, inputs.target.itemsize)
    handled = batch.tokens / (engines if inputs.config.rollout.ranks else 1)
    coefficients = cluster.coefficients
    return (
        cluster.compute_seconds(flops / ranks + 2 * adapters * computed)
        + cluster.memory_seconds(read * token_bytes)
        + tokens * coefficients.sequence_step_seconds
        + handled * coefficients.token_seconds
        + _exchange_seconds(inputs, tokens=decoded_or_given, messages=0)
    )


def _exchange_seconds(inputs: StepInputs, tokens: float, messages: int) -> float:
    """Seconds in which the ranks of an engine sum hidden states, twice a layer."""
    size = inputs.config.rollout.tensor_parallel
    sums = 2 * inputs.shape.num_layers
    if size == 1:
        return 0.0
    sent = tokens * inputs.shape.hidden_size * inputs.target.itemsize * sums * 2 * (size - 1) / size
    return inputs.cluster.link_seconds(sent, messages * sums, size)
