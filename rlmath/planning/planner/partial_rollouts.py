"""The work of sampling with partial rollouts (`rollout.tail: carry` and `defer`), in the steady state of a long run.

The scheduling is that of a run (`algorithms.partial_rollouts`), with completions that are lengths only and at most
`MOST_GROUPS` groups a step: what a step does for a group does not depend on how many there are, but for chance.
Selection drops nothing here, and the first and last steps of a run, which fill and empty the flight, do not count.

"carry": groups in flight begin at different steps, so that the end of one round is the middle of other completions, and
the longest completion no longer decides how long a step is; a step with enough complete groups makes no round at all.
What it costs: in every round all that is sampled so far of the carried completions is prefilled again. Every completion
is sampled whole, in the end: tokens, KV cache read and prompts of an average step are those of `rollout`, and so is the
mean length of a running sequence, as it has each of its positions once. Different are the engine steps, and what is
prefilled again.

"defer": most steps end with the longest of short completions, others have the long ones together. What it costs: tokens
that are sampled and discarded, and the prompts of the groups that are sampled anew; nothing is prefilled again. How
many groups are short depends on how alike their completions are: `PROMPT_SHARE`.
"""

# Shape legend: U groups of a round that are not complete, G completions of a group, S slices of a round,
# R requests of one engine, N groups that are drawn.

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.partial_rollouts import (
    Flight,
    FlightRules,
    GroupInFlight,
    advance_carry,
    advance_defer,
)
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    Score,
    ScoredCompletion,
    Segment,
)
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_formulas import (
    StageWork,
    default_batched_tokens,
    engine_bytes,
    layer_elements,
)
from rlmath.planning.planner.lengths import Batch, Lengths
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.rollout import (
    Carry,
    Defer,
    Rollout,
    Sampled,
    list_schedule,
    running_length,
    sampled_once,
    sampling_work,
    slots_of,
    split_work,
)
from rlmath.planning.planner.training import LOGPROBS, forward_cost, head_flops
from rlmath.planning.planner.work import Work
from rlmath.rollout.flight_rules import flight_rules, slice_tokens

MOST_GROUPS = 64
"""Groups of a simulated step, where the real one has more."""
LEAST_LENGTHS = 1024
"""Different lengths of the completions of a simulated run."""
STEPS = 48
"""Of the steady state that are averaged. Where the rounds of a step are no whole number on average, they come in
patterns of a few steps: 48 is a multiple of most. With four times as many, or four times `MOST_GROUPS`, engine steps
differ by up to 7% where not every step makes a round, and the seconds of a step by about 1%."""
CARRIED_TOKEN, OWN_CARRIED_TOKEN = 0.01, 0.15
"""The host's work for a token that is carried into a round, in that for a new one (`Work.tokens`): every rank joins the
slices of all, an engine lays out those that it samples. Measured on a server's core: 2 ns and 30 ns; `token_seconds` of
a GPU is 0.2 µs."""
PROMPT_SHARE = 0.7
"""Share of the variance of the logarithm of a length that completions of one prompt have in common, for "defer". An
assumption, not measured, and what "defer" brings hangs on it: at 0 and 16 completions a group nearly every group has a
long one, and it is slower than "wait" (docs/planning.md). "carry" is simulated with 0."""
DEFER_STEPS = 4 * STEPS
"""As `STEPS`, for "defer": it is a matter of chance which steps need a second round."""
DEFER_WARM_UP = 64
"""Steps before these; after 53 short rounds of complete groups alone `Flight.short_share` is 1, rounded."""
EVEN_GROUPS = 1024
"""Groups whose completions are evenly spread over the distribution, for "defer": several times those of a round, so
that how many of a round are short is left to chance, as in a run."""


# ---------------------------------------------------------------- the work of a step that carries


def partial_rollout_of(
    config: Config, shape: ModelShape, target: Target, cluster: Cluster, batch: Batch, ranks: int
) -> Rollout:
    """Of a step on average; the engines are on the first `ranks` ranks of the cluster."""
    engines = max(1, ranks // config.rollout.tensor_parallel)
    rules, length = flight_rules(config), slice_tokens(config.rollout)
    state = steady_state(batch.lengths, batch.group, rules, length)
    share = batch.sequences / state.sequences / engines
    most = math.ceil(share * max(len(one.slices_S) for one in state.rounds))
    sampled = sampled_once(batch)
    slots = slots_of(config, shape, target, running_length(batch.prompt_tokens, sampled), most)
    steps, tail = play_rounds(batch.lengths, batch.group, rules, length, share, slots)
    carried = state.carried.times(share)
    steps += round(carried.prefilled(batch.prompt_tokens) / tokens_of_an_engine_step(config, target))
    engine = engine_bytes(shape, config.rollout, target.kind, target.itemsize, target.total_bytes)
    work = sampling_work(config, shape, target, cluster, batch, sampled, engines, steps)
    work += prefill_again_work(config, shape, target, cluster, batch.prompt_tokens, carried)
    host = CARRIED_TOKEN * engines + OWN_CARRIED_TOKEN
    work += Work(tokens=batch.tokens + host * carried.tokens)
    carry = Carry(state.rounds_of_a_step, carried.tokens, state.staleness, state.oldest)
    return Rollout(sampled, work, slots, most, steps, tail, engine.weights, carry=carry)


def tokens_of_an_engine_step(config: Config, target: Target) -> int:
    """The most that an engine prefills in one step."""
    return config.rollout.max_num_batched_tokens or default_batched_tokens(target.total_bytes or 0)


@lru_cache(maxsize=256)
def play_rounds(
    lengths: Lengths, group: int, rules: FlightRules, length: int, share: float, slots: int
) -> tuple[int, int]:
    """(engine steps of a step, those of its rounds in which nothing was waiting any more), without prefill, of an
    engine that has `share` of the sequences of a simulated step, and decodes `slots` at a time."""
    state = steady_state(lengths, group, rules, length)
    played = [play_slices(one.slices_S, math.ceil(share * len(one.slices_S)), slots) for one in state.rounds]
    steps, tail = (sum(numbers) / STEPS for numbers in zip(*played, strict=True))
    return round(steps), round(tail)


def play_slices(slices_S: np.ndarray, requests: int, slots: int) -> tuple[float, float]:
    """(engine steps, those after the last request has begun) of a round on the engine that ends last. Its requests are
    evenly spread over those of the round, and in the same order.

    >>> play_slices(np.array([8, 8, 2, 8]), requests=2, slots=2), play_slices(np.array([8, 8, 2, 8]), 4, slots=2)
    ((8, 8), (16, 8))
    """
    if requests <= slots:
        longest = int(slices_S.max())
        return longest, longest
    places_R = ((np.arange(requests) + 0.5) * len(slices_S) / requests).astype(np.int64)
    end, last_start = list_schedule(slices_S[places_R].tolist(), slots)
    return end, end - last_start


@dataclass(frozen=True)
class Carried:
    """The completions that are prefilled again: those that had tokens at the beginning of a round."""

    count: float = 0.0
    tokens: float = 0.0
    """Sampled before the round."""
    squares: float = 0.0
    """Sum of the squares of these."""

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.count + other.count, self.tokens + other.tokens, self.squares + other.squares)

    def times(self, factor: float) -> Carried:
        return Carried(factor * self.count, factor * self.tokens, factor * self.squares)

    def prefilled(self, prompt: float) -> float:
        """Tokens, with prompts of `prompt` tokens each: completions of a group may be on several engines."""
        return self.tokens + self.count * prompt


def prefill_again_work(
    config: Config, shape: ModelShape, target: Target, cluster: Cluster, prompt: float, carried: Carried
) -> Work:
    """One rank's part in prefilling the carried completions of its engine: a forward pass as that of log-probs, but
    only the last token of each has logits."""
    size, cost = config.rollout.tensor_parallel, forward_cost(shape)
    tokens = carried.prefilled(prompt)
    squares = carried.squares + 2 * prompt * carried.tokens + carried.count * prompt * prompt
    layers = shape.num_layers
    stage = StageWork(
        chunk_layers=layers,
        in_flight=1,
        has_embedding=True,
        has_head=True,
        pipelined=False,
        tokens=tokens_of_an_engine_step(config, target),
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
    return work + split_work(shape, size, target.itemsize, cluster, tokens, steps=0)


# ---------------------------------------------------------------- the work of a step that defers


def deferring_rollout_of(
    config: Config,
    shape: ModelShape,
    target: Target,
    cluster: Cluster,
    batch: Batch,
    ranks: int,
    prompt_share: float = PROMPT_SHARE,
) -> Rollout:
    """Of a step on average; the engines are on the first `ranks` ranks of the cluster."""
    engines = max(1, ranks // config.rollout.tensor_parallel)
    state = deferring_state(
        batch.lengths, batch.group, flight_rules(config), slice_tokens(config.rollout), prompt_share
    )
    share = batch.sequences / state.sequences / engines
    places, played = [], []
    for rounds in filter(None, (state.short, state.whole)):
        running = running_length(batch.prompt_tokens, _sum_of(rounds))
        most = math.ceil(share * max(len(one.slices_S) for one in rounds))
        slots = slots_of(config, shape, target, running, most)
        places.append((most, slots))
        played.append(_play_deferring(rounds, share, slots))
    steps, tail = (round(sum(numbers) / DEFER_STEPS) for numbers in zip(*played, strict=True))
    most, slots = max(places)
    sampled = state.sampled.times(batch.sequences / state.sequences)
    work = sampling_work(config, shape, target, cluster, batch, sampled, engines, steps)
    work += Work(tokens=sampled.begun * batch.prompt_tokens + sampled.tokens)
    engine = engine_bytes(shape, config.rollout, target.kind, target.itemsize, target.total_bytes)
    defer = Defer(state.rounds_of_a_step, state.deferred, 1 - state.learned_tokens / state.sampled.tokens)
    return Rollout(sampled, work, slots, most, steps, tail, engine.weights, defer=defer)


@lru_cache(maxsize=256)
def _play_deferring(rounds: tuple[DeferringRound, ...], share: float, slots: int) -> tuple[float, float]:
    """(engine steps, those in which nothing was waiting any more) of all these rounds, as `play_rounds`."""
    played = [play_slices(one.slices_S, math.ceil(share * len(one.slices_S)), slots) for one in rounds]
    steps, tail = (sum(numbers) for numbers in zip(*played, strict=True))
    return steps, tail


# ---------------------------------------------------------------- the steady state of carrying


@dataclass(frozen=True, eq=False)
class Round:
    """A simulated round."""

    slices_S: np.ndarray
    """New tokens of every completion that was not finished, those begun first in front."""
    carried: Carried


@dataclass(frozen=True, eq=False)
class SteadyState:
    """`STEPS` steps in a row, late enough in a run that their average is that of all later ones."""

    sequences: int
    """That a simulated step learns from."""
    rounds: tuple[Round, ...]
    staleness: float
    """Steps between the one that samples a token and the one that learns from it, mean over tokens."""
    oldest: int
    """The most of these."""

    @property
    def rounds_of_a_step(self) -> float:
        return len(self.rounds) / STEPS

    @property
    def carried(self) -> Carried:
        """Of all rounds of a step."""
        return sum((one.carried for one in self.rounds), Carried()).times(1 / STEPS)


@lru_cache(maxsize=64)
def steady_state(lengths: Lengths, group: int, rules: FlightRules, length: int) -> SteadyState:
    """Of groups of so many completions, in slices of `length` tokens. `rules` are those of the real run; nothing is
    dropped."""
    simulation = _Simulation(lengths, group, _scaled(rules), length)
    for _ in range(2 * (rules.max_staleness + 1) + 2):
        simulation.step()
    simulation.rounds.clear()
    tokens_by_age = sum((simulation.step() for _ in range(STEPS)), Counter())
    staleness = sum(age * tokens for age, tokens in tokens_by_age.items()) / tokens_by_age.total()
    sequences = simulation.rules.groups_per_step * group
    return SteadyState(sequences, tuple(simulation.rounds), staleness, max(tokens_by_age))


def _scaled(rules: FlightRules) -> FlightRules:
    """The same with at most `MOST_GROUPS` groups a step."""
    groups = min(rules.groups_per_step, MOST_GROUPS)
    in_flight = max(groups, round(rules.max_groups * groups / rules.groups_per_step))
    return FlightRules(groups, in_flight, rules.max_staleness)


_KEPT = Chosen((0,))
_SCORE = Score(0.0, False, "", "")
_WHOLE = ScoredCompletion(Completion(0, (), (), "", "stop", 0), _SCORE)
_ENDLESS = 2**40
"""Steps that a simulated run still has."""


class _Simulation:
    """A run whose completions are lengths.

    All completions of a group begin together, and have a slice in every round until they are finished: so those that
    are not finished have the same number of tokens, and the group is complete with its longest one. That one alone is
    in the flight; the lengths of the others are beside. Its segments have the tokens of the whole group.
    """

    def __init__(self, lengths: Lengths, group: int, rules: FlightRules, slice_tokens: int) -> None:
        self.rules = rules
        self.rounds: list[Round] = []
        self._group, self._slice_tokens = group, slice_tokens
        number = group * max(rules.groups_per_step, -(-LEAST_LENGTHS // group))
        self._quantiles = np.array([round(lengths.at((i + 0.5) / number)) for i in range(number)])
        self._random = np.random.default_rng(0)
        self._lengths: list[np.ndarray] = []
        """By draw: tokens of the G completions."""
        self._flight = Flight()
        self._step = 0

    def step(self) -> Counter[int]:
        """Make the next step: the tokens that it learns from, by their age in steps."""
        found = advance_carry(
            self._flight, self.rules, self._step, _ENDLESS, 1, self._sample_round, lambda group: _KEPT
        )
        tokens_by_age: Counter[int] = Counter()
        for group in found.groups:
            for segment in group.samples[0].completion.segments:
                tokens_by_age[self._step - segment.step] += segment.tokens
        self._step += 1
        return tokens_by_age

    def _sample_round(self, groups: list[GroupInFlight]) -> list[GroupInFlight]:
        while len(self._lengths) < self._flight.next_draw:
            # Evenly spread over the distribution, in an order of chance.
            self._lengths.extend(self._random.permutation(self._quantiles).reshape(-1, self._group))
        going_on = [i for i, group in enumerate(groups) if not group.is_complete]
        lengths_UG = np.stack([self._lengths[groups[i].draw] for i in going_on])
        before_U1 = np.array([[len(groups[i].samples[0].token_ids)] for i in going_on])
        slices_UG = np.clip(lengths_UG - before_U1, 0, self._slice_tokens)
        samples_now = slices_UG > 0
        carried_S = np.broadcast_to(before_U1, slices_UG.shape)[samples_now & (before_U1 > 0)].astype(float)
        carried = Carried(len(carried_S), float(carried_S.sum()), float((carried_S**2).sum()))
        self.rounds.append(Round(slices_UG[samples_now], carried))
        after = list(groups)
        tokens_U, longest_U = slices_UG.sum(1).tolist(), lengths_UG.max(1).tolist()
        for i, tokens, longest in zip(going_on, tokens_U, longest_U, strict=True):
            after[i] = self._longer(groups[i], tokens, longest)
        return after

    def _longer(self, group: GroupInFlight, tokens: int, longest: int) -> GroupInFlight:
        """A group after a round that has sampled so many tokens of it; its longest completion ends with `longest`."""
        (sample,) = group.samples
        assert isinstance(sample, PartialCompletion)
        segments = (*sample.segments, Segment(tokens, 0, self._step))
        done = len(sample.token_ids) + self._slice_tokens
        if done < longest:
            sample = PartialCompletion(range(done), (), segments)
        else:
            whole = Completion(0, range(longest), (), "", "stop", 0, segments)
            sample = ScoredCompletion(whole, _SCORE)
        return GroupInFlight(group.draw, group.first_step, (sample,))


# ---------------------------------------------------------------- the steady state of deferring


@dataclass(frozen=True, eq=False)
class DeferringRound:
    """A simulated round, short or whole."""

    slices_S: np.ndarray
    """Tokens of every completion."""
    sampled: Sampled


@dataclass(frozen=True, eq=False)
class DeferringState:
    """`DEFER_STEPS` steps in a row, as `SteadyState`."""

    sequences: int
    """That a simulated step learns from."""
    short: tuple[DeferringRound, ...]
    whole: tuple[DeferringRound, ...]
    learned_tokens: float
    """Of a step."""
    deferred: float
    """Share of the groups that are learned from."""

    @property
    def rounds_of_a_step(self) -> float:
        return (len(self.short) + len(self.whole)) / DEFER_STEPS

    @property
    def sampled(self) -> Sampled:
        """In a step."""
        return _sum_of(self.short + self.whole).times(1 / DEFER_STEPS)


def _sum_of(rounds: tuple[DeferringRound, ...]) -> Sampled:
    return sum((one.sampled for one in rounds), Sampled())


@lru_cache(maxsize=64)
def deferring_state(
    lengths: Lengths, group: int, rules: FlightRules, length: int, prompt_share: float
) -> DeferringState:
    """Of groups of so many completions; those with one of more than `length` tokens are deferred. `rules` are those of
    the real run; nothing is dropped."""
    simulation = _DeferringSimulation(lengths, group, _scaled(rules), length, prompt_share)
    for _ in range(DEFER_WARM_UP):
        simulation.step()
    simulation.rounds = {False: [], True: []}
    learned = [one for _ in range(DEFER_STEPS) for one in simulation.step()]
    sequences = simulation.rules.groups_per_step * group
    tokens = sum(simulation.tokens_of(one) for one in learned)
    deferred = sum(one.deferred for one in learned)
    short, whole = (tuple(simulation.rounds[kind]) for kind in (False, True))
    return DeferringState(sequences, short, whole, tokens / DEFER_STEPS, deferred / len(learned))


def alike_lengths(
    quantiles: np.ndarray, group: int, prompt_share: float, random: np.random.Generator
) -> np.ndarray:
    """`quantiles` (ascending lengths) in an order of chance, N groups of G completions: were their distribution normal,
    the completions of a group would have `prompt_share` of the variance in common."""
    prompts_N1 = random.standard_normal((len(quantiles) // group, 1))
    own_NG = random.standard_normal((len(quantiles) // group, group))
    scores_NG = math.sqrt(prompt_share) * prompts_N1 + math.sqrt(1 - prompt_share) * own_NG
    ranks = scores_NG.ravel().argsort().argsort()
    return quantiles[ranks].reshape(scores_NG.shape)


class _DeferringSimulation:
    """A run whose completions are lengths. In the flight one sample stands for its group: it is complete where all of
    the group are."""

    def __init__(
        self, lengths: Lengths, group: int, rules: FlightRules, slice_tokens: int, prompt_share: float
    ) -> None:
        self.rules = rules
        self.rounds: dict[bool, list[DeferringRound]] = {False: [], True: []}
        """By whether they are whole."""
        self._group, self._prompt_share = group, prompt_share
        self._most = {False: slice_tokens, True: lengths.longest}
        number = group * max(rules.groups_per_step, EVEN_GROUPS)
        self._quantiles = np.array([round(lengths.at((i + 0.5) / number)) for i in range(number)])
        self._random = np.random.default_rng(0)
        self._lengths: list[np.ndarray] = []
        """By draw: tokens of the G completions."""
        self._flight = Flight()
        self._step = 0

    def step(self) -> list[GroupInFlight]:
        """Make the next step: the groups that it learns from."""
        found = advance_defer(
            self._flight, self.rules, self._step, _ENDLESS, 1, self._sample_round, lambda group: _KEPT
        )
        self._step += 1
        return found.groups

    def tokens_of(self, group: GroupInFlight) -> int:
        return int(self._lengths[group.draw].sum())

    def _sample_round(self, groups: list[GroupInFlight], whole: bool) -> list[GroupInFlight]:
        while len(self._lengths) < self._flight.next_draw:
            self._lengths.extend(
                alike_lengths(self._quantiles, self._group, self._prompt_share, self._random)
            )
        lengths_UG = np.stack([self._lengths[group.draw] for group in groups])
        done_UG = lengths_UG <= self._most[whole]
        slices_S = np.minimum(lengths_UG, self._most[whole]).ravel()
        squares = float((slices_S.astype(float) ** 2).sum())
        sampled = Sampled(len(slices_S), float(done_UG.sum()), float(slices_S.sum()), squares)
        self.rounds[whole].append(DeferringRound(slices_S, sampled))
        return [
            GroupInFlight(
                group.draw, group.first_step, (_WHOLE if done else NOTHING_SAMPLED,), group.deferred
            )
            for group, done in zip(groups, done_UG.all(axis=1).tolist(), strict=True)
        ]
