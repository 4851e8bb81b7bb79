"""The tables of an evaluation and their files; the AReaL documents' columns come first.

On the console a table is as wide as a terminal at most; the columns of pass@k follow in a further
box:

+---------+---------------+---------------+---------------+------------+
| dataset | num_questions | greedy_length | sample_length | greedy_acc |
+---------+---------------+---------------+---------------+------------+
|  aime24 |       30      |    19328.0    |    13663.5    |    50.0    |
+---------+---------------+---------------+---------------+------------+
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmath.config.run_files import write_whole
from rlmath.config.terminal import visible
from rlmath.evals.results import BenchmarkResult, Row
from rlmath.report.results_file import FORMAT, GREEDY, RESULTS, SAMPLED

COLUMNS = (
    "dataset",
    "num_questions",
    "greedy_length",
    "sample_length",
    "greedy_acc",
    "sample_pass@1",
)
"""The first columns of the first table; pass@k follows, for every k that the samples allow."""
PROBLEM_COUNTS = ("too_long", "unusable", "not_judged")
WIDTH = 80
"""Most columns of the console that a table takes."""


def first_table(results: Sequence[BenchmarkResult]) -> list[list[str]]:
    """The header and the rows, as text; "-" marks what was not sampled."""
    rows = [result.row for result in results]
    names = [*COLUMNS, *_by_k("pass@", rows)]
    return [names, *([cell(name, row.get(name)) for name in names] for row in rows)]


def second_table(results: Sequence[BenchmarkResult]) -> list[list[str]]:
    """Intervals, majorities, shares of truncated completions, and counts that are not 0.

    The counts are those of PROBLEM_COUNTS."""
    rows = [result.row for result in results]
    counts = [name for name in PROBLEM_COUNTS if any(row[name] for row in rows)]
    numbers = [*_by_k("maj@", rows), "greedy_truncated", "sample_truncated", *counts]
    table = [["dataset", "greedy_acc 95%", "sample_pass@1 95%", *numbers]]
    for row in rows:
        intervals = [_interval(row, name) for name in (GREEDY, SAMPLED)]
        table.append(
            [str(row["dataset"]), *intervals, *(cell(name, row.get(name)) for name in numbers)]
        )
    return table


def _by_k(measure: str, rows: Sequence[Row]) -> list[str]:
    """Names of the columns `measure`k, in the order of k."""
    names = {name for row in rows for name in row if name.startswith(measure)}
    return sorted(names, key=lambda name: int(name.removeprefix(measure)))


def cell(name: str, value: float | int | str | None) -> str:
    """A number as text for the tables: shares in percent, lengths in tokens, with one decimal.

    >>> cell("greedy_acc", 0.5), cell("greedy_length", 19328), cell("num_questions", 30), cell("pass@16", None)
    ('50.0', '19328.0', '30', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name in ("num_questions", *PROBLEM_COUNTS):
        return str(value)
    return f"{value if name.endswith('_length') else 100 * value:.1f}"


def _interval(row: Row, name: str) -> str:
    low = row[f"{name}_low"]
    high = row[f"{name}_high"]
    return "-" if low is None else f"{cell(name, low)} - {cell(name, high)}"


def boxed_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of text in a frame, with centred cells; the first row is the header."""
    widths = _widths(table)
    line = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    rows = [
        "| "
        + " | ".join(text.center(width) for text, width in zip(row, widths, strict=True))
        + " |"
        for row in table
    ]
    return "\n".join([line, rows[0], line, *rows[1:], line])


def boxed_tables(table: Sequence[Sequence[str]], keys: int = 1) -> str:
    """`boxed_table` in as many boxes below each other as are needed for WIDTH.

    Columns of "-" are left out. A box is wider where its cells do not allow less. Each begins with
    the first `keys` columns."""
    widths = _widths(table)
    first = list(range(keys))
    boxes = []
    columns = first
    for column in range(keys, len(widths)):
        if all(row[column] == "-" for row in table[1:]):
            continue
        if len(columns) > keys and sum(widths[i] + 3 for i in (*columns, column)) + 1 > WIDTH:
            boxes.append(columns)
            columns = first
        columns = [*columns, column]
    return "\n".join(
        boxed_table([[row[i] for i in chosen] for row in table]) for chosen in (*boxes, columns)
    )


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in table) for i in range(len(table[0]))]


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of text as a Markdown table; the first row is the header."""
    rows = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([rows[0], "|" + " --- |" * len(table[0]), *rows[1:]])


def write_results(
    folder: Path, settings: Mapping[str, Any], results: Sequence[BenchmarkResult]
) -> None:
    """Write results.json (by problem), results.csv (a line a benchmark) and results.md.

    The last has both tables. The same completions give the same bytes."""
    content = {
        "format": FORMAT,
        "settings": dict(settings),
        "benchmarks": {
            result.row["dataset"]: {
                "row": result.row,
                "problems": [asdict(problem) for problem in result.problems],
            }
            for result in results
        },
    }
    write_whole(folder / RESULTS, json.dumps(content, indent=1) + "\n")
    lines = "".join(f"    {name}: {visible(str(value))}\n" for name, value in settings.items())
    tables = (markdown_table(table) for table in (first_table(results), second_table(results)))
    write_whole(folder / "results.md", "\n\n".join(["# Evaluation", lines, *tables]) + "\n")
    rows = [result.row for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", text.getvalue())
