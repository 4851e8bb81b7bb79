"""The metrics of a run, read with bounds from `metrics.jsonl` and `validation.jsonl`, and thinned to be drawn.

A run may still write the files, and a file may be damaged: a last line without an end is ignored, lines that are no
rows are counted in a note. What is above the bounds of this module is left out, with a note.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlmath.config.files import open_regular
from rlmath.config.terminal import excerpt

MOST_BYTES = 2**30
"""Read of one file."""
MOST_LINE_BYTES = 2**20
MOST_ROWS = 200_000
MOST_VALUES = 8_000_000
"""Of all metrics together; some 100 bytes of memory each."""
MOST_NAMES = 1000
"""Metrics of a run."""
MOST_NAME_CHARS = 200
MOST_VALUE = 1e30
"""Larger values are left out as those that are not finite: no axis could show the others beside them."""
MOST_STEP = 10**12

DRAWN_POINTS = 1500
"""Points of a curve in the page."""
STACKED_POINTS = 400
"""Steps of a stacked area in the page."""


class Curve(NamedTuple):
    """A metric over the steps, rising."""

    steps: list[int]
    values: list[float]


@dataclass
class Metrics:
    """The finite values of every metric."""

    curves: dict[str, Curve] = field(default_factory=dict)
    last_step: int = 0
    rows: int = 0

    def curve(self, name: str) -> Curve:
        """Empty where the run has no such metric."""
        return self.curves.get(name, Curve([], []))

    def has(self, name: str) -> bool:
        return name in self.curves

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.curves if name.startswith(prefix)]


def read_metrics(path: Path, notes: list[str]) -> Metrics:
    """The rows of a file of metrics; of a step written twice (a resumed run) the later row counts.

    What was left out is added to `notes`. Errors: OSError where the file is not there or cannot be read, ValueError
    where it is no regular file.
    """
    columns: dict[str, tuple[array, array]] = {}
    steps = array("q")
    row_of_step: dict[int, int] = {}
    damaged, first_damage, odd, read, surplus = 0, "", 0, 0, False
    for number, line in finished_lines(path, MOST_BYTES, MOST_LINE_BYTES):
        if len(steps) == MOST_ROWS or read >= MOST_VALUES:
            notes.append(
                f"{path.name}: only the first {len(steps)} rows were read; what follows them is left out."
            )
            break
        try:
            if line is None:
                raise ValueError(f"longer than {MOST_LINE_BYTES} bytes")
            row = json.loads(line)
            step = int(row["step"])
            if not 0 <= step <= MOST_STEP:
                raise ValueError("no step")
            values = {name: float(value) for name, value in row.items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            damaged += 1
            shown = excerpt(str(error), 80)
            first_damage = first_damage or f"line {number} ({type(error).__name__}: {shown})"
            continue
        read += len(values)
        row_number = len(steps)
        steps.append(step)
        row_of_step[step] = row_number
        for name, value in values.items():
            column = columns.get(name)
            if column is None:
                if len(columns) >= MOST_NAMES or len(name) > MOST_NAME_CHARS:
                    surplus = True
                    continue
                column = columns[name] = array("q"), array("d")
            if abs(value) <= MOST_VALUE:  # no NaN is
                column[0].append(row_number)
                column[1].append(value)
            else:
                odd += 1
    if damaged:
        notes.append(
            f"{path.name}: {damaged} lines are no rows of metrics and were left out; the first is {first_damage}."
        )
    if surplus:
        notes.append(
            f"{path.name}: only {MOST_NAMES} metrics with names of at most {MOST_NAME_CHARS} characters are read."
        )
    if odd:
        notes.append(
            f"{path.name}: {odd} values are NaN, infinite or above {MOST_VALUE:g} and are not drawn."
        )
    if _was_cut(path):
        notes.append(f"{path.name}: only its first {MOST_BYTES >> 20} MiB were read.")
    columns.pop("step", None)
    in_order = sorted(row_of_step)
    place = {row_of_step[step]: rank for rank, step in enumerate(in_order)}
    curves = {}
    for name, (rows, values) in columns.items():
        found = sorted((place[row], value) for row, value in zip(rows, values, strict=True) if row in place)
        if found:
            curves[name] = Curve([in_order[rank] for rank, _ in found], [value for _, value in found])
    return Metrics(curves, in_order[-1] if in_order else 0, len(in_order))


def _was_cut(path: Path) -> bool:
    return path.stat().st_size > MOST_BYTES


def finished_lines(path: Path, most_bytes: int, most_line: int) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line) of every line that is ended, of the first `most_bytes`; None for a line that is longer
    than `most_line` bytes. Errors: as `read_metrics`."""
    with open_regular(path) as file:
        number = read = 0
        while read < most_bytes:
            line = file.readline(most_line + 1)
            number, read = number + 1, read + len(line)
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) <= most_line:
                return  # the end, or a line that is being written
            else:
                while read < most_bytes and line and not line.endswith(b"\n"):
                    line = file.readline(most_line)
                    read += len(line)
                yield number, None


# ---------------------------------------------------------------- what is drawn of them


def thinned(curve: Curve, most: int = DRAWN_POINTS) -> Curve:
    """At most `most` points: of every bucket of neighbours the smallest and the largest value, and the first and the
    last point of all.

    >>> thinned(Curve(list(range(8)), [0.0, 5.0, 1.0, 1.0, 1.0, -3.0, 1.0, 2.0]), 6)
    Curve(steps=[0, 1, 2, 4, 5, 7], values=[0.0, 5.0, 1.0, 1.0, -3.0, 2.0])
    """
    count = len(curve.values)
    if count <= most:
        return curve
    buckets = (most - 2) // 2
    kept = [0]
    for number in range(buckets):
        start, end = 1 + (count - 2) * number // buckets, 1 + (count - 2) * (number + 1) // buckets
        places = range(start, end)
        low, high = min(places, key=curve.values.__getitem__), max(places, key=curve.values.__getitem__)
        kept += sorted({low, high})
    kept.append(count - 1)
    return Curve([curve.steps[place] for place in kept], [curve.values[place] for place in kept])


def means_on_common_steps(
    curves: Sequence[Curve], most: int = STACKED_POINTS
) -> tuple[list[int], list[list[float]], int]:
    """The curves over the same steps, to be stacked: (steps, values by curve, steps that a point is the mean of). Where
    a curve has no value it counts as 0; with more than `most` steps a point is the mean of neighbours.

    >>> means_on_common_steps([Curve([1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0]), Curve([2], [4.0])], 2)
    ([2, 4], [[2.0, 6.0], [2.0, 0.0]], 2)
    """
    steps = sorted({step for curve in curves for step in curve.steps})
    width = max(1, math.ceil(len(steps) / most))
    groups = [steps[start : start + width] for start in range(0, len(steps), width)]
    lookups = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    values = [
        [sum(lookup.get(step, 0.0) for step in group) / len(group) for group in groups] for lookup in lookups
    ]
    return [group[-1] for group in groups], values, width
