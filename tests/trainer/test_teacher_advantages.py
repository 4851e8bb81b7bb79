"""The teacher's part of advantages, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rlmath.algorithms.types import Sample
from rlmath.data.packing import pack
from rlmath.distributed.mesh import Mesh
from rlmath.trainer.token_advantages import Advantages, add_teacher_advantages

ALONE = Mesh(0, 1, 1, 1, 1)
SAMPLES = [
    Sample((5, 6), (7, 8), (-1.0, -2.0), 0.5),
    Sample((5,), (9, 98), (-1.5, -0.5), -0.25),
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_token_gets_its_own_difference_and_unknown_ones_nothing(recomputed: bool) -> None:
    """Tokens 5 6 7 8 | 5 9 98; of 98 tokens that both know, the last one is none. coef is 2."""
    batch = pack(SAMPLES, [0, 1], 1)
    teacher = torch.tensor([9.0, 9.0, -0.5, -2.5, 9.0, -1.0, 9.0])
    engine = batch.behaviour_logprobs_T
    policy = [engine + 0.25] if recomputed else None
    shift = 0.25 if recomputed else 0.0
    found = add_teacher_advantages(
        Advantages([batch], [[0.5, -0.25]]), policy, [teacher], [[2, 2]], coef=2.0, vocab_size=98, mesh=ALONE
    )
    # log teacher - log q: 0.5 and -0.5 of the first, 0.5 of the second, each less the shift
    first, second = [0.5 - shift, -0.5 - shift], [0.5 - shift]
    wanted = [0.0, 0.0, 0.5 + 2 * first[0], 0.5 + 2 * first[1], 0.0, -0.25 + 2 * second[0], -0.25]
    assert found.batches[0].advantages_T.tolist() == pytest.approx(wanted)
    assert found.means_PG[0] == pytest.approx([0.5 + sum(first), -0.25 + sum(second)])
    assert found.teacher_kl == pytest.approx(-(sum(first) + sum(second)) / 4)
