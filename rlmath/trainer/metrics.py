"""The numbers of a step under the names that users of AReaL and RLinf know."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain

from rlmath.algorithms.dynamic_sampling import DROP_REASONS, FILTER_REASONS, Selection, has_contrast
from rlmath.algorithms.types import Score, ScoredGroup
from rlmath.answers.verifier import FAILURES, VERDICTS
from rlmath.config.schema import AlgorithmConfig, RewardConfig
from rlmath.data.micro_batches import Cost
from rlmath.models.learner import MinibatchResult
from rlmath.rewards.several_rewards import compared_rewards, named_rewards
from rlmath.rollout.work_queue import EngineUsage, idle_shares
from rlmath.trainer.token_advantages import RewardKL
from rlmath.workers.function_calls import MAX_METRICS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mismatch:
    """Difference between the engines' log-probs and the policy's, per sampled token (nats)."""

    mean: float
    largest: float


@dataclass(frozen=True)
class UpdateRecord:
    """What the updates of a step leave for its metrics."""

    results: list[MinibatchResult]
    """The result of every minibatch, in the order of their use."""
    advantages: list[list[float]]
    """Advantages by group and completion.

    With KL in the reward they are means over the completion's tokens."""
    reward_kl: RewardKL | None
    """The KL, where it is part of the reward."""
    passes: float = 0.0
    """How often the samples were learned from.

    It is less than `algorithm.epochs` where early stop ended the step."""
    critic_results: list[MinibatchResult] = field(default_factory=list)
    """The result of every minibatch of the critic, where there is one."""
    critic_metrics: dict[str, float] = field(default_factory=dict)
    teacher_kl: float | None = None
    """KL(policy || teacher) per token (nats), where the teacher is in the advantages.

    It is estimated from sampled tokens."""
    routing: dict[str, float] = field(default_factory=dict)
    """The sums of `models.routing.COUNTS` over all ranks, of the engines' routes in the first pass
    that replayed them, or of the policy's own in all updates; empty where nothing is replayed."""
    unreplayed: Mismatch | None = None
    """The mismatch of a policy that does not replay the engines' routes; None: not measured."""


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards and lengths of all that was sampled, without lost completions if there are others.

    Lengths in tokens; ratios from 0 to 1."""
    judged = [group.judged for group in groups]
    groups = judged if any(group.completions for group in judged) else groups
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    n = len(completions)
    response_tokens = sum(completion.n_sampled for completion in completions)
    all_tokens = _tokens(groups)
    prompt_tokens = sum(len(group.prompt.token_ids) * len(group.completions) for group in groups)
    reward = _finite_mean([score.reward for score in scores])
    mixed = sum(len(set(group.rewards)) > 1 for group in groups)
    return {
        "task_reward": reward,
        "rollout/rewards": reward,
        "rollout/response_length": response_tokens / n,
        "rollout/policy_version": sum(c.policy_version for c in completions) / n,
        "rollout/groups_with_contrast": mixed / len(groups),
        "avg_seq_len": all_tokens / n,
        "avg_prompt_len": prompt_tokens / n,
        "no_eos_ratio": sum(c.finish_reason == "length" for c in completions) / n,
        "n_seqs": float(n),
        "n_tokens": float(all_tokens),
        "n_valid_tokens": float(response_tokens),
        **accuracy_metrics(scores),
    } | reward_metrics(scores, truncated=[c.finish_reason == "length" for c in completions])


def accuracy_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """The share of right answers by the verifier, where all rows of the run have a solution.

    Otherwise it is the share of completions that a function of the user's counts as right, by its
    metric "correct" or a reward above 0."""
    verified = [score.verified_correct for score in scores if score.verified_correct is not None]
    if verified:
        return {"rollout/accuracy": sum(verified) / len(verified)}
    return {"rollout/reward_positive": sum(score.correct for score in scores) / len(scores)}


def engine_metrics(rounds: Sequence[Sequence[EngineUsage]]) -> dict[str, float]:
    """What the engines did in the rollouts of a step, which each have a usage for every engine.

    It is empty where there was no rollout. `idle_share` is the share of the time (0 to 1) in which
    an engine had nothing left to sample while another still did: the mean over engines, the most,
    and each engine's own where there are few. `tail_share` is the share of the engines' steps in
    which nothing was left to begin. `batch_fill` is the number of sequences decoded at a time, as a
    share of the most that the engine decoded."""
    if not rounds:
        return {}
    shares = idle_shares([[usage.seconds for usage in usages] for usages in rounds])
    usages = [usage for usages in rounds for usage in usages]
    steps = max(1, sum(usage.steps for usage in usages))
    metrics = {
        "rollout/idle_share": sum(shares) / len(shares),
        "rollout/idle_share_max": max(shares),
        "rollout/tail_share": sum(usage.tail_steps for usage in usages) / steps,
        "rollout/batch_fill": sum(usage.fill * usage.steps for usage in usages) / steps,
    }
    if len(shares) <= 8:
        metrics |= {
            f"rollout/idle_share/engine_{index}": share for index, share in enumerate(shares)
        }
    return metrics


def reward_metrics(scores: Sequence[Score], truncated: Sequence[bool]) -> dict[str, float]:
    """The parts of the reward.

    They are shares of completions (0 to 1), how answers were decided, how long they waited for a
    reward worker, and the means of what the user's reward function reports."""
    n = len(scores)
    kinds = Counter(score.verdict for score in scores)
    metrics = {
        "reward/correct": sum(score.correct for score in scores) / n,
        "reward/boxed": sum(score.boxed for score in scores) / n,
        "reward/truncated": sum(truncated) / n,
        "reward/failures": sum(
            score.verdict in FAILURES or bool(score.failures) for score in scores
        )
        / n,
        "reward/queue_wait_s": sum(score.queue_seconds for score in scores) / n,
        "reward/queue_wait_s_max": max(score.queue_seconds for score in scores),
    }
    metrics |= {f"reward/verdict/{kind}": kinds[kind] / n for kind in VERDICTS}
    named: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.metrics:
            named.setdefault(name, []).append(value)
    if len(named) > MAX_METRICS:
        _warn_of_names()
        named = {name: named[name] for name in list(named)[:MAX_METRICS]}
    return metrics | {f"reward/own/{name}": _finite_mean(values) for name, values in named.items()}


def part_metrics(groups: Sequence[ScoredGroup], reward: RewardConfig) -> dict[str, float]:
    """Means of each of several rewards, and the share of completions on which it failed.

    A reward that gave nothing has no mean. Where each is normalised for itself, a group has
    contrast where any of them has. Lost completions are left out."""
    groups = [group.judged for group in groups]
    scores = [score for group in groups for score in group.scores]
    if not scores:
        return {}
    metrics = {}
    for k, named_reward in enumerate(named_rewards(reward)):
        values = [value for score in scores if (value := score.parts[k]) is not None]
        if values:
            metrics[f"reward/{named_reward.name}"] = _finite_mean(values)
        failed = sum(
            score.parts[k] is None
            or any(failure.name == named_reward.name for failure in score.failures)
            for score in scores
        )
        metrics[f"reward/{named_reward.name}/failures"] = failed / len(scores)
    if compared := compared_rewards(reward):
        mixed = sum(has_contrast(group.scores, compared) for group in groups)
        metrics["rollout/groups_with_contrast"] = mixed / len(groups)
    return metrics


@cache
def _warn_of_names() -> None:
    text = (
        "reward.function gives more than %d names of metrics in a step; the first %d of each "
        "step are logged"
    )
    logger.warning(text, MAX_METRICS, MAX_METRICS)


def _finite_mean(values: Sequence[float]) -> float:
    """The mean, also of finite numbers whose sum is none.

    >>> _finite_mean([1.0, 2.0]), _finite_mean([1.5e308, 1.5e308])
    (1.5, 1.5e+308)
    """
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else sum(value / len(values) for value in values)


def selection_metrics(selection: Selection) -> dict[str, float]:
    """Counts of groups and completions that length filters and dynamic sampling left out."""
    groups = selection.dropped_groups()
    completions = selection.filtered_completions()
    return {
        "selection/groups_sampled": float(len(selection.sampled)),
        "selection/groups_learned": float(len(selection.sampled) - groups.total()),
        "selection/extra_prompts": float(len(selection.sampled) - selection.wanted),
        **{f"selection/dropped/{reason}": float(groups[reason]) for reason in DROP_REASONS},
        **{f"selection/filtered/{reason}": float(completions[reason]) for reason in FILTER_REASONS},
    }


def update_metrics(
    record: UpdateRecord,
    groups: Sequence[ScoredGroup],
    task_reward: float,
    settings: AlgorithmConfig,
) -> dict[str, float]:
    """Loss, ratio, KL and gradient of the minibatches that were learned from, means over tokens.

    They are those of all minibatches where every one was discarded. A step without any minibatch
    has only their number. `kl_reward` is minus the weighted KL per token. `final_reward` is the
    mean reward of the completions learned from with their KL taken off; where KL is part of the
    loss it is `task_reward` plus `kl_reward`, for orientation only."""
    results = record.results
    learned_results = [result for result in results if result.discarded is None]
    overflowed = sum(result.overflowed for result in results)
    counts = {
        "train/early_stopped_minibatches": float(len(results) - len(learned_results) - overflowed),
        "train/minibatches": float(len(results)),
    }
    counts |= loss_scale_metrics(results)
    if not results:
        return counts
    counted = learned_results or results
    mean = partial(_mean, counted)
    reference_kl = mean("reference_kl") if record.reward_kl is None else record.reward_kl.per_token
    kl_reward = -settings.kl_coef * reference_kl
    final_reward = task_reward + kl_reward
    if record.reward_kl is not None:
        rewards = [reward for group in groups for reward in group.rewards]
        final_reward = _finite_mean(rewards) - settings.kl_coef * record.reward_kl.per_completion
    tokens = [completion.n_sampled for group in groups for completion in group.completions]
    pairs = zip(chain.from_iterable(record.advantages), tokens, strict=True)
    metrics = {
        "advantage": sum(advantage * n for advantage, n in pairs) / sum(tokens),
        "actor_loss": mean("loss", weight_name="denominator"),
        "importance_weight": mean("ratio"),
        "actor_clip_ratio": mean("clipped"),
        "ppo_approx_kl": mean("approx_kl"),
        "kl_reward": kl_reward,
        "final_reward": final_reward,
        "train/entropy_loss": mean("entropy"),
        "train/proximal_kl": mean("proximal_kl"),
        "train/reference_kl": reference_kl,
        "train/grad_norm": sum(result.grad_norm for result in counted) / len(counted),
        "train/learning_rate": results[-1].learning_rate,
    }
    if settings.importance_correction is not None or settings.masks_alone:
        metrics["train/importance_correction"] = mean("correction")
        metrics["train/importance_correction_cut"] = mean("correction_cut")
    if settings.masks_alone:
        metrics["train/importance_masked_geometric"] = mean("masked_geometric")
        metrics["train/importance_masked_binary_kl"] = mean("masked_binary_kl")
    if settings.proximal_logprobs == "compare":
        metrics["train/proximal_error"] = mean("proximal_error")
    if settings.off_policy_mask is not None:
        metrics["train/off_policy_masked"] = mean("masked_off_policy")
    return metrics | counts


def teaching_metrics(record: UpdateRecord, sampled: int, every_group: bool) -> dict[str, float]:
    """The share (0 to 1) of the `sampled` groups that the policy learned from.

    They were kept, have an advantage that is not 0, and a minibatch was not discarded. With
    `every_group`, where a teacher is part of the loss, every group that was kept teaches."""
    is_used = any(result.discarded is None for result in record.results)
    teaching = sum(every_group or any(row) for row in record.advantages) if is_used else 0
    return {"train/teaching_groups": teaching / sampled}


def loss_scale_metrics(results: Sequence[MinibatchResult]) -> dict[str, float]:
    """The last loss scale of a run in float16, and minibatches whose gradients overflowed it."""
    scales = [result.loss_scale for result in results if result.loss_scale is not None]
    if not scales:
        return {}
    overflowed = sum(result.overflowed for result in results)
    return {"train/loss_scale": scales[-1], "train/overflowed_minibatches": float(overflowed)}


def teacher_metrics(record: UpdateRecord) -> dict[str, float]:
    """KL(policy || teacher) per token (nats).

    It is over the whole vocabulary of the minibatches that were learned from, or estimated from
    the sampled tokens where it is in the advantages."""
    if record.teacher_kl is not None:
        return {"train/teacher_kl": record.teacher_kl}
    counted = [result for result in record.results if result.discarded is None] or record.results
    return {"train/teacher_kl": _mean(counted, "teacher_kl")} if counted else {}


def _mean(results: Sequence[MinibatchResult], name: str, weight_name: str = "tokens") -> float:
    total = sum(result.sums[name] for result in results)
    return total / sum(result.sums[weight_name] for result in results)


def routing_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """How often the policy would have chosen other experts than those that it replays (0 to 1).

    A share of (token, layer) pairs, and of tokens, which differ where any layer does."""
    if not counts.get("pairs"):
        return {}
    return {
        "routing/differing_choices": counts["differing_pairs"] / counts["pairs"],
        "routing/differing_tokens": counts["differing_tokens"] / counts["tokens"],
    }


def unreplayed_metrics(mismatch: Mismatch | None) -> dict[str, float]:
    """The difference between engine and policy if the policy chose experts by itself (nats).

    That with the engine's experts is `mismatch_metrics`, of the same tokens."""
    if mismatch is None:
        return {}
    return {
        "routing/mismatch_without_replay": mismatch.mean,
        "routing/mismatch_without_replay_max": mismatch.largest,
    }


def mismatch_metrics(results: Sequence[MinibatchResult], only_first: bool) -> dict[str, float]:
    """Difference between the engine's log-probs and the policy's own, per token (nats).

    With `only_first` it is that of the first minibatch: without recomputed log-probs, only its
    policy is the one that sampled."""
    counted = results[:1] if only_first else results
    if not counted:
        return {}
    return {
        "train/behaviour_logprob_diff": _mean(counted, "mismatch"),
        "train/behaviour_logprob_diff_max": max(
            result.maxima["mismatch_max"] for result in counted
        ),
    }


def pace_metrics(
    seconds: Mapping[str, float],
    sampled_tokens: int,
    sampled: Sequence[ScoredGroup],
    learned: Sequence[ScoredGroup],
    passes: float,
) -> dict[str, float]:
    """Seconds of every phase, and tokens per second where a phase works on tokens.

    The rollout is paced by the tokens it sampled, the step by all that its groups have ("learned":
    by the completion tokens that it learns from), the others by all tokens that they read: the
    update makes `passes` over what is learned from."""
    read = _tokens(learned)
    worked = {
        "rollout": sampled_tokens,
        "logprobs": read,
        "reference": read,
        "teacher": read,
        "update": read * passes,
        "step": _tokens(sampled),
    }
    metrics = {f"seconds/{phase}": value for phase, value in seconds.items()}
    for phase, tokens in worked.items():
        if seconds.get(phase, 0.0) > 0:
            metrics[f"tokens_per_second/{phase}"] = tokens / seconds[phase]
    if seconds.get("step", 0.0) > 0:
        learned_tokens = sum(c.n_sampled for group in learned for c in group.completions)
        metrics["tokens_per_second/learned"] = learned_tokens / seconds["step"]
    return metrics


def mfu_metrics(
    seconds: Mapping[str, float],
    sampled_tokens: int,
    sampled: Sequence[ScoredGroup],
    learned: Sequence[ScoredGroup],
    passes: float,
    forward: Cost,
    trained: Cost,
    peak_flops: float,
) -> dict[str, float]:
    """Model FLOP utilisation of rollout and update (0 to 1).

    It is the model's own arithmetic over what all ranks could compute (`peak_flops`, FLOP/s),
    without padding and recomputation. `forward` is the cost of a forward pass, `trained` that of
    forward and backward pass. A token of the step's rollout counts as one of `sampled` on
    average."""
    metrics = {}
    if seconds.get("rollout", 0.0) > 0:
        all_tokens = sum(c.n_sampled for group in sampled for c in group.completions)
        flops = _sampling_flops(sampled, forward) * sampled_tokens / max(1, all_tokens)
        metrics["rollout/mfu"] = flops / (seconds["rollout"] * peak_flops)
    if seconds.get("update", 0.0) > 0:
        lengths = [
            len(group.prompt.token_ids) + len(c.token_ids)
            for group in learned
            for c in group.completions
        ]
        flops = passes * sum(map(trained.of, lengths))
        metrics["train/mfu"] = flops / (seconds["update"] * peak_flops)
    return metrics


def _sampling_flops(groups: Sequence[ScoredGroup], forward: Cost) -> float:
    """FLOPs of the forward passes for all completions; a prompt is read once for its group."""
    flops = 0.0
    for group in groups:
        prompt = len(group.prompt.token_ids)
        whole = sum(forward.of(prompt + len(c.token_ids)) for c in group.completions)
        flops += whole - (len(group.completions) - 1) * forward.of(prompt)
    return flops


def _tokens(groups: Sequence[ScoredGroup]) -> int:
    return sum(
        len(group.prompt.token_ids) + len(c.token_ids)
        for group in groups
        for c in group.completions
    )
