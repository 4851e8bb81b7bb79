import json

from tools.bench_rollout import Figures, make_requests, report_case


def test_one_group_in_50_is_20_times_longer_and_exactly_so():
    requests_PG = make_requests(200, draw=3)
    assert all(request.min_new_tokens == request.max_new_tokens for row in requests_PG for request in row)
    for start in range(0, 200, 50):
        lengths_PG = [[request.max_new_tokens for request in row] for row in requests_PG[start : start + 50]]
        (long,) = [row for row in lengths_PG if max(row) > 15]
        assert all(length % 20 == 0 and 5 <= length // 20 <= 15 for length in long)
        assert min(min(row) for row in lengths_PG) >= 5


def test_figures_are_medians_and_the_least_favourable_repeat(capsys):
    pairs = [
        (Figures(2.0, 20, 0.0), Figures(3.0, 30, 0.3)),
        (Figures(2.0, 20, 0.0), Figures(1.0, 22, 0.1)),
        (Figures(5.0, 50, 0.2), Figures(6.0, 50, 0.2)),
    ]
    report_case("case", pairs)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert list(line) == ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
    assert {line["metric"]: (line["value"], line["ratio"]) for line in lines} == {
        "rollout_seconds": (2.0, 1.5),
        "engine_steps": (20, 1.5),
        "idle_share": (0.0, 200.0),
        "least_speedup": (0.5, 0.5),
        "least_speedup_in_steps": (1.0, 1.0),
    }
    assert lines[0]["baseline"] == "fixed shares: 3.0000"
