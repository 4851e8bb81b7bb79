"""On-policy distillation on every layout against transformers, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.config.schema import AlgorithmConfig, TeacherConfig
from rlmath.trainer.policy_update import make_samples as samples_of
from tests.distributed import oracle, teacher_cases
from tests.distributed.policy_cases import LEARNING_RATE, Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import assert_close
from tests.distributed.update_cases import StepOutcome, make_groups
from tests.selection import keeping, matrix
from tests.tiny_models import VOCAB, make_model_folder, make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

LAYOUTS = [
    Case(),
    Case(tensor=2),
    Case(pipeline=2, max_tokens=64),
    Case(data=2, max_tokens=64),
    Case(tensor=2, pipeline=2, max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, max_tokens=64),
    Case(tensor=2, sequence=True),
]
FEWER = 97
"""Rows of a teacher with fewer than the policy's."""
SAMPLES = make_samples(24)
COEF = 0.7


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Teachers of another shape than the policy, with more rows or fewer."""
    place = tmp_path_factory.mktemp("teachers")
    shape = {"hidden_size": 160, "intermediate_size": 224, "num_hidden_layers": 8}
    return {
        "more": make_model_folder(place / "more", seed=9, vocab_size=VOCAB + 9, **shape),
        "fewer": make_model_folder(place / "fewer", seed=9, vocab_size=FEWER, **shape),
    }


def all_logprobs(model: torch.nn.Module, sample: Sample, common: int) -> Tensor:
    """Log-probs at the completion's positions, over the first `common` tokens."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1, :common].float()
    return torch.log_softmax(logits / oracle.TEMPERATURE, -1)


def dense_loss(
    model: torch.nn.Module,
    teacher: torch.nn.Module,
    samples: list[Sample],
    loss: str,
    coef: float = COEF,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate with a teacher, and the mean KL.

    The teacher is in the advantages, or as the KL of the whole distributions; the mean KL is of the
    sampled tokens or of the whole. The advantages' log-probs are those of the model itself."""
    common = min(model.config.vocab_size, teacher.config.vocab_size)
    total = torch.zeros(())
    kl = torch.zeros(())
    count = 0
    for sample in samples:
        logprobs = oracle.completion_logprobs(model, sample)
        model_logprobs = all_logprobs(model, sample, common)
        with torch.no_grad():
            teacher_logprobs = all_logprobs(teacher, sample, common)
        advantage = torch.full_like(logprobs.detach(), sample.advantage)
        if loss == "full":
            kl_T = (model_logprobs.exp() * (model_logprobs - teacher_logprobs)).sum(-1)
            total = total + coef * kl_T.sum()
        else:
            ids = torch.tensor(sample.completion_ids)[:, None]
            kl_T = (model_logprobs - teacher_logprobs).gather(1, ids)[:, 0].detach()
            advantage = advantage - coef * kl_T
        ratio = (logprobs - torch.tensor(sample.behaviour_logprobs)).exp()
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        kl = kl + kl_T.detach().sum()
        count = count + len(sample.completion_ids)
    return total / count, kl / count


def check_gradients(
    ranks: RankPool,
    folder: Path,
    teacher: Path,
    case: Case,
    loss: str,
    samples: list[Sample] = SAMPLES,
) -> None:
    settings = TeacherConfig(path=str(teacher), loss=loss, coef=COEF)
    gradients = ranks.run(case.ranks, teacher_cases.gradients, folder, case, samples, settings)[0]
    model = oracle.load(folder)
    dense_loss(model, oracle.load(teacher), samples, loss)[0].backward()
    assert_close(gradients, oracle.gradients(model), 1e-5)


def check_step(
    ours: StepOutcome, model: torch.nn.Module, teacher: Path, samples: list[Sample], loss: str
) -> None:
    total, kl = dense_loss(model, oracle.load(teacher), samples, loss)
    total.backward()
    expected = {n: -LEARNING_RATE["sgd"] * g for n, g in oracle.gradients(model).items()}
    assert_close(ours.update, expected, 2e-5)
    (result,) = ours.record.results
    teacher_kl = ours.record.teacher_kl
    teacher_kl = (
        result.sums["teacher_kl"] / result.sums["tokens"] if teacher_kl is None else teacher_kl
    )
    assert teacher_kl == pytest.approx(kl.item(), rel=1e-4)


@matrix
@pytest.mark.parametrize(
    ("case", "loss"),
    keeping(
        [(case, loss) for case in LAYOUTS for loss in ("advantage", "full")],
        (LAYOUTS[1], "full"),
        (LAYOUTS[2], "advantage"),
        others=0,
    ),
    ids=str,
)
def test_gradients_with_a_teacher_equal_those_of_transformers(
    ranks: RankPool, untied_model: Path, teachers: dict[str, Path], case: Case, loss: str
) -> None:
    check_gradients(ranks, untied_model, teachers["more"], case, loss)


STEPS = [
    (Case(max_tokens=128), "full"),
    (Case(pipeline=2, data=2, max_tokens=64), "advantage"),
    (Case(max_tokens=128), "advantage"),
    (Case(pipeline=2, data=2, max_tokens=64), "full"),
]


@matrix
@pytest.mark.parametrize(("case", "loss"), keeping(STEPS, *STEPS[:2], others=0), ids=str)
def test_a_step_learns_from_the_teacher_alone_or_with_rewards(
    ranks: RankPool, untied_model: Path, teachers: dict[str, Path], case: Case, loss: str
) -> None:
    """On-policy, ratios are 1; an offloaded teacher gives the same bits."""
    torch.set_num_threads(1)
    groups = make_groups((4, 3, 4))
    algorithm = AlgorithmConfig(advantage="dr_grpo", early_stop_ratio=None)
    for with_rewards in (False, True):
        settings = TeacherConfig(str(teachers["more"]), loss, COEF, with_rewards)
        arguments = (untied_model, case, groups, algorithm, settings)
        outcome, _ = ranks.run(case.ranks, teacher_cases.step, *arguments)[0]
        moved, offloaded = ranks.run(case.ranks, teacher_cases.step, *arguments, True)[0]
        assert "teacher" in offloaded and set(offloaded) <= {"teacher", "teacher_head"}
        assert all(
            torch.equal(moved.update[name], tensor) for name, tensor in outcome.update.items()
        )
        rewards = [[reward for reward in group.rewards] for group in groups]
        centred = [
            [reward - sum(row) / len(row) if with_rewards else 0.0 for reward in row]
            for row in rewards
        ]
        model = oracle.load(untied_model)
        samples = [
            Sample(
                sample.prompt_ids,
                sample.completion_ids,
                tuple(oracle.completion_logprobs(model, sample).tolist()),
                sample.advantage,
            )
            for sample in samples_of(groups, centred)
        ]
        check_step(outcome, model, teachers["more"], samples, loss)
        assert (outcome.record.teacher_kl is None) == (loss == "full")


@matrix
@pytest.mark.parametrize("loss", keeping(["advantage", "full"], "full", others=0))
def test_a_step_compares_both_over_the_tokens_that_both_know(
    ranks: RankPool, untied_model: Path, teachers: dict[str, Path], loss: str
) -> None:
    """The policy's log-probs for a teacher with fewer tokens are those among these."""
    torch.set_num_threads(1)

    def known(token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(3 + token % (FEWER - 3) for token in token_ids)

    groups = [
        replace(
            group,
            prompt=replace(group.prompt, token_ids=known(group.prompt.token_ids)),
            completions=tuple(
                replace(completion, token_ids=known(completion.token_ids))
                for completion in group.completions
            ),
        )
        for group in make_groups((4, 3))
    ]
    algorithm = AlgorithmConfig(advantage="dr_grpo", early_stop_ratio=None)
    settings = TeacherConfig(str(teachers["fewer"]), loss, COEF, with_rewards=False)
    outcome, _ = ranks.run(
        1, teacher_cases.step, untied_model, Case(), groups, algorithm, settings
    )[0]
    model = oracle.load(untied_model)
    samples = [
        replace(
            sample, behaviour_logprobs=tuple(oracle.completion_logprobs(model, sample).tolist())
        )
        for sample in samples_of(groups, [[0.0] * len(group.completions) for group in groups])
    ]
    check_step(outcome, model, teachers["fewer"], samples, loss)
