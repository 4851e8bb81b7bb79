"""The critic on every layout against transformers.

Compared are values, advantages, and the updates of both models.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.types import Completion, Sample, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, CriticConfig
from rlmath.trainer.policy_update import make_samples
from tests.distributed import critic_cases, oracle
from tests.distributed.policy_cases import LEARNING_RATE, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.distributed.update_cases import REFERENCE_FACTOR, make_groups
from tests.selection import keeping, matrix
from tests.tiny_models import make_model_folder

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

LAYOUTS = [
    Case(max_tokens=128),
    Case(tensor=2, max_tokens=64),
    Case(tensor=2, sequence=True, max_tokens=64),
    Case(pipeline=2, max_tokens=64),
    Case(data=2, max_tokens=64),
    Case(tensor=2, pipeline=2, max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, max_tokens=64),
]
ALGORITHM = AlgorithmConfig(
    advantage="gae",
    advantage_eps=1e-5,
    kl_in="reward",
    kl_estimator="k1",
    kl_coef=0.5,
    early_stop_ratio=None,
)
GAMMA = 0.99
VALUE_LAMBDA = 0.97
ALPHA = 0.2
CLIP = 0.3


def with_cut_off_completions(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The first completion of every group was cut off."""

    def cut(one: Completion) -> Completion:
        return Completion(one.sample_index, one.token_ids, one.logprobs, one.text, "length", 0)

    return [
        ScoredGroup(group.prompt, (cut(group.completions[0]), *group.completions[1:]), group.scores)
        for group in groups
    ]


GROUPS = with_cut_off_completions(make_groups((4, 4, 3, 1, 4)))


@pytest.fixture(scope="module")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random critic with a value head.

    Its shape differs from the policy's, and its embedding has fewer rows."""
    import transformers

    torch.manual_seed(9)
    folder = tmp_path_factory.mktemp("critic") / "value"
    plain = make_model_folder(folder.with_name("plain"), hidden_size=64, intermediate_size=96)
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        plain, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.3)
        model.score.bias.fill_(0.2)
    model.save_pretrained(folder)
    return folder


def settings(value_model: Path, **changes: Any) -> CriticConfig:
    defaults: dict[str, Any] = {
        "path": str(value_model),
        "lr": LEARNING_RATE["sgd"],
        "gamma": GAMMA,
        "value_lambda": VALUE_LAMBDA,
        "policy_length_alpha": ALPHA,
        "clip": CLIP,
        "bootstrap_truncated": True,
    }
    return CriticConfig(**defaults | changes)


def value_oracle(folder: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def values_of(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Values of what precedes each completion token, and one after the last."""
    ids = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
    return model(ids[None]).logits[0, len(sample.prompt_ids) - 1 :, 0]


def slow_gae(
    rewards: list[float], values: list[float], end: float, gamma: float, lam: float
) -> list[float]:
    """Token by token, as the papers write it."""
    advantages = [0.0] * len(rewards)
    behind = 0.0
    after = end
    for t in reversed(range(len(rewards))):
        behind = rewards[t] + gamma * after - values[t] + gamma * lam * behind
        advantages[t], after = behind, values[t]
    return advantages


def dense_step(
    policy_folder: Path, critic_folder: Path
) -> tuple[list[list[float]], dict[str, Tensor], dict[str, Tensor], float]:
    """One step of policy and critic in plain torch.

    Returns advantages, the updates of both by SGD, and the critic's loss."""
    samples = make_samples(GROUPS, [[0.0] * len(group.completions) for group in GROUPS])
    completions = [completion for group in GROUPS for completion in group.completions]
    rewards = [reward for group in GROUPS for reward in group.rewards]
    policy = oracle.load(policy_folder)
    reference = oracle.load(policy_folder)
    critic = value_oracle(critic_folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_FACTOR)
    logprobs = [oracle.completion_logprobs(policy, sample) for sample in samples]
    values = [values_of(critic, sample) for sample in samples]
    advantages = []
    returns = []
    for i, sample in enumerate(samples):
        with torch.no_grad():
            log_ref = oracle.completion_logprobs(reference, sample)
        kl = kl_estimate("k1", logprobs[i].detach().double(), log_ref.double())
        token_rewards = (-ALGORITHM.kl_coef * kl).tolist()
        token_rewards[-1] += rewards[i]
        *before, end = values[i].detach().double().tolist()
        end = end if completions[i].finish_reason == "length" else 0.0
        lam = max(0.0, 1 - 1 / (ALPHA * len(token_rewards)))
        advantages.append(slow_gae(token_rewards, before, end, GAMMA, lam))
        gains = slow_gae(token_rewards, before, end, GAMMA, VALUE_LAMBDA)
        returns.append([gain + value for gain, value in zip(gains, before, strict=True)])
    every = torch.tensor(list(itertools.chain.from_iterable(advantages)), dtype=torch.float64)
    scale = 1 / (every.std(correction=0) + ALGORITHM.advantage_eps)
    advantages = [[float((a - every.mean()) * scale) for a in row] for row in advantages]
    tokens = len(every)
    total = sum(
        -(torch.tensor(row) * (p - p.detach()).exp()).sum()
        for row, p in zip(advantages, logprobs, strict=True)
    )
    (total / tokens).backward()
    loss = sum(
        0.5 * ((v[:-1] - torch.tensor(row)) ** 2).sum()
        for v, row in zip(values, returns, strict=True)
    )
    (loss / tokens).backward()
    policy_update = {n: -LEARNING_RATE["sgd"] * g for n, g in oracle.gradients(policy).items()}
    critic_update = {n: -LEARNING_RATE["sgd"] * g for n, g in oracle.gradients(critic).items()}
    return advantages, policy_update, critic_update, float(loss.detach() / tokens)


@matrix
@pytest.mark.parametrize("case", keeping(LAYOUTS, LAYOUTS[2], LAYOUTS[3], others=0), ids=str)
def test_a_step_of_policy_and_critic_is_that_of_transformers(
    ranks: RankPool, untied_model: Path, value_model: Path, case: Case
) -> None:
    torch.set_num_threads(1)
    critic = settings(value_model)
    outcome = ranks.run(
        case.ranks, critic_cases.step, untied_model, case, GROUPS, critic, ALGORITHM
    )[0]
    advantages, policy_update, critic_update, loss = dense_step(untied_model, value_model)
    mean_advantages = [advantage for row in outcome.record.advantages for advantage in row]
    assert mean_advantages == pytest.approx([sum(row) / len(row) for row in advantages], abs=1e-4)
    assert_close(outcome.policy_update, policy_update, 1e-5)
    assert_close(outcome.critic_update, critic_update, 1e-5)
    assert outcome.record.critic_metrics["critic/loss"] == pytest.approx(loss, rel=1e-5)
    assert outcome.record.critic_metrics["critic/clip_share"] == 0.0
    assert outcome.record.reward_kl.per_token != 0


@pytest.mark.full
@pytest.mark.parametrize("case", keeping([LAYOUTS[0], LAYOUTS[5]], LAYOUTS[0]), ids=str)
def test_without_a_value_head_the_critic_begins_with_values_of_zero(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    samples = make_samples(GROUPS, [[0.0] * len(group.completions) for group in GROUPS])
    critic = settings(untied_model, path=None)
    values_by_index: dict[int, list[float]] = {}
    for part in ranks.run(case.ranks, critic_cases.values, untied_model, case, samples, critic):
        values_by_index |= part
    assert [len(values_by_index[i]) for i in range(len(samples))] == [
        len(sample.completion_ids) for sample in samples
    ]
    assert {value for row in values_by_index.values() for value in row} == {0.0}


ON_TWO = Case(optimizer="adam", data=2)
BFLOAT16 = replace(ON_TWO, dtype="bfloat16")


@matrix
@pytest.mark.parametrize(
    ("saved", "loaded"),
    keeping(
        [
            (BFLOAT16, BFLOAT16),
            (Case(optimizer="adam", tensor=2, pipeline=2), ON_TWO),
            (ON_TWO, ON_TWO),
        ],
        (BFLOAT16, BFLOAT16),
    ),
    ids=str,
)
def test_a_checkpoint_has_the_critic_and_its_optimizer(
    ranks: RankPool,
    untied_model: Path,
    value_model: Path,
    tmp_path: Path,
    saved: Case,
    loaded: Case,
) -> None:
    """On the same layout the next update is bit-equal; on another one it is equal to rounding.

    In bfloat16, as on GPU, the head is float32 beside it, and the optimizer steps it before the
    others."""
    samples = make_samples(GROUPS, [[0.0] * len(group.completions) for group in GROUPS])
    critic = settings(value_model, lr=0.01, warmup_steps=2)
    arguments = samples, critic, tmp_path / "checkpoints"
    saved_weights = ranks.run(saved.ranks, critic_cases.save, untied_model, saved, *arguments)[0]
    loaded_weights = ranks.run(loaded.ranks, critic_cases.load, untied_model, loaded, *arguments)[0]
    if saved == loaded:
        assert all(torch.equal(loaded_weights[name], saved_weights[name]) for name in saved_weights)
    assert_close(loaded_weights, saved_weights, 1e-4)
