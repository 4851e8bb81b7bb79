import math
from dataclasses import replace

import pytest

from rlmath.algorithms.dynamic_sampling import Chosen, Selection
from rlmath.algorithms.types import Completion, Prompt, RewardFailure, Score, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, RewardConfig
from rlmath.data.micro_batches import Cost
from rlmath.models.critic import VALUE_SUMS
from rlmath.models.learner import MinibatchResult
from rlmath.rewards.several_rewards import TAKEN
from rlmath.rollout.work_queue import EngineUsage
from rlmath.trainer.critic import critic_metrics
from rlmath.trainer.metrics import (
    UpdateRecord,
    engine_metrics,
    mfu_metrics,
    mismatch_metrics,
    pace_metrics,
    part_metrics,
    rollout_metrics,
    selection_metrics,
    teacher_metrics,
    teaching_metrics,
    update_metrics,
)
from rlmath.trainer.token_advantages import RewardKL

RIGHT = Score(5.0, True, "2", "string", True, (("steps", 4.0),), verified_correct=True)
WRONG = Score(-5.0, False, "3", "number", True, verified_correct=False)
LATE = Score(-5.0, False, "", "timeout", queue_seconds=1.2, verified_correct=False)
BROKEN = Score(-5.0, False, "", "error", verified_correct=False)
SILENT = Score(-5.0, False, "", "no_answer", verified_correct=False)


def group(prompt_tokens: int, *answers: tuple[int, str, Score]) -> ScoredGroup:
    """A group of (tokens, finish reason, score)."""
    completions = tuple(
        Completion(
            g, (9,) * tokens, (-1.0,) * tokens, text="", finish_reason=reason, policy_version=g
        )
        for g, (tokens, reason, _) in enumerate(answers)
    )
    prompt = Prompt("q", "?", (1,) * prompt_tokens, solutions=("2",), task="math")
    return ScoredGroup(prompt, completions, tuple(score for _, _, score in answers))


GROUPS = [
    group(3, (2, "stop", RIGHT), (4, "length", WRONG)),
    group(5, (6, "length", LATE), (8, "stop", BROKEN)),
    group(4, (10, "stop", RIGHT), (10, "stop", SILENT)),
]
ADVANTAGES = [[1.0, -1.0], [0.0, 0.0], [0.5, -1.5]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_reward", (2 * 5 - 4 * 5) / 6),
        ("rollout/accuracy", 2 / 6),
        ("rollout/response_length", 40 / 6),
        ("rollout/policy_version", 1 / 2),
        ("rollout/groups_with_contrast", 2 / 3),
        ("reward/failures", 2 / 6),
        ("reward/queue_wait_s_max", 1.2),
        ("reward/boxed", 3 / 6),
        ("reward/verdict/timeout", 1 / 6),
        ("reward/own/steps", 4.0),
        ("avg_seq_len", (2 * (3 + 5 + 4) + 40) / 6),
        ("no_eos_ratio", 2 / 6),
        ("n_seqs", 6.0),
        ("n_valid_tokens", 40.0),
    ],
)
def test_rollout_metrics_by_hand(name: str, value: float):
    assert rollout_metrics(GROUPS)[name] == pytest.approx(value)


def with_scores(*scores: Score) -> list[ScoredGroup]:
    return [group(3, *((2, "stop", score) for score in scores))]


def test_means_of_finite_numbers_are_finite():
    huge = Score(1.5e308, True, "", "function", metrics=(("size", 1.7e308),))
    metrics = rollout_metrics(with_scores(huge, huge, huge, huge))
    assert metrics["reward/own/size"] == pytest.approx(1.7e308)
    assert metrics["task_reward"] == metrics["rollout/rewards"] == pytest.approx(1.5e308)


def test_accuracy_is_what_the_verifier_says_and_not_that_a_reward_is_above_0():
    """A length bonus pays every completion a little; one of four is right, another only says so."""
    paid = [
        Score(0.1, True, "", "function", verified_correct=right)
        for right in (True, False, False, False)
    ]
    metrics = rollout_metrics(with_scores(*paid))
    assert metrics["rollout/accuracy"] == 0.25
    assert "rollout/reward_positive" not in metrics
    assert metrics["reward/correct"] == 1.0, "what selection and curriculum count"


def test_without_a_verifier_the_share_of_positive_rewards_is_called_so():
    paid = [Score(reward, reward > 0, "", "function") for reward in (0.1, 0.2, 0.3, -1.0)]
    metrics = rollout_metrics(with_scores(*paid))
    assert metrics["rollout/reward_positive"] == 0.75
    assert "rollout/accuracy" not in metrics


def test_names_of_a_function_are_bounded_and_told(caplog):
    """Fifty are as many as may be: none of them is left out, and nothing is told."""
    fifty = Score(1.0, True, "", "function", metrics=tuple((f"of {m}", 1.0) for m in range(50)))
    metrics = rollout_metrics(with_scores(fifty, fifty))
    assert sum(name.startswith("reward/own/") for name in metrics) == 50 and not caplog.text
    scores = [
        Score(1.0, True, "", "function", metrics=tuple((f"of {n} {m}", 1.0) for m in range(40)))
        for n in range(4)
    ]
    own_metrics = [
        name for name in rollout_metrics(with_scores(*scores)) if name.startswith("reward/own/")
    ]
    assert own_metrics == [f"reward/own/of {n} {m}" for n in range(2) for m in range(40)][:50]
    assert "more than 50 names of metrics in a step" in caplog.text


def usage(seconds: float, steps: int = 10, tail_steps: int = 0, fill: float = 1.0) -> EngineUsage:
    return EngineUsage(seconds, steps, tail_steps, fill)


def test_idle_shares_of_engines_are_told_one_by_one_up_to_eight():
    # Two rollouts of 4 s and 1 s: the first engine idled 1 of 5 s, the second half a second.
    metrics = engine_metrics([[usage(3.0), usage(4.0)], [usage(1.0), usage(0.5)]])
    assert {name: share for name, share in metrics.items() if "idle" in name} == pytest.approx(
        {
            "rollout/idle_share": 0.15,
            "rollout/idle_share_max": 0.2,
            "rollout/idle_share/engine_0": 0.2,
            "rollout/idle_share/engine_1": 0.1,
        }
    )
    assert len(engine_metrics([[usage(1.0)] * 8])) == 12
    assert list(engine_metrics([[usage(1.0)] * 9])) == [
        "rollout/idle_share",
        "rollout/idle_share_max",
        "rollout/tail_share",
        "rollout/batch_fill",
    ]
    assert engine_metrics([]) == {}


def test_shares_of_engine_steps_weigh_an_engine_by_its_steps() -> None:
    metrics = engine_metrics([[usage(1.0, 30, 15, 0.5), usage(1.0, 10, 1, 0.9)]])
    assert metrics["rollout/tail_share"] == pytest.approx(16 / 40)
    assert metrics["rollout/batch_fill"] == pytest.approx((0.5 * 30 + 0.9 * 10) / 40)


def minibatch(
    tokens: float, scale: float, norm: float, lr: float, why: str | None = None
) -> MinibatchResult:
    """A minibatch whose sums are `scale` times 1, 2, 3, ...

    It has twice as many tokens as its loss is divided by."""
    names = (
        "loss",
        "ratio",
        "clipped",
        "approx_kl",
        "proximal_kl",
        "reference_kl",
        "entropy",
        "mismatch",
    )
    names += ("correction", "correction_cut", "masked_geometric", "masked_binary_kl")
    names += ("masked_off_policy", "proximal_error")
    sums = {name: scale * number for number, name in enumerate(names, start=1)}
    sums |= {"tokens": tokens, "denominator": tokens / 2}
    return MinibatchResult(sums, {"mismatch_max": scale}, norm, learning_rate=lr, discarded=why)


CRITIC_RESULT = MinibatchResult(
    dict.fromkeys(VALUE_SUMS, 1.0),
    {},
    math.inf,
    learning_rate=0.1,
    discarded="the gradient norm is not finite (inf)",
)
RESULTS = [
    minibatch(10.0, 1.0, norm=0.5, lr=0.1),
    minibatch(30.0, 5.0, norm=9.0, lr=0.2, why="mean importance ratio 6 is above 5"),
    minibatch(20.0, 6.0, norm=1.5, lr=0.3),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # sums of 1 + 6 = 7 times the column's number, over 30 tokens: the second was discarded
        ("actor_loss", 7 / 15),
        ("importance_weight", 14 / 30),
        ("actor_clip_ratio", 21 / 30),
        ("ppo_approx_kl", 28 / 30),
        ("train/proximal_kl", 35 / 30),
        ("train/reference_kl", 42 / 30),
        ("train/entropy_loss", 49 / 30),
        ("kl_reward", -0.14),
        ("final_reward", 2.0 - 0.14),
        ("advantage", (2 * 1 - 4 * 1 + 10 * 0.5 - 10 * 1.5) / 40),
        ("train/grad_norm", 1.0),
        ("train/learning_rate", 0.3),
        ("train/early_stopped_minibatches", 1.0),
        ("train/minibatches", 3.0),
    ],
)
def test_update_metrics_are_means_over_the_tokens_that_were_learned_from(name: str, value: float):
    record = UpdateRecord(RESULTS, ADVANTAGES, None)
    assert update_metrics(record, GROUPS, 2.0, AlgorithmConfig(kl_coef=0.1))[name] == pytest.approx(
        value
    )


def test_kl_inside_of_the_reward_is_part_of_the_final_reward_of_a_completion():
    record = UpdateRecord(RESULTS, ADVANTAGES, RewardKL(per_token=0.5, per_completion=40.0))
    metrics = update_metrics(record, GROUPS, 2.0, AlgorithmConfig(kl_coef=0.1, kl_in="reward"))
    assert metrics["kl_reward"] == pytest.approx(-0.05)
    assert metrics["final_reward"] == pytest.approx((2 * 5 - 4 * 5) / 6 - 4.0)
    assert metrics["train/reference_kl"] == 0.5


def test_the_correction_is_told_where_there_is_one():
    record = UpdateRecord(RESULTS, ADVANTAGES, None)
    metrics = update_metrics(record, GROUPS, 2.0, AlgorithmConfig(importance_correction="token"))
    assert metrics["train/importance_correction"] == pytest.approx(7 * 9 / 30)
    assert metrics["train/importance_correction_cut"] == pytest.approx(7 * 10 / 30)
    assert "train/importance_masked_geometric" not in metrics
    assert "train/importance_correction" not in update_metrics(
        record, GROUPS, 2.0, AlgorithmConfig()
    )
    metrics = update_metrics(record, GROUPS, 2.0, AlgorithmConfig(importance_mask_binary_kl=0.1))
    assert metrics["train/importance_correction_cut"] == pytest.approx(7 * 10 / 30)
    assert metrics["train/importance_masked_geometric"] == pytest.approx(7 * 11 / 30)
    assert metrics["train/importance_masked_binary_kl"] == pytest.approx(7 * 12 / 30)


def test_masks_and_errors_are_told_where_they_are_computed() -> None:
    record = UpdateRecord(RESULTS, ADVANTAGES, None)
    for name, number, settings in (
        ("train/off_policy_masked", 13, AlgorithmConfig(off_policy_mask=0.1)),
        ("train/proximal_error", 14, AlgorithmConfig(proximal_logprobs="compare")),
    ):
        metrics = update_metrics(record, GROUPS, 2.0, settings)
        assert metrics[name] == pytest.approx(7 * number / 30)
        assert name not in update_metrics(record, GROUPS, 2.0, AlgorithmConfig())


def test_a_step_whose_minibatches_were_all_discarded_has_their_gradient_norm():
    def of(*norms: float) -> dict[str, float]:
        results = [replace(RESULTS[1], grad_norm=norm) for norm in norms]
        return update_metrics(
            UpdateRecord(results, ADVANTAGES, None), GROUPS, 2.0, AlgorithmConfig()
        )

    metrics = of(9.0, 3.0)
    assert metrics["train/grad_norm"] == 6.0
    assert metrics["train/early_stopped_minibatches"] == metrics["train/minibatches"] == 2.0
    assert (
        of(9.0, math.inf)["train/grad_norm"]
        == critic_metrics([CRITIC_RESULT])["critic/grad_norm"]
        == math.inf
    )


def test_minibatches_that_overflow_their_loss_scale_are_not_stopped_early():
    too_large = replace(RESULTS[1], loss_scale=8.0, overflowed=True)
    results = [too_large, replace(RESULTS[1], loss_scale=4.0), replace(RESULTS[2], loss_scale=4.0)]
    metrics = update_metrics(
        UpdateRecord(results, ADVANTAGES, None), GROUPS, 2.0, AlgorithmConfig()
    )
    assert (metrics["train/loss_scale"], metrics["train/overflowed_minibatches"]) == (4.0, 1.0)
    assert metrics["train/early_stopped_minibatches"] == 1.0 and metrics["train/grad_norm"] == 1.5


def test_a_step_without_anything_to_learn_from_has_only_its_counts():
    metrics = update_metrics(UpdateRecord([], [], None), [], 2.0, AlgorithmConfig())
    assert metrics == {"train/early_stopped_minibatches": 0.0, "train/minibatches": 0.0}
    assert mismatch_metrics([], only_first=True) == {}


def test_groups_that_teach_are_those_that_moved_the_policy():
    """Three of twelve sampled groups were kept; the middle one has no advantage but 0."""
    update = UpdateRecord(RESULTS, ADVANTAGES, None)
    assert teaching_metrics(update, sampled=12, every_group=False) == {
        "train/teaching_groups": 2 / 12
    }
    assert teaching_metrics(update, sampled=12, every_group=True) == {
        "train/teaching_groups": 3 / 12
    }
    empty_update = UpdateRecord([], [], None)
    assert teaching_metrics(empty_update, sampled=12, every_group=True) == {
        "train/teaching_groups": 0.0
    }
    discarded_update = UpdateRecord(
        [replace(minibatch, discarded="ratio") for minibatch in RESULTS], ADVANTAGES, None
    )
    assert teaching_metrics(discarded_update, sampled=12, every_group=True) == {
        "train/teaching_groups": 0.0
    }


def test_selection_metrics_count_groups_and_completions():
    chosen = [
        Chosen((0, 1)),
        Chosen((1,), ("short",)),
        Chosen((), ("short", "long"), "empty"),
        *[Chosen((), dropped="right")] * 3,
    ]
    metrics = selection_metrics(Selection(GROUPS * 2, chosen, wanted=1))
    assert {name: value for name, value in metrics.items() if value} == {
        "selection/groups_sampled": 6.0,
        "selection/groups_learned": 2.0,
        "selection/extra_prompts": 5.0,
        "selection/dropped/right": 3.0,
        "selection/dropped/empty": 1.0,
        "selection/filtered/short": 2.0,
        "selection/filtered/long": 1.0,
    }
    assert {
        "selection/dropped/wrong",
        "selection/dropped/surplus",
        "selection/filtered/truncated",
    } <= set(metrics)


def test_the_mismatch_over_all_minibatches_and_over_the_first():
    assert mismatch_metrics(RESULTS, only_first=False) == {
        "train/behaviour_logprob_diff": pytest.approx(12 * 8 / 60),
        "train/behaviour_logprob_diff_max": 6.0,
    }
    assert mismatch_metrics(RESULTS, only_first=True) == {
        "train/behaviour_logprob_diff": pytest.approx(0.8),
        "train/behaviour_logprob_diff_max": 1.0,
    }


def test_phases_are_paced_by_the_tokens_they_work_on():
    seconds = {"sync": 0.5, "rollout": 2.0, "update": 4.0, "reference": 0.0, "step": 8.0}
    # 40 tokens were sampled, 64 with their prompts; the first group has 2 x 3 + 6 tokens, read in
    # two epochs
    assert pace_metrics(seconds, 40, GROUPS, GROUPS[:1], passes=2) == {
        "seconds/sync": 0.5,
        "seconds/rollout": 2.0,
        "seconds/update": 4.0,
        "seconds/reference": 0.0,
        "seconds/step": 8.0,
        "tokens_per_second/rollout": 20.0,
        "tokens_per_second/update": 6.0,
        "tokens_per_second/step": 8.0,
        "tokens_per_second/learned": 0.75,
    }


def test_mfu_counts_the_models_own_arithmetic() -> None:
    seconds = {"rollout": 2.0, "update": 4.0}
    first_group = GROUPS[:1]

    def mfu(seconds: dict[str, float], sampled_tokens: int, passes: int = 2) -> dict[str, float]:
        return mfu_metrics(
            seconds,
            sampled_tokens,
            first_group,
            learned=first_group if passes else [],
            passes=passes,
            forward=Cost(linear=3.0, quadratic=1.0),
            trained=Cost(8.0, 2.0),
            peak_flops=1_000.0,
        )

    metrics = mfu(seconds, 6)
    prompt = len(GROUPS[0].prompt.token_ids)
    answers = [len(completion.token_ids) for completion in GROUPS[0].completions]
    whole = [3.0 * (prompt + n) + (prompt + n) ** 2 for n in answers]
    read_again = (len(answers) - 1) * (3.0 * prompt + prompt**2)
    trained = sum(8.0 * (prompt + n) + 2 * (prompt + n) ** 2 for n in answers)
    assert metrics["train/mfu"] == pytest.approx(2 * trained / 4_000.0)
    assert metrics["rollout/mfu"] == pytest.approx((sum(whole) - read_again) / 2_000.0)
    assert "train/mfu" not in mfu({"rollout": 2.0}, 6, passes=0)
    # Of a step that sampled half as many tokens as the groups that it learns from have.
    half = mfu(seconds, 3)
    assert half["rollout/mfu"] == pytest.approx(metrics["rollout/mfu"] / 2)
    assert half["train/mfu"] == metrics["train/mfu"]


def test_the_kl_to_a_teacher_is_exact_or_estimated() -> None:
    """Minibatches that were learned from are summed where it is taken over the whole vocabulary.

    That is (1 + 2) / 30 tokens."""
    kls = (1.0, 50.0, 2.0)
    results = [
        replace(minibatch, sums=minibatch.sums | {"teacher_kl": kl})
        for minibatch, kl in zip(RESULTS, kls, strict=True)
    ]
    assert teacher_metrics(UpdateRecord(results, ADVANTAGES, None)) == {"train/teacher_kl": 0.1}
    estimated = UpdateRecord(results, ADVANTAGES, None, teacher_kl=0.25)
    assert teacher_metrics(estimated) == {"train/teacher_kl": 0.25}
    assert teacher_metrics(UpdateRecord([], [], None)) == {}


def test_several_rewards_have_a_mean_of_what_is_there_and_a_share_of_failures():
    def scored(*parts: float | None) -> Score:
        failures = tuple(RewardFailure("own", "error", "") for part in parts if part is None)
        return Score(1.0, True, "", "string", parts=parts, failures=failures)

    groups = [
        group(3, (2, "stop", scored(1.0, 0.5, None)), (2, "stop", scored(1.0, 0.7, None))),
        group(3, (2, "stop", scored(1.0, 0.3, None)), (2, "stop", scored(0.0, None, None))),
        group(3, (2, "stop", scored(1.0, 0.1, None)), (2, "stop", scored(1.0, 0.1, None))),
    ]
    reward = RewardConfig(rewards=["correctness", "length", "own=m:f"], combine="gdpo")
    metrics = part_metrics(groups, reward)
    assert metrics == pytest.approx(
        {
            "reward/correctness": 5 / 6,
            "reward/correctness/failures": 0.0,
            "reward/length": 1.7 / 5,
            "reward/length/failures": 1 / 6,
            "reward/own/failures": 1.0,
            "rollout/groups_with_contrast": 2 / 3,
        }
    )
    assert part_metrics(groups, replace(reward, combine="sum")) == metrics
    assert part_metrics(groups, RewardConfig()) == {}
    assert rollout_metrics(groups)["reward/failures"] == 1.0


def test_no_name_of_a_reward_is_that_of_another_metric():
    taken_names = {
        name.split("/")[1] for name in rollout_metrics(GROUPS) if name.startswith("reward/")
    }
    assert taken_names == set(TAKEN)


def test_a_failure_counts_for_the_reward_of_its_name_that_gave_a_number_all_the_same():
    """The message of a failure may be anything."""
    failures = (RewardFailure("own", "error", "length"),)
    score = Score(1.0, True, "", "string", parts=(1.0, 0.5, 0.25), failures=failures)
    reward = RewardConfig(rewards=["correctness", "length", "own=m:f"])
    metrics = part_metrics([group(3, (2, "stop", score))], reward)
    failed = {name: share for name, share in metrics.items() if name.endswith("/failures")}
    assert failed == {
        "reward/correctness/failures": 0.0,
        "reward/length/failures": 0.0,
        "reward/own/failures": 1.0,
    }
