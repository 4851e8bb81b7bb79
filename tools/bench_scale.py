"""What grows with the number of ranks, from 8 to 512: start, schedule, and the control plane of a step.

    python tools/bench_scale.py [--quick]

512 processes do not fit on a laptop. So the run's own code is called as if on one rank of N: it computes the plans of
that rank, makes its process groups without a network (`scale_costs`), draws its work from a store that counts
(`scale_rollout`). What a message costs is measured with real groups of 2 and 4 processes (`scale_messages`), and what
512 ranks would take by that is computed in the open: case "512 ranks, computed".

"same batch": 512 prompts with 16 answers each, whatever N; "growing batch": 4 prompts for every rank. Lengths are those
of `bench_packing` (mean 7,900 tokens). The weights are those of a Qwen2.5-72B on TP4 x PP2, with engines of 4 ranks and
nodes of 8; work is drawn by N engines of one rank.

Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}. For every metric
comes a line with the exponent of its growth: value ~ ranks^exponent, least squares over all N; 1 is linear. Seconds are
medians, those of plans CPU seconds; counts and bytes do not vary, but for those of engines that are threads and ask the
store at once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import scale_costs, scale_messages, scale_rollout
from tools.scale_rollout import GROUP, Figures

RANKS = (8, 16, 32, 64, 128, 256, 512)
SAME = 512 * GROUP
GROWING = 4 * GROUP
"""Samples of a rank."""
GLOO_RANKS = (4, 8, 16)
GATHERS_A_STEP = 2
"""Of objects, by all ranks, over gloo; each is a gather of sizes and one of contents."""
SUMS_A_STEP = 12
"""Of metrics over all ranks: one or two of every minibatch, stops and saves. On GPU they take NCCL's way."""


def growth(values: Sequence[float], ranks: Sequence[int] = RANKS) -> float:
    """The exponent of a power law through the values, 0 where they stay 0.

    >>> growth([8.0, 16.0, 32.0], [1, 2, 4])
    1.0
    """
    if not all(value > 0 for value in values):
        return 0.0
    fit = statistics.linear_regression([math.log(n) for n in ranks], [math.log(value) for value in values])
    return round(fit.slope, 3)


def unit_of(metric: str) -> str:
    return next((unit for word, unit in (("seconds", "s"), ("bytes", "B")) if word in metric), "count")


def report(
    case: str, metric: str, value: float, unit: str, baseline: str | None = None, ratio: float | None = None
) -> None:
    line = {"bench": "scale", "case": case, "metric": metric, "value": round(value, 6), "unit": unit}
    print(json.dumps(line | {"baseline": baseline, "ratio": ratio and round(ratio, 3)}), flush=True)


def report_growth(
    case: str, measure: Callable[[int], Figures], repeats: int = 1, ranks: Sequence[int] = RANKS
) -> dict[str, list[float]]:
    """Every metric for every N, and its exponent; the medians by metric."""
    found: dict[str, list[float]] = {}
    for n in ranks:
        runs = [measure(n) for _ in range(repeats)]
        for metric in runs[0]:
            found.setdefault(metric, []).append(statistics.median(run[metric] for run in runs))
            report(f"{case}{n} ranks", metric, found[metric][-1], unit_of(metric))
    for metric, values in found.items():
        about = f"{case}{ranks[0]} to {ranks[-1]} ranks"
        report(about, f"{metric}: growth", growth(values, ranks), "exponent of ranks")
    return found


def rollout(ranks: int, samples: int) -> Figures:
    """Requests to the store, and the records that are gathered afterwards, with engines of one rank and of eight."""
    drawn = scale_rollout.draw_rollout(ranks, samples)
    alone, of_eight = (scale_rollout.records(drawn, samples, size) for size in (1, 8))
    return {
        "claims_requests": drawn.requests,
        "claims_bytes": drawn.store_bytes,
        **alone,
        **{f"{name}, engines of 8 ranks": value for name, value in of_eight.items()},
    }


def contention(ranks: int) -> Figures:
    """Requests of engines that all ask one counter for their next prompt at the same moment."""
    numbers, requests = scale_rollout.add_at_once(ranks)
    return {
        "counter_requests_each": sum(requests) / ranks,
        "counter_requests_most": max(requests),
        "counter_duplicates": ranks - len(set(numbers)),
    }


def report_records() -> None:
    """Bytes of a sample's record on its way, against Python's own numbers in tuples."""
    (per_token, _), (in_tuples, _) = (scale_rollout.record_bytes(compact) for compact in (True, False))
    report("records", "bytes_per_token", per_token, "B", f"tuples: {in_tuples:.2f}", in_tuples / per_token)
    for action, (ours, tuples) in scale_rollout.record_seconds().items():
        metric = f"{action}_seconds_per_million_tokens"
        report("records", metric, 1e6 * ours, "s", f"tuples: {1e6 * tuples:.4f}", tuples / ours)


def report_messages(repeats: int, found: dict[str, list[float]]) -> None:
    """Measured with 2 and 4 processes; then 512 ranks by the costs of 2, which do not wait for each other's core.

    In a ring, each of N ranks sends N - 1 messages for a gather and twice as many for a sum; a sum takes its bytes
    around twice.
    """
    costs = {n: scale_messages.message_costs(n, repeats) for n in (2, 4)}
    for n, figures in costs.items():
        for metric, value in figures.items():
            report(f"{n} processes", metric, value, "s")
    two, ranks = costs[2], RANKS[-1]
    message = max(two["gather_small_seconds"], two["sum_small_seconds"] / 2)
    per_byte = (two["sum_large_seconds"] - two["sum_small_seconds"]) / scale_messages.LARGE
    request = min(figures["store_request_seconds"] / n for n, figures in costs.items())
    for metric, seconds in (
        ("gathers_seconds", 2 * GATHERS_A_STEP * (ranks - 1) * message),
        ("sums_seconds_over_gloo", 2 * SUMS_A_STEP * (ranks - 1) * message),
        ("records_seconds", per_byte * found["records_bytes_sent"][-1]),
        ("claims_seconds_of_the_store", request * found["claims_requests"][-1]),
    ):
        report(f"{ranks} ranks, computed", metric, seconds, "s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat, within a minute")
    quick = parser.parse_args(arguments).quick
    repeats = 1 if quick else 5
    for connect_all in (True, False):
        way = "all connected" if connect_all else "connected when needed"
        report_growth(
            f"gloo, {way}, ", lambda n, a=connect_all: scale_messages.gloo_start(n, a), ranks=GLOO_RANKS
        )
    report_growth("start, ", scale_costs.process_groups, repeats)
    report_growth("start, 72B, ", scale_costs.sync_plan, repeats)
    report_growth("checkpoint, 72B, ", scale_costs.checkpoint)
    report_growth("", scale_costs.heartbeat)
    for case, samples in (("same batch, ", lambda n: SAME), ("growing batch, ", lambda n: GROWING * n)):
        report_growth(case, lambda n, s=samples: scale_costs.step_schedule(n, s(n)), repeats)
        found = report_growth(case, lambda n, s=samples: rollout(n, s(n)))
        if case.startswith("same"):
            same = found
    report_growth("at once, ", contention, repeats, ranks=(8, 64, 256))
    report_records()
    report_messages(20 if quick else 100, same)


if __name__ == "__main__":
    main()
