"""Engines that are asked for the policy's log-probs.

Equal weights pass on every layout, others end every rank.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import probe_cases
from tests.distributed.policy_cases import Case
from tests.distributed.probe_cases import HARMS
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix

pytestmark = pytest.mark.distributed

EXACT = 1e-5
"""Most by which log-probs in float32 may differ (nats)."""
HELD_BACK = 12
LAYOUTS = {
    1: [Case(min_new_tokens=HELD_BACK)],
    2: [
        Case(tensor=2, min_new_tokens=HELD_BACK),
        Case(pipeline=2, min_new_tokens=HELD_BACK),
        Case(pipeline=2, virtual_pipeline=2, min_new_tokens=HELD_BACK),
        Case(data=2, min_new_tokens=HELD_BACK),
    ],
}


@pytest.fixture(
    scope="module",
    params=[
        ([LAYOUTS[2][0], LAYOUTS[2][2]], 1),
        pytest.param((LAYOUTS[1], 1), marks=pytest.mark.full),
        pytest.param((LAYOUTS[2], 2), marks=pytest.mark.full),
    ],
    ids=["2-engines-2-layouts", "1-rank", "1-engine-of-2"],
)
def by_layout(
    request: pytest.FixtureRequest, ranks: RankPool, untied_model: Path
) -> list[tuple[dict[str, Any], ...]]:
    """What all ranks report, by layout."""
    layouts, engine_size = request.param
    arguments = (untied_model, layouts, engine_size, EXACT)
    return list(zip(*ranks.run(layouts[0].ranks, probe_cases.agreement, *arguments), strict=True))


def test_equal_weights_pass_alike_on_all_ranks(by_layout: list[tuple[dict[str, Any], ...]]) -> None:
    for reports in by_layout:
        for name in ("metrics", "healed"):
            first = reports[0][name]
            assert all(report[name] == first for report in reports)
            assert first.keys() == {"sync/probe_difference", "sync/probe_difference_max"}
            assert 0 <= first["sync/probe_difference"] < EXACT
            assert first["sync/probe_difference"] <= first["sync/probe_difference_max"] < 1e-4


@pytest.mark.parametrize("harm", HARMS)
def test_other_weights_end_every_rank_with_the_difference(
    by_layout: list[tuple[dict[str, Any], ...]], harm: str
) -> None:
    for reports in by_layout:
        harmed = [report["harmed"][harm] for report in reports]
        assert len({report["error"] for report in harmed}) == 1
        assert "sync.probe_threshold" in harmed[0]["error"]
        if harm.endswith("not finite"):
            assert all(
                "sync.probe_threshold" in report["error where anything is allowed"]
                for report in harmed
            )
            assert "nan" in harmed[0]["error"]
            continue
        (difference,) = {report["sync/probe_difference"] for report in harmed}
        assert difference > 0.01 and {
            report["error where anything is allowed"] for report in harmed
        } == {""}
        named = [
            float(number) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", harmed[0]["error"])
        ]
        assert any(math.isclose(number, difference, rel_tol=0.01) for number in named)


@matrix
def test_an_engine_without_the_policys_adapters_is_noticed_and_merging_them_advised(
    ranks: RankPool, untied_model: Path
) -> None:
    (report,) = ranks.run(1, probe_cases.adapters_lost, untied_model)
    assert report["whole"]["sync/probe_difference"] < EXACT
    assert "sync.probe_threshold" in report["error"] and "lora.engine=merged" in report["error"]


@matrix
def test_scored_tokens_do_not_change_texts_that_go_on_from_them(
    ranks: RankPool, untied_model: Path
) -> None:
    """The prompts fill blocks of vLLM's prefix cache.

    Those of the probe do so only where blocks are small."""
    (report,) = ranks.run(1, probe_cases.texts_after_scores, untied_model)
    assert report["scores"][0] == report["scores"][1]
    assert report["left"] == 0
    assert report["after scores"] == report["alone"]
