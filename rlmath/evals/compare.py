"""Compares two evaluations, with the interval of their difference."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.intervals import difference_interval
from rlmath.config.help import counted
from rlmath.config.terminal import visible
from rlmath.evals.tables import boxed_tables
from rlmath.report.results_file import Accuracies, Results


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
    """Second minus first, with the interval of pairs (`difference_interval`).

    The pairs are formed problem by problem."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        _, low, high = self.difference
        return low > 0 or high < 0


def differences(first: Results, second: Results) -> list[Difference]:
    """The differences of every benchmark and measure that both have.

    ValueError if they have none in common."""
    rows = []
    for dataset, measures in first.accuracies.items():
        for measure, first_accuracies in measures.items():
            second_accuracies = second.accuracies.get(dataset, {}).get(measure)
            common = (
                []
                if second_accuracies is None
                else [
                    problem
                    for problem in first_accuracies.shares
                    if problem in second_accuracies.shares
                ]
            )
            if second_accuracies is not None and common:
                rows.append(
                    _difference(
                        dataset, measure, first_accuracies, second=second_accuracies, common=common
                    )
                )
    if not rows:
        raise ValueError(
            f"--compare: {first.name} has {', '.join(first.accuracies) or 'nothing'}, "
            f"{second.name} has "
            f"{', '.join(second.accuracies) or 'nothing'}; needed: a benchmark in common, greedy "
            "or sampled in both"
        )
    return rows


def _difference(
    dataset: str, measure: str, first: Accuracies, second: Accuracies, common: list[str]
) -> Difference:
    """The difference of the second evaluation from the first on these problems."""
    before = first.of(common)
    after = second.of(common)
    pairs = [after.shares[problem] - before.shares[problem] for problem in common]
    return Difference(
        dataset,
        measure,
        problems=len(common),
        left_out=len(first.shares.keys() ^ second.shares.keys()),
        first=(before.mean, *before.interval),
        second=(after.mean, *after.interval),
        difference=(sum(pairs) / len(pairs), *difference_interval(pairs)),
    )


def other_settings(first: Results, second: Results) -> list[str]:
    """One clause for each setting that differs, without those of the model."""
    names = dict.fromkeys([*first.settings, *second.settings])
    return [
        f"{name} is {first.settings.get(name)!r} in the first and {second.settings.get(name)!r} "
        "in the second"
        for name in names
        if not name.startswith(("about_", "model"))
        and first.settings.get(name) != second.settings.get(name)
    ]


def comparison_text(first: Results, second: Results) -> str:
    """The table of differences with notes; in percent, differences in percentage points."""
    table = [
        ["dataset", "measure", "A", "B", "B - A", "B - A 95%", "", "problems", "A 95%", "B 95%"]
    ]
    rows = differences(first, second)
    for row in rows:
        (mean_a, interval_a), (mean_b, interval_b), difference = (
            _cells(row.first),
            _cells(row.second),
            _cells(row.difference, "+"),
        )
        cells = [
            row.dataset,
            row.measure,
            mean_a,
            mean_b,
            *difference,
            "clear" if row.is_clear else "",
        ]
        table.append([*cells, str(row.problems), interval_a, interval_b])
    named = {"A": first, "B": second}
    notes = [
        f"{name}: {results.name} (model {results.settings.get('about_model', '?')})"
        for name, results in named.items()
    ]
    notes += [f"Settings differ: {sentence}." for sentence in other_settings(first, second)]
    notes += [
        f"{row.dataset}, {row.measure}: {counted(row.left_out, 'problem', 'are')} in one of the "
        "two only, and left out."
        for row in rows
        if row.left_out
    ]
    unshared = sorted(first.accuracies.keys() ^ second.accuracies.keys())
    notes += [f"In one of the two only: {', '.join(unshared)}."] if unshared else []
    notes += [boxed_tables(table, keys=2), '"clear": the 95% interval of B - A leaves out 0.']
    return visible("\n".join(notes))


def _cells(mean: tuple[float, float, float], sign: str = "") -> list[str]:
    percent, low, high = (100 * number for number in mean)
    return [f"{percent:{sign}.1f}", f"{low:{sign}.1f} to {high:{sign}.1f}"]
