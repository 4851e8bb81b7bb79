"""`rollout.tail` side by side, for recipes of configs/areal with the default lengths."""

from dataclasses import replace

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.models.hf_config import required_shape
from rlmath.planning.memory_estimate import plan_ranks
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.planner.partial_rollouts import deferring_rollout_of
from rlmath.planning.planner.published import RECIPES
from rlmath.planning.planner.step import StepPlan, plan_step
from rlmath.planning.planner.tails import (
    SLICES,
    STALENESS,
    Tails,
    carrying,
    compare_tails,
    deferring,
    settings_of_tail,
    with_more_staleness,
    with_other_slices,
)
from rlmath.planning.planner.work import DEFAULTS
from rlmath.rollout.flight_rules import slice_tokens
from tests.planning.planner.shapes import CONFIG, on_nodes, recipe


def tails_of(config: Config, nodes: int, search: bool = False) -> Tails:
    return compare_tails(config, *on_nodes(config, nodes), search)


def carry_of(tails: Tails) -> StepPlan:
    assert tails.carry is not None
    return tails.carry


def fastest_in_training_ranks(tails: Tails) -> StepPlan:
    """Of the ways whose engines have no ranks of their own."""
    return min((plan for plan in tails.plans if plan.overlap is None), key=lambda plan: plan.step_seconds)


@pytest.mark.parametrize(
    ("name", "nodes", "step", "rollout", "tail"),
    [
        ("1.5b_n16.yaml", 16, 244.06082832835642, 220.43299452382183, 153.287643462632),
        ("32b_n16.yaml", 16, 3052.7885080800693, 2157.01563981055, 299.9697808710414),
    ],
)
def test_waiting_is_predicted_as_before_there_were_partial_rollouts(
    name: str, nodes: int, step: float, rollout: float, tail: float
):
    """But for two things: gradients were cleared twice for a minibatch then, and are cleared once (`Learner`), which
    saves writing them a time; and with sequence parallelism tensor-parallel ranks exchange more than was planned then,
    as tools/fake_rank.py counts (32B: 33.2 s of 3,053)."""
    config = recipe(name)
    wait = tails_of(config, nodes).wait
    shape, _ = required_shape(config.model.path)
    gradients = max(
        plan.part("gradients") for plan in plan_ranks(config, shape, nodes * 8, planned_target(config))
    )
    speed = wait.cluster.machine.memory * DEFAULTS["cuda"].memory_share
    once_less = config.algorithm.n_minibatches * gradients / speed
    assert 0.01 < once_less < 0.02
    assert wait.step_seconds + once_less == pytest.approx(step, rel=1e-9)
    assert wait.seconds["rollout"] == pytest.approx(rollout, rel=1e-9)
    assert wait.tail_seconds == pytest.approx(tail, rel=1e-9)
    assert wait.rollout.carry is None and "logprobs" not in wait.seconds


def test_the_longest_tail_is_predicted_in_half_the_time():
    """docs/planning.md has the figures, and what would remain without any tail."""
    tails = tails_of(recipe("1.5b_n16.yaml"), 16, search=True)
    carried = [carry_of(tails), *tails.found]
    seconds = [plan.step_seconds for plan in (tails.wait, *carried)]
    assert [settings_of_tail(plan)["max_staleness"] for plan in carried] == list(STALENESS)
    assert seconds == sorted(seconds, reverse=True), "the more staleness, the faster, up to 7"
    fastest = fastest_in_training_ranks(tails)
    assert fastest is tails.found[-1]
    of = settings_of_tail(fastest)
    assert (of["max_staleness"], of["slice_tokens"], of["max_groups_in_flight"]) == (7, 6912, 4096)
    assert 5 < of["staleness"] < 6
    assert carry_of(tails).step_seconds < 0.75 * tails.wait.step_seconds
    assert fastest.step_seconds <= 120 < 0.5 * tails.wait.step_seconds
    without_tail = tails.wait.step_seconds - tails.wait.tail_seconds
    assert fastest.step_seconds > without_tail + fastest.seconds["logprobs"]
    assert tails.fastest is tails.found_asynchronous[-1], "engines on ranks of their own have no tail"


@pytest.mark.parametrize(("minibatches", "most"), [(4, 120), (1, 114)])
def test_the_longest_tail_with_the_settings_that_docs_planning_names(minibatches: int, most: float):
    config = load_config(
        [RECIPES / "1.5b_n16.yaml", RECIPES.parent / "algorithms" / "decoupled.yaml"],
        [
            "rollout.tail=carry",
            "rollout.max_staleness=7",
            "rollout.slice_tokens=6912",
            f"algorithm.n_minibatches={minibatches}",
        ],
    )
    tails = tails_of(config, 16)
    plan = carry_of(tails)
    assert plan.config == config, "nothing is missing for carrying"
    assert plan.step_seconds <= most and fastest_in_training_ranks(tails) is plan
    assert tails.asynchronous is not None and tails.asynchronous.config.rollout.max_staleness == 7
    assert tails.fastest is tails.asynchronous
    carry = plan.rollout.carry
    assert carry is not None and carry.oldest == 7
    assert carry.rounds == pytest.approx(0.46, abs=0.01) and carry.staleness == pytest.approx(5.2, abs=0.1)


def test_one_minibatch_saves_the_pass_for_log_probs():
    four, one = (
        carry_of(tails_of(recipe("1.5b_n16.yaml", f"algorithm.n_minibatches={n}"), 16)) for n in (4, 1)
    )
    assert "logprobs" in four.seconds and "logprobs" not in one.seconds
    assert one.rollout == four.rollout
    assert 5 < four.step_seconds - one.step_seconds < 8


def test_one_node_waits_faster_than_it_carries():
    """Its engines have four times the sequences that they have places for: the tail is a tenth of a step, and what
    carrying saves of it is less than the pass for log-probs."""
    tails = tails_of(recipe("1.5b_n1.yaml"), 1, search=True)
    wait, carry = tails.wait, carry_of(tails)
    assert tails.fastest is wait and wait.tail_seconds < 0.1 * wait.step_seconds
    assert 0 < wait.seconds["rollout"] - carry.seconds["rollout"] < carry.seconds["logprobs"]
    short = carry_of(tails_of(recipe("1.5b_n1.yaml", "rollout.max_staleness=7"), 1))
    assert short.rollout.carry is not None and carry.rollout.carry is not None
    assert short.rollout.carry.prefilled_again > 6 * carry.rollout.carry.prefilled_again
    assert short.step_seconds > 1.05 * carry.step_seconds, "it prefills more again"


def test_a_run_that_carries_is_planned_as_it_is():
    settings = ("rollout.tail=carry", "rollout.slice_tokens=5000", "rollout.max_staleness=3")
    needed = ("recompute_logprobs=true", "importance_correction=token", "importance_mask_high=5")
    config = recipe("1.5b_n16.yaml", *settings, *(f"algorithm.{one}" for one in needed))
    tails = tails_of(config, 16)
    carry, wait = carry_of(tails), tails.wait
    assert carry.config == config and wait.config.rollout == replace(config.rollout, tail="wait")
    assert wait.config.algorithm == config.algorithm and "logprobs" in wait.seconds
    shape, _ = required_shape(config.model.path)
    arguments = (planned_target(config), carry.cluster, carry.batch, DEFAULTS["cuda"])
    assert plan_step(config, shape, *arguments).step_seconds == carry.step_seconds
    assert settings_of_tail(carry) == {
        "tail": "carry",
        "max_staleness": 3,
        "slice_tokens": 5000,
        "max_groups_in_flight": 2048,
        "staleness": pytest.approx(carry.rollout.carry.staleness),
    }


def test_carrying_needs_a_bounded_weight_for_older_tokens():
    found = carrying(CONFIG).algorithm
    assert found.recompute_logprobs and found.importance_correction == "token"
    assert found.importance_mask_high == 5.0
    own = replace(CONFIG.algorithm, importance_correction="sequence", importance_cap=2.0)
    kept = carrying(replace(CONFIG, algorithm=own)).algorithm
    assert kept == replace(own, recompute_logprobs=True)
    fresh = replace(CONFIG, rollout=replace(CONFIG.rollout, max_staleness=0))
    assert carrying(fresh).algorithm == CONFIG.algorithm


def test_more_staleness_is_tried_with_two_lengths_of_slices():
    """The longest completion has 16 tokens."""
    rollout = replace(CONFIG.rollout, slice_tokens=5, max_groups_in_flight=8, max_staleness=1)
    ways = list(with_more_staleness(replace(CONFIG, rollout=rollout)))
    assert [{one.rollout.max_staleness for one in some} for some in ways] == [{each} for each in STALENESS]
    assert [[slice_tokens(one.rollout) for one in some] for some in ways] == [
        [8],
        [6, 11],
        [4, 8],
        [3, 6],
        [2, 4],
    ]
    for one in (one for some in ways for one in some):
        assert one.rollout.tail == "carry" and one.rollout.group_size == CONFIG.rollout.group_size
        assert one.rollout.max_groups_in_flight is None, "as many as may be"


@pytest.mark.full
def test_the_search_keeps_the_faster_length_of_slices():
    """Twice the default length for every staleness above 1, as less is prefilled again; and it tells nothing twice."""
    tails = tails_of(recipe("1.5b_n16.yaml"), 16, search=True)
    assert [settings_of_tail(plan)["slice_tokens"] for plan in tails.found] == [18432, 13824, 9216, 6912]
    (carry,) = (plan for plan in tails.found if plan.config.rollout.max_staleness == 7)
    own = replace(carry.config, rollout=replace(carry.config.rollout, slice_tokens=None))
    default = tails_of(own, 16, search=True)
    fastest = fastest_in_training_ranks(default)
    assert carry_of(default).step_seconds > fastest.step_seconds == carry.step_seconds
    assert len(default.found) == len(STALENESS)
    rollout = replace(carry.config.rollout, max_groups_in_flight=4096)  # the default, said
    same = tails_of(replace(carry.config, rollout=rollout), 16, search=True)
    assert fastest_in_training_ranks(same) is same.carry and len(same.found) == len(STALENESS) - 1


def test_settings_that_nothing_can_be_carried_with_are_told():
    tails = tails_of(recipe("1.5b_n16.yaml", "rollout.max_groups_in_flight=9000"), 16)
    assert tails.carry is None and tails.plans == (tails.wait, tails.defer, tails.asynchronous)
    (problem,) = tails.problems
    assert "rollout.max_groups_in_flight is 9000" in problem


# ---------------------------------------------------------------- defer


def test_a_run_that_defers_is_planned_as_it_is():
    """Its update, its sync and its other work are those of a run that waits; there is no pass for log-probs."""
    config = recipe("1.5b_n16.yaml", "rollout.tail=defer", "rollout.slice_tokens=9216")
    tails = tails_of(config, 16)
    wait, defer = tails.wait, tails.defer
    assert defer.config == config and defer.rollout.carry is None and defer.rollout.defer is not None
    assert wait.seconds.keys() == defer.seconds.keys()
    assert all(wait.seconds[name] == defer.seconds[name] for name in wait.seconds if name != "rollout")
    assert settings_of_tail(defer) == {
        "tail": "defer",
        "slice_tokens": 9216,
        "deferred": defer.rollout.defer.deferred,
        "discarded": defer.rollout.defer.discarded,
    }
    # More is sampled, and finished completions that are discarded are judged.
    assert defer.flops.sampling > 1.3 * wait.flops.sampling and defer.flops.backward == wait.flops.backward
    assert defer.judging_seconds > 1.1 * wait.judging_seconds
    # Wait would have the slices, too, but for what they cost.
    assert defer.rollout.steps < wait.rollout.steps and defer.rollout.slots > wait.rollout.slots


@pytest.mark.full
def test_other_slices_are_tried_and_the_fastest_is_kept_where_it_is_faster():
    assert [one.rollout.slice_tokens for one in with_other_slices(CONFIG)] == [4, 6, 8, 11], "of 16 tokens"
    assert len(SLICES) == 4
    tails = tails_of(recipe("1.5b_n16.yaml"), 16, search=True)
    assert settings_of_tail(tails.defer)["slice_tokens"] == 13824
    best = tails.found_defer
    assert best is not None and settings_of_tail(best)["slice_tokens"] == 9216
    assert best.step_seconds < tails.defer.step_seconds
    own = tails_of(best.config, 16, search=True)
    assert own.defer == best and own.found_defer is None
    assert tails_of(best.config, 16).found_defer is None


@pytest.mark.full
def test_deferring_depends_on_how_alike_the_completions_of_a_group_are():
    """docs/planning.md: slower than waiting at 0, and with what is assumed; faster where they are all but the same."""
    config = recipe("1.5b_n16.yaml")
    shape, _ = required_shape(config.model.path)
    wait = tails_of(config, 16).wait
    arguments = (shape, planned_target(config), wait.cluster, wait.batch, wait.cluster.ranks)
    steps = [
        deferring_rollout_of(deferring(config, None), *arguments, share).steps for share in (0.0, 0.7, 1.0)
    ]
    assert steps[0] > wait.rollout.steps > steps[1] > steps[2]
