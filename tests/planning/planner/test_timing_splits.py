"""Which ranks are the engines': every legal split, the fastest, and what has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmath.cli.plan import recipe_of
from rlmath.config.schema import Config
from rlmath.planning.planner.machines import Cluster
from rlmath.planning.planner.published import (
    ASYNCHRONOUS,
    COLOCATED,
    SYNCHRONOUS,
    one_factor,
    predict,
)
from rlmath.planning.planner.splits import (
    Splits,
    asynchronous,
    colocated,
    compare_splits,
    corrected,
    engine_ranks,
)
from rlmath.planning.planner.step import plan_step
from rlmath.planning.planner.tails import ASYNCHRONOUS_STALENESS, compare_tails, settings_of_tail
from tests.planning.planner.shapes import CONFIG, on_nodes, recipe


def splits_of(config: Config, nodes: int) -> Splits:
    return compare_splits(config, *on_nodes(config, nodes))


def test_every_split_of_whole_engines_and_whole_copies_of_the_model_is_tried():
    """Of 32 ranks engines have multiples of 2, and trainers multiples of 4."""
    config = recipe("7b_n4.yaml", "parallel=t2p2", "rollout.tensor_parallel=2")
    found = splits_of(config, 4)
    assert [engine_ranks(plan) for plan in found.plans] == list(range(4, 32, 4))
    for plan in found.plans:
        assert plan.mesh.world_size == 32 - engine_ranks(plan) and plan.mesh.data == plan.mesh.world_size // 4
        assert plan.mesh.num_engines == engine_ranks(plan) // 2
    assert found.without_room == 0 and found.problems == ()


def test_the_fastest_split_is_the_one_where_neither_side_waits_long():
    found = splits_of(recipe("1.5b_n16.yaml", "rollout.max_staleness=8"), 16)
    best = found.best
    assert best is not None and best.overlap is not None and len(found.plans) == 127
    assert best.step_seconds == min(plan.step_seconds for plan in found.plans)
    overlap = best.overlap
    assert overlap.trainer_seconds == pytest.approx(overlap.engine_seconds, rel=0.03)
    assert 80 < engine_ranks(best) < 100
    one = asynchronous(recipe("1.5b_n16.yaml", "rollout.max_staleness=8"), engine_ranks(best))
    assert best.config == one and plan_step(one, *on_nodes(one, 16)).step_seconds == best.step_seconds


def test_a_table_has_a_few_splits():
    found = splits_of(recipe("1.5b_n16.yaml"), 16)
    best = found.best
    assert best is not None
    assert [engine_ranks(plan) for plan in found.shown()] == sorted({32, 64, 80, 96, 112, engine_ranks(best)})
    own = found.plans[6]
    assert engine_ranks(own) == 7 and own in found.shown(own) and best in found.shown(own)
    assert Splits((), 3).shown() == () and Splits((), 3).shown(own) == (own,) and Splits((), 3).best is None


def test_a_split_has_what_learning_from_older_tokens_needs():
    found = asynchronous(replace(CONFIG, rollout=replace(CONFIG.rollout, tail="carry")), 2)
    assert found.rollout.ranks == 2 and found.rollout.tail == "wait" and found.parallel.data is None
    assert found.algorithm == corrected(CONFIG.algorithm)
    fresh = replace(CONFIG, rollout=replace(CONFIG.rollout, max_staleness=0))
    assert asynchronous(fresh, 2).algorithm == CONFIG.algorithm
    clipped = replace(found, algorithm=replace(CONFIG.algorithm, recompute_logprobs=False))
    assert asynchronous(clipped, 1).algorithm == clipped.algorithm, "a run of its own kind keeps its loss"
    assert asynchronous(colocated(clipped), 1).algorithm == found.algorithm
    compared = replace(CONFIG, sync=replace(CONFIG.sync, checksum_every=5))
    assert asynchronous(compared, 2).sync.checksum_every == 0
    assert colocated(found).rollout.ranks == 0 and colocated(CONFIG) == CONFIG


def test_splits_without_room_are_counted():
    """A rank of 7B has a whole copy and its share of the optimizer's 91 GB: few trainers have no room for it."""
    found = splits_of(recipe("7b_n4.yaml", "parallel=t1"), 4)
    assert found.without_room > 0 and len(found.plans) + found.without_room == 31
    trainers = [plan.mesh.world_size for plan in found.plans]
    assert trainers == list(range(31, found.without_room, -1)), "the fewest are left out"


def test_what_no_split_can_have_is_told():
    told = splits_of(recipe("1.5b_n1.yaml", "parallel=t8"), 1)
    assert told.plans == () and told.best is None and "ranks that train" in told.problems[0]
    none = compare_splits(recipe("1.5b_n1.yaml"), *_of_one_rank(recipe("1.5b_n1.yaml")))
    assert none.problems == (
        "the run has 1 rank; needed: more than the 1 of an engine (rollout.tensor_parallel), or none is left to train. "
        "Start more, or lower rollout.tensor_parallel.",
    )
    large = splits_of(recipe("32b_n16.yaml", "parallel=t1", "parallel.sequence=false"), 16)
    assert large.plans == () and large.without_room == 15
    (memory,) = large.problems
    assert memory.startswith(
        "no split of the 128 ranks fits the memory of the devices. Give a copy of the model more"
    )
    untold = splits_of(recipe("1.5b_n1.yaml", "algorithm.advantage=remax"), 1)
    assert untold.plans == () and untold.problems


def _of_one_rank(config: Config) -> tuple:
    shape, target, cluster, *others = on_nodes(config, 1)
    return shape, target, Cluster(cluster.machine, 1, 1), *others


# ---------------------------------------------------------------- beside every `rollout.tail`


@pytest.mark.full
def test_engines_on_ranks_of_their_own_stand_beside_every_tail():
    config = recipe("1.5b_n16.yaml")
    tails = compare_tails(config, *on_nodes(config, 16), search=True)
    beside = [tails.asynchronous, *tails.found_asynchronous]
    assert tails.asynchronous is not None and tails.asynchronous_problems == ()
    best = splits_of(config, 16).best
    assert best is not None and tails.asynchronous.step_seconds == best.step_seconds
    found = [settings_of_tail(plan) for plan in beside if plan is not None]
    assert [of["max_staleness"] for of in found] == list(ASYNCHRONOUS_STALENESS)
    assert {of["tail"] for of in found} == {"asynchronous"}
    assert tails.fastest is tails.found_asynchronous[-1]
    assert tails.fastest.step_seconds < 0.96 * min(plan.step_seconds for plan in tails.found)


def test_a_run_that_has_a_split_keeps_it_and_is_compared_with_all_ranks_doing_both():
    config = asynchronous(recipe("1.5b_n16.yaml", "rollout.max_staleness=4"), 64)
    tails = compare_tails(config, *on_nodes(config, 16), search=False)
    assert tails.asynchronous is not None and tails.asynchronous.config == config
    wait = compare_tails(colocated(config), *on_nodes(config, 16), search=False).wait
    assert tails.wait.step_seconds == wait.step_seconds and tails.wait.mesh.world_size == 128
    assert tails.found_asynchronous == ()


def test_a_run_that_learns_from_older_tokens_without_recomputed_log_probs_is_compared_as_it_is():
    """No way of it has the pass for log-probs; of one that learns from none, those ways have it that need it."""
    clipped = recipe("1.5b_n16.yaml", "rollout.max_staleness=4")
    own = replace(
        clipped, rollout=replace(clipped.rollout, ranks=93), parallel=replace(clipped.parallel, data=None)
    )
    for config, passes in ((own, False), (clipped, True)):
        tails = compare_tails(config, *on_nodes(config, 16), search=True)
        assert tails.carry is not None and tails.asynchronous is not None
        beside = (tails.carry, tails.asynchronous, *tails.found, *tails.found_asynchronous)
        assert {"logprobs" in plan.seconds for plan in beside} == {passes}
        assert all(
            plan.config.rollout.ranks == 0 for plan in (tails.wait, tails.carry, tails.defer, *tails.found)
        )
    fastest = splits_of(own, 16).best
    split = splits_of(own, 16).plans[92]
    assert plan_step(own, *on_nodes(own, 16)).step_seconds == split.step_seconds
    assert fastest is not None and fastest.step_seconds <= split.step_seconds


# ---------------------------------------------------------------- published figures


def test_one_factor_makes_a_prediction_what_was_published():
    row = SYNCHRONOUS[0]
    *others, defaults = recipe_of(row)
    before = predict(row, *others, defaults)
    coefficients = one_factor(before, defaults)
    assert predict(row, *others, coefficients).seconds == pytest.approx(147.6)
    for beside in ASYNCHRONOUS[:2]:
        *others, _ = recipe_of(beside)
        ratio = predict(beside, *others, coefficients).seconds / predict(beside, *others, defaults).seconds
        assert ratio == pytest.approx(147.6 / before.seconds), "the same for every run"


def test_asynchronous_rows_are_those_of_the_synchronous_ones_on_the_same_ranks():
    assert SYNCHRONOUS[:2] == COLOCATED
    for together, beside in zip(SYNCHRONOUS, ASYNCHRONOUS, strict=True):
        assert (together.name, together.recipe, together.nodes) == (beside.name, beside.recipe, beside.nodes)
        assert beside.sampling[0] + beside.training[0] == 8 * beside.nodes
        assert beside.sampling[0] == 3 * beside.training[0] and beside.staleness is not None
        _, tensor, pipeline = beside.training
        assert beside.training[0] % (tensor * pipeline) == beside.sampling[0] % beside.sampling[1] == 0


def test_a_published_asynchronous_row_is_the_slower_of_its_sides():
    for row in ASYNCHRONOUS:
        found = predict(row, *recipe_of(row))
        assert found.seconds == max(found.rollout, found.update)
