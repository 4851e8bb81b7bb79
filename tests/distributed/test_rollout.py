"""Rollouts by engines that draw their work: the same result whoever drew what, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import rollout_cases
from tests.distributed.rank_pool import RankPool
from tests.distributed.rollout_cases import PROMPTS, ROLLOUT

pytestmark = pytest.mark.distributed
COUNTS = [9, 1, 0, 9]
"""Prompts of the rollouts; fewer than engines, and none, as dynamic sampling may have it."""


@pytest.fixture(scope="module")
def alone(ranks: RankPool, untied_model: Path) -> dict:
    return ranks.run(1, rollout_cases.collected, untied_model, 1, COUNTS)[0]


def test_groups_are_whole_and_in_the_order_of_the_prompts(alone: dict) -> None:
    for count, groups in zip(COUNTS, alone["groups"], strict=True):
        assert [group.prompt for group in groups] == PROMPTS[:count]
        for group in groups:
            assert [c.sample_index for c in group.completions] == list(range(ROLLOUT.group_size))
            assert {c.policy_version for c in group.completions} == {3}
            assert len(group.scores) == ROLLOUT.group_size
    first, *_, again = alone["groups"]
    assert first == again
    lengths = [len(c.token_ids) for group in first for c in group.completions]
    assert min(lengths) < max(lengths)


@pytest.mark.parametrize(
    "engines", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_what_is_collected_does_not_depend_on_who_drew_it(
    ranks: RankPool, untied_model: Path, alone: dict, engines: int
) -> None:
    for report in ranks.run(engines, rollout_cases.collected, untied_model, 1, COUNTS):
        assert report["groups"] == alone["groups"]
        assert [len(seconds) for seconds in report["engine_seconds"]] == [engines] * len(COUNTS)
        assert report["new_keys"] == 0


def test_fixed_shares_give_the_same_text(ranks: RankPool, untied_model: Path, alone: dict) -> None:
    first, second = ranks.run(2, rollout_cases.fixed_shares, untied_model)
    drawn = {
        (p, c.sample_index): (c.token_ids, c.logprobs)
        for p, group in enumerate(alone["groups"][0])
        for c in group.completions
    }
    assert first | second == drawn


@pytest.mark.parametrize(
    ("ranks_in_all", "engine_size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_the_ranks_of_an_engine_draw_alike(
    ranks: RankPool, untied_model: Path, ranks_in_all: int, engine_size: int
) -> None:
    reports = ranks.run(ranks_in_all, rollout_cases.collected, untied_model, engine_size, COUNTS)
    assert all(report["groups"] == reports[0]["groups"] for report in reports)
    assert reports[0]["groups"][0] == reports[0]["groups"][3]
    assert all(report["new_keys"] == 0 for report in reports)


def test_a_request_has_bounds_of_its_own(ranks: RankPool, untied_model: Path) -> None:
    ((*lengths,),) = ranks.run(1, rollout_cases.lengths_asked_for, untied_model)
    assert len(lengths) == 8 and all(asked == made for asked, made in lengths)
