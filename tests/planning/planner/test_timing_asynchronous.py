"""Engines on ranks of their own: by hand, against a run of every sequence with a real one's rules, and at limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.partial_rollouts import (
    Flight,
    FlightRules,
    draw,
    is_enough,
    leaving,
    left_behind,
    room,
    too_old,
)
from rlmath.algorithms.types import NOTHING_SAMPLED, Completion, Score, ScoredCompletion
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.models.hf_config import required_shape
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.memory_formulas import engine_bytes
from rlmath.planning.planner.asynchronous import EngineCosts, Overlap, places_of, transfer_work
from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean
from rlmath.planning.planner.machines import Cluster, machine_of
from rlmath.planning.planner.partial_rollouts import Carried, prefill_again_work, tokens_of_an_engine_step
from rlmath.planning.planner.published import RECIPES
from rlmath.planning.planner.rollout import (
    play,
    rollout_of,
    running_length,
    sampled_once,
    sampling_work,
    slots_of,
)
from rlmath.planning.planner.splits import asynchronous
from rlmath.planning.planner.step import ENGINE_PHASES, TRAINER_PHASES, StepPlan, batch_of, plan_step
from rlmath.planning.planner.training import held_parameters, logprobs_work, publish_work, update_work
from rlmath.planning.planner.work import DEFAULTS, Coefficients, Work, seconds_of
from tests.planning.planner.shapes import BATCH, CONFIG, GPU, MACHINE, TINY, training
from tests.selection import keeping

ONE = Coefficients(*[1.0] * 10)
"""Machine and links reach what they can, and everything else takes a second."""


# ---------------------------------------------------------------- the formula, by hand

COSTS = EngineCosts(
    tokens=1200,
    rollout_steps=600,
    places=8,
    step_seconds=1.0,
    token_seconds=90.0,
    transfer_seconds=4.0,
    again_seconds=2.0,
)


def test_a_step_of_an_engine_by_hand():
    """400 engine steps of 3 sequences, 90 s of tokens, 4 s of transfer, 3 sequences again."""
    assert COSTS.seconds(3) == 400 + 90 + 4 + 6
    assert COSTS.seconds(8) == 150 + 90 + 4 + 16


def test_admission_lets_the_longest_completion_end_in_time():
    """Trainers work half of a step. From the version that begins a completion to the training that must have it are 1.5
    steps, in which it gets 600 tokens: 400 in a step, as each of three sequences of an engine that samples 1,200."""
    assert COSTS.admitted(500, trainer=250, staleness=1) == 1.5 * 1200 / 600 == 3
    assert COSTS.steady(250, staleness=1) == pytest.approx(500)


def test_a_step_is_no_shorter_than_what_trainers_do():
    """At T = S one step is between, for 2 sequences: 600 + 90 + 4 + 4 s, which trainers of 698 s leave no time to."""
    assert COSTS.admitted(698, trainer=698, staleness=1) == 2
    assert COSTS.steady(698, staleness=1) == pytest.approx(698)
    assert COSTS.steady(900, staleness=1) == pytest.approx(900)
    assert COSTS.steady(697, staleness=1) > 697.1


def test_with_enough_staleness_all_places_are_taken():
    assert COSTS.admitted(500, trainer=250, staleness=7) == 8
    assert COSTS.steady(100, staleness=7) == pytest.approx(150 + 90 + 4 + 16)


def test_two_sides_share_a_step_or_take_turns():
    beside = Overlap(3, 5, 30.0, 40.0, False, 2.0, 8, (10.0, 5.0))
    assert beside.seconds == 40 and beside.floor == 15
    assert replace(beside, take_turns=True).seconds == 70


# ---------------------------------------------------------------- the formula, against a run of every sequence

STEPS, WARM_UP = 40, 16
GROUPS, GROUP = 12, 6
MIXED = lengths_with_mean(90, 300)
"""3% are cut off."""


class _Run:
    """An asynchronous run whose completions are lengths, with one engine.

    Admission, and which groups a step takes, are those of `trainer.async_rollouts`. A version is published when the
    engine has taken the one before.
    """

    def __init__(self, costs: EngineCosts, trainer: float, staleness: int, on_new_weights: str) -> None:
        self.costs, self.trainer, self.on_new_weights = costs, trainer, on_new_weights
        self.rules = FlightRules(GROUPS, GROUPS * (staleness + 1), staleness)
        self.now, self.published = 0.0, list[float]()
        self._random, self._shuffled = np.random.default_rng(0), list[int]()
        self._left: list[tuple[int, int]] = []
        """Running, each as (tokens that are missing, draw)."""
        self._waiting: list[tuple[int, int]] = []
        self._unfinished: dict[int, int] = {}
        self._new_weights = False

    def seconds(self) -> float:
        """Of a step, on average."""
        flight = Flight()
        for step in range(STEPS):
            self._wait(flight, step)
            end = self.now + self.trainer
            while self.now < end or self._new_weights:
                self._engine_steps(until=end)
            self.published.append(self.now)
            self._new_weights = True
        return (self.published[-1] - self.published[WARM_UP]) / (STEPS - 1 - WARM_UP)

    def _wait(self, flight: Flight, step: int) -> None:
        while True:
            self._mark_complete(flight)
            found = leaving(flight, self.rules, lambda group: Chosen((0,)))
            for group in draw(flight, room(flight, found, self.rules, 10**6), step, 1):
                self._unfinished[group.draw] = GROUP
                self._waiting += [(length, group.draw) for length in self._lengths()]
            behind = left_behind(flight, found)
            if is_enough(found, self.rules) and not too_old(behind, self.rules, step, lambda g: Chosen((0,))):
                flight.groups = behind
                return
            self._engine_steps()

    def _mark_complete(self, flight: Flight) -> None:
        whole = ScoredCompletion(Completion(0, (), (), "", "stop", 0), Score(0.0, False, "", ""))
        flight.groups = [
            replace(group, samples=(NOTHING_SAMPLED if self._unfinished[group.draw] else whole,))
            for group in flight.groups
        ]

    def _lengths(self) -> list[int]:
        if not self._shuffled:
            number = GROUPS * GROUP * 8
            every = [round(MIXED.at((i + 0.5) / number)) for i in range(number)]
            self._shuffled = self._random.permutation(every).tolist()
        found, self._shuffled = self._shuffled[:GROUP], self._shuffled[GROUP:]
        return found

    def _engine_steps(self, until: float = float("inf")) -> None:
        """Steps of the engine until a sequence ends, or the time is `until`."""
        if self._new_weights and not (self._left and self.on_new_weights == "finish"):
            self._new_weights = False
            self.now += self.costs.transfer_seconds
            if self.on_new_weights == "recompute":
                self.now += self.costs.again_seconds * len(self._left)
        if not self._new_weights:
            free = self.costs.places - len(self._left)
            self._left += self._waiting[:free]
            self._waiting = self._waiting[free:]
        if not self._left:
            assert until < float("inf"), "neither side has anything to do"
            self.now = max(self.now, until)
            return
        of_one = self.costs.step_seconds + self.costs.token_seconds / self.costs.tokens * len(self._left)
        steps = min(length for length, _ in self._left)
        if until < float("inf"):
            steps = min(steps, max(1, math.ceil((until - self.now) / of_one)))
        self.now += steps * of_one
        self._left = [(length - steps, group) for length, group in self._left]
        for length, group in self._left:
            self._unfinished[group] -= length == 0
        self._left = [one for one in self._left if one[0] > 0]


def engine_costs(places: int, token_share: float) -> EngineCosts:
    """Of an engine that has 72 sequences a step, whose tokens take so many times an engine step for each."""
    sequences = GROUPS * GROUP
    tokens = sequences * MIXED.mean
    alone, _ = play(MIXED, sequences, min(places, sequences), sequences)
    return EngineCosts(tokens, alone, places, 1.0, tokens * token_share, 10.0, 0.5)


def cases() -> Iterator[tuple[int, int, float]]:
    """(places, staleness, seconds of the trainers in those of an engine with all its places)."""
    for places in (24, 72, 400):
        for staleness in (1, 2, 4, 8):
            for share in (0.3, 0.9):
                yield places, staleness, share


@pytest.mark.parametrize("on_new_weights", ["recompute", "keep"])
@pytest.mark.parametrize(
    ("places", "staleness", "share"), keeping(cases(), (24, 8, 0.3), (72, 2, 0.9), (400, 1, 0.9), others=0)
)
def test_the_formula_is_met_by_a_run_of_every_sequence(
    places: int, staleness: int, share: float, on_new_weights: str
):
    costs = engine_costs(places, token_share=0.01)
    if on_new_weights == "keep":
        costs = replace(costs, again_seconds=0.0)
    trainer = share * costs.seconds(min(places, 72))
    found = _Run(costs, trainer, staleness, on_new_weights).seconds()
    assert costs.steady(trainer, staleness) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("share", [0.3, 1.5])
def test_finishing_is_met_by_a_run_of_every_sequence(staleness: int, share: float):
    costs = engine_costs(72, token_share=0.01)
    engine = costs.rollout_steps + costs.token_seconds + costs.transfer_seconds
    found = _Run(costs, share * engine, staleness, "finish").seconds()
    assert max(share, 1) * engine == pytest.approx(found, rel=0.05)


def test_without_staleness_a_run_of_every_sequence_takes_turns():
    """By chance no completion of a step may be the longest that there is."""
    costs = engine_costs(72, token_share=0.01)
    turns = 100 + costs.rollout_steps + costs.token_seconds + costs.transfer_seconds
    assert 0.98 * turns < _Run(costs, 100.0, 0, "recompute").seconds() < 1.001 * turns


# ---------------------------------------------------------------- the work of a tiny model, by hand

TWO_NODES = Cluster(MACHINE, 2, 2)


def tiny(ranks: int = 2, **rollout: int | str) -> Config:
    """Of the last so many ranks each has an engine."""
    return replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=ranks, **rollout))


def tiny_plan(config: Config, cluster: Cluster = TWO_NODES, batch: Batch = BATCH) -> StepPlan:
    return plan_step(config, TINY, GPU, cluster, batch, ONE)


def weights() -> int:
    return engine_bytes(TINY, CONFIG.rollout, GPU.kind, GPU.itemsize, GPU.total_bytes).weights


def test_trainers_do_what_so_many_ranks_do_and_get_what_is_sampled():
    alike = replace(BATCH, lengths=Lengths(10.0, 1e-6, 16))
    found, two = tiny_plan(tiny(), batch=alike), training(CONFIG, 2, batch=alike)
    assert set(found.work) == {"records", "update", "publish", "other", *ENGINE_PHASES}
    assert found.work["records"].tokens == pytest.approx(8 * 16)
    assert found.work["update"] == update_work(two) and found.mesh.data == 2
    assert found.work["other"] == Work(steps=1, tokens=found.work["records"].tokens / 2)
    (held,) = held_parameters(two, two.mesh, 4)
    assert publish_work(two) == found.work["publish"] == Work(host=2 * held.parameters)
    recomputing = replace(CONFIG.algorithm, recompute_logprobs=True, n_minibatches=2)
    more = replace(tiny(), algorithm=recomputing)
    assert tiny_plan(more).work["logprobs"] == logprobs_work(
        training(replace(CONFIG, algorithm=recomputing), 2)
    )


def test_trainers_on_a_part_of_the_first_node_share_gradients_inside_it():
    """Of two nodes of 4, three ranks of the first train, or five, the last of them on the second."""
    cluster = Cluster(MACHINE, 2, 4)
    inside, across = (tiny_plan(tiny(ranks), cluster).work["update"] for ranks in (5, 3))
    assert inside == update_work(training(CONFIG, 3)) and inside.network == 0 < inside.node
    assert across.network > 0


def test_a_copy_on_cpu_is_read_and_written():
    cpu = replace(training(CONFIG, 2), target=Target("cpu", "CPU", None, local_layers=True))
    (held,) = held_parameters(cpu, cpu.mesh, 4)
    assert publish_work(cpu) == Work(memory=2 * 4 * held.parameters)


def test_engines_take_new_weights_in_turns():
    """Two engines on other nodes: half of the time one waits for the other. Three: one turn more on average."""
    turn = Work(network=weights(), host=weights(), messages=2)
    assert transfer_work(tiny(), GPU, TWO_NODES, weights()) == turn.times(1.5)
    assert transfer_work(tiny(3), GPU, TWO_NODES, weights()) == turn.times(2)
    in_a_node = Work(host=2 * weights(), messages=2)
    assert transfer_work(tiny(1), GPU, Cluster(MACHINE, 1, 2), weights()) == in_a_node
    cpu = Target("cpu", "CPU", None, local_layers=True)
    on_cpu = Work(node=weights(), memory=2 * weights(), messages=2)
    assert transfer_work(tiny(1), cpu, Cluster(MACHINE, 1, 2), weights()) == on_cpu


def test_a_trainer_that_is_alone_sends_all_ranks_of_an_engine_their_weights():
    config = tiny(4, tensor_parallel=4)
    alone = transfer_work(config, GPU, Cluster(MACHINE, 5, 1), weights())
    assert alone == Work(network=4 * weights(), host=weights(), messages=2)


def test_completions_of_ten_tokens_by_hand():
    """An engine samples 4 of them for a step, 40 tokens in 10 engine steps where all begin together. With staleness 1
    and trainers that take t of S seconds, (2 - t) x 40 / 10 are sampled at a time."""
    alike = replace(BATCH, lengths=Lengths(10.0, 1e-6, 16))
    keep = tiny(max_staleness=1, on_new_weights="keep")
    found = tiny_plan(keep, batch=alike)
    overlap = found.overlap
    assert overlap is not None and (overlap.trainers, overlap.engine_ranks, overlap.places) == (2, 2, 4)
    assert overlap.running == pytest.approx(
        min(4, (2 - overlap.trainer_seconds / found.step_seconds) * 4), rel=1e-6
    )
    sampled = sampled_once(alike)
    steps = 40 / overlap.running
    work = sampling_work(keep, TINY, GPU, TWO_NODES, alike, sampled, 2, 0)
    work += Work(memory=weights(), decode_steps=1).times(steps) + Work(tokens=8 * 16 / 2)
    assert seconds_of(found.work["rollout"], MACHINE, ONE) == pytest.approx(seconds_of(work, MACHINE, ONE))
    transfer = seconds_of(found.work["transfer"], MACHINE, ONE)
    assert overlap.engine_seconds == pytest.approx(seconds_of(work, MACHINE, ONE) + transfer)
    assert found.step_seconds == max(overlap.trainer_seconds, overlap.engine_seconds)
    of_trainers = ("records", "update", "publish", "other")
    assert overlap.trainer_seconds == sum(found.seconds[name] for name in of_trainers)


@pytest.mark.parametrize("on_new_weights", ["recompute", "keep"])
def test_as_many_run_as_the_step_itself_admits(on_new_weights: str):
    """With 16 places for 4 completions a step: (2 - t / S) x 40 / 10 at a time, of S that follows from so many."""
    alike = replace(BATCH, lengths=Lengths(10.0, 1e-6, 16))
    found = tiny_plan(tiny(max_staleness=1, max_num_seqs=16, on_new_weights=on_new_weights), batch=alike)
    overlap = found.overlap
    assert overlap is not None and overlap.places == 16
    assert found.step_seconds == overlap.engine_seconds > 1.01 * overlap.trainer_seconds
    assert 4 < overlap.running < 8
    assert overlap.running == pytest.approx((2 - overlap.trainer_seconds / found.step_seconds) * 4, rel=1e-4)


def test_a_running_completion_of_ten_tokens_is_half_done():
    """So it has 5 tokens on average, and their square is 100 / 3."""
    alike = replace(BATCH, lengths=Lengths(10.0, 1e-6, 16))
    config = tiny(max_staleness=3)
    found = tiny_plan(config, batch=alike)
    assert found.overlap is not None
    carried = Carried(1, 5.0, 100 / 3)
    again = prefill_again_work(config, TINY, GPU, TWO_NODES, 6.0, carried)
    steps = 11 / tokens_of_an_engine_step(config, GPU)
    again += Work(memory=weights(), decode_steps=1).times(steps)
    expected, got = again.times(found.overlap.running), found.work["again"]
    for name in ("flops", "memory", "decode_steps"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=1e-4)


def test_the_floor_is_what_all_ranks_together_would_take():
    """Every token reads the keys and values before it: 8 x (10 x 6 + 100 / 2) tokens, of 2 x 4 layers x 8 elements of 2
    bytes, on 4 ranks; the update of 2 trainers is spread over 4."""
    alike = replace(BATCH, lengths=Lengths(10.0, 1e-6, 16))
    found = tiny_plan(tiny(), batch=alike)
    assert found.overlap is not None
    read, update = found.overlap.floor_parts
    assert read == pytest.approx(8 * 110 * 2 * 4 * 8 * 2 / 4 / 1e3, rel=1e-4)
    assert update == pytest.approx(found.seconds["update"] / 2)


def test_places_are_those_of_settings_and_cache():
    sampled = sampled_once(BATCH)
    running = running_length(6.0, sampled)
    assert places_of(tiny(), TINY, GPU, BATCH) == 4, "rollout.max_num_seqs"
    assert places_of(tiny(max_concurrent_sequences=3), TINY, GPU, BATCH) == 3
    cpu = Target("cpu", "CPU", None, local_layers=True)
    many = tiny(max_num_seqs=10**9)
    cache = engine_bytes(TINY, many.rollout, "cpu", 4, None).kv_cache
    assert places_of(many, TINY, cpu, BATCH) == slots_of(many, TINY, cpu, running, 10**9)
    assert places_of(many, TINY, cpu, BATCH) == int(cache / (2 * 4 * 8 * 4) / running)


def test_judging_is_hidden_behind_the_whole_step():
    slow = replace(tiny_plan(tiny(max_staleness=1)), judging_seconds=10**6)
    overlap = slow.overlap
    assert overlap is not None
    assert slow.step_seconds == 10**6 and slow.judging_exposed == 10**6 - overlap.seconds
    turns = replace(slow, overlap=replace(overlap, take_turns=True))
    assert turns.judging_exposed == 10**6 - slow.seconds["rollout"]


# ---------------------------------------------------------------- limits of a recipe


def recipe(ranks: int, *overrides: str) -> Config:
    """1.5B on 128 GPUs."""
    return asynchronous(load_config([RECIPES / "1.5b_n16.yaml"], list(overrides)), ranks)


def planned(config: Config) -> tuple[StepPlan, Overlap]:
    shape, _ = required_shape(config.model.path)
    target = planned_target(config)
    cluster = Cluster(machine_of(config, target), 16, 8)
    plan = plan_step(config, shape, target, cluster, batch_of(config), DEFAULTS["cuda"])
    assert plan.overlap is not None
    return plan, plan.overlap


@pytest.mark.parametrize("ranks", [32, 64, 96])
def test_without_staleness_a_step_is_the_sum_of_its_phases(ranks: int):
    """As where the same engines sample and the same trainers train one after the other, and no log-probs are old."""
    config = recipe(ranks, "rollout.max_staleness=0")
    plan, overlap = planned(config)
    assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()))
    shape, _ = required_shape(config.model.path)
    target = planned_target(config)
    waiting = rollout_of(config, shape, target, plan.cluster, plan.batch, ranks)
    assert (plan.rollout.steps, plan.rollout.tail_steps, plan.rollout.slots) == (
        waiting.steps,
        waiting.tail_steps,
        waiting.slots,
    )
    host = Work(tokens=plan.batch.tokens * (1 - 1 / ranks))
    machine, coefficients = plan.cluster.machine, DEFAULTS["cuda"]
    assert plan.seconds["rollout"] + seconds_of(host, machine, coefficients) == pytest.approx(
        seconds_of(waiting.work, machine, coefficients)
    )
    assert "again" not in plan.work and "logprobs" not in plan.work and overlap.take_turns
    finishing, _ = planned(recipe(ranks, "rollout.max_staleness=0", "rollout.on_new_weights=finish"))
    assert finishing.step_seconds == plan.step_seconds


def test_many_engines_wait_for_the_trainers_and_few_keep_them_waiting():
    many, of_many = planned(recipe(120, "rollout.max_staleness=8"))
    assert many.step_seconds == of_many.trainer_seconds > 2 * of_many.engine_seconds
    assert of_many.trainer_seconds == pytest.approx(
        sum(many.seconds.get(name, 0.0) for name in TRAINER_PHASES)
    )
    few, of_few = planned(recipe(16, "rollout.max_staleness=8"))
    assert few.step_seconds == of_few.engine_seconds > 2 * of_few.trainer_seconds
    assert of_few.engine_seconds == pytest.approx(sum(few.seconds[name] for name in ENGINE_PHASES))
    assert of_few.running == of_few.places == 256


@pytest.mark.parametrize("ranks", [32, 80, 96])
@pytest.mark.parametrize("staleness", [1, 4, 8])
def test_keeping_the_cache_is_never_slower_than_computing_it_again(ranks: int, staleness: int):
    def of(on_new_weights: str) -> tuple[StepPlan, Overlap]:
        chosen = (f"rollout.max_staleness={staleness}", f"rollout.on_new_weights={on_new_weights}")
        return planned(recipe(ranks, *chosen))

    (keep, of_keep), (recompute, of_recompute), (finish, _) = map(of, ("keep", "recompute", "finish"))
    assert keep.step_seconds <= recompute.step_seconds
    assert of_keep.engine_seconds < of_recompute.engine_seconds
    assert "again" in recompute.seconds and "again" not in keep.seconds
    assert keep.step_seconds < finish.step_seconds or finish.step_seconds == of_keep.trainer_seconds
    assert finish.tail_seconds > 0 == keep.tail_seconds


def test_the_more_staleness_the_shorter_a_step_until_all_places_are_taken():
    steps, running = [], []
    for staleness in (0, 1, 2, 4, 8, 16):
        plan, overlap = planned(recipe(80, f"rollout.max_staleness={staleness}"))
        steps.append(plan.step_seconds)
        running.append(overlap.running)
    assert steps[:4] == sorted(steps[:4], reverse=True) and steps[0] > 2 * steps[3]
    assert running == sorted(running) and running[-1] == 256
    assert steps[-1] == pytest.approx(steps[-2], rel=0.01)


def test_fewer_places_of_an_engine_are_slower_and_prefill_less_again():
    told = ("rollout.max_staleness=8",)
    all_places, of_all = planned(recipe(64, *told))
    half, of_half = planned(recipe(64, *told, "rollout.max_concurrent_sequences=128"))
    assert (of_half.places, of_half.running) == (128, 128) and of_all.running == 256
    assert half.step_seconds > all_places.step_seconds
    assert half.seconds["again"] == pytest.approx(all_places.seconds["again"] / 2)


def test_no_split_is_faster_than_the_floor():
    floors = []
    for ranks in (16, 64, 87, 112):
        plan, overlap = planned(
            recipe(
                ranks, "rollout.max_staleness=16", "rollout.on_new_weights=keep", "algorithm.n_minibatches=1"
            )
        )
        assert plan.step_seconds > 1.3 * overlap.floor
        floors.append(overlap.floor)
    assert max(floors) < 1.02 * min(floors)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (89, ("rollout.on_new_weights=keep",)),
        (96, ("rollout.on_new_weights=keep", "algorithm.n_minibatches=1")),
    ],
)
def test_the_recipe_with_the_longest_tail_in_at_most_105_seconds(ranks: int, overrides: tuple[str, ...]):
    """docs/planning.md has these, and what they are with other settings; colocated engines that wait: 244 s."""
    plan, overlap = planned(recipe(ranks, "rollout.max_staleness=8", *overrides))
    assert plan.step_seconds <= 105 < 1.65 * overlap.floor
    assert overlap.floor == pytest.approx(64.5, abs=0.2)
