"""Engines in the ranks: their weights are the policy's.

Their text depends on nothing but the seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import engine_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.models.test_logprobs import check_shards, shard_of
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
    ([Case(tensor=2, lora="all"), Case(pipeline=2, lora="all")], 1, False),
    ([Case(tensor=2, lora="attention"), Case(pipeline=2, lora="attention")], 2, True),
    ([Case(pipeline=2, virtual_pipeline=2, lora="mlp")], 2, False),
    ([Case(tensor=2, lora="all", lora_engine="merged")], 1, False),
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
    return (
        {True: "tied", False: "untied"}[value] if isinstance(value, bool) else f"engines-of-{value}"
    )


@pytest.mark.parametrize(
    ("cases", "engine_size", "tied"), keeping(MATRIX, FIRST, others=0), ids=_name
)
def test_engine_logprobs_equal_the_policys_after_every_update(
    ranks: RankPool,
    untied_model: Path,
    tied_model: Path,
    tied: bool,
    cases: list[Case],
    engine_size: int,
) -> None:
    folder = tied_model if tied else untied_model
    check_engines(ranks, folder, cases, engine_size, updates=3)


def check_engines(
    ranks: RankPool, folder: Path, cases: list[Case], engine_size: int, updates: int
) -> None:
    """Log-probs of every layout's engines are the policy's within 1e-5 nats.

    They are compared before and after each update."""
    by_rank = ranks.run(
        cases[0].ranks, engine_cases.mismatch_of_layouts, folder, cases, engine_size, updates
    )
    for case, *mismatches in zip(cases, *by_rank, strict=True):
        measured = [largest for largest in mismatches if largest]
        assert measured and all(len(largest) == updates + 1 for largest in measured), case
        assert max(max(largest) for largest in measured) < 1e-5, case


@matrix
def test_no_prefix_of_old_weights_is_used_with_new_ones(
    ranks: RankPool, untied_model: Path
) -> None:
    """A prompt longer than a block of the KV cache is sampled again after updates.

    The last of them is followed by nothing that empties the cache: the difference is then large, so
    the others would be seen, too."""
    (report,) = ranks.run(1, engine_cases.old_prefixes, untied_model)
    assert report["block"] == engine_cases.PREFIX_BLOCK < report["prompt"]
    for name in ("first", "again", "with a new version", "slept", "nothing shared"):
        assert report[name] < 1e-5, name
    assert report["nothing dropped"] > 1e-3


@matrix
def test_log_probs_of_two_shards_are_those_of_the_whole_vocabulary(ranks: RankPool) -> None:
    check_shards(*ranks.run(2, shard_of))
