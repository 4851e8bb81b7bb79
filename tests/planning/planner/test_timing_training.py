"""The work of log-probs and updates, counted by hand."""

from dataclasses import replace

import pytest

from rlmath.config.schema import PolicyConfig
from rlmath.data.seqlen_balancing import forward_cost, training_cost
from rlmath.models.hf_config import critic_shape
from rlmath.planning.planner.training import (
    LOGPROBS,
    Held,
    critic_work,
    gradient_exchanges,
    held_parameters,
    logprobs_work,
    pass_exchanges,
    update_work,
)
from rlmath.planning.planner.work import Work
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

FORWARD = BATCH.tokens * (4 * LAYER_FLOPS + HEAD_FLOPS) + BATCH.squares * PAIR_FLOPS
LAYERS = BATCH.tokens * 4 * LAYER_FLOPS + BATCH.squares * PAIR_FLOPS


def recomputing(granularity: str, method: str | None = None, layers: int | None = None):
    policy = PolicyConfig(
        max_tokens_per_microbatch=33,
        recompute_granularity=granularity,
        recompute_method=method,
        recompute_num_layers=layers,
    )
    return replace(CONFIG, policy=policy)


def test_flops_of_one_rank():
    assert logprobs_work(inputs(CONFIG, 1)).flops == pytest.approx(FORWARD)
    assert update_work(inputs(CONFIG, 1)).flops == pytest.approx(3 * FORWARD)


def test_a_critic_reads_everything_once_and_learns_from_it_once():
    critic = critic_shape(TINY, TINY)
    one_pass = LAYERS + BATCH.tokens * 2 * TINY.hidden_size  # its head has one row
    assert critic_work(replace(inputs(CONFIG, 1), shape=critic)).flops == pytest.approx(4 * one_pass)


def test_a_forward_pass_is_a_third_of_what_the_schedule_balances():
    cost = training_cost(TINY)
    assert forward_cost(TINY).of(7) == pytest.approx(cost.of(7) / 3)


def test_all_experts_of_a_token_count():
    moe = replace(TINY, architecture="Qwen3MoeForCausalLM", num_experts=8, experts_per_token=2, qk_norm=True)
    more = forward_cost(moe).linear - forward_cost(TINY).linear
    assert more == 4 * 2 * (3 * 8 * 16 + 8 * 8)  # one more expert, and the router, in each of 4 layers


def test_recomputation_adds_the_forward_pass_of_what_is_recomputed():
    mlp = BATCH.tokens * 4 * 2 * 3 * TINY.hidden_size * TINY.ffn_size  # 4 layers of three matrices
    for config, again in (
        (recomputing("full", "uniform", 1), LAYERS),
        (recomputing("full", "block", 1), LAYERS / 4),
        (recomputing("selective"), mlp),
    ):
        assert update_work(inputs(config, 1)).flops == pytest.approx(3 * FORWARD + again)


def test_of_local_layers_the_attention_is_recomputed():
    local = replace(inputs(recomputing("selective"), 1), target=replace(GPU, local_layers=True))
    attention = BATCH.squares * PAIR_FLOPS
    assert update_work(local).flops == pytest.approx(3 * FORWARD + attention)


def test_a_recomputed_mlp_is_summed_over_tensor_parallel_ranks_once_more():
    plain, again = (
        update_work(inputs(with_ranks(config, tensor=2), 2)).node
        for config in (CONFIG, recomputing("selective"))
    )
    ends = 4 / (4 * 4 * 2)  # of the embedding and of the output layer, which are computed once
    assert again == pytest.approx(plain * (2.5 / 2 + ends) / (1 + ends))


def test_ranks_share_the_flops():
    one = update_work(inputs(CONFIG, 1)).flops
    assert update_work(inputs(CONFIG, 4)).flops == pytest.approx(one / 4)
    assert update_work(inputs(with_ranks(CONFIG, tensor=2), 4)).flops == pytest.approx(one / 4)


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    # 128 tokens on one data-parallel rank, 33 in a micro-batch.
    piped = inputs(with_ranks(CONFIG, pipeline=2), 2)
    assert piped.microbatches == 4 and piped.idle_factor == pytest.approx((4 + 1) / 4)
    assert inputs(with_ranks(CONFIG, pipeline=2, virtual_pipeline=2), 2).idle_factor == pytest.approx(4.5 / 4)
    # The last stage has two layers and the head.
    last = BATCH.tokens * (2 * LAYER_FLOPS + HEAD_FLOPS) + BATCH.squares * PAIR_FLOPS / 2
    assert update_work(piped).flops == pytest.approx(3 * last * 5 / 4)


def test_minibatches_cost_pipelines_more():
    config = with_ranks(CONFIG, pipeline=2)
    split = replace(config, algorithm=replace(config.algorithm, n_minibatches=4))
    assert inputs(split, 2).microbatches == 1 and inputs(split, 2).idle_factor == 2.0


def test_tensor_parallel_ranks_sum_hidden_states_twice_a_layer():
    work = update_work(inputs(with_ranks(CONFIG, tensor=2), 2))
    state = BATCH.tokens * 8 * 2
    # 4 layers x 2 sums, forwards and backwards; one of the embedding, one behind the output layer's gradient; each rank
    # sends 2 (t - 1) / t of a sum.
    assert work.node == pytest.approx(state * (4 * 2 * 2 + 2) * 1.0) and work.network == 0


def test_data_parallel_ranks_scatter_gradients_and_gather_parameters():
    done = inputs(CONFIG, 4)
    (held,) = (one.parameters for one in held_parameters(done, done.mesh, 4))
    layer = 4 * 64 + 3 * 128 + 3 * 8 + 2 * 8  # matrices, biases of query, key and value, two norms
    assert held == 4 * layer + 2 * 32 * 8 + 8
    assert update_work(done).node == pytest.approx(held * (4 + 2) * 3 / 4)
    plain = replace(CONFIG, optimizer=replace(CONFIG.optimizer, distributed=False))
    assert update_work(inputs(plain, 4)).node == pytest.approx(held * (4 + 4) * 3 / 4)


def test_between_nodes_the_cards_of_a_node_share_a_groups_bytes():
    done = inputs(CONFIG, 8, nodes=2)
    sent = held_parameters(done, done.mesh, 4)[0].parameters * 6 * 7 / 8
    assert update_work(done).network == pytest.approx(sent / 4)
    assert update_work(done).node == pytest.approx(sent)


def test_experts_share_gradients_with_the_ranks_that_have_the_same():
    moe = replace(TINY, architecture="Qwen3MoeForCausalLM", num_experts=8, experts_per_token=2, qk_norm=True)

    def of_one_minibatch(ranks: int, nodes: int) -> tuple[Work, Held, Held]:
        """What one more minibatch costs, and what a rank holds."""
        once = with_ranks(CONFIG, expert=4)
        twice = replace(once, algorithm=replace(once.algorithm, n_minibatches=2))
        plans = [replace(inputs(config, ranks, nodes), shape=moe) for config in (once, twice)]
        one, two = map(update_work, plans)
        return two + one.times(-1.0), *held_parameters(plans[0], plans[0].mesh, 4)

    work, dense, experts = of_one_minibatch(8, nodes=2)
    assert experts.parameters == 4 * 2 * 3 * 8 * 16 and (experts.ranks, experts.stride) == (2, 4)
    # The two ranks with the same experts are on two nodes, and share their cards with nobody of their group.
    # Both optimizers gather the parameters of both: 8 bytes a parameter instead of 6.
    assert work.network == pytest.approx(dense.parameters * 8 * 7 / 8 / 4 + experts.parameters * 8 / 2)
    work, dense, experts = of_one_minibatch(4, nodes=1)
    assert experts.ranks == 1
    assert work.node == pytest.approx(dense.parameters * 8 * 3 / 4)
    assert work.memory == pytest.approx(dense.parameters * (12 + 28 / 4) + experts.parameters * (12 + 28))


def test_with_sequence_parallelism_stages_send_a_share_of_the_hidden_states():
    piped = with_ranks(CONFIG, tensor=2, pipeline=2)
    sequence = replace(piped, parallel=replace(piped.parallel, sequence=True))
    whole, share = (update_work(inputs(config, 4)) for config in (piped, sequence))
    state = BATCH.tokens * 8 * 2
    # Of the last stage, which has 2 of 4 layers: 2 x state to and from the next one, or half of it. Sums in halves, of
    # which a rank sends (t - 1) / t: 4 a layer, backwards 2 more, since the input is gathered again; for the output
    # layer 2 and 3.
    gathered_again = (2 * 2 + 1) * state / 2
    found = pass_exchanges(inputs(piped, 4), replace(inputs(piped, 4).mesh, rank=2), 2, LOGPROBS)
    assert found["pipeline"].messages == inputs(piped, 4).microbatches
    assert whole.node - share.node == pytest.approx(2 * state / 2 - gathered_again)


def test_the_first_and_the_last_stage_sum_the_gradient_of_a_matrix_that_both_have():
    tied = replace(TINY, tied_embeddings=True)
    for config, more in ((with_ranks(CONFIG, pipeline=2), 32 * 8 * 4), (CONFIG, 0)):
        plain = inputs(config, 2)
        found = gradient_exchanges(replace(plain, shape=tied), plain.mesh, 2)
        assert sum(work.node for name, work in found.items() if name == "embedding") == more


def test_epochs_repeat_the_update():
    twice = replace(CONFIG, algorithm=replace(CONFIG.algorithm, epochs=2))
    assert update_work(inputs(twice, 1)) == update_work(inputs(CONFIG, 1)).times(2)
