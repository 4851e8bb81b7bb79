"""Compares two evaluations, with the interval of their difference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.terminal import visible
from rlmath.evals.pass_at_k import bootstrap_interval
from rlmath.evals.tables import FORMAT, RESULTS, boxed_tables


@dataclass(frozen=True)
class Results:
    """The content of a results.json."""

    name: str
    settings: dict[str, Any]
    values: dict[str, dict[str, dict[str, float]]]
    """By dataset and measure ("greedy_acc", "sample_pass@1"): the share of correct answers by problem id."""


@dataclass(frozen=True)
class Difference:
    """One measure of one benchmark, over the problems that both evaluations have."""

    dataset: str
    measure: str
    problems: int
    left_out: int
    """Problems that only one of the two has."""
    first: tuple[float, float, float]
    """Mean over problems, and both ends of its 95% interval."""
    second: tuple[float, float, float]
    difference: tuple[float, float, float]
    """Second minus first: resampled in pairs, problem by problem."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        _, low, high = self.difference
        return low > 0 or high < 0


def read_results(path: Path) -> Results:
    """Read an output folder's results.json, or the file itself. ValueError if it is not one."""
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--compare: there is no {file}; needed: the --output of a finished evaluation")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}; needed: {FORMAT}")
        values = {str(name): _values(found["problems"]) for name, found in content["benchmarks"].items()}
        return Results(str(path), dict(content["settings"]), values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"--compare: {file} is no results.json ({type(error).__name__}: {error})") from error


def _values(problems: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    greedy = {str(p["problem_id"]): float(p["greedy"]) for p in problems if p["greedy"] is not None}
    sampled = {str(p["problem_id"]): int(p["right"]) / int(p["samples"]) for p in problems if p["samples"]}
    return {name: found for name, found in (("greedy_acc", greedy), ("sample_pass@1", sampled)) if found}


def differences(first: Results, second: Results, seed: int = 0) -> list[Difference]:
    """The differences of every benchmark and measure that both have. ValueError if they have none in common."""
    found = []
    for dataset, measures in first.values.items():
        for measure, ours in measures.items():
            theirs = second.values.get(dataset, {}).get(measure, {})
            common = [problem for problem in ours if problem in theirs]
            if common:
                a, b = [ours[p] for p in common], [theirs[p] for p in common]
                pairs = [later - earlier for earlier, later in zip(a, b, strict=True)]
                left_out = len(ours.keys() ^ theirs.keys())
                means = (_mean(a, seed), _mean(b, seed), _mean(pairs, seed))
                found.append(Difference(dataset, measure, len(common), left_out, *means))
    if not found:
        raise ValueError(
            f"--compare: {first.name} has {', '.join(first.values) or 'nothing'}, {second.name} has "
            f"{', '.join(second.values) or 'nothing'}; needed: a benchmark in common, greedy or sampled in both"
        )
    return found


def _mean(values: list[float], seed: int) -> tuple[float, float, float]:
    return (sum(values) / len(values), *bootstrap_interval(values, seed))


def other_settings(first: Results, second: Results) -> list[str]:
    """One clause for each setting that differs, without those of the model."""
    names = dict.fromkeys([*first.settings, *second.settings])
    return [
        f"{name} is {first.settings.get(name)!r} in the first and {second.settings.get(name)!r} in the second"
        for name in names
        if not name.startswith(("about_", "model")) and first.settings.get(name) != second.settings.get(name)
    ]


def comparison_text(first: Results, second: Results) -> str:
    """The table of differences with notes; in percent, differences in percentage points."""
    table = [["dataset", "measure", "A", "B", "B - A", "B - A 95%", "", "problems", "A 95%", "B 95%"]]
    found = differences(first, second)
    for one in found:
        (a, of_a), (b, of_b), difference = _cells(one.first), _cells(one.second), _cells(one.difference, "+")
        row = [one.dataset, one.measure, a, b, *difference, "clear" if one.is_clear else ""]
        table.append([*row, str(one.problems), of_a, of_b])
    named = {"A": first, "B": second}
    notes = [
        f"{name}: {one.name} (model {one.settings.get('about_model', '?')})" for name, one in named.items()
    ]
    notes += [f"Settings differ: {sentence}." for sentence in other_settings(first, second)]
    notes += [
        f"{one.dataset}, {one.measure}: {one.left_out} problems are in one of the two only, and are left out."
        for one in found
        if one.left_out
    ]
    alone = sorted(first.values.keys() ^ second.values.keys())
    notes += [f"In one of the two only: {', '.join(alone)}."] if alone else []
    notes += [boxed_tables(table, keys=2), '"clear": the 95% interval of B - A leaves out 0.']
    return visible("\n".join(notes))


def _cells(mean: tuple[float, float, float], sign: str = "") -> list[str]:
    value, low, high = (100 * number for number in mean)
    return [f"{value:{sign}.1f}", f"{low:{sign}.1f} to {high:{sign}.1f}"]
