"""Engines that are asked for the policy's log-probs: equal weights pass on every layout, others end every rank."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import oracle, probe_cases
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
        pytest.param((LAYOUTS[1], 1), marks=matrix),
        pytest.param((LAYOUTS[2], 1), marks=pytest.mark.full),
        pytest.param((LAYOUTS[2], 2), marks=pytest.mark.full),
    ],
    ids=["2-engines-2-layouts", "1-rank", "2-engines", "1-engine-of-2"],
)
def by_layout(
    request: pytest.FixtureRequest, ranks: RankPool, untied_model: Path
) -> list[tuple[dict[str, Any], ...]]:
    """What all ranks report, by layout."""
    layouts, engine_size = request.param
    arguments = (untied_model, layouts, engine_size, EXACT)
    return list(zip(*ranks.run(layouts[0].ranks, probe_cases.agreement, *arguments), strict=True))


def plain_logprobs(model: torch.nn.Module, token_ids: tuple[int, ...]) -> Tensor:
    """Of every token but the first, at temperature 1."""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        return torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]


@matrix
def test_equal_weights_pass_alike_on_all_ranks(by_layout: list[tuple[dict[str, Any], ...]]) -> None:
    for reports in by_layout:
        for name in ("metrics", "healed"):
            first = reports[0][name]
            assert all(report[name] == first for report in reports)
            assert first.keys() == {"sync/probe_difference", "sync/probe_difference_max"}
            assert 0 <= first["sync/probe_difference"] < EXACT
            assert first["sync/probe_difference"] <= first["sync/probe_difference_max"] < 1e-4


@pytest.mark.full
def test_the_policy_is_asked_at_temperature_1_with_nothing_held_back(
    by_layout: list[tuple[dict[str, Any], ...]], untied_model: Path
) -> None:
    model = oracle.load(untied_model)
    for reports in by_layout:
        for report in reports:
            assert len(report["sequences"]) == len(report["expected"]) > 1
            for token_ids, found in zip(report["sequences"], report["expected"], strict=True):
                wanted = plain_logprobs(model, token_ids)
                torch.testing.assert_close(torch.tensor(found), wanted, atol=EXACT, rtol=0)


@pytest.mark.parametrize("harm", HARMS)
def test_other_weights_end_every_rank_with_the_difference(
    by_layout: list[tuple[dict[str, Any], ...]], harm: str
) -> None:
    for reports in by_layout:
        harmed = [report["harmed"][harm] for report in reports]
        assert len({one["error"] for one in harmed}) == 1
        assert "sync.probe_threshold" in harmed[0]["error"]
        if harm.endswith("not finite"):
            assert all("sync.probe_threshold" in one["error where anything is allowed"] for one in harmed)
            assert "nan" in harmed[0]["error"]
            continue
        (difference,) = {one["sync/probe_difference"] for one in harmed}
        assert difference > 0.01 and {one["error where anything is allowed"] for one in harmed} == {""}
        named = [float(number) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", harmed[0]["error"])]
        assert any(math.isclose(number, difference, rel_tol=0.01) for number in named)


@pytest.mark.full
def test_what_a_sync_moved_are_the_bytes_of_its_plan(
    by_layout: list[tuple[dict[str, Any], ...]], untied_model: Path
) -> None:
    model = sum(parameter.nbytes for parameter in oracle.load(untied_model).parameters())
    for reports in by_layout:
        for report in reports:
            moved = {name: gib * 2**30 for name, gib in report["moved"].items() if name.endswith("_gib")}
            assert {**moved, "lower bound": reports[0]["planned"]["lower bound"]} == report["planned"]
            if report["engine size"] == 1:
                assert moved["sync/copied_gib"] + moved["sync/received_gib"] == model
            assert report["moved"]["seconds/sync_packing"] > 0
        for name in ("sync/sent_gib", "sync/received_gib"):
            assert sum(r["moved"][name] for r in reports) * 2**30 == reports[0]["planned"]["lower bound"]


@pytest.mark.full
def test_checksums_and_probes_are_due_at_the_first_sync_and_every_so_many(
    ranks: RankPool, untied_model: Path
) -> None:
    due = {
        0: [],
        1: [0, 1, 2, 3, 4, 5, 6],
        2: [0, 2, 4, 6],
        3: [0, 3, 6],
        9: [0],
    }
    settings = [*((checksum, 0) for checksum in due), *((0, probe) for probe in due)]
    for found in ranks.run(2, probe_cases.rhythm, untied_model, settings, 7):
        for (checksum, probe), syncs in zip(settings, found, strict=True):
            ended = [number for number, (error, _) in enumerate(syncs) if error]
            probed = [number for number, (_, names) in enumerate(syncs) if names]
            assert (ended, probed) == (due[checksum], due[probe]), (checksum, probe)
            assert all("mlp.down_proj.weight in engine 1" in syncs[number][0] for number in ended)


@matrix
def test_scored_tokens_do_not_change_texts_that_go_on_from_them(ranks: RankPool, untied_model: Path) -> None:
    """The prompts fill blocks of vLLM's prefix cache, which those of the probe do only where blocks are small."""
    (found,) = ranks.run(1, probe_cases.texts_after_scores, untied_model)
    assert found["scores"][0] == found["scores"][1]
    assert found["left"]["requests"] == 0
    assert found["after scores"] == found["alone"]
