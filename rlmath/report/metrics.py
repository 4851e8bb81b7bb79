"""The curves of a run, of `metrics.jsonl` and `validation.jsonl`, thinned to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlmath.config.terminal import excerpt
from rlmath.telemetry.metrics_writer import rows_by_step

MOST_BYTES = 2**26
"""Bytes of a file that are read: of a longer one every second, third, ... row, and the last."""
MOST_VALUE = 1e30
"""Largest value that is drawn.

Larger ones are left out as those that are not finite: no axis could show the others beside them."""

DRAWN_POINTS = 1500
"""Points of a curve in the page."""


class Curve(NamedTuple):
    """A metric over the steps, rising."""

    steps: list[int]
    values: list[float]

    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values, strict=True))


@dataclass
class Metrics:
    curves: dict[str, Curve] = field(default_factory=dict)
    last_step: int = 0

    def curve(self, name: str) -> Curve:
        """The curve of a metric; empty where the run has no such metric."""
        return self.curves.get(name, Curve([], []))

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.curves if name.startswith(prefix)]


def read_curves(path: Path, notes: list[str]) -> Metrics:
    """The rows of a file of metrics; `notes` gets what was left out.

    OSError where it cannot be read, ValueError where it is no regular file."""
    rows, damaged = rows_by_step(path, MOST_BYTES)
    undrawable = 0
    metrics = Metrics(last_step=max(rows, default=0))
    for step, row in rows.items():
        for name, value in row.items():
            if name == "step":
                continue
            if abs(value) <= MOST_VALUE:  # no NaN is
                steps, values = metrics.curves.setdefault(name, Curve([], []))
                steps.append(step)
                values.append(value)
            else:
                undrawable += 1
    if (size := path.stat().st_size) > MOST_BYTES:
        notes.append(
            f"{path.name}: of {size / 2**20:.0f} MiB {len(rows)} rows, spread evenly, were read."
        )
    if damaged:
        number, error = damaged[0]
        first_problem = f"line {number} ({type(error).__name__}: {excerpt(str(error), 80)})"
        notes.append(
            f"{path.name}: {len(damaged)} lines are no rows of metrics and were left out; the "
            f"first is {first_problem}."
        )
    if undrawable:
        notes.append(
            f"{path.name}: {undrawable} values are NaN, infinite or above {MOST_VALUE:g} and are "
            "not "
            "drawn."
        )
    return metrics


# ---------------------------------------------------------------- what is drawn of them


def thinned(curve: Curve, most: int = DRAWN_POINTS) -> Curve:
    """The curve with at most `most` points.

    They are the least and greatest of every bucket of neighbours, and the first and last of all.

    >>> thinned(Curve(list(range(8)), [0.0, 5.0, 1.0, 1.0, 1.0, -3.0, 1.0, 2.0]), 6)
    Curve(steps=[0, 1, 2, 4, 5, 7], values=[0.0, 5.0, 1.0, 1.0, -3.0, 2.0])
    """
    count = len(curve.values)
    if count <= most:
        return curve
    buckets = (most - 2) // 2
    drawn_places = [0]
    for number in range(buckets):
        start = 1 + (count - 2) * number // buckets
        end = 1 + (count - 2) * (number + 1) // buckets
        places = range(start, end)
        lowest = min(places, key=curve.values.__getitem__)
        highest = max(places, key=curve.values.__getitem__)
        drawn_places += sorted({lowest, highest})
    drawn_places.append(count - 1)
    return Curve(
        [curve.steps[place] for place in drawn_places],
        [curve.values[place] for place in drawn_places],
    )


def stacked(named: list[tuple[str, Curve]], most: int = DRAWN_POINTS) -> list[tuple[str, Curve]]:
    """Curves over the same steps, at most `most`.

    Values are means over as many steps, 0 where a curve has no value.

    >>> stacked([("a", Curve([1, 2, 3], [5.0, 5.0, 5.0])), ("b", Curve([2], [8.0]))], 2)
    [('a', Curve(steps=[2, 3], values=[5.0, 5.0])), ('b', Curve(steps=[2, 3], values=[4.0, 0.0]))]
    """
    steps = sorted({step for _, curve in named for step in curve.steps})
    width = max(1, -(-len(steps) // most))
    spans = [steps[start : start + width] for start in range(0, len(steps), width)]
    stack = []
    for name, curve in named:
        values = curve.by_step()
        means = [sum(values.get(step, 0.0) for step in span) / len(span) for span in spans]
        stack.append((name, Curve([span[-1] for span in spans], means)))
    return stack
