"""Tokens that others wrote inside of a completion: nothing counts them, whatever stands there.

Sampled tokens that are not learned count, and get no gradient."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.advantages import ADVANTAGE_KINDS
from rlmath.algorithms.dynamic_sampling import SelectionRules, choose
from rlmath.algorithms.losses import Normalisation, TokenInputs, TokenLoss, policy_loss
from rlmath.algorithms.token_selection import TokenRules
from rlmath.algorithms.types import Completion, Prompt, Sample, Score, ScoredGroup, Segment
from rlmath.config.algorithm_schema import PRESETS
from rlmath.config.load import load_config
from rlmath.config.schema import AlgorithmConfig, Config, CriticConfig, RewardConfig
from rlmath.data.dataset import ValidationFile
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import loss_settings, token_rules
from rlmath.models.critic import TokenValues
from rlmath.models.learner import GRPO_SUMS, MinibatchResult
from rlmath.rewards.several_rewards import summed_rewards
from rlmath.telemetry.samples import SampleWriter, read_samples, samples_file
from rlmath.trainer.critic import CriticInAdvantages
from rlmath.trainer.metrics import UpdateRecord, pace_metrics, rollout_metrics, update_metrics
from rlmath.trainer.policy_update import PolicyUpdater, make_samples, token_counts
from rlmath.trainer.rollouts.synchronous import staleness_metrics
from rlmath.trainer.token_advantages import (
    Advantages,
    KLInReward,
    PackedStep,
    ScoredStep,
    StepLogprobs,
    TokensThatCount,
    add_teacher_advantages,
)
from rlmath.trainer.validation import file_metrics
from rlmath.workers.user_functions import group_for_hooks
from tests.algorithms.test_losses_textbook import Book
from tests.tiny_models import shape_of

pytestmark = pytest.mark.usefixtures("process_group")

ALONE = Mesh(0, 1, 1, 1, 1)
NOTHING: Any = None
PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]

MARKS = [["xxx..xox", "xx", "x...xxx."], ["oo.x", "xxxx", "xxxxx..x"]]
"""The completions of two prompts: "x" is learned, "o" sampled and not learned, "." what others
wrote."""
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]
LENGTHS = [[sum(mark != "." for mark in marks) for marks in row] for row in MARKS]
TOTAL = sum(map(sum, LENGTHS))


def make_group(number: int, dense: bool) -> ScoredGroup:
    """A prompt with its completions; `dense`, these without the tokens of others."""
    completions = []
    scores = []
    for index, marks in enumerate(MARKS[number]):
        marks = marks.replace(".", "") if dense else marks
        runs = [
            (sampled, len(list(run)))
            for sampled, run in itertools.groupby(marks, lambda mark: mark != ".")
        ]
        ranks = itertools.count()
        logprobs = [
            math.nan if mark == "." else -0.5 - 0.1 * ((next(ranks) + index) % 5) for mark in marks
        ]
        segments = tuple(Segment(tokens, 4, 1, sampled=sampled) for sampled, tokens in runs)
        completions.append(Completion(index, (7,) * len(marks), logprobs, "", "stop", 4, segments))
        reward = REWARDS[number][index]
        scores.append(Score(reward, reward > 0, "", "string", parts=(reward, 1.0, 0.5)))
    prompt = Prompt(f"q{number}", "?", (5, 6, 7)[: number + 1], ("2",), "math")
    return ScoredGroup(prompt, tuple(completions), tuple(scores))


def make_groups(dense: bool) -> list[ScoredGroup]:
    return [make_group(number, dense) for number in range(len(MARKS))]


def packed_samples(
    groups: Sequence[ScoredGroup], means_PG: Sequence[Sequence[float]], **how: Any
) -> MicroBatch:
    """All completions in one pack with padding, which is NaN where nothing is sampled."""
    learned = [
        [mark != "o" for mark in marks if mark != "." or len(marks) == len(completion.token_ids)]
        for group, row in zip(groups, MARKS, strict=True)
        for completion, marks in zip(group.completions, row, strict=True)
    ]
    samples: list[Sample] = [
        replace(sample, learned=mask)
        for sample, mask in zip(make_samples(groups, means_PG), learned, strict=True)
    ]
    batch = pack(samples, range(len(samples)), 16, **how)
    return replace(
        batch,
        advantages_T=torch.where(batch.sampled_T, batch.advantages_T, math.nan),
        behaviour_logprobs_T=torch.where(batch.sampled_T, batch.behaviour_logprobs_T, math.nan),
    )


def column(batch: MicroBatch, seed: int) -> Tensor:
    """Numbers from -2 to 0 at sampled tokens, and NaN elsewhere; float32.

    They are the same wherever the tokens lie."""
    draw = torch.Generator().manual_seed(seed)
    numbers_T = torch.full(batch.token_ids_T.shape, math.nan)
    numbers_T[batch.sampled_T] = -2 * torch.rand(int(batch.sampled_T.sum()), generator=draw)
    return numbers_T


def by_completion(batch: MicroBatch, values_T: Tensor) -> list[list[float]]:
    """The values of sampled tokens, sample after sample; what is elsewhere must be 0."""
    assert not values_T[~batch.sampled_T].any(), values_T
    return [
        values_T[batch.sampled_T & (batch.segments_T == s)].tolist()
        for s in range(len(batch.sample_indices))
    ]


# ---------------------------------------------------------------- every preset, to the gradient


@dataclass(frozen=True)
class Learned:
    """What a step learns by, and its gradient."""

    batch: MicroBatch
    advantages: Advantages
    tokens: TokenInputs
    sums: TokenLoss
    gradient_T: Tensor
    """The gradient of the minibatch's loss by the log-probs, float64."""


def learn(folder: Path, config: Config, dense: bool) -> Learned:
    """A step with these settings, without models: log-probs, entropies and values are given."""
    algorithm = config.algorithm
    groups = make_groups(dense)
    updater = PolicyUpdater(
        config,
        shape_of(folder),
        ALONE,
        actor=NOTHING,
        reference=None,
        offload=NOTHING,
        timers=PhaseTimers(),
    )
    scored = updater.score(groups, 0)
    means_PG = updater.reward_advantages(groups, scored.rewards_PG, scored.tokens_PG)
    batch = packed_samples(groups, means_PG, normalisation=updater.normalisation)
    old_T, reference_T, entropy_T, drift_T = (column(batch, seed) for seed in range(4))
    packed = PackedStep(scored, [batch], (slice(0, 1),), seed=1)
    logprobs = StepLogprobs([old_T], [reference_T], [entropy_T])
    advantages = Advantages([batch], means_PG)
    if algorithm.advantage == "gae":
        advantages, _ = estimated(config, packed, logprobs, advantages)
    elif algorithm.kl_in == "reward" and algorithm.kl_coef:
        advantages = KLInReward(algorithm, ALONE).apply(packed, logprobs, advantages)
    if (rules := token_rules(algorithm)) is not None:
        advantages = TokensThatCount(rules, ALONE).apply(packed, logprobs, advantages)
    shaped = advantages.batches[0]
    settings = loss_settings(algorithm, config.teacher)
    leaf_T = (old_T + 0.3 * drift_T + 0.3).double().requires_grad_()
    distance_T = torch.where(shaped.sampled_T, leaf_T, 0.0) - reference_T.nan_to_num(0.0)
    teacher_kl_T = torch.where(shaped.sampled_T, distance_T.square(), math.nan)
    tokens = TokenInputs(
        logprobs_T=leaf_T,
        entropy_T=-entropy_T.double(),
        proximal_logprobs_T=old_T.double(),
        behaviour_logprobs_T=shaped.behaviour_logprobs_T.double(),
        reference_logprobs_T=reference_T.double() if settings.kl_coef else None,
        advantages_T=shaped.advantages_T.double(),
        weights_T=shaped.loss_weights_T.double(),
        sampled_T=shaped.sampled_T,
        learned_T=shaped.learned_T,
        segments_T=shaped.segments_T,
        n_segments=shaped.n_segments,
        teacher_kl_T=teacher_kl_T if settings.teacher_coef else None,
        penalty_T=None if shaped.penalty_T is None else shaped.penalty_T.double(),
    )
    sums = policy_loss(tokens, settings)
    (gradient_T,) = torch.autograd.grad(sums.loss / shaped.loss_count, leaf_T, retain_graph=True)
    return Learned(shaped, advantages, tokens, sums, gradient_T)


def dense_loss(learned: Learned, config: Config) -> Tensor:
    """The minibatch's loss, formula by formula over the sampled tokens."""
    tokens = learned.tokens
    settings = loss_settings(config.algorithm, config.teacher)
    loss = Book(tokens, settings).sums()["loss"]
    for t in tokens.learned_T.nonzero()[:, 0].tolist():
        if tokens.penalty_T is not None:
            distance = (tokens.logprobs_T[t] - tokens.proximal_logprobs_T[t]).abs()
            loss = loss + tokens.weights_T[t] * tokens.penalty_T[t] * distance
        if tokens.teacher_kl_T is not None:
            loss = loss + tokens.weights_T[t] * settings.teacher_coef * tokens.teacher_kl_T[t]
    samples = sum(map(len, MARKS))
    count = TOTAL if config.algorithm.loss_normalisation == "token" else samples
    return loss / count


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns_as_if_the_tokens_of_others_were_not_there(
    tied_model: Path, preset: str
) -> None:
    needed_settings = {"distill": ["teacher.path=t"], "lora": ["optimizer.lr=1e-5"]}.get(preset, [])
    config = load_config([], [*PATHS, f"algorithm.preset={preset}", *needed_settings])
    gaps, dense = (learn(tied_model, config, is_dense) for is_dense in (False, True))
    assert not gaps.gradient_T[~gaps.batch.learned_T].any() and gaps.gradient_T.any()
    (by_formula_T,) = torch.autograd.grad(dense_loss(gaps, config), gaps.tokens.logprobs_T)
    torch.testing.assert_close(gaps.gradient_T, by_formula_T, rtol=1e-10, atol=1e-12)
    assert gaps.batch.loss_count == dense.batch.loss_count
    assert gaps.batch.sampled_T.sum() == dense.batch.sampled_T.sum() == gaps.sums.tokens == TOTAL
    if preset == "clip_cov":  # the random numbers that choose tokens are those of their places
        return
    for name in ("advantages_T", "loss_weights_T", "behaviour_logprobs_T"):
        pair = [getattr(learned.batch, name)[learned.batch.sampled_T] for learned in (gaps, dense)]
        torch.testing.assert_close(*pair, rtol=1e-6, atol=0.0)
    pair = [learned.gradient_T[learned.batch.sampled_T] for learned in (gaps, dense)]
    torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)
    for name, value in vars(gaps.sums).items():
        torch.testing.assert_close(value, getattr(dense.sums, name), rtol=1e-6, atol=1e-6)
    for gap_means, dense_means in zip(
        gaps.advantages.means_PG, dense.advantages.means_PG, strict=True
    ):
        assert gap_means == pytest.approx(dense_means)
    assert gaps.advantages.critic_metrics == pytest.approx(dense.advantages.critic_metrics)
    assert gaps.advantages.reward_kl == dense.advantages.reward_kl


# ---------------------------------------------------------------- every advantage, by its formula


def by_hand(kind: str, rewards: list[list[float]], k: int) -> list[list[float]]:
    """The advantage of every completion, in the words of the papers; no eps."""
    flat = [reward for row in rewards for reward in row]
    centred = [[reward - statistics.mean(row) for reward in row] for row in rewards]
    if kind == "grpo":
        return [[value / statistics.stdev(row) for value in row] for row in centred]
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return [
            [r - statistics.mean(row[:g] + row[g + 1 :]) for g, r in enumerate(row)]
            for row in rewards
        ]
    if kind == "lite_ppo":
        return [[value / statistics.stdev(flat) for value in row] for row in centred]
    if kind == "opo":
        rows = zip(rewards, LENGTHS, strict=True)
        means = [sum(n * r for r, n in zip(*row, strict=True)) / sum(row[1]) for row in rows]
        return [[reward - mean for reward in row] for row, mean in zip(rewards, means, strict=True)]
    if kind == "maxrl":
        passes = [sum(reward > 0 for reward in row) / len(row) for row in rewards]
        return [
            [(float(r > 0) - p) / p for r in row] for row, p in zip(rewards, passes, strict=True)
        ]
    if kind == "pass@k":
        best = [
            [
                [
                    max(0.0, r - max(others))
                    for others in itertools.combinations(row[:g] + row[g + 1 :], k - 1)
                ]
                for g, r in enumerate(row)
            ]
            for row in rewards
        ]
        return [[k * statistics.mean(gains) for gains in row] for row in best]
    values = rewards if kind == "ppo" else centred
    pairs = [pair for row in zip(values, LENGTHS, strict=True) for pair in zip(*row, strict=True)]
    tokens = [value for value, length in pairs for _ in range(length)]
    mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
    return [[(value - mean) / deviation for value in row] for row in values]


@pytest.mark.parametrize("kl_coef", [0.0, 0.25])
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_every_advantage_is_that_of_the_sampled_tokens(
    tied_model: Path, kind: Any, kl_coef: float
) -> None:
    """Each token has the KL to go where KL is in the reward.

    That is old minus reference, of the sampled tokens from it on."""
    algorithm = AlgorithmConfig(
        advantage=kind,
        pass_k=2,
        advantage_eps=0.0,
        kl_coef=kl_coef,
        kl_in="reward",
        kl_estimator="k1",
    )
    learned = learn(tied_model, Config(algorithm=algorithm), dense=False)
    batch = learned.batch
    old, reference = (by_completion(batch, column(batch, seed).nan_to_num(0.0)) for seed in (0, 1))
    to_go = [
        [sum(kl[t:]) for t in range(len(kl))]
        for kl in (
            [a - b for a, b in zip(*rows, strict=True)] for rows in zip(old, reference, strict=True)
        )
    ]
    totals = iter([kl_coef * row[0] for row in to_go])
    if kind == "ppo" and kl_coef:
        rewards = [reward for row in REWARDS for reward in row]
        returns = [[r - kl_coef * kl for kl in row] for r, row in zip(rewards, to_go, strict=True)]
        tokens = [value for row in returns for value in row]
        mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
        expected = [[(value - mean) / deviation for value in row] for row in returns]
    else:
        rows = by_hand(kind, [[reward - next(totals) for reward in row] for row in REWARDS], k=2)
        expected = [
            [advantage] * length
            for pair in zip(rows, LENGTHS, strict=True)
            for advantage, length in zip(*pair, strict=True)
        ]
    advantages = by_completion(batch, torch.where(batch.sampled_T, batch.advantages_T, 0.0))
    for completion_advantages, expected_advantages in zip(advantages, expected, strict=True):
        assert completion_advantages == pytest.approx(expected_advantages, abs=1e-5)
    means = [mean for row in learned.advantages.means_PG for mean in row]
    assert means == pytest.approx([statistics.mean(row) for row in expected], abs=1e-5)
    if kl_coef:
        assert not batch.advantages_T[~batch.sampled_T].any()
        assert learned.advantages.reward_kl is not None
        assert learned.advantages.reward_kl.per_token == pytest.approx(
            sum(row[0] for row in to_go) / TOTAL
        )


def estimated(
    config: Config, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
) -> tuple[Advantages, list[Any]]:
    """Advantages and returns by a critic whose values are given.

    The values are column 5, and 2 after each completion's end."""
    values = [
        TokenValues(column(batch, 5), torch.full((batch.n_segments,), 2.0))
        for batch in packed.batches
    ]
    critic: Any = SimpleNamespace(learner=SimpleNamespace(values=lambda batches: values))
    part = CriticInAdvantages(
        critic,
        config,
        kl_in_reward=config.algorithm.kl_in == "reward",
        mesh=ALONE,
        offload=NOTHING,
        timers=PhaseTimers(),
    )
    return part._estimate(packed, logprobs, advantages)


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_a_step_of_gae_goes_from_a_sampled_token_to_the_next_one(alpha: float | None) -> None:
    """The token after a gap follows the one before it.

    The reward is the last sampled token's."""
    gamma = 0.9
    lam = 0.8
    value_lambda = 0.95
    kl_coef = 0.25
    config = Config(
        algorithm=AlgorithmConfig(
            advantage="gae", advantage_eps=0.0, kl_in="reward", kl_coef=kl_coef, kl_estimator="k1"
        ),
        critic=CriticConfig(
            gamma=gamma,
            policy_lambda=lam,
            policy_length_alpha=alpha,
            value_lambda=value_lambda,
            bootstrap_truncated=True,
        ),
    )
    groups = make_groups(dense=False)
    cut = replace(groups[0].completions[2], finish_reason="length")  # others wrote its last token
    groups[0] = replace(groups[0], completions=(*groups[0].completions[:2], cut))
    scored = ScoredStep(0, groups, REWARDS, token_counts(groups))
    batch = packed_samples(groups, [[0.0] * 3] * 2)
    packed = PackedStep(scored, [batch], (slice(0, 1),), seed=1)
    logprobs = StepLogprobs([column(batch, 0)], [column(batch, 1)])
    estimates, targets = estimated(config, packed, logprobs, Advantages([batch], [[0.0] * 3] * 2))
    old, reference, values = (
        by_completion(batch, column(batch, seed).nan_to_num(0.0)) for seed in (0, 1, 5)
    )

    def discounted(s: int, factor: float) -> list[float]:
        row = [0.0] * len(values[s])
        behind = 0.0
        after = 2.0 if s == 2 else 0.0
        for t in reversed(range(len(row))):
            reward = -kl_coef * (old[s][t] - reference[s][t])
            if t == len(row) - 1:
                reward += [reward for rewards in REWARDS for reward in rewards][s]
            behind = reward + gamma * after - values[s][t] + gamma * factor * behind
            row[t], after = behind, values[s][t]
        return row

    lengths = [length for row in LENGTHS for length in row]
    factors = [lam if alpha is None else max(0.0, 1 - 1 / (alpha * length)) for length in lengths]
    expected = [discounted(s, factor) for s, factor in enumerate(factors)]
    expected_advantages = [value for row in expected for value in row]
    mean, deviation = statistics.mean(expected_advantages), statistics.pstdev(expected_advantages)
    for completion_advantages, row in zip(
        by_completion(batch, estimates.batches[0].advantages_T), expected, strict=True
    ):
        assert completion_advantages == pytest.approx(
            [(value - mean) / deviation for value in row], abs=1e-5
        )
    for s, completion_returns in enumerate(by_completion(batch, targets[0].returns_T)):
        expected_returns = [
            a + v for a, v in zip(discounted(s, value_lambda), values[s], strict=True)
        ]
        assert completion_returns == pytest.approx(expected_returns, abs=1e-5)
    all_values = [value for row in values for value in row]
    all_returns = [
        a + v
        for s, row in enumerate(values)
        for a, v in zip(discounted(s, value_lambda), row, strict=True)
    ]
    errors = [a - v for a, v in zip(all_returns, all_values, strict=True)]
    unexplained = statistics.pvariance(errors) / statistics.pvariance(all_returns)
    assert estimates.critic_metrics == pytest.approx(
        {
            "critic/value": statistics.mean(all_values),
            "critic/return": statistics.mean(all_returns),
            "critic/explained_variance": 1 - unexplained,
        },
        abs=1e-5,
    )
    kl = sum(a - b for rows in zip(old, reference, strict=True) for a, b in zip(*rows, strict=True))
    assert estimates.reward_kl is not None and estimates.reward_kl.per_token == pytest.approx(
        kl / TOTAL
    )


def test_large_rewards_keep_their_small_differences() -> None:
    """Without discounts a constant that all rewards have more changes no advantage."""
    config = Config(
        algorithm=AlgorithmConfig(advantage="gae", advantage_eps=0.0),
        critic=CriticConfig(gamma=1.0, policy_lambda=1.0, value_lambda=1.0),
    )
    groups = make_groups(dense=False)
    batch = packed_samples(groups, [[0.0] * 3] * 2)

    def advantages(constant: float) -> list[float]:
        rewards = [[constant + reward for reward in row] for row in ((1.06, 0, 0.56), (0.06, 1, 2))]
        scored = ScoredStep(0, groups, rewards, token_counts(groups))
        packed = PackedStep(scored, [batch], (slice(0, 1),), seed=1)
        estimates, _ = estimated(
            config, packed, StepLogprobs(None, None), Advantages([batch], [[0.0] * 3] * 2)
        )
        by_sample = by_completion(batch, estimates.batches[0].advantages_T)
        return [value for row in by_sample for value in row]

    assert advantages(2.0**20) == pytest.approx(advantages(0.0), abs=0.01)


def test_a_teacher_is_asked_of_sampled_tokens_alone() -> None:
    groups = make_groups(dense=False)
    batch = packed_samples(groups, REWARDS)
    policy_T, teacher_T = column(batch, 0), column(batch, 1)
    added = add_teacher_advantages(
        Advantages([batch], REWARDS),
        [policy_T],
        [teacher_T],
        token_counts(groups),
        coef=2.0,
        vocab_size=99,
        mesh=ALONE,
    )
    gap_T = (teacher_T - policy_T)[batch.sampled_T]
    assert added.teacher_kl == pytest.approx(-float(gap_T.sum()) / TOTAL)
    wanted_T = batch.advantages_T[batch.sampled_T] + 2 * gap_T
    torch.testing.assert_close(added.batches[0].advantages_T[batch.sampled_T], wanted_T)
    per_sample = gap_T.split([length for row in LENGTHS for length in row])
    means = [mean for row in added.means_PG for mean in row]
    rewards = [reward for row in REWARDS for reward in row]
    assert means == pytest.approx(
        [r + 2 * float(n.mean()) for r, n in zip(rewards, per_sample, strict=True)]
    )


def test_a_share_of_tokens_is_one_of_all_that_are_sampled() -> None:
    """The upper 0.4 of the entropies of 25 tokens are 10 of them, learned or not.

    Of the learned tokens alone it would be 8."""
    batch = packed_samples(make_groups(dense=False), [[1.0] * 3] * 2)
    entropy_T = column(batch, 2)
    packed = PackedStep(ScoredStep(0, [], [], []), [batch], (slice(0, 1),), seed=1)
    part = TokensThatCount(TokenRules(entropy_share=0.4), ALONE)
    masked = part.apply(
        packed, StepLogprobs(None, None, [entropy_T]), Advantages([batch], [])
    ).batches[0]
    least = sorted(entropy_T[batch.sampled_T].tolist())[-10]
    wanted_T = (entropy_T >= least)[batch.sampled_T].float()
    assert masked.advantages_T[batch.sampled_T].tolist() == wanted_T.tolist()
    assert masked.learned_T.equal(batch.learned_T) and masked.sampled_T.equal(batch.sampled_T)


@pytest.mark.parametrize(
    "rules",
    [TokenRules(kl_cov=0.3, kl_coef=2.0), TokenRules(clip_cov=0.2, clip_low=0.05)],
    ids=["kl_cov", "clip_cov"],
)
def test_tokens_are_chosen_by_how_much_their_own_advantages_move_the_policy(
    rules: TokenRules,
) -> None:
    """Advantages differ from token to token, and from the weights of the loss.

    The covariance is that of the policy's log-probs, not of the engine's."""
    groups = make_groups(dense=False)
    batch = packed_samples(groups, [[0.0] * 3] * 2, normalisation=Normalisation("sequence"))
    batch = replace(batch, advantages_T=column(batch, 3) + 1)
    policy_T = column(batch, 0)
    sampled_T = batch.sampled_T
    before = batch.advantages_T[sampled_T].tolist()
    tokens = list(zip(policy_T[sampled_T].tolist(), before, strict=True))
    means = [statistics.mean(values) for values in zip(*tokens, strict=True)]
    covariances = [(p - means[0]) * (a - means[1]) for p, a in tokens]
    packed = PackedStep(ScoredStep(0, [], [], []), [batch], (slice(0, 1),), seed=5)
    logprobs = StepLogprobs([policy_T], None, [column(batch, 2)])
    (chosen,) = (
        TokensThatCount(rules, ALONE).apply(packed, logprobs, Advantages([batch], [])).batches
    )
    advantages = chosen.advantages_T[sampled_T].tolist()
    if rules.kl_cov is not None:
        least = sorted(covariances)[-int(rules.kl_cov * TOTAL)]
        assert chosen.penalty_T is not None and advantages == before
        assert chosen.penalty_T[sampled_T].tolist() == [
            2.0 if covariance >= least else 0.0 for covariance in covariances
        ]
        return
    clipped = [t for t in range(TOTAL) if advantages[t] != before[t]]
    inside = {t for t in range(TOTAL) if rules.clip_low <= covariances[t] <= rules.clip_high}
    assert set(clipped) < inside and [advantages[t] for t in clipped] == [0.0] * len(clipped)
    assert len(clipped) == int(rules.clip_cov * TOTAL) and chosen.penalty_T is None


def test_each_step_clips_other_tokens_and_a_token_has_its_draw_wherever_it_is_packed() -> None:
    """All covariances are inside of the bounds: chance alone decides."""
    rules = TokenRules(clip_cov=0.4, clip_low=-9.0, clip_high=9.0)
    samples = make_samples(make_groups(dense=True), REWARDS)

    def clipped(order: Sequence[int], seed: int) -> dict[int, list[int]]:
        """The tokens of each sample that lost their advantage."""
        batch = pack(samples, order, 16)
        batch = replace(batch, advantages_T=torch.where(batch.sampled_T, 1.0, 0.0))
        columns = [torch.zeros_like(batch.advantages_T)]
        packed = PackedStep(ScoredStep(0, [], [], []), [batch], (slice(0, 1),), seed=seed)
        logprobs = StepLogprobs(columns, None, columns)
        (chosen,) = (
            TokensThatCount(rules, ALONE).apply(packed, logprobs, Advantages([batch], [])).batches
        )
        rows = by_completion(batch, chosen.advantages_T)
        return {
            index: [t for t, advantage in enumerate(row) if advantage == 0.0]
            for index, row in zip(order, rows, strict=True)
        }

    first = clipped(range(6), seed=1)
    assert sum(map(len, first.values())) == int(0.4 * TOTAL)
    assert len({tuple(first[index]) for index in (0, 2, 5)}) == 3, "each sample has its own draws"
    assert clipped([4, 2, 0, 5, 1, 3], seed=1) == first != clipped(range(6), seed=2)


# ---------------------------------------------------------------- lengths


def test_a_completion_is_as_long_as_what_was_sampled_of_it(tmp_path: Path) -> None:
    gaps, dense = make_groups(dense=False), make_groups(dense=True)
    assert token_counts(gaps) == token_counts(dense) == LENGTHS
    costly = RewardConfig(length_penalty=100.0)
    short_rules = SelectionRules(max_tokens=5)
    for from_gaps, from_dense in zip(gaps, dense, strict=True):
        assert summed_rewards(from_gaps, costly) == summed_rewards(from_dense, costly)
        assert summed_rewards(from_gaps, costly) != from_gaps.rewards
        assert (
            choose(from_gaps, short_rules)
            == choose(from_dense, short_rules)
            != choose(from_gaps, SelectionRules())
        )
        assert group_for_hooks(from_gaps) == group_for_hooks(from_dense)
    minibatch_result = MinibatchResult(dict.fromkeys(GRPO_SUMS, 1.0), {}, 1.0, 0.1, discarded=None)
    update = UpdateRecord([minibatch_result], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], None)
    from_gaps, from_dense = (
        update_metrics(update, groups, 0.0, AlgorithmConfig()) for groups in (gaps, dense)
    )
    assert from_gaps == from_dense
    paces = [
        pace_metrics({"step": 1.0}, TOTAL, sampled=groups, learned=groups, passes=1.0)
        for groups in (gaps, dense)
    ]
    assert paces[0]["tokens_per_second/learned"] == paces[1]["tokens_per_second/learned"] == TOTAL
    file = ValidationFile("f", [group.prompt for group in gaps], too_long=0, unusable=())
    assert file_metrics(file, gaps, samples=3) == file_metrics(file, dense, samples=3)
    SampleWriter(str(tmp_path), groups_per_step=2).write(1, gaps, REWARDS)
    rows = [row for _, row in read_samples(samples_file(str(tmp_path), 1)) if isinstance(row, dict)]
    assert [[completion["length"] for completion in row["completions"]] for row in rows] == LENGTHS
    assert staleness_metrics(gaps, 2, 1) == staleness_metrics(dense, 2, 1)
    gap_metrics, dense_metrics = rollout_metrics(gaps), rollout_metrics(dense)
    written_tokens = sum(marks.count(".") for row in MARKS for marks in row)
    assert gap_metrics["n_tokens"] == dense_metrics.pop("n_tokens") + written_tokens
    assert gap_metrics["avg_seq_len"] == pytest.approx(
        dense_metrics.pop("avg_seq_len") + written_tokens / 6
    )
    assert {name: gap_metrics[name] for name in dense_metrics} == dense_metrics
