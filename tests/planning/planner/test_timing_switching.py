"""Weights on their way, against the exact plan of a sync; offloading; and the sum of a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.planning.memory_estimate import mesh_of, plan_ranks
from rlmath.planning.planner.step import own_share, plan_step, recomputes_logprobs, switch_work, sync_work
from rlmath.planning.planner.work import (
    DEFAULTS,
    NAMES,
    Cluster,
    Machine,
    Work,
    read_coefficients,
    seconds_by_coefficient,
    seconds_of,
)
from rlmath.rollout.weight_sync.shard_layouts import training_layout
from tests.planning.planner.shapes import BATCH, CONFIG, GPU, MACHINE, TINY, inputs, with_ranks
from tests.rollout.weight_sync.oracle import plan_of_all

LARGER = replace(TINY, hidden_size=256, ffn_size=512, head_dim=128, vocab_size=1024)
"""Matrices, not vectors, make up the weights."""


@pytest.mark.parametrize(
    ("tensor", "pipeline", "engine"),
    [(1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 4, 2)],
)
def test_bytes_received_are_those_of_the_exact_plan(tensor: int, pipeline: int, engine: int):
    config = with_ranks(CONFIG, tensor=tensor, pipeline=pipeline)
    config = replace(config, rollout=replace(config.rollout, tensor_parallel=engine))
    mesh = mesh_of(config, 4, 0)
    exact = plan_of_all(LARGER, training_layout(4, mesh), mesh, 2, 2**20)
    found = sync_work(replace(inputs(config, 4), shape=LARGER))
    # The first stage has the embedding, the last the head: shares of the model are not quite even.
    assert found.node == pytest.approx(exact.lower_bound / 4, rel=0.12, abs=1)
    assert found.network == 0


def test_every_rank_has_a_part_of_what_its_engine_needs():
    mesh = mesh_of(with_ranks(CONFIG, tensor=4), 8, 0)
    assert own_share(mesh, mesh.tensor) == pytest.approx(1 / 4)
    assert own_share(replace(mesh, engine_size=8), mesh.tensor) == pytest.approx(1 / 4)


def test_stages_of_other_nodes_send_over_the_network():
    found = sync_work(inputs(with_ranks(CONFIG, pipeline=2), 4, nodes=2))
    assert found.node == 0 and found.network > 0


def test_experts_of_other_nodes_send_over_the_network():
    moe = replace(TINY, architecture="Qwen3MoeForCausalLM", num_experts=8, experts_per_token=2, qk_norm=True)
    config = with_ranks(CONFIG, expert=4)
    assert sync_work(replace(inputs(config, 4, nodes=2), shape=moe)).network > 0
    assert sync_work(replace(inputs(config, 4), shape=moe)).network == 0


def test_what_is_offloaded_goes_there_and_back():
    config = replace(CONFIG, memory=replace(CONFIG.memory, offload_optimizer=True))
    (plan,) = plan_ranks(config, TINY, 1, GPU)
    assert switch_work(config, plan, GPU).host == 2 * plan.part("optimizer")
    assert switch_work(CONFIG, plan, GPU) == Work(switches=1)


def test_seconds_are_the_sum_over_coefficients():
    work = Work(
        flops=500.0, memory=700.0, node=10.0, network=1.0, host=2.0, messages=2, decode_steps=3, tokens=7
    )
    parts = seconds_by_coefficient(work, MACHINE, DEFAULTS["cuda"])
    assert set(parts) == set(NAMES)
    assert parts["flops_share"] == pytest.approx(0.5 / 0.55) and parts["memory_share"] == pytest.approx(1.0)
    assert parts["link_share"] == pytest.approx((0.1 + 0.1 + 0.2) / 0.75)
    assert parts["decode_step_seconds"] == pytest.approx(3 * 4e-3)
    assert seconds_of(work, MACHINE, DEFAULTS["cuda"]) == pytest.approx(sum(parts.values()))


def test_a_step_is_its_phases_one_after_the_other():
    plan = plan_step(inputs(CONFIG, 2), DEFAULTS["cuda"])
    assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()))
    assert list(plan.seconds) == ["switch", "sync", "rollout", "update", "other"]
    assert 0 < plan.tail_seconds < plan.seconds["rollout"]


def test_judging_is_hidden_behind_the_rollout_as_far_as_it_goes():
    fast = Machine("fast", "cuda", 1e15, 1e15, 1e15, 1e15, 1e15)
    many = replace(BATCH, sequences=80000)
    quick = replace(DEFAULTS["cuda"], decode_step_seconds=4e-12, sequence_step_seconds=1e-14)
    plan = plan_step(replace(inputs(CONFIG, 2, batch=many), cluster=Cluster(fast, 1, 2)), quick)
    assert plan.judging_seconds == pytest.approx(40000 / 3500 / CONFIG.reward.workers)
    assert plan.judging_exposed == pytest.approx(plan.judging_seconds - plan.seconds["rollout"])
    assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()) + plan.judging_exposed)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"n_minibatches": 2}, True),
        ({"epochs": 2}, True),
        ({"n_minibatches": 2, "recompute_logprobs": False}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"kl_coef": 0.1}, False),
    ],
)
def test_log_probs_are_recomputed_where_the_update_does(changes: dict, expected: bool):
    assert recomputes_logprobs(replace(CONFIG, algorithm=replace(CONFIG.algorithm, **changes))) == expected


def test_a_reference_has_a_pass_of_its_own():
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, kl_coef=0.1, n_minibatches=2))
    plan = plan_step(inputs(config, 2), DEFAULTS["cuda"])
    assert plan.seconds["reference"] == plan.seconds["logprobs"] > 0


def test_an_asynchronous_step_is_as_long_as_its_slower_side():
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=2, max_staleness=2))
    plan = plan_step(inputs(config, 4), DEFAULTS["cuda"])
    assert list(plan.seconds) == ["rollout", "update", "other"]
    assert plan.step_seconds == pytest.approx(max(plan.trainer_seconds, plan.engine_seconds))
    turns = replace(plan, config=replace(config, rollout=replace(config.rollout, max_staleness=0)))
    assert turns.step_seconds == pytest.approx(sum(plan.seconds.values()))


def test_trainers_beside_engines_take_as_long_as_alone_on_their_node():
    """Three of eight ranks on two nodes train: they are on the first."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=5))
    beside = plan_step(inputs(config, 8, nodes=2), DEFAULTS["cuda"]).parts["update"]
    assert beside == plan_step(inputs(CONFIG, 3), DEFAULTS["cuda"]).parts["update"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"flops_shar": 1.0}, 'no coefficient "flops_shar". Did you mean "flops_share"'),
        ({"flops_share": "1e3"}, "the coefficient flops_share is '1e3'; needed: a number above 0"),
        ({"flops_share": 0}, "the coefficient flops_share is 0; needed: a number above 0"),
        (None, 'it has no "coefficients"'),
    ],
)
def test_wrong_coefficients_are_refused(tmp_path: Path, values: dict | None, told: str):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"kind": "cpu", "coefficients": values}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_coefficients(file, "cpu")
    assert told in str(error.value)


def test_coefficients_of_a_file_take_the_place_of_the_defaults(tmp_path: Path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"kind": "cpu", "coefficients": {"step_seconds": 2}}), encoding="utf-8")
    assert read_coefficients(file, "cpu") == replace(DEFAULTS["cpu"], step_seconds=2)
    with pytest.raises(ValueError, match='of kind "cpu"; this plan is for "cuda"'):
        read_coefficients(file, "cuda")
