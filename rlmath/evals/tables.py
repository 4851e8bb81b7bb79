"""The table of the AReaL documents, and the files that hold it.

+---------+---------------+---------------+---------------+------------+---------------+--------+---------+
| dataset | num_questions | greedy_length | sample_length | greedy_acc | sample_pass@1 | pass@8 | pass@16 |
+---------+---------------+---------------+---------------+------------+---------------+--------+---------+
|  aime24 |       30      |    19328.0    |    13663.5    |    50.0    |      50.4     |  77.3  |   80.0  |
+---------+---------------+---------------+---------------+------------+---------------+--------+---------+
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmath.config.terminal import visible
from rlmath.evals.results import BenchmarkResult

RESULTS = "results.json"
FORMAT = 1
"""Version of results.json."""

COLUMNS = ("dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1")
COLUMNS += ("pass@8", "pass@16")
"""The columns of the first table; "-" marks those that need more samples than there are."""

Row = dict[str, float | int | str | None]
"""Numbers by column; shares from 0 to 1."""


def row_of(result: BenchmarkResult) -> Row:
    """All numbers of a benchmark, by the names of the table's columns."""
    row: Row = {"dataset": result.dataset, "num_questions": result.num_questions}
    greedy, sampled = result.greedy, result.sampled
    row["greedy_length"] = greedy and greedy.length
    row["sample_length"] = sampled and sampled.length
    row["greedy_acc"] = greedy and greedy.accuracy
    if sampled:
        row |= {f"sample_pass@{k}" if k == 1 else f"pass@{k}": value for k, value in sampled.pass_at.items()}
        row |= {f"maj@{k}": value for k, value in sampled.maj_at.items()}
    row["greedy_acc_low"], row["greedy_acc_high"] = greedy.interval if greedy else (None, None)
    row["sample_pass@1_low"], row["sample_pass@1_high"] = sampled.interval if sampled else (None, None)
    row["greedy_truncated"] = greedy and greedy.truncated
    row["sample_truncated"] = sampled and sampled.truncated
    return row | {"too_long": result.too_long, "unusable": result.unusable, "not_judged": result.not_judged}


def first_table(results: Sequence[BenchmarkResult]) -> list[list[str]]:
    """The header and the rows, as text."""
    rows = [row_of(result) for result in results]
    return [list(COLUMNS), *([cell(name, row.get(name)) for name in COLUMNS] for row in rows)]


def second_table(results: Sequence[BenchmarkResult]) -> list[list[str]]:
    """Intervals, majorities, and counts of truncated or excluded completions."""
    rows = [row_of(result) for result in results]
    sizes = sorted({int(name[4:]) for row in rows for name in row if name.startswith("maj@")})
    counts = ["greedy_truncated", "sample_truncated", "too_long", "unusable", "not_judged"]
    numbers = [*(f"maj@{k}" for k in sizes), *counts]
    table = [["dataset", "greedy_acc 95%", "sample_pass@1 95%", *numbers]]
    for row in rows:
        intervals = [_interval(row, name) for name in ("greedy_acc", "sample_pass@1")]
        table.append([str(row["dataset"]), *intervals, *(cell(name, row.get(name)) for name in numbers)])
    return table


def cell(name: str, value: float | int | str | None) -> str:
    """A number as text for the tables: shares in percent, lengths in tokens, with one decimal.

    >>> cell("greedy_acc", 0.5), cell("greedy_length", 19328), cell("num_questions", 30), cell("pass@16", None)
    ('50.0', '19328.0', '30', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name in ("num_questions", "too_long", "unusable", "not_judged"):
        return str(value)
    return f"{value if name.endswith('_length') else 100 * value:.1f}"


def _interval(row: Row, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "-" if low is None else f"{cell(name, low)} - {cell(name, high)}"


def boxed_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of text in a frame, with centred cells; the first row is the header."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    line = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    rows = [
        "| " + " | ".join(text.center(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    return "\n".join([line, rows[0], line, *rows[1:], line])


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of text as a Markdown table; the first row is the header."""
    rows = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([rows[0], "|" + " --- |" * len(table[0]), *rows[1:]])


def write_results(folder: Path, settings: Mapping[str, Any], results: Sequence[BenchmarkResult]) -> None:
    """results.json (all, problem by problem), results.csv (a line for each benchmark) and results.md (both tables).

    The same completions give the same bytes.
    """
    content = {
        "format": FORMAT,
        "settings": dict(settings),
        "benchmarks": {
            result.dataset: {"row": row_of(result), "problems": [asdict(p) for p in result.problems]}
            for result in results
        },
    }
    _write(folder / RESULTS, json.dumps(content, indent=1) + "\n")
    lines = "".join(f"    {name}: {visible(str(value))}\n" for name, value in settings.items())
    tables = (markdown_table(table) for table in (first_table(results), second_table(results)))
    _write(folder / "results.md", "\n\n".join(["# Evaluation", lines, *tables]) + "\n")
    rows = [row_of(result) for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(folder / "results.csv", text.getvalue())


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
