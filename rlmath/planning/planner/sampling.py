"""The work of sampling: prefill, decoding in batches that change, and the tail of the longest completions.

An engine decodes as many sequences at a time as `rollout.max_num_seqs` and its KV cache allow; when one is finished,
the next takes its place. Once none waits, fewer and fewer are left, until the longest is finished: the tail. Engines
draw their prompts, so all have about the same to do, and the one that has the longest completion of all ends last.

Partial rollouts and tail batching ("carry", "defer") are planned as steps that wait. Engines on ranks of their own
(`rollout.ranks`) fill their places with completions of later steps.
"""

# Shape legend: R requests of one engine.

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rlmath.data.seqlen_balancing import forward_cost
from rlmath.planning.memory_formulas import (
    BLOCK_TOKENS,
    FLOAT32_BYTES,
    EngineBytes,
    engine_bytes,
    kv_bytes_per_token,
)
from rlmath.planning.planner.lengths import Lengths
from rlmath.planning.planner.training import StepInputs
from rlmath.planning.planner.work import Work

LOGIT_PASSES = 4
"""Rows of float32 logits that sampling reads or writes for a token: raw, scaled, sorted, log-probs."""
BUCKET_MESSAGES = 2
"""Messages of a bucket of weights: it is sent and received, or announced and sent."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Sampled:
    """What is sampled in a step."""

    count: float
    """Completions, each of which computes its prompt as far as its group does not share it."""
    tokens: float
    squares: float
    """Sum of the squares of the completions' lengths."""

    def times(self, factor: float) -> Sampled:
        return Sampled(factor * self.count, factor * self.tokens, factor * self.squares)


@dataclass(frozen=True)
class PlannedRollout:
    """What the engine that ends last does."""

    sampled: Sampled
    """By all engines together."""
    work: Work
    slots: int
    """Sequences that it decodes at a time."""
    requests: int
    """Sequences that it decodes in all."""
    steps: int
    """Engine steps from the first token to the last."""
    tail_steps: int
    """Engine steps in which nothing was waiting any more."""
    weights: int
    """Bytes that a rank of the engine reads in every step, whatever its batch."""


def sampled_once(inputs: StepInputs) -> Sampled:
    """Every completion of a step that is learned from, whole."""
    count, lengths = inputs.batch.sequences, inputs.batch.lengths
    return Sampled(count, count * lengths.mean, count * lengths.moment(2))


def rollout_of(inputs: StepInputs) -> PlannedRollout:
    """The rollout of a step, by engines on all ranks of the cluster, or on its `rollout.ranks` last ones.

    Engines of their own that may be ahead of training decode completions of later steps, too, so that there is no tail:
    a step takes them as long as its tokens with all places taken, but the longest completion must be finished within
    `max_staleness` steps. Trainers are taken to be as slow as the engines; that running sequences are prefilled again
    is left out.
    """
    rollout, batch, sampled = inputs.config.rollout, inputs.batch, sampled_once(inputs)
    engines = max(1, (rollout.ranks or inputs.cluster.ranks) // rollout.tensor_parallel)
    requests = -(-batch.sequences // engines)
    most = (rollout.max_concurrent_sequences if rollout.ranks else None) or rollout.max_num_seqs
    places = slots_of(inputs, running_length(batch.prompt_tokens, sampled), most)
    slots = min(places, requests)
    steps, tail = play(batch.lengths, requests, slots, batch.sequences)
    if rollout.ranks and rollout.max_staleness > 0 and rollout.on_new_weights != "finish":
        full = sampled.tokens / engines / places
        steps, tail = math.ceil(max(full, steps / rollout.max_staleness)), 0
        slots = max(1, round(sampled.tokens / engines / steps))
    handled = batch.tokens / engines if rollout.ranks else batch.tokens
    work = sampling_work(inputs, sampled, engines, steps) + Work(tokens=handled)
    return PlannedRollout(sampled, work, slots, requests, steps, tail, engine_of(inputs).weights)


# ---------------------------------------------------------------- the schedule of one engine


def slots_of(inputs: StepInputs, running: float, requests: int) -> int:
    """Sequences that an engine decodes at a time: as many as its KV cache holds of the mean length that a running
    sequence has. What vLLM computes again after it has put a sequence off is left out."""
    rollout = inputs.config.rollout
    room = engine_of(inputs).kv_cache / kv_bytes_per_token(
        inputs.shape, rollout.tensor_parallel, inputs.target.itemsize
    )
    return max(1, min(rollout.max_num_seqs, requests, int(room / running)))


def running_length(prompt: float, sampled: Sampled) -> float:
    """Mean length, prompt and what is sampled so far, of a sequence that is being decoded (tokens): a long one runs
    long, and is half done on average."""
    return prompt + sampled.squares / (2 * sampled.tokens)


@lru_cache(maxsize=256)
def play(lengths: Lengths, requests: int, slots: int, sequences: int) -> tuple[int, int]:
    """(engine steps, those after the last request has begun) of an engine with so many requests and places.

    Its completions are evenly spread over the distribution; the longest is the longest of all `sequences` of the step.

    >>> play(Lengths(10.0, 0.02, 100), requests=4, slots=2, sequences=4)
    (20, 10)
    """
    lengths_R = [lengths.at((i + 0.5) / requests) for i in range(requests)]
    lengths_R[-1] = lengths.at(1 - 0.5 / max(sequences, requests))
    order = sorted(range(requests), key=lambda i: (i + 1) * _GOLDEN % 1)  # even, too
    end, last_start = list_schedule((lengths_R[i] for i in order), slots)
    return round(end), round(end - last_start)


def list_schedule(lengths: Iterable[float], slots: int) -> tuple[float, float]:
    """(end, start of the last) of sequences of these lengths that begin in this order, each as soon as one of `slots`
    places is free.

    >>> list_schedule([5, 2, 4], slots=2)
    (6, 2)
    """
    running: list[float] = []
    last_start = 0.0
    for length in lengths:
        if len(running) < slots:
            heapq.heappush(running, length)
            continue
        last_start = running[0]
        heapq.heapreplace(running, last_start + length)
    return max(running), last_start


# ---------------------------------------------------------------- the work of one engine rank


def engine_of(inputs: StepInputs) -> EngineBytes:
    """The memory of an engine rank."""
    target = inputs.target
    return engine_bytes(inputs.shape, inputs.config.rollout, target.kind, target.itemsize, target.total_bytes)


def sampling_work(inputs: StepInputs, sampled: Sampled, engines: int, steps: int) -> Work:
    """One rank's part in sampling `sampled`, which `engines` share, in so many engine steps."""
    own = sampled.times(max(1 / engines, 1 / sampled.count))
    work = decode_work(inputs, own, steps) + _prefill_work(inputs, own.count)
    return work + split_work(inputs, work.sequence_steps, steps)


def decode_work(inputs: StepInputs, sampled: Sampled, steps: int) -> Work:
    """One rank's part in decoding what its engine samples in so many engine steps.

    Every step reads the weights; every token reads the keys and values of all before it, and makes a row of logits.
    """
    shape, ranks = inputs.shape, inputs.config.rollout.tensor_parallel
    read_tokens = sampled.tokens * inputs.batch.prompt_tokens + sampled.squares / 2
    logits = LOGIT_PASSES * FLOAT32_BYTES * shape.vocab_size / ranks
    cost = forward_cost(shape)
    flops = sampled.tokens * cost.linear + 2 * cost.quadratic * read_tokens
    return Work(
        flops=flops / ranks,
        memory=steps * engine_of(inputs).weights
        + read_tokens * kv_bytes_per_token(shape, ranks, inputs.target.itemsize)
        + sampled.tokens * logits,
        decode_steps=steps,
        sequence_steps=sampled.tokens,
    )


def _prefill_work(inputs: StepInputs, requests: float) -> Work:
    """Prompts, computed once for a group as far as whole blocks of the KV cache hold them."""
    batch, block = inputs.batch, BLOCK_TOKENS[inputs.target.kind]
    shared = batch.prompt_tokens // block * block
    tokens = requests * (batch.prompt_tokens - shared + shared / batch.group)
    cost = forward_cost(inputs.shape)
    flops = tokens * (cost.linear + cost.quadratic * batch.prompt_tokens)
    return Work(flops=flops / inputs.config.rollout.tensor_parallel)


def split_work(inputs: StepInputs, tokens: float, steps: int) -> Work:
    """What the ranks of an engine exchange: two sums of hidden states a layer."""
    shape, size = inputs.shape, inputs.config.rollout.tensor_parallel
    if size == 1:
        return Work()
    sums = 2 * shape.num_layers
    sent = tokens * shape.hidden_size * inputs.target.itemsize * sums * 2 * (size - 1) / size
    inside = inputs.cluster.in_a_node(size)
    return Work(node=sent if inside else 0.0, network=0.0 if inside else sent, messages=steps * sums)
