"""What is computed from the reports of engines on ranks of their own."""

from __future__ import annotations

import pytest

from rlmath.rollout.generation import WeightsTaken
from rlmath.trainer.rollouts.asynchronous import EngineReport, engine_report_metrics


def report(seconds: float, busy: float, tokens: int, latency: float) -> EngineReport:
    taken = WeightsTaken(
        version=3,
        learned_at=100.0,
        transfer_seconds=0.5,
        seconds=seconds,
        busy_seconds=busy,
        new_tokens=tokens,
        interrupted=2,
        prefilled_again_tokens=10,
        running=6.0,
        queued_scores=1,
    )
    return EngineReport(taken, latency)


def test_rates_are_over_time_and_not_over_reports() -> None:
    """One of two engines has reported twice, over times that differ."""
    reports = [report(1.0, 0.5, 100, 0.2), report(9.0, 8.5, 4500, 0.4), report(10.0, 9.0, 5400, 0.9)]
    found = engine_report_metrics(reports, engines=2)
    assert found["tokens_per_second/rollout"] == pytest.approx(1000.0)
    assert found["rollout/engine_busy_share"] == pytest.approx(0.9)
    assert found["rollout/interrupted_sequences"] == 6 and found["rollout/prefilled_again_tokens"] == 30
    assert found["sync/latency_s"] == pytest.approx(0.5) and found["sync/latency_s_max"] == 0.9


def test_without_a_report_there_are_no_metrics() -> None:
    assert engine_report_metrics([], engines=2) == {}
