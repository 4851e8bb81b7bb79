"""Weights on their way, against the exact plan of a sync; offloading; and the sum of a step."""

from dataclasses import replace

import pytest

from rlmath.planning.memory_estimate import mesh_of, plan_ranks
from rlmath.planning.planner.step import (
    own_share,
    plan_step,
    recomputes_logprobs,
    reference_switch_work,
    switch_work,
    sync_work,
)
from rlmath.planning.planner.work import (
    DEFAULTS,
    NAMES,
    Cluster,
    Machine,
    Work,
    seconds_by_coefficient,
    seconds_of,
    slower_by,
)
from rlmath.rollout.weight_sync.shard_layouts import training_layout
from tests.planning.planner.shapes import (
    BATCH,
    CONFIG,
    GPU,
    HEAD_FLOPS,
    LAYER_FLOPS,
    MACHINE,
    PAIR_FLOPS,
    TINY,
    inputs,
    with_ranks,
)
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
    exact = plan_of_all(LARGER, training_layout(4, mesh, None, None), mesh, 2, 2**20)
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
    config = replace(CONFIG, memory=replace(CONFIG.memory, offload_optimizer=True, offload_reference=True))
    config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    (plan,) = plan_ranks(config, TINY, 1, GPU)
    assert switch_work(config, plan, GPU).host == 2 * plan.part("optimizer")
    assert switch_work(CONFIG, plan, GPU) == Work(switches=1)
    assert reference_switch_work(config, plan, GPU).host == 2 * plan.part("reference") > 0
    assert reference_switch_work(CONFIG, plan, GPU) == Work()


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
    slower = slower_by(DEFAULTS["cuda"], dict.fromkeys(NAMES, 2.0))
    assert seconds_of(work, MACHINE, slower) == pytest.approx(2 * sum(parts.values()))


def test_a_step_is_its_phases_one_after_the_other():
    plan = plan_step(inputs(CONFIG, 2), DEFAULTS["cuda"])
    assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()))
    assert list(plan.seconds) == ["switch", "sync", "rollout", "update", "other"]
    assert 0 < plan.tail_seconds < plan.seconds["rollout"]


def test_judging_is_hidden_behind_the_rollout_as_far_as_it_goes():
    fast = Machine("fast", "cuda", 1e15, 1e15, 1e15, 1e15, 1e15)
    many = replace(BATCH, sequences=80000)
    quick = slower_by(DEFAULTS["cuda"], {"decode_step_seconds": 1e-9, "sequence_step_seconds": 1e-9})
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


def test_flops_of_a_step_are_those_of_all_its_passes():
    config = replace(
        CONFIG,
        policy=replace(CONFIG.policy, recompute_granularity="full", recompute_method="uniform"),
        algorithm=replace(CONFIG.algorithm, kl_coef=0.1, epochs=2),
    )
    flops = plan_step(inputs(config, 2), DEFAULTS["cuda"]).flops
    layers, attention = BATCH.tokens * 4 * LAYER_FLOPS, BATCH.squares * PAIR_FLOPS
    one_pass = layers + attention + BATCH.tokens * HEAD_FLOPS
    assert flops.forward == pytest.approx(4 * one_pass)  # two epochs, the policy's log-probs, the reference's
    assert flops.backward == pytest.approx(4 * one_pass)
    assert flops.recomputed == pytest.approx(2 * (layers + attention))
    assert flops.sampling == pytest.approx(
        8 * 10 * (4 * LAYER_FLOPS + HEAD_FLOPS + 22 * PAIR_FLOPS), rel=0.03
    )
    # 8 completions of 10 tokens at positions 6 to 15: (6 + ... + 15) x 2 / 10 = 21 to 22 pairs a token
