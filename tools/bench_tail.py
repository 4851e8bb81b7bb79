"""The tail of a rollout (`rollout.tail`): tokens learned per second of rollout with every way to treat it.

    python tools/bench_tail.py [--ways carry defer] [--quick]

Ranks under torchrun, one engine each, 2 and 4 of them, with a random Qwen2 of 0.6M parameters. A step learns from
groups of 4 completions, 8 groups for each engine. Their lengths are log-normal as the planner's
(`rlmath.planning.planner.lengths`): mean 0.3 of the longest that is allowed, 3% cut off there. Length and seed follow from
repeat, draw and sample, so that all ways sample the same completions.

- wait: a step samples its own groups to their end.
- carry: rounds of a slice of every completion in flight, until enough groups are complete; the others go on in the next
  step (`advance_carry` of `rlmath.algorithms.partial_rollouts`, the run's own scheduler).
- defer: groups with a completion of more than a slice are sampled anew, in steps of their own (`advance_defer`).

Settings that a case does not name are as a run has them. An engine has 32 places, which "wait" fills when a step
begins, or 64. With 32 places every completion's length is drawn alone. With 64 a half of the variance of its logarithm
is that of its prompt: "defer" gains little where each completion of a group is as likely to be long as any other. All
ways sample through the run's work queue and gather to all ranks what was sampled. Cached prefixes are dropped before
every round, as a run does (when a step begins, the weights are new): what is carried is prefilled again. Time is that
of rollouts alone; nothing is scored or trained.

Carry and defer make steps until about as much is in flight as will be, then those that count; the ways take turns, step
by step. They learn from as many groups, in steps of the same numbers; what is in flight before and after makes some of
them different ones.

Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}. `value` is that of
the way that the case names, `ratio` above 1 means that it is better, null that there is nothing to compare. Medians of
the repeats:

- learned_tokens_per_second: tokens of the groups that were learned, by the seconds of those steps;
- least_speedup: the way's tokens per second by wait's, of the repeat where that is least;
- learned_tokens_per_engine_step: by the engine steps of the engine that makes most, summed over rounds;
- rollout_seconds, engine_steps (of the engine that makes most), rounds: of a step, mean;
- filled: tokens sampled, as a share of all places in all those engine steps (0 to 1);
- tail_share: share of all engines' steps behind the last that an engine begins (0 to 1);
- learned_length: of a completion, mean over all repeats (ratio: by wait's, should be 1);
- tokens_in_flight: sampled and not learned, after a step, mean;
- prefilled_again: sampled tokens that were prefilled again, per learned token;
- discarded: tokens that were sampled and discarded, per learned token;
- staleness: steps between the one that sampled a token and the one that learned it, mean over tokens;
- largest_staleness: the same, largest of all repeats;
- own_step_seconds ("paced"): what an engine step takes without its pause, median (ratio: the pace by that).

"paced" lets no engine step take less than 20 ms, by sleeping. Then the time goes by steps and not by computing, as it
does on a GPU, where a step takes about as long for few sequences as for many. "own cores" does not pause, and is
measured where both of two engines have a core of their own. There a step takes longer the more sequences it decodes,
and prefilling or sampling again costs more than on a GPU. Seconds are of use on an otherwise idle machine only; engine
steps are nearly the same on any.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

import torch.distributed as dist

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
from rlmath.config.schema import Config, DataConfig, RolloutConfig
from rlmath.distributed.collectives import all_gather_objects, shared_store
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.models.hf_config import read_model_shape
from rlmath.planning.planner.lengths import Lengths, lengths_measured
from rlmath.rollout.engine import Engine
from rlmath.rollout.flight_rules import flight_rules, slice_tokens
from rlmath.rollout.sampling import (
    AllAtOnce,
    Key,
    Load,
    Request,
    RequestResult,
    RequestSource,
    continued,
    request_seed,
)
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from rlmath.rollout.work_queue import EngineUsage, WorkQueue
from rlmath.trainer.rollouts.synchronous import tokens_of

REPOSITORY = Path(__file__).resolve().parents[1]
GROUP_SIZE, GROUPS = 4, 8
"""Completions of a group; groups of a step for each engine."""
MEAN_SHARE, CUT_OFF_SHARE = 0.3, 0.03
"""Mean length, as a share of the longest; share of the completions that are cut off."""
ENGINES = (2, 4)
STEP_SECONDS = 0.020
"""Pace of the paced cases."""
CARRY, OLDER, DEFER = (
    RolloutConfig(tail="carry"),
    RolloutConfig(tail="carry", max_staleness=4),
    RolloutConfig(tail="defer"),
)
PROMPT = (5, 6, 7, 8, 9, 10, 11)
SCORE = Score(1.0, True, "", "string")
NEVER_ENDS = 10**6
"""Steps that are left of the run whose first steps are measured."""


@dataclass(frozen=True)
class Completions:
    """How long completions are."""

    longest: int
    """Tokens."""
    prompt_share: float = 0.0
    """Of the variance of the logarithm of a length, what all completions of a group have in common (0 to 1)."""

    def length(self, repeat: int, draw: int, sample: int) -> int:
        """Tokens of a completion, whichever way samples it."""
        of_group, own = (
            random.Random(f"{repeat}/{draw}/{which}").gauss(0.0, 1.0) for which in ("group", sample)
        )
        score = math.sqrt(self.prompt_share) * of_group + math.sqrt(1 - self.prompt_share) * own
        return round(lengths(self.longest).at(min(max(NormalDist().cdf(score), 1e-9), 1 - 1e-9)))

    def request(self, repeat: int, draw: int, sample: int) -> Request:
        """For a whole completion of its exact length."""
        tokens = self.length(repeat, draw, sample)
        seed = request_seed(repeat, 0, str(draw), sample)
        return Request((0, sample), (*PROMPT, draw % 90 + 3), seed, tokens, tokens)


@cache
def lengths(longest: int) -> Lengths:
    """The distribution of the completions' lengths."""
    return lengths_measured(MEAN_SHARE * longest, longest, CUT_OFF_SHARE)


@dataclass(frozen=True)
class Case:
    engines: int
    places: int
    """Sequences that an engine decodes at a time (`rollout.max_num_seqs`)."""
    step_seconds: float
    """An engine step takes at least so long; 0: as long as it takes."""
    completions: Completions
    warm_up: int
    """Steps before those that count."""
    steps: int
    repeats: int
    tails: tuple[RolloutConfig, ...]
    """The ways but "wait"."""

    @property
    def groups(self) -> int:
        """That a step learns from."""
        return self.engines * GROUPS

    def named(self, tail: RolloutConfig) -> str:
        pace = f"paced at {1000 * self.step_seconds:.0f} ms" if self.step_seconds else "own cores"
        share = self.completions.prompt_share
        alike = f", {share:.0%} of the variance of log lengths by prompt" if share else ""
        way = f"{tail.tail}, slices of {self.slice_tokens(tail)}"
        if tail.tail == "carry":
            in_flight = self.rules(tail).max_groups
            way = f"{way}, staleness {tail.max_staleness}, {in_flight} groups in flight"
        return (
            f"{self.engines} engines of {self.places} places, {pace}, {self.groups} groups of {GROUP_SIZE} a step, at "
            f"most {self.completions.longest} tokens{alike}; {way}"
        )

    def slice_tokens(self, tail: RolloutConfig) -> int:
        return slice_tokens(self._config(tail).rollout)

    def rules(self, tail: RolloutConfig) -> FlightRules:
        return flight_rules(self._config(tail))

    def _config(self, tail: RolloutConfig) -> Config:
        rollout = replace(tail, max_new_tokens=self.completions.longest)
        return Config(data=DataConfig(prompts_per_step=self.groups), rollout=rollout)


# ---------------------------------------------------------------- completions


def make_rows(
    groups: Sequence[GroupInFlight], completions: Completions, repeat: int, slice_tokens: int
) -> list[list[Request]]:
    """The requests for the next slice of every completion that is not finished, as the trainer makes them: completions
    that have begun are rows of their own, in front as they were drawn earlier; those of a new group share a row."""
    rows: list[list[Request]] = []
    for group in groups:
        requests, begun = [], any(sample is not NOTHING_SAMPLED for sample in group.samples)
        for g in group.unfinished:
            so_far = group.samples[g]
            assert isinstance(so_far, PartialCompletion)
            key = (len(rows) + (len(requests) if begun else 0), g)
            whole = completions.request(repeat, group.draw, g)
            requests.append(continued(whole, key, so_far, slice_tokens))
        rows += [[request] for request in requests] if begun else [requests]
    return rows


def after_round(
    groups: Sequence[GroupInFlight],
    rows: Sequence[Sequence[Request]],
    results: Mapping[Key, RequestResult],
    completions: Completions,
    repeat: int,
    step: int,
) -> list[GroupInFlight]:
    """The groups with what was sampled for the rows that `make_rows` made of them. A completion that has all its tokens
    is finished."""
    keys, after = (request.key for row in rows for request in row), []
    for group in groups:
        samples = list(group.samples)
        for g in group.unfinished:
            so_far, result = samples[g], results[next(keys)]
            assert isinstance(so_far, PartialCompletion)
            samples[g] = part = so_far.extended(result.token_ids, result.logprobs, step, step)
            missing = completions.length(repeat, group.draw, g) - len(part.token_ids)
            assert missing >= 0, "lengths are exact"
            if not missing:
                completion = Completion(g, part.token_ids, part.logprobs, "", "stop", step, part.segments)
                samples[g] = ScoredCompletion(completion, SCORE)
        after.append(replace(group, samples=tuple(samples)))
    return after


# ---------------------------------------------------------------- sampling


class Paced:
    """A source that lets no engine step, the last one included, take less than `step_seconds`."""

    def __init__(self, source: RequestSource, step_seconds: float) -> None:
        self._source = source
        self._step_seconds = step_seconds
        self._began: float | None = None
        self.own_seconds: list[float] = []
        """What each step took before the pause."""

    def pop(self, load: Load) -> Sequence[Request]:
        """Asked before every step, and after the last."""
        if self._began is not None:
            self.own_seconds.append(time.perf_counter() - self._began)
            time.sleep(max(0.0, self._step_seconds - self.own_seconds[-1]))
        requests = self._source.pop(load)
        self._began = time.perf_counter()
        return requests

    def finished(self, result: RequestResult) -> None:
        self._source.finished(result)


@dataclass
class Counted:
    """What rounds did, summed, but for the list."""

    rounds: int = 0
    engine_steps: int = 0
    """Of the engine that makes most, by round."""
    all_steps: int = 0
    """Of all engines."""
    tail_steps: int = 0
    sampled_tokens: int = 0
    prefilled_again: int = 0
    own_seconds: list[float] = field(default_factory=list)
    """Of every step of every engine."""


class Sampler:
    """Makes rounds with the engines of a case. Every rank calls it alike, also those without a part in the case."""

    def __init__(self, engine: Engine, case: Case, way: str, repeat: int) -> None:
        self._engine, self._case, self._repeat = engine, case, repeat
        self._name = f"{case.engines}/{case.places}/{case.step_seconds}/{way}/{repeat}"
        self._rounds = 0
        self.counted = Counted()

    def round(self, groups: Sequence[GroupInFlight], slice_tokens: int, step: int) -> list[GroupInFlight]:
        """The groups after a slice of every completion that is not finished."""
        case, repeat = self._case, self._repeat
        rows = make_rows(groups, case.completions, repeat, slice_tokens)
        self._engine.reset_prefix_cache()
        results = self._sample(rows)
        counted = self.counted
        counted.sampled_tokens += sum(len(result.token_ids) for result in results.values())
        counted.prefilled_again += sum(len(one.so_far) for row in rows for one in row)
        return after_round(groups, rows, results, case.completions, repeat, step)

    def _sample(self, rows: Sequence[Sequence[Request]]) -> dict[Key, RequestResult]:
        """By key, on every rank."""
        rank, engines = environment_rank(), self._case.engines
        store = shared_store(f"{self._name}/{self._rounds}")  # a collective at its first call
        self._rounds += 1
        queue, source = None, AllAtOnce([])
        if rank < engines:
            mesh = Mesh(rank, engines, tensor=1, pipeline=1, engine_size=1)
            source = queue = WorkQueue(store, rows, mesh, self._case.places)
        paced = Paced(source, self._case.step_seconds)
        results = list(self._engine.generate(paced))
        mine = None if queue is None else (results, queue.usage(0.0), paced.own_seconds)
        parts = [part for part in all_gather_objects(mine) if part is not None]
        if queue is not None:
            queue.close()
        self._count([(usage, seconds) for _, usage, seconds in parts])
        return {result.key: result for of_engine, _, _ in parts for result in of_engine}

    def _count(self, engines: Sequence[tuple[EngineUsage, list[float]]]) -> None:
        counted = self.counted
        counted.rounds += 1
        counted.engine_steps += max(len(seconds) for _, seconds in engines)
        for usage, seconds in engines:
            counted.all_steps += len(seconds)
            counted.tail_steps += usage.tail_steps
            counted.own_seconds += seconds


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Figures:
    """Of one way in one repeat: of the steps that count."""

    seconds: float
    steps: int
    learned_tokens: int
    completions: int
    """Learned."""
    rounds: int
    engine_steps: int
    """Of the engine that makes most, by round."""
    filled: float
    """Tokens sampled, as a share of all places in all `engine_steps` (0 to 1)."""
    tail_share: float
    """Share of all engines' steps that are behind the last sequence that the engine begins (0 to 1)."""
    tokens_in_flight: float
    """After a step, mean."""
    prefilled_again: int
    """Sampled tokens that were prefilled again."""
    discarded: int
    """Sampled tokens that were discarded."""
    staleness: float
    """Steps between the one that sampled a token and the one that learned it, mean over learned tokens."""
    largest_staleness: int
    own_step_seconds: float
    """An engine step without the pause, median."""

    @property
    def tokens_per_second(self) -> float:
        return self.learned_tokens / self.seconds

    @property
    def tokens_per_engine_step(self) -> float:
        return self.learned_tokens / self.engine_steps


def segments_of(group: GroupInFlight) -> list[Segment]:
    """Of a complete group."""
    finished = (one for one in group.samples if isinstance(one, ScoredCompletion))
    return [segment for one in finished for segment in one.completion.segments]


def whole_groups(case: Case, step: int) -> list[GroupInFlight]:
    """The groups of a step that waits."""
    draws = range(step * case.groups, (step + 1) * case.groups)
    return [GroupInFlight(draw, step, (NOTHING_SAMPLED,) * GROUP_SIZE) for draw in draws]


def keep(group: GroupInFlight) -> Chosen:
    """All of a group is learned from."""
    return Chosen(tuple(range(GROUP_SIZE)))


class Way:
    """The steps of one repeat with "wait" (None) or another `rollout.tail`."""

    def __init__(self, engine: Engine, case: Case, tail: RolloutConfig | None, repeat: int) -> None:
        self._case, self._tail = case, tail
        name = "wait" if tail is None else f"{tail.tail}{tail.max_staleness}"
        self._sampler = Sampler(engine, case, name, repeat)
        self._flight = Flight()
        self._seconds = 0.0
        self._learned: list[GroupInFlight] = []
        self._in_flight: list[int] = []
        self._ages: list[tuple[int, int]] = []
        """Of the learned tokens' segments: (steps since they were sampled, tokens)."""

    def warm_up(self, step: int) -> None:
        """A step that does not count. Those that wait are alike from the first one on: they make only the last."""
        if self._tail is not None or step == self._case.warm_up - 1:
            self._learn(step)
        self._sampler.counted = Counted()

    def count(self, step: int) -> None:
        """A step that counts."""
        dist.barrier()
        started = time.perf_counter()
        groups = self._learn(step)
        self._seconds += time.perf_counter() - started
        assert len(groups) == self._case.groups, "every step learns from as many groups"
        self._learned += groups
        self._in_flight.append(sum(map(tokens_of, self._flight.groups)))
        self._ages += [(step - one.step, one.tokens) for group in groups for one in segments_of(group)]

    def _learn(self, step: int) -> list[GroupInFlight]:
        """The groups that a step learns from."""
        case, sampler, tail = self._case, self._sampler, self._tail
        longest = case.completions.longest
        if tail is None:
            return sampler.round(whole_groups(case, step), longest, step)
        length = case.slice_tokens(tail)
        flight = self._flight, case.rules(tail), step, NEVER_ENDS, GROUP_SIZE
        if tail.tail == "carry":
            return advance_carry(*flight, lambda groups: sampler.round(groups, length, step), keep).groups

        def sample_round(groups: list[GroupInFlight], whole: bool) -> list[GroupInFlight]:
            return sampler.round(groups, longest if whole else length, step)

        return advance_defer(*flight, sample_round, keep).groups

    def figures(self) -> Figures:
        """Of the steps that counted. A collective."""
        counted, tokens = self._sampler.counted, sum(map(tokens_of, self._learned))
        nothing_carried = self._tail is not None and self._tail.tail == "defer"
        return Figures(
            seconds=max(all_gather_objects(self._seconds)),
            steps=self._case.steps,
            learned_tokens=tokens,
            completions=GROUP_SIZE * len(self._learned),
            rounds=counted.rounds,
            engine_steps=counted.engine_steps,
            filled=counted.sampled_tokens / (counted.engine_steps * self._case.engines * self._case.places),
            tail_share=counted.tail_steps / counted.all_steps,
            tokens_in_flight=statistics.mean(self._in_flight),
            prefilled_again=counted.prefilled_again,
            discarded=counted.sampled_tokens - tokens if nothing_carried else 0,
            staleness=sum(age * count for age, count in self._ages) / tokens,
            largest_staleness=max(age for age, _ in self._ages),
            own_step_seconds=statistics.median(counted.own_seconds),
        )


def compare(engine: Engine, case: Case, repeat: int) -> list[Figures]:
    """Waiting, and every other way, with the same completions; a step of each in turns, so that what else the machine
    does slows all of them down."""
    ways = [Way(engine, case, tail, repeat) for tail in (None, *case.tails)]
    for step in range(case.warm_up):
        for way in ways:
            way.warm_up(step)
    for step in range(case.warm_up, case.warm_up + case.steps):
        for way in ways if step % 2 else reversed(ways):
            way.count(step)
    return [way.figures() for way in ways]


# ---------------------------------------------------------------- output


def report(
    case: str, metric: str, value: float, unit: str, baseline: str | None = None, ratio: float | None = None
) -> None:
    line = {
        "bench": "tail",
        "case": case,
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "baseline": baseline,
        "ratio": None if ratio is None else round(ratio, 3),
    }
    print(json.dumps(line), flush=True)


def report_case(case: str, pace: float, pairs: Sequence[tuple[Figures, Figures]]) -> None:
    """The medians of (wait, another way); `pace` is that of the engine steps (s), 0 without one."""

    def medians(figure: Callable[[Figures], float]) -> tuple[float, float]:
        wait, other = (statistics.median(map(figure, way)) for way in zip(*pairs, strict=True))
        return wait, other

    def more(metric: str, unit: str, figure: Callable[[Figures], float]) -> None:
        wait, other = medians(figure)
        report(case, metric, other, unit, f"wait: {wait:.4f}", other / wait)

    def less(metric: str, unit: str, figure: Callable[[Figures], float]) -> None:
        wait, other = medians(figure)
        report(case, metric, other, unit, f"wait: {wait:.4f}", wait / other if other else None)

    def alone(metric: str, unit: str, figure: Callable[[Figures], float]) -> None:
        report(case, metric, medians(figure)[1], unit)

    more("learned_tokens_per_second", "tokens/s", lambda one: one.tokens_per_second)
    least = min(other.tokens_per_second / wait.tokens_per_second for wait, other in pairs)
    report(case, "least_speedup", least, "ratio", "wait", least)
    more("learned_tokens_per_engine_step", "tokens", lambda one: one.tokens_per_engine_step)
    less("rollout_seconds", "s", lambda one: one.seconds / one.steps)
    less("engine_steps", "steps", lambda one: one.engine_steps / one.steps)
    more("filled", "share", lambda one: one.filled)
    less("tail_share", "share", lambda one: one.tail_share)
    wait, other = (
        sum(one.learned_tokens for one in way) / sum(one.completions for one in way)
        for way in zip(*pairs, strict=True)
    )
    report(case, "learned_length", other, "tokens", f"wait: {wait:.4f}", other / wait)
    alone("rounds", "rounds", lambda one: one.rounds / one.steps)
    alone("tokens_in_flight", "tokens", lambda one: one.tokens_in_flight)
    alone("prefilled_again", "tokens", lambda one: one.prefilled_again / one.learned_tokens)
    alone("discarded", "tokens", lambda one: one.discarded / one.learned_tokens)
    alone("staleness", "steps", lambda one: one.staleness)
    largest = max(other.largest_staleness for _, other in pairs)
    report(case, "largest_staleness", largest, "steps")
    if pace:
        _, own = medians(lambda one: one.own_step_seconds)
        report(case, "own_step_seconds", own, "s", f"pace: {pace:.4f}", pace / own)


# ---------------------------------------------------------------- program


WAYS = ("carry", "defer")
"""What is measured against "wait" unless others are named."""


def cases_of(ways: Sequence[str], quick: bool) -> list[Case]:
    """The cases with these ways, and in them no others."""
    found = [
        replace(case, tails=tuple(tail for tail in case.tails if tail.tail in ways))
        for case in cases(quick, len(os.sched_getaffinity(0)))
    ]
    return [case for case in found if case.tails]


def cases(quick: bool, cores: int) -> list[Case]:
    """Paced, and at full speed with 2 engines where each has a core; with `quick` shorter, and paced only."""
    alone, alike = Completions(64 if quick else 96), Completions(64 if quick else 96, prompt_share=0.5)
    if quick:
        return [
            Case(2, 32, STEP_SECONDS, alone, 3, 6, 2, (CARRY,)),
            Case(4, 64, STEP_SECONDS, alike, 3, 8, 2, (DEFER,)),
        ]
    paced = [
        case
        for engines in ENGINES
        for case in (
            Case(engines, 32, STEP_SECONDS, alone, 7, 10, 5, (CARRY, OLDER)),
            Case(engines, 64, STEP_SECONDS, alike, 4, 32, 5, (CARRY, DEFER)),
        )
    ]
    return paced + [replace(case, step_seconds=0.0) for case in paced if case.engines <= min(2, cores)]


def run_rank(folder: Path, todo: Sequence[Case]) -> None:
    """What every rank under torchrun does; each has an engine of its own."""
    device = open_device("cpu")
    mesh = Mesh(environment_rank(), environment_world_size(), tensor=1, pipeline=1, engine_size=1)
    init_process_group(device, 600.0)
    settings = RolloutConfig(max_num_seqs=max(case.places for case in todo), cpu_kv_cache_gib=0.1)
    longest = len(PROMPT) + 1 + max(case.completions.longest for case in todo)
    shapes = engine_shapes(read_model_shape(folder), engine_size=1)
    engine = Engine(str(folder), settings, longest, mesh, device, shapes)
    list(engine.generate([todo[0].completions.request(0, draw, 0) for draw in range(settings.max_num_seqs)]))
    for case in todo:
        repeats = [compare(engine, case, repeat) for repeat in range(1, case.repeats + 1)]
        if mesh.rank == 0:
            wait, *others = zip(*repeats, strict=True)
            for tail, figures in zip(case.tails, others, strict=True):
                report_case(case.named(tail), case.step_seconds, list(zip(wait, figures, strict=True)))
    dist.barrier()
    engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="shorter completions, fewer steps, within two minutes"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # set for the ranks, by this program
    options = parser.parse_args(arguments)
    if options.model is not None:
        run_rank(options.model, cases_of(options.ways, options.quick))
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make = [sys.executable, "-m", "rlmath.cli.make_tiny_model", "--output", str(folder)]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={max(ENGINES)}")
        program = (str(Path(__file__).resolve()), "--model", str(folder), "--ways", *options.ways)
        command = [sys.executable, *launcher, *program, *(["--quick"] if options.quick else [])]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


if __name__ == "__main__":
    main()
