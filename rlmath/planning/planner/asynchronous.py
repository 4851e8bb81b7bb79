"""The engines of an asynchronous run (`rollout.ranks`), in the steady state of a long run.

Trainers and engines have ranks of their own, and work at the same time. A step takes as long as the slower of the two:

    S = max(T, E)        T seconds of the trainers, E of an engine

Trainers do log-probs, reference, update, and a copy of the new weights to the host. An engine samples A tokens for
every step, b sequences at a time on average, and takes each new version of the weights once:

    E(b) = (A / b) x step + tokens + transfer + again(b)

Step is an engine step whatever its batch (weights, messages, the engine's own time), tokens the work of the A tokens
whatever their batch (keys and values, logits, FLOPs, the host), transfer the time from its call for new weights, in
which it samples nothing. With `rollout.on_new_weights` "recompute" the b sequences, which are half done on average, are
prefilled again: again(b). With "keep" that is nothing.

**How many sequences run.** An engine has places for C: `rollout.max_num_seqs`, `rollout.max_concurrent_sequences`, its
KV cache. Admission may give it fewer. The groups that a step admits begin with the weights of version v, and are
learned in step v + max_staleness at the latest. From the version to the start of that training, which itself ends with
a new version, pass (max_staleness + 1) S - T seconds, and by then the last of these completions must be finished. A
rollout of them alone takes R engine steps with C places: as many as the longest has tokens, or more where not all have
a place. An engine samples A tokens in S seconds, so each of b sequences gets A / b. Hence, for max_staleness >= 1,

    b = min(C, (max_staleness + 1 - T / S) x A / R),      S = max(T, E(b))

which one S solves. With max_staleness 0 no group may begin while trainers work on the step before: rollout and update
take turns, S = T + E, and the engine steps of E are R. With "finish" they are R, too, since every engine ends all
sequences before it takes a version, and takes every version; but trainers work beside it.

Left out: chance, a publication that waits for the engines that have not taken the version before, groups that selection
drops. Compared with a simulation of every sequence, with the rules of a run, S is from 8% too short to 10% too long
(tests/planning/planner).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.lengths import Batch
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.partial_rollouts import Carried, prefill_again_work, tokens_of_an_engine_step
from rlmath.planning.planner.rollout import (
    Rollout,
    kv_read_bytes,
    play,
    running_length,
    sampled_once,
    sampling_work,
    slots_of,
    split_work,
)
from rlmath.planning.planner.work import Coefficients, Work, seconds_of
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes

BUCKET_MESSAGES = 2
"""Of a bucket of weights: it is announced and sent."""


# ---------------------------------------------------------------- one engine, by hand


@dataclass(frozen=True)
class EngineCosts:
    """What an engine does for a step, and the seconds that it takes."""

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
        """S: seconds of a step, where an engine is as fast as that, or the trainers' where it is faster. A step that is
        longer lets more sequences run, and is longer than the engine then needs: S is between."""
        least = self.admitted(trainer, trainer, staleness)
        low, high = trainer, trainer + self.seconds(least) + self.again_seconds * self.places
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            if not low < middle < high:
                break
            if self.seconds(self.admitted(middle, trainer, staleness)) > middle:
                low = middle
            else:
                high = middle
        return high


# ---------------------------------------------------------------- trainers and engines


@dataclass(frozen=True)
class Overlap:
    """How the two sides of an asynchronous step share its seconds."""

    trainers: int
    """Ranks."""
    engine_ranks: int
    trainer_seconds: float
    engine_seconds: float
    take_turns: bool
    """One side waits while the other works (`rollout.max_staleness` 0)."""
    running: float
    """Sequences that an engine decodes at a time, mean."""
    places: int
    """The most of these that it has room for."""
    floor_parts: tuple[float, float]
    """Seconds of reading keys and values, and of the update, were each spread over all ranks: no split of the ranks
    takes less than their sum."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        sides = (self.trainer_seconds, self.engine_seconds)
        return sum(sides) if self.take_turns else max(sides)

    @property
    def floor(self) -> float:
        return sum(self.floor_parts)


@dataclass(frozen=True)
class EngineSide:
    """What the engines of an asynchronous step do."""

    rollout: Rollout
    work: dict[str, Work]
    """By phase, of the rank that has the most: "rollout", "again" where sequences are prefilled again, "transfer"."""
    running: float
    places: int


def engine_side(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
    trainer_seconds: float,
) -> EngineSide:
    """The engines on `rollout.ranks`, beside trainers that work so many seconds of a step."""
    rollout, sampled = config.rollout, sampled_once(batch)
    engines = rollout.ranks // rollout.tensor_parallel
    own = sampled.times(max(1 / engines, 1 / sampled.begun))
    requests = -(-batch.sequences // engines)
    places = places_of(config, shape, target, batch)
    weights = engine_bytes(shape, rollout, target.kind, target.itemsize, target.total_bytes).weights
    transfer = transfer_work(config, target, cluster, weights)
    tokens = sampling_work(config, shape, target, cluster, batch, sampled, engines, 0)
    tokens += Work(tokens=batch.tokens / engines)
    one_step = Work(memory=weights, decode_steps=1)
    one_step += split_work(shape, rollout.tensor_parallel, target.itemsize, cluster, 0.0, 1)
    slots = min(places, requests)
    alone, tail = play(batch.lengths, requests, slots, batch.sequences)
    if rollout.max_staleness == 0 or rollout.on_new_weights == "finish":
        work = {"rollout": tokens + one_step.times(alone), "transfer": transfer}
        rolled = Rollout(sampled, work["rollout"], slots, requests, alone, tail, weights)
        return EngineSide(rolled, work, own.tokens / alone, places)
    again = Work()
    if rollout.on_new_weights == "recompute":
        again = _again_work(config, shape, target, cluster, batch, one_step)
    found = (one_step, tokens, transfer, again)
    seconds = (seconds_of(work, cluster.machine, coefficients) for work in found)
    costs = EngineCosts(own.tokens, alone, places, *seconds)
    step = costs.steady(trainer_seconds, rollout.max_staleness)
    running = costs.admitted(step, trainer_seconds, rollout.max_staleness)
    steps = own.tokens / running
    work = {"rollout": tokens + one_step.times(steps)}
    if rollout.on_new_weights == "recompute":
        work["again"] = again.times(running)
    work["transfer"] = transfer
    rolled = Rollout(sampled, work["rollout"], round(running), requests, round(steps), 0, weights)
    return EngineSide(rolled, work, running, places)


def places_of(config: Config, shape: ModelShape, target: Target, batch: Batch) -> int:
    """C: sequences that an engine has places for, however many are admitted."""
    rollout = config.rollout
    most = rollout.max_concurrent_sequences or rollout.max_num_seqs
    return slots_of(config, shape, target, running_length(batch.prompt_tokens, sampled_once(batch)), most)


def _again_work(
    config: Config, shape: ModelShape, target: Target, cluster: Cluster, batch: Batch, one_step: Work
) -> Work:
    """One running sequence is prefilled again, as `partial_rollouts` has it. A long completion runs long: the mean of
    what is sampled of a running one is E[l²] / (2 E[l]), that of its square E[l³] / (3 E[l])."""
    lengths = batch.lengths
    tokens, squares = lengths.moment(2) / (2 * lengths.mean), lengths.moment(3) / (3 * lengths.mean)
    carried = Carried(1.0, tokens, squares)
    steps = carried.prefilled(batch.prompt_tokens) / tokens_of_an_engine_step(config, target)
    work = prefill_again_work(config, shape, target, cluster, batch.prompt_tokens, carried)
    return work + one_step.times(steps)


def transfer_work(config: Config, target: Target, cluster: Cluster, weights: int) -> Work:
    """New weights for an engine, of which a rank holds `weights` bytes; it samples nothing from its call until they are
    there. All trainers serve one engine after the other (`weight_sync.publish`), and an engine that all others are
    ahead of waits for as many turns: half of them on average. Weights travel through the memory of the hosts."""
    size = config.rollout.tensor_parallel
    engines, trainers = config.rollout.ranks // size, cluster.ranks - config.rollout.ranks
    moved = weights * max(1.0, size / trainers)
    buckets = math.ceil(moved / bucket_bytes(config.sync.bucket_mib, target.kind, cluster.ranks))
    turn = Work(messages=BUCKET_MESSAGES * buckets)
    if target.kind == "cpu":
        turn += Work(node=moved, memory=2.0 * weights)
    elif cluster.nodes == 1:
        turn += Work(host=moved + weights)
    else:
        turn += Work(network=moved, host=weights)
    return turn.times((engines + 1) / 2)


def floor_of(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    coefficients: Coefficients,
    update_seconds: float,
) -> tuple[float, float]:
    """`Overlap.floor_parts`, of a run whose trainers take `update_seconds` for the update."""
    engines = cluster.ranks / config.rollout.tensor_parallel
    own = sampled_once(batch).times(1 / engines)
    read = Work(memory=kv_read_bytes(config, shape, target, batch.prompt_tokens, own))
    trainers = cluster.ranks - config.rollout.ranks
    return (
        seconds_of(read, cluster.machine, coefficients),
        update_seconds * trainers / cluster.ranks,
    )
