"""From 8 to 512 ranks nothing that is counted grows faster than linearly. Times are not tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.rank_pool import RankPool
from tools import scale_costs, scale_rollout
from tools.bench_scale import GROWING, RANKS, SAME, growth, main, report_growth, unit_of
from tools.scale_rollout import GROUP, Figures

FOUR_LAYERS = replace(scale_costs.LARGE, num_layers=4)


def at_most_linear(measure: Callable[[int], Figures]) -> dict[str, float]:
    """The exponents of all counts, after a look at them."""
    found = {n: measure(n) for n in RANKS}
    exponents = {}
    for metric in found[8]:
        if unit_of(metric) == "s":
            continue
        values = [found[n][metric] for n in RANKS]
        assert values[-1] <= 64 * values[0], metric
        exponents[metric] = growth(values)
        assert exponents[metric] <= 1.0, metric
    return exponents


def test_growth_of_power_laws() -> None:
    assert growth([n**2 for n in RANKS]) == 2.0
    assert growth([5.0] * 7) == 0.0
    assert growth([0.0] * 7) == 0.0
    assert growth([3.0 * n**0.5 for n in RANKS]) == 0.5


def test_a_rank_plans_a_weight_sync_that_does_not_grow_with_the_ranks() -> None:
    # With 8 ranks there is one node; from 16 on a cell has two.
    found = [scale_costs.sync_plan(n, FOUR_LAYERS) for n in RANKS[1:]]
    for metric in ("sync_copies_planned", "sync_rounds", "sync_peers", "sync_bytes_received"):
        assert len({figures[metric] for figures in found}) == 1, metric
    assert found[0]["sync_peers"] > 0


@pytest.mark.distributed
def test_process_groups(ranks: RankPool) -> None:
    """A rank makes them all, and is in as many whatever the ranks."""
    found = {n: ranks.run(1, scale_costs.process_groups, n)[0] for n in (8, 64, 512)}
    assert found[8]["groups_joined"] == found[64]["groups_joined"] == found[512]["groups_joined"]
    assert [found[n]["group_peers"] for n in (8, 64, 512)] == [7, 63, 511]
    for smaller, larger in ((8, 64), (64, 512)):
        assert (
            found[smaller]["groups_made"] < found[larger]["groups_made"] <= 8 * found[smaller]["groups_made"]
        )


def test_hearts_ask_the_store_in_proportion_to_the_ranks() -> None:
    """A rank watches two others, the last one of a node three: with one node they are the same."""
    for n in RANKS:
        found = scale_costs.heartbeat(n)
        assert 6 * n <= found["heart_requests_a_beat"] <= 6.125 * n
        assert found["heart_bytes_a_beat"] < 1100 * n
        assert found["failure_requests_of_a_rank"] == 2
        assert found["failure_bytes_of_a_rank"] < 500 * n


def test_a_checkpoints_index_has_entries_of_tensors_and_of_borders_between_ranks() -> None:
    assert at_most_linear(lambda n: scale_costs.checkpoint(n, FOUR_LAYERS))["checkpoint_index_entries"] < 0.7


@pytest.mark.parametrize(
    "samples", [lambda n: SAME // 8, lambda n: GROWING * n // 4], ids=["same", "growing"]
)
def test_drawing_asks_the_store_in_proportion_to_prompts_and_engines(samples: Callable[[int], int]) -> None:
    """First samples behind the engines' own parts, the marks of remaining ones, a second look at every prompt, and what
    is cleared up: not prompts times engines. A counter takes two requests where another engine has added meanwhile."""
    for n in RANKS:
        count = samples(n)
        drawn, prompts = scale_rollout.draw_rollout(n, count), count // GROUP
        assert 3 * prompts + 2 * n <= drawn.requests <= 6 * prompts + 4 * n + 2
        assert sum(drawn.tokens) > 0


def test_records_are_set_by_the_batch_and_not_by_the_ranks() -> None:
    per_token, per_sample = scale_rollout.record_bytes()
    assert 8 + 4 <= per_token < 12.1, "a token, its log-prob, and the four characters of these texts"
    assert scale_rollout.record_bytes(compact=False)[0] > 1.4 * per_token
    for n in (8, 64, 256):
        drawn = scale_rollout.draw_rollout(n, 1024)
        for ranks_per_engine in (1, 8):
            found = scale_rollout.records(drawn, 1024, ranks_per_engine)
            expected = per_token * sum(drawn.tokens) + per_sample * 1024
            assert found["records_bytes"] == pytest.approx(expected, rel=0.001)
            assert found["records_bytes"] <= found["records_bytes_sent"] <= 2 * found["records_bytes"]


def test_lines_are_those_of_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    report_growth("", scale_costs.heartbeat, ranks=(8, 16))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(
        list(line) == ["bench", "case", "metric", "value", "unit", "baseline", "ratio"] for line in lines
    )
    assert [line["case"] for line in lines] == ["8 ranks"] * 4 + ["16 ranks"] * 4 + ["8 to 16 ranks"] * 4
    assert lines[-1]["unit"] == "exponent of ranks"


def test_help_names_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--quick" in capsys.readouterr().out
