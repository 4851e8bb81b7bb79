"""The work of sampling: prefill, decoding in batches that change, and the tail of the longest completions.

An engine decodes as many sequences at a time as `rollout.max_num_seqs` and its KV cache allow; when one is finished,
the next takes its place. Once none waits, fewer and fewer are left, until the longest is finished: the tail. Engines
draw their prompts, so all have about the same to do, and the one that has the longest completion of all ends last.

What a step does about its tail is estimated in closed form, of a long run's steady state, without chance and without
groups that selection drops:

- "carry": a completion of l tokens has ceil(l / slice) rounds, a group as many as its longest. Of `max_groups` groups
  in flight a round completes one in as many, so a step makes as many rounds as complete the groups that it learns from.
  Sampled tokens are prefilled again in every later round of their completion.
- "defer": a group with a completion longer than a slice is discarded and sampled anew, whole, in a step of such groups.
  How many groups are short depends on how alike their completions are: `PROMPT_SHARE`, an assumption.
- engines on ranks of their own (`rollout.ranks`): `EngineCosts`.
"""

# Shape legend: R requests of one engine.

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from rlmath.planning.memory_formulas import (
    BLOCK_TOKENS,
    FLOAT32_BYTES,
    EngineBytes,
    StageWork,
    default_batched_tokens,
    engine_bytes,
    kv_bytes_per_token,
    layer_elements,
)
from rlmath.planning.planner.lengths import Lengths, lengths_with_mean
from rlmath.planning.planner.training import LOGPROBS, StepInputs, forward_cost, head_flops
from rlmath.planning.planner.work import Coefficients, Work, seconds_of
from rlmath.rollout.flight_rules import flight_rules, slice_tokens
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes

LOGIT_PASSES = 4
"""Rows of float32 logits that sampling reads or writes for a token: raw, scaled, sorted, log-probs."""
PROMPT_SHARE = 0.7
"""Share of the variance of the logarithm of a length that completions of one prompt have in common, for "defer". An
assumption, not measured, and what "defer" brings hangs on it."""
BUCKET_MESSAGES = 2
"""Of a bucket of weights: it is sent and received, or announced and sent."""
QUANTILES = tuple((i + 0.5) / 256 for i in range(256))
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Sampled:
    """What is sampled in a step, on average."""

    begun: float
    """Completions, each of which computes its prompt as far as its group does not share it."""
    finished: float
    """Of these, those that are sampled to their end, in this step or in a later one, and judged."""
    tokens: float
    squares: float
    """Sum of the squares of the completions' lengths."""

    def times(self, factor: float) -> Sampled:
        return Sampled(
            factor * self.begun, factor * self.finished, factor * self.tokens, factor * self.squares
        )


@dataclass(frozen=True)
class Rollout:
    """What the engine that ends last does."""

    sampled: Sampled
    """By all engines together."""
    work: Work
    slots: int
    """Sequences that it decodes at a time."""
    requests: int
    """Sequences that it decodes in all; with partial rollouts those of a round."""
    steps: int
    """Engine steps from the first token to the last."""
    tail_steps: int
    """Of these, those in which nothing was waiting any more."""
    weights: int
    """Bytes that a rank of the engine reads in every step, whatever its batch."""
    remark: str = ""
    """What `rollout.tail` does in a step, for the console."""


def rollout_of(inputs: StepInputs) -> Rollout:
    """The rollout of a step whose engines are on all ranks of the cluster."""
    return {"wait": _waiting, "carry": _carrying, "defer": _deferring}[inputs.config.rollout.tail](inputs)


def sampled_once(inputs: StepInputs) -> Sampled:
    """Every completion of a step that is learned from, whole."""
    count, lengths = inputs.batch.sequences, inputs.batch.lengths
    return Sampled(count, count, count * lengths.mean, count * lengths.moment(2))


def _engines(inputs: StepInputs) -> int:
    return max(1, inputs.cluster.ranks // inputs.config.rollout.tensor_parallel)


def _waiting(inputs: StepInputs) -> Rollout:
    batch, engines, sampled = inputs.batch, _engines(inputs), sampled_once(inputs)
    requests = -(-batch.sequences // engines)
    slots = slots_of(inputs, running_length(batch.prompt_tokens, sampled), requests)
    steps, tail = play(batch.lengths, requests, slots, batch.sequences)
    work = sampling_work(inputs, sampled, engines, steps) + Work(tokens=batch.tokens)
    return Rollout(sampled, work, slots, requests, steps, tail, engine_of(inputs).weights)


# ---------------------------------------------------------------- partial rollouts


@dataclass(frozen=True)
class Carried:
    """The completions that are prefilled again: those that had tokens at the beginning of a round."""

    count: float
    tokens: float
    """Sampled before the round."""
    squares: float
    """Sum of the squares of these."""

    def prefilled(self, prompt: float) -> float:
        """Tokens, with prompts of `prompt` tokens each: completions of a group may be on several engines."""
        return self.tokens + self.count * prompt


def _carrying(inputs: StepInputs) -> Rollout:
    batch, engines, sampled = inputs.batch, _engines(inputs), sampled_once(inputs)
    rules, length = flight_rules(inputs.config), slice_tokens(inputs.config.rollout)
    rounds = rounds_of_group(batch.lengths, batch.group, length) * rules.groups_per_step / rules.max_groups
    parts = [math.ceil(batch.lengths.at(share) / length) for share in QUANTILES]
    each = batch.sequences / engines / len(parts)
    requests = max(1, math.ceil(each * sum(parts) / rounds))
    carried = Carried(
        each * sum(k - 1 for k in parts),
        each * sum(length * k * (k - 1) / 2 for k in parts),
        each * sum(length**2 * (k - 1) * k * (2 * k - 1) / 6 for k in parts),
    )
    slots = slots_of(inputs, running_length(batch.prompt_tokens, sampled), requests)
    steps, tail = play_slices(batch.lengths, length, requests, slots)
    again = carried.prefilled(batch.prompt_tokens) / tokens_of_an_engine_step(inputs)
    steps, tail = round(rounds * steps + again), round(rounds * tail)
    work = sampling_work(inputs, sampled, engines, steps) + prefill_again_work(inputs, carried)
    work += Work(tokens=batch.tokens)
    remark = f"in {rounds:.3g} rounds of {length:,} tokens, for which it prefills {carried.tokens:,.0f} tokens again"
    return Rollout(sampled, work, slots, requests, steps, tail, engine_of(inputs).weights, remark)


def rounds_of_group(lengths: Lengths, group: int, length: int) -> float:
    """Rounds of `length` tokens until the longest of a group's completions is finished, mean: the probabilities that
    it is longer than 0, 1, 2, ... of them.

    >>> rounds_of_group(Lengths(10.0, 0.02, 100), group=4, length=8)
    2.0
    """
    ends = range(length, lengths.longest, length)
    return 1.0 + sum(1 - replace(lengths, longest=end).within ** group for end in ends)


def tokens_of_an_engine_step(inputs: StepInputs) -> int:
    """The most that an engine prefills in one step."""
    given = inputs.config.rollout.max_num_batched_tokens
    return given or default_batched_tokens(inputs.target.total_bytes or 0)


def prefill_again_work(inputs: StepInputs, carried: Carried) -> Work:
    """One rank's part in prefilling the carried completions of its engine: a forward pass as that of log-probs, but
    only the last token of each has logits."""
    shape, target, prompt = inputs.shape, inputs.target, inputs.batch.prompt_tokens
    size, cost = inputs.config.rollout.tensor_parallel, forward_cost(shape)
    tokens = carried.prefilled(prompt)
    squares = carried.squares + 2 * prompt * carried.tokens + carried.count * prompt * prompt
    layers = shape.num_layers
    stage = StageWork(
        chunk_layers=layers,
        in_flight=1,
        has_embedding=True,
        has_head=True,
        pipelined=False,
        tokens=tokens_of_an_engine_step(inputs),
        tensor=size,
        sequence=False,
        itemsize=target.itemsize,
        device_kind=target.kind,
        local_layers=False,
    )
    touched = layers * layer_elements(shape, stage) * LOGPROBS.touches * target.itemsize
    work = Work(
        flops=(tokens * (cost.linear - head_flops(shape)) + squares * cost.quadratic) / size,
        memory=tokens * touched,
    )
    return work + split_work(inputs, tokens, steps=0)


# ---------------------------------------------------------------- tail batching


@dataclass(frozen=True)
class Deferral:
    """What tail batching makes of groups."""

    short: float
    """Share of the groups that have no completion longer than a slice (0 to 1)."""
    tokens_once: float
    """Of a completion in a short round, mean: up to a slice."""
    long_tokens: float
    """Of a completion of a deferred group, mean, sampled whole."""
    discarded: float
    """Share of the sampled tokens."""


def deferral(lengths: Lengths, group: int, length: int, prompt_share: float = PROMPT_SHARE) -> Deferral:
    """Of groups whose completions have `prompt_share` of the variance of their logarithm in common."""
    if length >= lengths.longest:
        return Deferral(1.0, lengths.mean, 0.0, 0.0)
    short = short_tokens = tokens = once = 0.0
    for share in QUANTILES:
        shift = lengths.spread * math.sqrt(prompt_share) * NormalDist().inv_cdf(share)
        own = max(1e-3, lengths.spread * math.sqrt(1 - prompt_share))
        alike = Lengths(lengths.median * math.exp(shift), own, lengths.longest)
        cut = replace(alike, longest=length)
        all_short = cut.within**group
        short += all_short / len(QUANTILES)
        once += cut.mean / len(QUANTILES)
        tokens += alike.mean / len(QUANTILES)
        if all_short > 0:
            below = (cut.mean - length * cut.truncated) / cut.within
            short_tokens += all_short * below / len(QUANTILES)
    long_tokens = (tokens - short_tokens) / (1 - short) if short < 1 else 0.0
    wasted = once - short_tokens
    return Deferral(short, once, long_tokens, wasted / (wasted + tokens))


def _deferring(inputs: StepInputs) -> Rollout:
    """A share of the steps, `Deferral.short`, learns from short groups; the others from deferred ones."""
    batch, engines, length = inputs.batch, _engines(inputs), slice_tokens(inputs.config.rollout)
    found = deferral(batch.lengths, batch.group, length)
    kinds = []
    if found.short > 0:
        lengths = lengths_with_mean(min(found.tokens_once, length), length, batch.lengths.spread)
        kinds.append((found.short, batch.sequences / found.short, lengths))
    if found.short < 1:
        lengths = lengths_with_mean(found.long_tokens, batch.lengths.longest, batch.lengths.spread)
        kinds.append((1 - found.short, float(batch.sequences), lengths))
    begun = tokens = squares = steps = tail = 0.0
    places = []
    for share, sequences, lengths in kinds:
        own = Sampled(sequences, sequences, sequences * lengths.mean, sequences * lengths.moment(2))
        requests = math.ceil(sequences / engines)
        slots = slots_of(inputs, running_length(batch.prompt_tokens, own), requests)
        of_all, of_tail = play(lengths, requests, slots, math.ceil(sequences))
        begun, tokens, squares = (
            begun + share * own.begun,
            tokens + share * own.tokens,
            squares + share * own.squares,
        )
        steps, tail = steps + share * of_all, tail + share * of_tail
        places.append((requests, slots))
    sampled = Sampled(begun, batch.sequences, tokens, squares)
    requests, slots = max(places)
    work = sampling_work(inputs, sampled, engines, round(steps))
    work += Work(tokens=begun * batch.prompt_tokens + tokens)
    remark = (
        f"{1 - found.short:.0%} of the groups are sampled anew, {found.discarded:.0%} of the sampled tokens discarded "
        f"(assumed: a prompt has {PROMPT_SHARE:.0%} of the variance of log-lengths)"
    )
    return Rollout(
        sampled, work, slots, requests, round(steps), round(tail), engine_of(inputs).weights, remark
    )


# ---------------------------------------------------------------- engines on ranks of their own


@dataclass(frozen=True)
class EngineCosts:
    """What an engine on ranks of its own does for a step, and the seconds that it takes.

    It samples A tokens for every step, b sequences at a time, and takes each new version of the weights once:

        E(b) = (A / b) x step + tokens + transfer + again x b

    The groups that a step admits begin with the weights of version v and are learned in step v + max_staleness at the
    latest. From the version to the start of that training pass (max_staleness + 1) S - T seconds, S being those of a
    step and T those of the trainers, and by then the longest of these completions must be finished, which takes R
    engine steps. Each of b sequences gets A / b of the engine steps of S seconds. Hence

        b = min(C, (max_staleness + 1 - T / S) x A / R),      S = max(T, E(b))
    """

    tokens: float
    """A: sampled for a step."""
    rollout_steps: int
    """R: engine steps in which a step's completions are sampled alone, from the first token to the last."""
    places: int
    """C: most sequences at a time."""
    step_seconds: float
    """An engine step, whatever its batch."""
    token_seconds: float
    """All A tokens, whatever their batch."""
    transfer_seconds: float
    """It takes the new weights of a step."""
    again_seconds: float
    """One running sequence is prefilled again."""

    def seconds(self, batch: float) -> float:
        """E(b): of a step, with so many sequences at a time.

        >>> EngineCosts(1200, 600, 8, 1.0, 90.0, 4.0, 2.0).seconds(3)
        500.0
        """
        steps = self.tokens / batch * self.step_seconds
        return steps + self.token_seconds + self.transfer_seconds + self.again_seconds * batch

    def admitted(self, step: float, trainer: float, staleness: int) -> float:
        """b: sequences at a time, on average, where a step takes so many seconds, of which the trainers work
        `trainer`; `staleness` is at least 1.

        >>> EngineCosts(1200, 600, 8, 1.0, 90.0, 4.0, 2.0).admitted(500.0, 250.0, staleness=1)
        3.0
        """
        return min(self.places, (staleness + 1 - trainer / step) * self.tokens / self.rollout_steps)

    def steady(self, trainer: float, staleness: int) -> float:
        """S: a step that is longer lets more sequences run, and is longer than the engine then needs."""
        least = self.admitted(trainer, trainer, staleness)
        low, high = trainer, trainer + self.seconds(least) + self.again_seconds * self.places
        for _ in range(60):
            middle = (low + high) / 2
            if self.seconds(self.admitted(middle, trainer, staleness)) > middle:
                low = middle
            else:
                high = middle
        return high


@dataclass(frozen=True)
class EngineSide:
    """What the engines of an asynchronous step do."""

    rollout: Rollout
    work: dict[str, Work]
    """By phase, of the rank that has the most: "rollout", "again" where sequences are prefilled again, "transfer"."""
    running: float
    """Sequences that an engine decodes at a time, mean."""
    places: int
    """The most of these that it has room for."""


def engine_side(inputs: StepInputs, coefficients: Coefficients, trainer_seconds: float) -> EngineSide:
    """The engines on `rollout.ranks` of the cluster, beside trainers that work so many seconds of a step."""
    rollout, batch, sampled = inputs.config.rollout, inputs.batch, sampled_once(inputs)
    engines = rollout.ranks // rollout.tensor_parallel
    own, requests = sampled.times(max(1 / engines, 1 / sampled.begun)), -(-batch.sequences // engines)
    most = rollout.max_concurrent_sequences or rollout.max_num_seqs
    places = slots_of(inputs, running_length(batch.prompt_tokens, sampled), most)
    weights = engine_of(inputs).weights
    transfer = transfer_work(inputs, weights)
    tokens = sampling_work(inputs, sampled, engines, 0) + Work(tokens=batch.tokens / engines)
    one_step = Work(memory=weights, decode_steps=1) + split_work(inputs, 0.0, 1)
    slots = min(places, requests)
    alone, tail = play(batch.lengths, requests, slots, batch.sequences)
    if rollout.max_staleness == 0 or rollout.on_new_weights == "finish":
        work = {"rollout": tokens + one_step.times(alone), "transfer": transfer}
        rolled = Rollout(sampled, work["rollout"], slots, requests, alone, tail, weights)
        return EngineSide(rolled, work, own.tokens / alone, places)
    again = _again_work(inputs, one_step) if rollout.on_new_weights == "recompute" else Work()
    machine = inputs.cluster.machine
    seconds = [seconds_of(work, machine, coefficients) for work in (one_step, tokens, transfer, again)]
    costs = EngineCosts(own.tokens, alone, places, *seconds)
    step = costs.steady(trainer_seconds, rollout.max_staleness)
    running = costs.admitted(step, trainer_seconds, rollout.max_staleness)
    steps = own.tokens / running
    work = {"rollout": tokens + one_step.times(steps), "again": again.times(running), "transfer": transfer}
    if rollout.on_new_weights != "recompute":
        del work["again"]
    rolled = Rollout(sampled, work["rollout"], round(running), requests, round(steps), 0, weights)
    return EngineSide(rolled, work, running, places)


def _again_work(inputs: StepInputs, one_step: Work) -> Work:
    """One running sequence is prefilled again. A long completion runs long: the mean of what is sampled of a running
    one is E[l²] / (2 E[l]), that of its square E[l³] / (3 E[l])."""
    lengths = inputs.batch.lengths
    tokens, squares = lengths.moment(2) / (2 * lengths.mean), lengths.moment(3) / (3 * lengths.mean)
    carried = Carried(1.0, tokens, squares)
    steps = carried.prefilled(inputs.batch.prompt_tokens) / tokens_of_an_engine_step(inputs)
    return prefill_again_work(inputs, carried) + one_step.times(steps)


def transfer_work(inputs: StepInputs, weights: int) -> Work:
    """New weights for an engine, of which a rank holds `weights` bytes; it samples nothing from its call until they are
    there. All trainers serve one engine after the other (`weight_sync.publish`), and an engine that all others are
    ahead of waits for as many turns: half of them on average. Weights travel through the memory of the hosts."""
    config, cluster, kind = inputs.config, inputs.cluster, inputs.target.kind
    size = config.rollout.tensor_parallel
    engines, trainers = config.rollout.ranks // size, cluster.ranks - config.rollout.ranks
    moved = weights * max(1.0, size / trainers)
    buckets = math.ceil(moved / bucket_bytes(config.sync.bucket_mib, kind, cluster.ranks))
    turn = Work(messages=BUCKET_MESSAGES * buckets)
    if kind == "cpu":
        turn += Work(node=moved, memory=2.0 * weights)
    elif cluster.nodes == 1:
        turn += Work(host=moved + weights)
    else:
        turn += Work(network=moved, host=weights)
    return turn.times((engines + 1) / 2)


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
    return _play(lengths_R, slots)


@lru_cache(maxsize=256)
def play_slices(lengths: Lengths, length: int, requests: int, slots: int) -> tuple[int, int]:
    """As `play`, of a round: completions have at most `length` tokens in it, and are in whichever of their rounds."""
    slices = []
    for share in QUANTILES:
        whole, rest = divmod(lengths.at(share), length)
        slices += [float(length)] * int(whole) + ([rest] if rest else [])
    slices.sort()
    slices_R = [slices[int((i + 0.5) * len(slices) / requests)] for i in range(requests)]
    slices_R[-1] = slices[-1]
    return _play(slices_R, slots)


def _play(lengths_R: Sequence[float], slots: int) -> tuple[int, int]:
    """In an order that is even, too."""
    order = sorted(range(len(lengths_R)), key=lambda i: (i + 1) * _GOLDEN % 1)
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
    own = sampled.times(max(1 / engines, 1 / sampled.begun))
    work = decode_work(inputs, own, steps) + _prefill_work(inputs, own.begun)
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
