"""Reads `results.json`, which an evaluation leaves, without anything that an evaluation needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.algorithms.intervals import Interval, accuracy_interval
from rlmath.config.files import read_json_object

RESULTS = "results.json"
FORMAT = 1
"""Version of results.json."""
GREEDY = "greedy_acc"
SAMPLED = "sample_pass@1"
"""The measures of a benchmark."""
MOST_BYTES = 2**28


@dataclass(frozen=True)
class Accuracies:
    """One measure of one benchmark."""

    shares: dict[str, float]
    """Share of right answers by problem id."""
    samples: int
    """Answers to each problem."""

    @property
    def mean(self) -> float:
        """Mean of the shares over the problems."""
        return sum(self.shares.values()) / len(self.shares)

    @property
    def interval(self) -> Interval:
        """The 95% interval of the mean."""
        return accuracy_interval(list(self.shares.values()), self.samples)

    def of(self, problems: list[str]) -> Accuracies:
        """The accuracies of these problems alone."""
        return Accuracies({problem: self.shares[problem] for problem in problems}, self.samples)


@dataclass(frozen=True)
class Results:
    """The content of a results.json."""

    name: str
    settings: dict[str, Any]
    accuracies: dict[str, dict[str, Accuracies]]
    """Accuracies by dataset and measure, GREEDY or SAMPLED."""


def read_results(path: Path, option: str = "--compare") -> Results:
    """Read an output folder's results.json, or the file itself.

    ValueError if it is not one, which names the `option`."""
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{option}: there is no {file}; needed: the --output of a finished evaluation"
        )
    try:
        content = read_json_object(file, MOST_BYTES)
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}; needed: {FORMAT}")
        accuracies = {
            str(dataset): _accuracies(benchmark["problems"])
            for dataset, benchmark in content["benchmarks"].items()
        }
        return Results(str(path), dict(content["settings"]), accuracies)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{option}: {file} is no results.json ({type(error).__name__}: {error})"
        ) from error


def _accuracies(problems: list[Mapping[str, Any]]) -> dict[str, Accuracies]:
    """Accuracies of the measures that were sampled."""
    greedy = {str(p["problem_id"]): float(p["greedy"]) for p in problems if p["greedy"] is not None}
    sampled = {
        str(p["problem_id"]): int(p["right"]) / int(p["samples"]) for p in problems if p["samples"]
    }
    samples = max((int(p["samples"]) for p in problems), default=0)
    if not all(0 <= share <= 1 for share in (*greedy.values(), *sampled.values())):
        raise ValueError("a problem's share of right answers is not from 0 to 1")
    measures = {GREEDY: Accuracies(greedy, 1), SAMPLED: Accuracies(sampled, samples)}
    return {measure: accuracies for measure, accuracies in measures.items() if accuracies.shares}
