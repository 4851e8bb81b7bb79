"""The figures of a run that stand at the beginning of its report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.report.metrics import Curve
from rlmath.report.run_folder import ShownRun
from rlmath.report.samples import number_of, text_of
from rlmath.telemetry.console import duration

ENDS = 10
"""First and last values are means of so many steps, or of as many as a third of the run has."""


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    more: str = ""
    is_bad: bool = False


def facts_of(run: ShownRun) -> Iterator[Fact]:
    """What there is of status, steps, accuracy, reward, speed, time and layout."""
    message = text_of(run.exit_status.get("message"), 200) if run.has_failed else ""
    yield Fact("Status", run.status, message, run.has_failed)
    planned = number_of(run.summary.get("steps"))
    of = f"of {planned:.0f}" if planned is not None and planned > run.metrics.last_step else ""
    yield Fact("Steps", str(run.metrics.last_step), of)
    yield from _from_to("Accuracy", run.metrics.curve("rollout/accuracy"), of="of the completions; ")
    yield from _from_to("Reward", run.metrics.curve("task_reward"))
    yield from _from_to("Training loss", run.metrics.curve("train/loss"))
    validated = run.validation.curve("validation/accuracy")
    if validated.values:
        best = max(range(len(validated.values)), key=validated.values.__getitem__)
        last, first, most = (_percent(validated.values[place]) for place in (-1, 0, best))
        more = f"of the answers; best {most} after step {validated.steps[best]}, first {first}"
        yield Fact("Validation accuracy", last, more)
    held_out = run.metrics.curve("held_out/loss")
    if held_out.values:
        yield Fact("Held-out loss", f"{held_out.values[-1]:.4g}", f"first {held_out.values[0]:.4g}")
    speed = number_of(run.summary.get("tokens_per_second"))
    if speed is not None:
        yield Fact("Tokens per second", f"{speed:,.0f}", "over the whole training")
    steps = run.metrics.curve("seconds/step").values
    if steps:
        yield Fact("Seconds of a step", f"{statistics.median(steps):.3g}", "median")
    seconds = number_of(run.summary.get("seconds_total"))
    if seconds is None and steps:
        seconds = statistics.fmean(steps) * run.metrics.last_step
    if seconds:
        yield Fact("Time", duration(seconds), "all starts" if run.summary else "of the steps")
    layout = text_of(run.summary.get("layout"), 120)
    if layout:
        yield Fact("Layout", layout)


def _from_to(name: str, curve: Curve, of: str = "") -> Iterator[Fact]:
    """The mean of the last steps, beside that of the first ones; `of` says what the values are shares of."""
    if not curve.values:
        return
    count = max(1, min(ENDS, len(curve.values) // 3))
    form = _percent if of else lambda value: f"{value:.4g}"
    last, first = statistics.fmean(curve.values[-count:]), statistics.fmean(curve.values[:count])
    which = f"the first {count} steps" if count > 1 else "the first step"
    more = f"{of}{form(first)} in {which}" if len(curve.values) > 1 else of.rstrip("; ")
    yield Fact(name, form(last), more)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
