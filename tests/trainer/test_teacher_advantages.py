"""The teacher's part of advantages, and tokens that count, by hand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.token_selection import TokenRules
from rlmath.algorithms.types import Sample
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.trainer.token_advantages import (
    Advantages,
    PackedStep,
    ScoredStep,
    StepLogprobs,
    TeacherInAdvantages,
    TokensThatCount,
    add_teacher_advantages,
)

pytestmark = pytest.mark.usefixtures("process_group")

ALONE = Mesh(0, 1, 1, 1, 1)
SAMPLES = [Sample((5, 6), (7, 8), (-1.0, -2.0), 0.5), Sample((5,), (9, 98), (-1.5, -0.5), -0.25)]


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_token_gets_its_own_difference_and_unknown_ones_nothing(recomputed: bool) -> None:
    """Tokens 5 6 7 8 | 5 9 98; of 98 tokens that both know, the last one is none. coef is 2."""
    batch = pack(SAMPLES, [0, 1], 1)
    teacher = torch.tensor([9.0, 9.0, -0.5, -2.5, 9.0, -1.0, 9.0])
    engine = batch.behaviour_logprobs_T
    policy = [engine + 0.25] if recomputed else None
    shift = 0.25 if recomputed else 0.0
    added = add_teacher_advantages(
        Advantages([batch], [[0.5, -0.25]]),
        policy,
        [teacher],
        [[2, 2]],
        coef=2.0,
        vocab_size=98,
        mesh=ALONE,
    )
    # log teacher - log q: 0.5 and -0.5 of the first, 0.5 of the second, each less the shift
    first, second = [0.5 - shift, -0.5 - shift], [0.5 - shift]
    expected = [0.0, 0.0, 0.5 + 2 * first[0], 0.5 + 2 * first[1], 0.0, -0.25 + 2 * second[0], -0.25]
    assert added.batches[0].advantages_T.tolist() == pytest.approx(expected)
    assert added.means_PG[0] == pytest.approx([0.5 + sum(first), -0.25 + sum(second)])
    assert added.teacher_kl == pytest.approx(-(sum(first) + sum(second)) / 4)


@pytest.mark.parametrize(("teachers_tokens", "shift"), [(99, 0.25), (98, 0.5)])
def test_a_teacher_with_fewer_tokens_is_compared_over_those_that_both_know(
    teachers_tokens: int, shift: float
) -> None:
    """The policy has 99 tokens; its log-probs over 98 are larger than those over all."""
    batch = pack(SAMPLES, [0, 1], 1)
    engine_T = batch.behaviour_logprobs_T
    teacher_T = engine_T + 1.0

    def over_common(batches: list[MicroBatch], vocab_size: int) -> list[Tensor]:
        assert vocab_size == 98
        return [packed_batch.behaviour_logprobs_T + 0.5 for packed_batch in batches]

    teacher: Any = SimpleNamespace(vocab_size=teachers_tokens, logprobs=lambda batches: [teacher_T])
    actor: Any = SimpleNamespace(forward_backward=SimpleNamespace(logprobs=over_common))
    offload: Any = SimpleNamespace(on_device=lambda *names: nullcontext())
    part = TeacherInAdvantages(
        teacher,
        actor,
        coef=2.0,
        vocab_size=99,
        offload=offload,
        timers=PhaseTimers(),
        mesh=ALONE,
    )
    packed = PackedStep(ScoredStep(0, [], [], [[2, 2]]), [batch], (slice(0, 1),), seed=1)
    logprobs = StepLogprobs([engine_T + 0.25], None)
    taught = part.apply(packed, logprobs, Advantages([batch], [[0.5, -0.25]]))
    gap = 1.0 - shift
    last = gap if teachers_tokens == 99 else 0.0  # token 98
    expected = [0.0, 0.0, 0.5 + 2 * gap, 0.5 + 2 * gap, 0.0, -0.25 + 2 * gap, -0.25 + 2 * last]
    assert taught.batches[0].advantages_T.tolist() == pytest.approx(expected)
    assert taught.teacher_kl == pytest.approx(-(3 * gap + last) / 4)


@pytest.mark.parametrize("split", [[[0, 1]], [[1], [0]]])
def test_tokens_of_low_entropy_lose_their_advantage_and_prompts_never_count(
    split: list[list[int]],
) -> None:
    """Tokens are 5 6 7 8 | 5 9 98, entropies 9 9 0.5 0.1 | 9 0.2 0.4.

    The upper half of the entropies is 0.5 and 0.4. Log-probs are -1 -2 | -1.5 -0.5 with advantages
    0.5 0.5 | -0.25 -0.25: covariances are 0.094 -0.281 | 0.094 -0.281."""
    entropies = {0: [9.0, 9.0, 0.5, 0.1], 1: [9.0, 0.2, 0.4]}
    batches = [pack(SAMPLES, indices, 1) for indices in split]
    entropy = [
        torch.tensor([token_entropy for index in indices for token_entropy in entropies[index]])
        for indices in split
    ]
    packed = PackedStep(ScoredStep(0, [], [], []), batches, (slice(0, len(batches)),), seed=1)
    rules = TokenRules(entropy_share=0.5, kl_cov=0.25, kl_coef=2.0)
    part = TokensThatCount(rules, ALONE)
    masked = part.apply(packed, StepLogprobs(None, None, entropy), Advantages(batches, [])).batches
    by_sample = {index: batch for batch in masked for index in batch.sample_indices}
    got = {index: _of_sample(batch, index) for index, batch in by_sample.items()}
    assert got[0] == ([0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 2.0, 0.0])
    assert got[1] == ([0.0, 0.0, -0.25], [0.0, 2.0, 0.0])


def test_tokens_count_by_the_advantages_that_the_parts_before_have_made() -> None:
    """Tokens 5 6 7 8 have an advantage of 0.5, to which the teacher adds -2 and 2.

    The upper half of the entropies is the first completion token's."""
    batch = pack(SAMPLES, [0], 1)
    plain = Advantages([batch], [[0.5]])
    packed = PackedStep(ScoredStep(0, [], [], []), [batch], (slice(0, 1),), seed=1)
    engine = batch.behaviour_logprobs_T
    teacher = engine + torch.tensor([0.0, 0.0, -2.0, 2.0])
    taught = add_teacher_advantages(
        plain, None, [teacher], [[2]], coef=1.0, vocab_size=99, mesh=ALONE
    )
    part = TokensThatCount(TokenRules(entropy_share=0.5), ALONE)
    logprobs = StepLogprobs(None, None, [torch.tensor([9.0, 9.0, 0.5, 0.1])])
    assert part.apply(packed, logprobs, taught).batches[0].advantages_T.tolist() == [
        0.0,
        0.0,
        -1.5,
        0.0,
    ]
    assert part.apply(packed, logprobs, plain).batches[0].advantages_T.tolist() == [
        0.0,
        0.0,
        0.5,
        0.0,
    ]


def _of_sample(batch: MicroBatch, index: int) -> tuple[list[float], list[float]]:
    of_sample_T = batch.segments_T == batch.sample_indices.index(index)
    assert batch.penalty_T is not None
    return batch.advantages_T[of_sample_T].tolist(), batch.penalty_T[of_sample_T].tolist()
