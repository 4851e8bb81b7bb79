"""Which cases of a behaviour `make test` runs, which `make test-matrix` adds, and which `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

POOLED_IN_TEST = (
    # the policy's arithmetic
    "test_parity::test_logprobs_equal_those_of_transformers[TP2xPP1xDP1-",
    "test_parity::test_gradients_equal_those_of_transformers[TP2xPP1xDP1-",
    "test_layouts::test_one_sgd_update_equals_that_of_torch",
    "test_invariance::test_gradients_and_sgd_updates_do_not_depend_on_layout_and_split",
    "test_moe::test_experts_answer_learn_and_leave_as_in_transformers",
    "test_optimizer::test_three_updates_are_those_of_torch",
    "test_update::test_ppo_with_kl_in_the_reward_is_that_of_plain_torch",
    # what must come back bit by bit
    "test_early_stop::test_a_discarded_minibatch_leaves_every_bit_of_the_state",
    "test_offload::test_learning_goes_on_bit_by_bit_as_if_nothing_had_left[TP1xPP1xDP2-",
    "test_store::test_on_the_same_layout_every_bit_comes_back_and_the_next_update_is_the_same",
    # policy and engine
    "test_sync::test_every_engine_has_the_policys_weights_after_every_sync",
    "test_engine::test_engine_logprobs_equal_the_policys_after_every_update",
    "test_probe::test_other_weights_end_every_rank_with_the_difference",
    "test_switch::test_memory_changes_hands_in_order_and_nothing_is_lost",
    "test_rollout::test_what_is_collected_does_not_depend_on_who_drew_it",
    # steps
    "test_grpo_settings::",
    "test_hooks::test_a_step_learns_with_the_advantages_of_the_groups_that_are_selected",
    "test_partial_rollouts::test_cut_or_whole_the_completions_are_the_same",
    "test_partial_rollouts::test_every_prompt_is_learned_once_and_in_time",
    "test_partial_rollouts::test_deferred_or_not_the_completions_are_the_same",
    "test_async::test_with_staleness_0_a_run_is_the_synchronous_one_bit_by_bit",
)
"""Tests that use the pool of ranks and that `make test` runs, by the beginning of their names. Of a test's cases those
with marks of their own stay where these say."""

POOLED_IN_MATRIX = (
    "test_architectures::test_a_model_answers_learns_and_leaves_as_in_transformers",
    "test_async::test_engines_of_their_own_have_the_policys_weights_and_every_prompt_is_learned_once",
    "test_async::test_interrupted_completions_go_on_with_the_new_weights",
    "test_context::",
    "test_convert_loads::test_megatron_loads_a_converted_model_bit_by_bit",
    "test_convert_loads::test_what_megatron_saves_is_converted_bit_by_bit[save_ours",
    "test_critic::test_a_step_of_policy_and_critic_is_that_of_transformers",
    "test_critic::test_a_checkpoint_has_the_critic_and_its_optimizer",
    "test_early_stop::",
    "test_engine::test_engine_logprobs_equal_the_policys_after_every_update",
    "test_engine::test_no_prefix_of_old_weights_is_used_with_new_ones",
    "test_engine::test_padded_vocabulary_has_no_probability",
    "test_evaluation::",
    "test_hooks::",
    "test_invariance::",
    "test_layouts::",
    "test_mbridge_oracle::",
    "test_memory_plan::test_training_holds_what_is_planned",
    "test_moe::",
    "test_offload::test_learning_goes_on_bit_by_bit_as_if_nothing_had_left",
    "test_offload::test_the_reference_is_here_only_while_it_computes",
    "test_optimizer::test_the_learning_rate_of_every_update",
    "test_optimizer::test_log_probs_are_computed_once_and_where_they_are_needed",
    "test_parity::test_gradients_equal_those_of_transformers",
    "test_parity::test_tied_embeddings_get_the_gradient_of_both_uses",
    "test_parity::test_one_sgd_update_equals_that_of_torch",
    "test_parity::test_one_adam_update_equals_that_of_torch",
    "test_parity::test_an_overlapped_reduction_gives_the_same_bits",
    "test_parity::test_kl_against_a_reference_is_part_of_the_update",
    "test_parity::test_packed_sequences_do_not_see_each_other",
    "test_partial_rollouts::test_engines_and_cuts_change_nothing",
    "test_partial_rollouts::test_log_probs_are_those_of_the_weights_that_sampled",
    "test_partial_rollouts::test_what_a_checkpoint_holds_continues_as_if_nothing_had_happened",
    "test_partial_rollouts::test_dynamic_sampling_replaces_dropped_groups_by_further_draws",
    "test_partial_rollouts::test_a_checkpoint_keeps_what_is_deferred",
    "test_probe::test_equal_weights_pass_alike_on_all_ranks",
    "test_probe::test_scored_tokens_do_not_change_texts_that_go_on_from_them",
    "test_rollout::test_groups_are_whole_and_in_the_order_of_the_prompts",
    "test_rollout::test_every_completion_has_its_own_reward_and_its_own_prompts_solutions",
    "test_rollout::test_a_completion_in_slices_is_the_whole_one",
    "test_rollout::test_the_ranks_of_an_engine_draw_alike",
    "test_sft::test_the_curve_is_that_of_transformers_with_adamw",
    "test_sft::test_every_layout_has_the_curve_of_a_single_rank",
    "test_store::",
    "test_switch::test_a_failure_anywhere_leaves_the_policy_whole_and_the_engine_asleep",
    "test_sync::test_every_engine_has_the_policys_weights_after_every_sync",
    "test_sync::test_vllms_own_model_gets_what_it_would_load_into_the_memory_that_it_has",
    "test_sync::test_one_rank_that_cannot_share_memory_makes_all_send_messages",
    "test_sync::test_damage_to_an_engines_weights_is_found_and_named",
    "test_sync::test_a_replica_that_went_astray_ends_every_rank_with_the_tensor_and_the_engine",
    "test_teacher::test_gradients_with_a_teacher_equal_those_of_transformers",
    "test_teacher::test_a_step_learns_from_the_teacher_alone_or_with_rewards",
    "test_transport::test_one_rank_without_memory_to_share_means_none_for_all",
    "test_update::test_epochs_over_minibatches_agree_between_layouts",
    "test_update::test_the_ratio_is_to_the_policy_before_the_steps_first_update",
    "test_update::test_after_a_discard_the_step_goes_on_or_ends",
)
"""Tests that use the pool and that `make test-matrix` runs; all others are for `make test-full`."""


def mark_of_pooled(node_id: str) -> str | None:
    """The mark of a test that uses the pool; None where `make test` runs it."""
    name = node_id.rpartition("/")[2].replace(".py::", "::")
    if name.startswith(POOLED_IN_TEST):
        return None
    return "matrix" if name.startswith(POOLED_IN_MATRIX) else "full"


matrix = pytest.mark.matrix
"""On a test: `make test` has another one of the same part of the program, CI runs this one with `make test-matrix`."""


def keeping(cases: Iterable[Any], *kept: Any, others: int = 1) -> list[Any]:
    """Cases for `parametrize`: `make test` runs those of `kept`, `make test-matrix` so many of the `others`, those that
    come first, and `make test-full` the rest. A case that has marks of its own stays as it is."""
    cases, own, found, count = list(cases), type(pytest.param()), [], 0
    assert all(case in cases for case in kept)
    for case in cases:
        if isinstance(case, own) or case in kept:
            found.append(case)
            continue
        count += 1
        mark = matrix if count <= others else pytest.mark.full
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark))
    return found
