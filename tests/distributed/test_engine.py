"""Engines in the ranks: their weights are the policy's, their text depends on nothing but the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import engine_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix

pytestmark = pytest.mark.distributed


TWO_RANKS = [
    Case(tensor=2),
    Case(pipeline=2),
    Case(data=2),
    Case(pipeline=2, first_stage_layers=1),
    Case(pipeline=2, virtual_pipeline=2),
]
FIRST = ([Case(tensor=2), Case(pipeline=2, virtual_pipeline=2)], 2, False)
MATRIX = [
    FIRST,
    ([Case()], 1, False),
    (TWO_RANKS, 2, False),
    (TWO_RANKS, 1, True),
    ([Case(tensor=2, lora="all"), Case(pipeline=2, lora="attention")], 1, False),
    *(
        pytest.param(cases, size, tied, marks=pytest.mark.full)
        for cases, size, tied in (
            (TWO_RANKS, 2, True),
            ([Case(tensor=2, pipeline=2)], 1, False),
            ([Case(tensor=2, pipeline=2), Case(tensor=2, data=2)], 4, True),
        )
    ),
]


def _name(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0].ranks}-ranks-in-{len(value)}-layouts"
    return {True: "tied", False: "untied"}[value] if isinstance(value, bool) else f"engines-of-{value}"


@pytest.mark.parametrize(("cases", "engine_size", "tied"), keeping(MATRIX, FIRST), ids=_name)
def test_engine_logprobs_equal_the_policys_after_every_update(
    ranks: RankPool, untied_model: Path, tied_model: Path, tied: bool, cases: list[Case], engine_size: int
) -> None:
    folder = tied_model if tied else untied_model
    check_engines(ranks, folder, cases, engine_size, updates=3)


def check_engines(ranks: RankPool, folder: Path, cases: list[Case], engine_size: int, updates: int) -> None:
    """Log-probs of every layout's engines are the policy's within 1e-5 nats, before and after each update."""
    by_rank = ranks.run(cases[0].ranks, engine_cases.mismatch_of_layouts, folder, cases, engine_size, updates)
    for case, *found in zip(cases, *by_rank, strict=True):
        measured = [largest for largest in found if largest]
        assert measured and all(len(largest) == updates + 1 for largest in measured), case
        assert max(max(largest) for largest in measured) < 1e-5, case


@matrix
def test_no_prefix_of_old_weights_is_used_with_new_ones(ranks: RankPool, untied_model: Path) -> None:
    """A prompt longer than a block of the KV cache is sampled again after updates. The last of them is followed by
    nothing that empties the cache: the difference is then large, so the others would be seen, too."""
    (report,) = ranks.run(1, engine_cases.old_prefixes, untied_model)
    assert report["block"] == engine_cases.PREFIX_BLOCK < report["prompt"]
    for name in ("first", "again", "with a new version", "slept"):
        assert report[name] < 1e-5, name
    assert report["nothing dropped"] > 1e-3


@matrix
@pytest.mark.parametrize(("share", "name"), [(0.0, "grad"), (0.3, "grad_with_entropy")])
def test_padded_vocabulary_has_no_probability(ranks: RankPool, share: float, name: str) -> None:
    first, second = ranks.run(2, engine_cases.vocab_padding, 3)
    logits = first["logits"].double().requires_grad_()
    masked = torch.zeros(7, 101, dtype=torch.bool)
    masked[first["masked"], 99] = True
    wanted = torch.log_softmax((logits / 0.7).masked_fill(masked, -1e30), -1)
    chosen = wanted.gather(1, first["targets"][:, None])[:, 0]
    entropy = -(wanted.exp() * wanted).sum(-1)
    rows = torch.arange(1.0, 8.0)
    ((chosen * rows).sum() + share * (entropy * rows.flip(0)).sum()).backward()
    grad = torch.cat((first[name], second[name]), dim=1)
    for found in (first, second):
        torch.testing.assert_close(found["logprobs"], chosen.detach().float(), atol=1e-6, rtol=2e-6)
        torch.testing.assert_close(found["entropy"], entropy.detach().float(), atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(grad[:, :101], logits.grad.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(grad[:, 101], torch.zeros(7))
