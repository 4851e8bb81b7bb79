"""The work of sampling: prefill, decoding in batches that change, and the tail of the longest completions.

Here every completion is sampled to its end in the step that began it (`rollout.tail: wait`); those that are carried
from step to step, or discarded and sampled anew, are in `partial_rollouts`.

An engine decodes as many sequences at a time as `rollout.max_num_seqs` and its KV cache allow; when one is finished,
the next takes its place. Once none waits, fewer and fewer are left, until the longest is finished: the tail. Engines
draw their prompts, so all have about the same to do, and the one that has the longest completion of all ends last.
"""

# Shape legend: R requests of one engine.

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_formulas import (
    BLOCK_TOKENS,
    FLOAT32_BYTES,
    engine_bytes,
    kv_bytes_per_token,
)
from rlmath.planning.planner.lengths import Batch, Lengths
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.training import forward_cost
from rlmath.planning.planner.work import Work

_GOLDEN = (math.sqrt(5) - 1) / 2
LOGIT_PASSES = 4
"""Rows of float32 logits that sampling reads or writes for a token: raw, scaled, sorted, log-probs."""


@dataclass(frozen=True)
class Sampled:
    """What is sampled in a step, on average."""

    begun: float = 0.0
    """Completions, each of which computes its prompt as far as its group does not share it."""
    finished: float = 0.0
    """Of these, those that are sampled to their end, in this step or in a later one, and judged."""
    tokens: float = 0.0
    squares: float = 0.0
    """Sum of the squares of the completions' lengths."""

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(
            self.begun + other.begun,
            self.finished + other.finished,
            self.tokens + other.tokens,
            self.squares + other.squares,
        )

    def times(self, factor: float) -> Sampled:
        return Sampled(
            factor * self.begun, factor * self.finished, factor * self.tokens, factor * self.squares
        )


def sampled_once(batch: Batch) -> Sampled:
    """Every completion of a step that is learned from, whole."""
    count, lengths = batch.sequences, batch.lengths
    return Sampled(count, count, count * lengths.mean, count * lengths.moment(2))


@dataclass(frozen=True)
class Carry:
    """What partial rollouts do in a step, on average."""

    rounds: float
    prefilled_again: float
    """Sampled tokens that an engine prefills again."""
    staleness: float
    """Steps between the one that samples a token and the one that learns from it, mean over tokens."""
    oldest: int
    """The most of these."""


@dataclass(frozen=True)
class Defer:
    """What tail batching does in a step, on average."""

    rounds: float
    deferred: float
    """Share of the groups that are sampled anew, and whole."""
    discarded: float
    """Share of the sampled tokens."""


@dataclass(frozen=True)
class Rollout:
    """What the engine that ends last does."""

    sampled: Sampled
    """By all engines together."""
    work: Work
    slots: int
    """Sequences that it decodes at a time."""
    requests: int
    """Sequences that it decodes in all; with partial rollouts those of a round, the largest."""
    steps: int
    """Engine steps from the first token to the last."""
    tail_steps: int
    """Of these, those in which nothing was waiting any more."""
    weights: int
    """Bytes that a rank of the engine reads in every step, whatever its batch."""
    carry: Carry | None = None
    """None: no completion is carried from step to step."""
    defer: Defer | None = None
    """None: no completion is discarded."""


def rollout_of(
    config: Config, shape: ModelShape, target: Target, cluster: Cluster, batch: Batch, ranks: int
) -> Rollout:
    """The engines are on the first `ranks` ranks of the cluster."""
    size = config.rollout.tensor_parallel
    engines = max(1, ranks // size)
    requests = -(-batch.sequences // engines)
    sampled = sampled_once(batch)
    running = running_length(batch.prompt_tokens, sampled)
    slots = slots_of(config, shape, target, running, requests)
    steps, tail = play(batch.lengths, requests, slots, batch.sequences)
    engine = engine_bytes(shape, config.rollout, target.kind, target.itemsize, target.total_bytes)
    work = sampling_work(config, shape, target, cluster, batch, sampled, engines, steps)
    work += Work(tokens=batch.tokens)
    return Rollout(sampled, work, slots, requests, steps, tail, engine.weights)


def sampling_work(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    sampled: Sampled,
    engines: int,
    steps: int,
) -> Work:
    """One rank's part in sampling `sampled`, which `engines` share, in so many engine steps. Of `batch` are the prompts
    and groups."""
    own = sampled.times(max(1 / engines, 1 / sampled.begun))
    work = decode_work(config, shape, target, batch.prompt_tokens, own, steps)
    work += _prefill_work(config, shape, target, batch, own.begun)
    size, tokens = config.rollout.tensor_parallel, work.sequence_steps
    return work + split_work(shape, size, target.itemsize, cluster, tokens, steps)


def slots_of(config: Config, shape: ModelShape, target: Target, running: float, requests: int) -> int:
    """Sequences that an engine decodes at a time: as many as its KV cache holds of the mean length that a running
    sequence has. What vLLM computes again after it has put a sequence off is left out."""
    rollout = config.rollout
    size = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes)
    room = size.kv_cache / kv_bytes_per_token(shape, rollout.tensor_parallel, target.itemsize)
    return max(1, min(rollout.max_num_seqs, requests, int(room / running)))


def running_length(prompt: float, sampled: Sampled) -> float:
    """Mean length, prompt and what is sampled so far, of a sequence that is being decoded (tokens): a long one runs
    long, and is half done on average."""
    return prompt + sampled.squares / (2 * sampled.tokens)


@lru_cache(maxsize=256)
def play(lengths: Lengths, requests: int, slots: int, sequences: int) -> tuple[int, int]:
    """(engine steps, those after the last request has begun) of an engine with so many requests and places.

    Its completions are evenly spread over the distribution, in an order that is even, too; the longest is the longest
    of all `sequences` of the step.

    >>> play(Lengths(10.0, 0.02, 100), requests=4, slots=2, sequences=4)
    (20, 10)
    """
    lengths_R = [lengths.at((i + 0.5) / requests) for i in range(requests)]
    lengths_R[-1] = lengths.at(1 - 0.5 / max(sequences, requests))
    order = sorted(range(requests), key=lambda i: (i + 1) * _GOLDEN % 1)
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


def decode_work(
    config: Config, shape: ModelShape, target: Target, prompt: float, sampled: Sampled, steps: int
) -> Work:
    """One rank's part in decoding what its engine samples, behind prompts of `prompt` tokens, in so many engine steps.

    Every step reads the weights; every token reads the keys and values of all before it, and makes a row of logits.
    """
    rollout, ranks = config.rollout, config.rollout.tensor_parallel
    engine = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes)
    read_tokens = _tokens_read(prompt, sampled)
    logits = LOGIT_PASSES * FLOAT32_BYTES * shape.vocab_size / ranks
    cost = forward_cost(shape)
    flops = sampled.tokens * cost.linear + 2 * cost.quadratic * read_tokens
    return Work(
        flops=flops / ranks,
        memory=steps * engine.weights
        + kv_read_bytes(config, shape, target, prompt, sampled)
        + sampled.tokens * logits,
        decode_steps=steps,
        sequence_steps=sampled.tokens,
    )


def kv_read_bytes(
    config: Config, shape: ModelShape, target: Target, prompt: float, sampled: Sampled
) -> float:
    """Keys and values that one rank reads to decode what its engine samples."""
    of_a_token = kv_bytes_per_token(shape, config.rollout.tensor_parallel, target.itemsize)
    return _tokens_read(prompt, sampled) * of_a_token


def _tokens_read(prompt: float, sampled: Sampled) -> float:
    """Every token reads those before it."""
    return sampled.tokens * prompt + sampled.squares / 2


def _prefill_work(config: Config, shape: ModelShape, target: Target, batch: Batch, requests: float) -> Work:
    """Prompts, computed once for a group as far as whole blocks of the KV cache hold them."""
    shared = batch.prompt_tokens // BLOCK_TOKENS[target.kind] * BLOCK_TOKENS[target.kind]
    tokens = requests * (batch.prompt_tokens - shared + shared / batch.group)
    cost = forward_cost(shape)
    flops = tokens * (cost.linear + cost.quadratic * batch.prompt_tokens)
    return Work(flops=flops / config.rollout.tensor_parallel)


def split_work(
    shape: ModelShape, size: int, itemsize: int, cluster: Cluster, tokens: float, steps: int
) -> Work:
    """What the ranks of an engine exchange: two sums of hidden states a layer."""
    if size == 1:
        return Work()
    sums = 2 * shape.num_layers
    sent = tokens * shape.hidden_size * itemsize * sums * 2 * (size - 1) / size
    inside = cluster.in_a_node(size)
    return Work(node=sent if inside else 0.0, network=0.0 if inside else sent, messages=steps * sums)
