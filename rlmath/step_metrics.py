"""The numbers of a step under the names that users of AReaL and RLinf know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlmath.policy.learner import MinibatchResult
from rlmath.rewards.verify import FAILURES, VERDICTS
from rlmath.types import Sample, Score, ScoredGroup


def rollout_metrics(groups: Sequence[ScoredGroup], samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards and lengths. Lengths in tokens; ratios from 0 to 1."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    n = len(completions)
    response_tokens = sum(len(c.token_ids) for c in completions)
    prompt_tokens = sum(len(group.prompt.token_ids) * len(group.completions) for group in groups)
    reward = sum(score.reward for score in scores) / n
    advantage_sum = sum(sample.advantage * len(sample.completion_ids) for sample in samples)
    mixed = sum(len(set(group.rewards)) > 1 for group in groups)
    return {
        "task_reward": reward,
        "rollout/rewards": reward,
        "rollout/accuracy": sum(score.correct for score in scores) / n,
        "rollout/response_length": response_tokens / n,
        "rollout/groups_with_contrast": mixed / len(groups),
        "avg_seq_len": (prompt_tokens + response_tokens) / n,
        "avg_prompt_len": prompt_tokens / n,
        "no_eos_ratio": sum(c.finish_reason == "length" for c in completions) / n,
        "n_seqs": float(n),
        "n_tokens": float(prompt_tokens + response_tokens),
        "n_valid_tokens": float(response_tokens),
        "advantage": advantage_sum / response_tokens,
    } | reward_metrics(scores, truncated=[c.finish_reason == "length" for c in completions])


def reward_metrics(scores: Sequence[Score], truncated: Sequence[bool]) -> dict[str, float]:
    """The parts of the reward: shares of completions (0 to 1), how answers were decided, and the means of what a
    reward function of the user's reports."""
    n = len(scores)
    kinds = Counter(score.verdict for score in scores)
    metrics = {
        "reward/correct": sum(score.correct for score in scores) / n,
        "reward/boxed": sum(score.boxed for score in scores) / n,
        "reward/truncated": sum(truncated) / n,
        "reward/failures": sum(kinds[kind] for kind in FAILURES) / n,
    }
    metrics |= {f"reward/verdict/{kind}": kinds[kind] / n for kind in VERDICTS}
    named: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.metrics:
            named.setdefault(name, []).append(value)
    return metrics | {f"reward/own/{name}": sum(values) / len(values) for name, values in named.items()}


def update_metrics(
    results: Sequence[MinibatchResult], kl_coef: float, task_reward: float
) -> dict[str, float]:
    """Loss, ratio, KL and gradient of the minibatches that were learned from, means over tokens; of all minibatches
    where every one was discarded.

    `kl_reward` is minus the weighted KL per token. KL is part of the loss here, not of the reward: `final_reward`, the
    mean reward of a completion plus `kl_reward`, is what AReaL's users look for, and no part of the update.
    """
    kept = [result for result in results if result.discarded is None]
    counted = kept or results
    tokens = sum(result.sums["tokens"] for result in counted)

    def mean(name: str) -> float:
        return sum(result.sums[name] for result in counted) / tokens

    kl_reward = -kl_coef * mean("reference_kl")
    return {
        "actor_loss": mean("loss"),
        "importance_weight": mean("ratio"),
        "actor_clip_ratio": mean("clipped"),
        "ppo_approx_kl": mean("approx_kl"),
        "kl_reward": kl_reward,
        "final_reward": task_reward + kl_reward,
        "train/entropy_loss": mean("entropy"),
        "train/reference_kl": mean("reference_kl"),
        "train/grad_norm": sum(result.grad_norm for result in kept) / len(kept) if kept else 0.0,
        "train/learning_rate": results[-1].learning_rate,
        "train/early_stopped_minibatches": float(len(results) - len(kept)),
        "train/minibatches": float(len(results)),
    }


def mismatch_metrics(results: Sequence[MinibatchResult], only_first: bool) -> dict[str, float]:
    """Difference between the engine's log-probs and the policy's own, per token (nats).

    With `only_first` the first minibatch alone is looked at: without recomputed log-probs, that is the only one whose
    policy is the one that sampled.
    """
    looked_at = results[:1] if only_first else results
    tokens = sum(result.sums["tokens"] for result in looked_at)
    return {
        "train/behaviour_logprob_diff": sum(result.sums["mismatch"] for result in looked_at) / tokens,
        "train/behaviour_logprob_diff_max": max(result.maxima["mismatch_max"] for result in looked_at),
    }


def pace_metrics(seconds: Mapping[str, float], n_tokens: float, n_valid_tokens: float) -> dict[str, float]:
    """Seconds of every phase, and tokens per second where a phase works on tokens.

    The rollout is paced by the tokens it sampled, the others by all tokens that they read.
    """
    metrics = {f"seconds/{phase}": value for phase, value in seconds.items()}
    for phase, value in seconds.items():
        if phase in ("rollout", "logprobs", "reference", "update", "step") and value > 0:
            worked = n_valid_tokens if phase == "rollout" else n_tokens
            metrics[f"tokens_per_second/{phase}"] = worked / value
    return metrics
