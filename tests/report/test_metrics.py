"""What is read of files of metrics, and how curves are thinned."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from rlmath.report.metrics import Curve, read_curves, thinned


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_an_unfinished_last_line_is_no_row(tmp_path: Path) -> None:
    path = written(tmp_path, '{"step": 1, "a": 2}\n{"step": 2, "a": 3}\n{"step": 3, "a": 4}')
    notes = []
    metrics = read_curves(path, notes)
    assert metrics.curve("a") == Curve([1, 2], [2.0, 3.0])
    assert (metrics.last_step, notes) == (2, [])


def test_of_a_step_written_twice_the_later_row_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path, '{"step":1,"a":1}\n{"step":2,"a":2,"b":2}\n{"step":3,"a":3}\n{"step":2,"a":9}\n'
    )
    metrics = read_curves(path, [])
    assert metrics.curve("a") == Curve([1, 2, 3], [1.0, 9.0, 3.0])
    assert "b" not in metrics.curves


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    bad_lines = ["{", "[1]", '{"a": 1}', '{"step": 2, "a": "x"}', "\xff\0", "[" * 9999]
    bad_lines += [
        '{"step": 1, "a": ' + "9" * 5000 + "}",
        '{"step": 1, "a": [' + "1," * 2**20 + "1]}",
        "null",
        '""',
    ]
    path = written(tmp_path, "\n".join([*bad_lines, '{"step": 7, "a": 1}', ""]))
    notes = []
    assert read_curves(path, notes).curve("a") == Curve([7], [1.0])
    (note,) = notes
    assert (
        note.startswith(f"metrics.jsonl: {len(bad_lines)} lines are no rows") and "line 1 " in note
    )


def test_values_that_are_not_finite_are_not_drawn_and_told(tmp_path: Path) -> None:
    rows = (
        '{"step": 1, "a": "NaN"}\n{"step": 2, "a": "Infinity"}\n{"step": 3, "a": '
        '1e300}\n{"step": 4, "a": 5}\n'
    )
    path = written(tmp_path, rows)
    notes = []
    assert read_curves(path, notes).curve("a") == Curve([4], [5.0])
    assert "3 values are NaN, infinite or above" in notes[0]


@pytest.mark.parametrize("steps", [1, 2, 100, 997])
def test_a_long_file_is_thinned_evenly_and_keeps_its_newest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    lines = [f'{{"step": {step:6d}, "a": {step:6d}.5}}\n' for step in range(1, steps + 1)]
    path = written(tmp_path, "".join(lines) + '{"step": 9999, "a')
    notes = []
    monkeypatch.setattr("rlmath.report.metrics.MOST_BYTES", 50 * len(lines[0]))
    metrics = read_curves(path, notes)
    curve = metrics.curve("a")
    assert (metrics.last_step, curve.steps[-1], curve.values[-1]) == (steps, steps, steps + 0.5)
    gaps = {later - earlier for earlier, later in itertools.pairwise(curve.steps)}
    assert len(curve.steps) <= 50 or steps <= 50
    assert len(gaps) <= 1 and curve.steps[0] <= max(gaps, default=1)
    assert bool(notes) == (steps > 50)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="FIFO"):
        read_curves(tmp_path / "metrics.jsonl", [])


@pytest.mark.parametrize("count", [1, 2, 1499, 1500, 1501, 10_000, 54_321])
def test_a_thinned_curve_keeps_its_extremes_and_ends(count: int) -> None:
    source = random.Random(count)
    curve = Curve(list(range(count)), [source.gauss(0, 1) for _ in range(count)])
    small = thinned(curve)
    assert len(small.values) <= 1500 and len(small.values) >= min(count, 1300)
    assert (min(small.values), max(small.values)) == (min(curve.values), max(curve.values))
    assert (small.steps[0], small.steps[-1]) == (0, count - 1)
    assert small.steps == sorted(set(small.steps))
    assert all(curve.values[step] == value for step, value in zip(*small, strict=True))
