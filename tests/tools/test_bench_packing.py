import json
import statistics

import pytest

from tools.bench_packing import (
    COST,
    Case,
    compare,
    draw_lengths,
    measure,
    report_case,
)


@pytest.mark.parametrize("limit", [16384, 24576, 28672])
def test_lengths_have_the_mean_and_the_cuts_that_are_promised(limit: int):
    # 20,000 draws: the mean's standard error is below 75 tokens, that of the cut share 0.0023.
    lengths = draw_lengths(limit, 20_000, seed=7)
    assert statistics.mean(lengths) == pytest.approx(7900, abs=300)
    assert max(lengths) <= limit + 1024
    assert sum(length > limit for length in lengths) / 20_000 == pytest.approx(0.12, abs=0.01)


def test_figures_of_two_ranks_of_which_one_has_a_microbatch_more():
    # 16 + 8 and 8 tokens; 32 need one micro-batch of 16 per rank, there are two, and an empty one costs 8 tokens.
    figures = measure([[[16], [8]], [[8]]], needed=32, max_tokens=16)
    assert figures.microbatches_over_bound == 2.0
    assert figures.computed_per_token == (16 + 8 + 8 + 8) / 32
    most, least = COST.of(16) + COST.of(8), COST.of(8)
    assert figures.flops_imbalance == pytest.approx(100 * (most - least) / ((most + least) / 2))


def test_ours_is_no_worse_than_the_baselines_and_printed_so(capsys):
    case = Case(16384, 20480, 4, 2)
    report_case(case, compare(case, n_samples=256, n_draws=1))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert list(line) == ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
        assert line["bench"] == "packing" and line["ratio"] >= 0.999
