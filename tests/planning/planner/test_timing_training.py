"""Log-probs, updates and the sum of a step, counted by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import PolicyConfig, SelectionConfig, ToolsConfig
from rlmath.data.micro_batches import forward_cost, training_cost
from rlmath.planning.planner.cluster import COEFFICIENTS, read_coefficients
from rlmath.planning.planner.step import (
    batch_of,
    plan_step,
    recomputes_logprobs,
    switch_seconds,
    sync_seconds,
)
from rlmath.planning.planner.training import gradient_seconds, logprobs_seconds, update_seconds
from tests.planning.of_policy import rank_plans
from tests.planning.planner.shapes import (
    BATCH,
    CONFIG,
    GPU,
    HEAD_FLOPS,
    LAYER_FLOPS,
    PAIR_FLOPS,
    TINY,
    inputs,
    with_ranks,
)

LAYERS = BATCH.tokens * 4 * LAYER_FLOPS + BATCH.squares * PAIR_FLOPS
FORWARD = LAYERS + BATCH.tokens * HEAD_FLOPS
STATE = BATCH.tokens * 8 * 2
"""Bytes of the hidden states of a step."""
LAYER = 4 * 64 + 3 * 128 + 3 * 8 + 2 * 8
"""Parameters: matrices, biases of query, key and value, two norms."""


def recomputing(granularity: str, method: str | None = None, layers: int | None = None):
    policy = PolicyConfig(
        max_tokens_per_microbatch=33,
        recompute_granularity=granularity,
        recompute_method=method,
        recompute_num_layers=layers,
    )
    return replace(CONFIG, policy=policy)


def test_flops_of_one_rank():
    assert logprobs_seconds(inputs(CONFIG, 1, flops=1.0)) == pytest.approx(FORWARD)
    assert update_seconds(inputs(CONFIG, 1, flops=1.0)) == pytest.approx(3 * FORWARD)


def test_given_tokens_are_trained_on_as_those_of_a_longer_prompt():
    """They are in forward and backward passes, in micro-batches, and in what the host packs."""
    given_more = replace(BATCH, given_tokens=5.0)
    longer = replace(BATCH, prompt_tokens=BATCH.prompt_tokens + 5)
    assert given_more.tokens == BATCH.tokens + 8 * 5
    step, longer_step = (
        inputs(CONFIG, 1, batch=batch, flops=1.0) for batch in (given_more, longer)
    )
    # Of 168 tokens 33 are in a micro-batch.
    assert step.microbatches == 6
    for phase_seconds in (logprobs_seconds, update_seconds):
        assert phase_seconds(step) == pytest.approx(phase_seconds(longer_step))
        assert phase_seconds(step) > phase_seconds(inputs(CONFIG, 1, flops=1.0))
    host = replace(step.cluster.coefficients, token_seconds=1.0)
    packed = plan_step(replace(step, cluster=replace(step.cluster, coefficients=host)))
    assert packed.seconds["other"] == pytest.approx(given_more.tokens)


def test_what_resampling_leaves_out_is_sampled_and_not_trained_on():
    halved = replace(CONFIG, selection=SelectionConfig(resample_to=BATCH.group // 2))
    whole = plan_step(inputs(CONFIG, 1, flops=1.0)).seconds
    resampled = plan_step(inputs(halved, 1, flops=1.0)).seconds
    assert resampled["rollout"] == whole["rollout"]
    assert resampled["update"] == pytest.approx(whole["update"] / 2)


def test_tools_give_completions_a_share_of_the_most_or_what_was_measured():
    """Three calls of 100 tokens and 16 around them."""
    tools = ToolsConfig(format="fence", max_calls=3, max_output_tokens=100)
    called = replace(CONFIG, tools=tools)
    batch = batch_of(called)
    assert batch.given_tokens == pytest.approx(0.3 * 3 * 116) and batch.calls == pytest.approx(0.9)
    more = replace(called, tools=replace(tools, max_calls=4, max_output_tokens=200))
    assert batch_of(more).given_tokens == pytest.approx(0.3 * 4 * 216)
    measured = batch_of(called, mean_given=348.0, mean_calls=3.0)
    assert (measured.given_tokens, measured.calls) == (348.0, 3.0)
    assert batch_of(called, mean_calls=0.0).given_tokens == 0
    assert batch_of(replace(called, tools=replace(tools, format=None))) == batch_of(CONFIG)
    assert batch_of(CONFIG).given_tokens == batch_of(CONFIG).calls == 0
    with pytest.raises(ValueError, match="--mean-given-tokens is 349; needed: from 0 to 348"):
        batch_of(called, mean_given=349.0)
    with pytest.raises(ValueError, match="--mean-calls is 1; needed: from 0 to 0"):
        batch_of(CONFIG, mean_calls=1.0)


def test_a_critic_reads_everything_once_and_learns_from_it_once():
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, advantage="gae"))
    one_pass = LAYERS + BATCH.tokens * 2 * TINY.hidden_size  # its head has one row
    assert plan_step(inputs(config, 1, flops=1.0)).seconds["critic"] == pytest.approx(4 * one_pass)


def test_a_teacher_reads_everything_once_with_as_many_rows_as_the_policy():
    step = inputs(CONFIG, 1, flops=1.0)
    teacher = replace(TINY, num_layers=2 * TINY.num_layers, vocab_size=TINY.vocab_size + 8)
    taught = replace(step, shapes=replace(step.shapes, teacher=teacher))
    one_pass = 2 * LAYERS + BATCH.tokens * HEAD_FLOPS
    assert plan_step(taught).seconds["teacher"] == pytest.approx(one_pass)


def test_a_forward_pass_is_a_third_of_what_the_schedule_balances():
    cost = training_cost(TINY)
    assert forward_cost(TINY).of(7) == pytest.approx(cost.of(7) / 3)


def test_all_experts_of_a_token_count():
    moe = replace(
        TINY, architecture="Qwen3MoeForCausalLM", num_experts=8, experts_per_token=2, qk_norm=True
    )
    extra_flops = forward_cost(moe).linear - forward_cost(TINY).linear
    assert extra_flops == 4 * 2 * (
        3 * 8 * 16 + 8 * 8
    )  # one more expert, and the router, in each of 4 layers


def test_recomputation_adds_the_forward_pass_of_what_is_recomputed():
    mlp = BATCH.tokens * 4 * 2 * 3 * TINY.hidden_size * TINY.ffn_size  # 4 layers of three matrices
    for config, recomputed in (
        (recomputing("full", "uniform", 1), LAYERS),
        (recomputing("full", "block", 1), LAYERS / 4),
        (recomputing("selective"), mlp),
    ):
        assert update_seconds(inputs(config, 1, flops=1.0)) == pytest.approx(
            3 * FORWARD + recomputed
        )


def test_ranks_share_the_flops():
    one_rank = update_seconds(inputs(CONFIG, 1, flops=1.0))
    assert update_seconds(inputs(CONFIG, 4, flops=1.0)) == pytest.approx(one_rank / 4)
    assert update_seconds(inputs(with_ranks(CONFIG, tensor=2), 4, flops=1.0)) == pytest.approx(
        one_rank / 4
    )


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    # 128 tokens on one data-parallel rank, 33 in a micro-batch.
    piped = inputs(with_ranks(CONFIG, pipeline=2), 2, flops=1.0)
    assert piped.microbatches == 4 and piped.idle_factor == pytest.approx((4 + 1) / 4)
    assert inputs(
        with_ranks(CONFIG, pipeline=2, virtual_pipeline=2), 2
    ).idle_factor == pytest.approx(4.5 / 4)
    # The last stage has two layers and the head.
    last = BATCH.tokens * (2 * LAYER_FLOPS + HEAD_FLOPS) + BATCH.squares * PAIR_FLOPS / 2
    assert update_seconds(piped) == pytest.approx(3 * last * 5 / 4)


def test_minibatches_cost_pipelines_more():
    config = with_ranks(CONFIG, pipeline=2)
    split = replace(config, algorithm=replace(config.algorithm, n_minibatches=4))
    assert inputs(split, 2).microbatches == 1 and inputs(split, 2).idle_factor == 2.0


def test_tensor_parallel_ranks_sum_hidden_states_twice_a_layer():
    # 4 layers x 2 sums, forwards and backwards; each rank sends 2 (t - 1) / t of a sum.
    assert update_seconds(inputs(with_ranks(CONFIG, tensor=2), 2, node=1.0)) == pytest.approx(
        STATE * 4 * 2 * 2
    )


def test_stages_send_hidden_states_and_with_sequence_parallelism_a_share_of_them():
    piped = with_ranks(CONFIG, pipeline=2)
    assert logprobs_seconds(inputs(piped, 2, node=1.0)) == pytest.approx(STATE)
    assert logprobs_seconds(inputs(piped, 2, nodes=2, network=1.0)) == pytest.approx(STATE)
    both = with_ranks(CONFIG, pipeline=2, tensor=2)
    sequence = replace(both, parallel=replace(both.parallel, sequence=True))
    whole, share = (logprobs_seconds(inputs(config, 4, node=1.0)) for config in (both, sequence))
    assert whole - share == pytest.approx(STATE / 2)


def test_data_parallel_ranks_scatter_gradients_and_gather_parameters():
    parameters = 4 * LAYER + 2 * 32 * 8 + 8
    assert update_seconds(inputs(CONFIG, 4, node=1.0)) == pytest.approx(
        parameters * (4 + 2) * 3 / 4
    )
    plain = replace(CONFIG, optimizer=replace(CONFIG.optimizer, distributed=False))
    assert update_seconds(inputs(plain, 4, node=1.0)) == pytest.approx(parameters * (4 + 4) * 3 / 4)
    # Between nodes the cards of a node share a group's bytes.
    assert update_seconds(inputs(CONFIG, 8, nodes=2, network=1.0)) == pytest.approx(
        parameters * 6 * 7 / 8 / 4
    )


def test_experts_share_gradients_with_the_ranks_that_have_the_same():
    moe = replace(
        TINY, architecture="Qwen3MoeForCausalLM", num_experts=8, experts_per_token=2, qk_norm=True
    )
    config = with_ranks(CONFIG, expert=4)
    experts = 4 * 2 * 3 * 8 * 16  # layers, experts of a rank, matrices
    for ranks, shared in ((4, 0), (8, experts / 2)):
        done = inputs(config, ranks, shape=moe, node=1.0)
        dense = 4 * (LAYER - 3 * 128 - 3 * 8 + 8 * 8 + 2 * 4) + 2 * 32 * 8 + 8
        expected = 6 * (dense * (ranks - 1) / ranks + shared)
        assert gradient_seconds(done, done.mesh, 4) == pytest.approx(expected, rel=0.02)
    # On two nodes the two ranks with the same experts share their cards with nobody of their group.
    done = inputs(config, 8, 2, shape=moe, network=1.0)
    expected = 6 * (dense * 7 / 8 / 4 + experts / 2)
    assert gradient_seconds(done, done.mesh, 4) == pytest.approx(expected, rel=0.02)


def test_epochs_repeat_the_update():
    twice = replace(CONFIG, algorithm=replace(CONFIG.algorithm, epochs=2))
    once = update_seconds(inputs(CONFIG, 1, flops=1.0))
    assert update_seconds(inputs(twice, 1, flops=1.0)) == pytest.approx(2 * once)


# ---------------------------------------------------------------- the step


def test_weights_that_other_ranks_have_are_sent_over_what_is_between_them():
    for tensor, pipeline, engine, nodes, link in (
        (1, 1, 1, 1, None),
        (2, 1, 2, 1, None),
        (2, 1, 1, 1, "node"),
        (1, 2, 1, 1, "node"),
        (1, 2, 1, 2, "network"),
    ):
        config = with_ranks(CONFIG, tensor=tensor, pipeline=pipeline)
        config = replace(config, rollout=replace(config.rollout, tensor_parallel=engine))
        for speed in ("node", "network"):
            assert (sync_seconds(inputs(config, 4, nodes, **{speed: 1.0})) > 0) == (speed == link)


def test_what_is_offloaded_goes_there_and_back():
    config = replace(CONFIG, memory=replace(CONFIG.memory, offload_optimizer=True))
    (plan,) = rank_plans(config, TINY, 1, GPU)
    assert switch_seconds(inputs(config, 1, host=1.0)) == 2 * plan.part("optimizer")
    assert switch_seconds(inputs(CONFIG, 1, host=1.0)) == 0


def usual(config, ranks: int, nodes: int = 1):
    """The plan of a step with the coefficients of GPUs."""
    speeds = {"flops": 1e9, "memory": 1e9, "node": 1e9, "network": 1e9, "host": 1e9}
    done = inputs(config, ranks, nodes, **speeds)
    return plan_step(
        replace(done, cluster=replace(done.cluster, coefficients=COEFFICIENTS["cuda"]))
    )


def test_a_step_is_its_phases_one_after_the_other():
    plan = usual(CONFIG, 2)
    assert plan.step_seconds == pytest.approx(sum(plan.seconds.values()))
    assert list(plan.seconds) == ["sync", "rollout", "update", "other"]
    assert 0 < plan.rollout.tail_seconds < plan.seconds["rollout"]


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
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, **changes))
    assert recomputes_logprobs(config.algorithm, config.on_policy) == expected


def test_a_reference_has_a_pass_of_its_own():
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, kl_coef=0.1, n_minibatches=2))
    plan = usual(config, 2)
    assert plan.seconds["reference"] == plan.seconds["logprobs"] > 0


def test_an_asynchronous_step_is_as_long_as_its_slower_side():
    plan = usual(replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=2, max_staleness=2)), 4)
    assert list(plan.seconds) == ["rollout", "update", "other"]
    assert plan.step_seconds == pytest.approx(max(plan.trainer_seconds, plan.seconds["rollout"]))
    turns = replace(
        plan, config=replace(plan.config, rollout=replace(plan.config.rollout, max_staleness=0))
    )
    assert turns.step_seconds == pytest.approx(sum(plan.seconds.values()))


def test_trainers_beside_engines_take_as_long_as_alone_on_their_node():
    """Three of eight ranks on two nodes train: they are on the first."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=5))
    assert usual(config, 8, nodes=2).seconds["update"] == usual(CONFIG, 3).seconds["update"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"flops_shar": 1.0}, 'no coefficient "flops_shar". Did you mean "flops_share"'),
        ({"flops_share": "1e3"}, "the coefficient flops_share is '1e3'; needed: a number above 0"),
        ({"flops_share": 0}, "the coefficient flops_share is 0; needed: a number above 0"),
        (None, 'needed: {"kind": "cpu", "coefficients": {name: number}}'),
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
    file.write_text(
        json.dumps({"kind": "cpu", "coefficients": {"step_seconds": 2}}), encoding="utf-8"
    )
    assert read_coefficients(file, "cpu") == (replace(COEFFICIENTS["cpu"], step_seconds=2), [])
    file.write_text(
        '{"kind": "cpu", "coefficients": {"switch_seconds": 1, "step_seconds": 2}}',
        encoding="utf-8",
    )
    coefficients, (warning,) = read_coefficients(file, "cpu")
    assert coefficients.step_seconds == 2 and "switch_seconds is ignored" in warning
    with pytest.raises(ValueError, match=r'needed: \{"kind": "cuda"'):
        read_coefficients(file, "cuda")
