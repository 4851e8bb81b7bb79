"""The text of the code stays as plain as it is: counts of what makes a reader stop."""

from __future__ import annotations

import pytest

from tests.programs import REPOSITORY
from tools.clarity import Clarity, clarity_of

SOURCE = '''"""Of a module that has some of each."""

LIMIT = 3
"""For every call."""


def best(values: list[int]) -> int:
    """The largest of values."""
    found, one = max(values), 1
    for value in values:
        print(value, found, *values, *sorted(values))
    left, found = [found, one]
    return print(1, 2, 3, 4, 5) or found  # a line that is wider than a hundred columns, as nobody reads to its end
'''


def test_each_count_of_a_file() -> None:
    counts = Clarity()
    counts.add(SOURCE)
    assert counts == Clarity(
        statements=7,
        assigned_names=6,
        filler_names=3,
        lines=13,
        wide_lines=1,
        positional_calls=1,
        splatted_calls=1,
        tuple_assignments=1,
        functions=1,
        undocumented_functions=0,
        docstrings=3,
        fragments=2,
    )
    assert counts.row()[:3] == ["7", "50.0%", "7.7%"]


@pytest.mark.parametrize(
    (
        "folder",
        "filler_share",
        "wide_share",
        "positional_calls",
        "splatted_calls",
        "tuple_assignments",
    ),
    [
        ("rlmath", 0.002, 0.01, 30, 30, 40),
        ("tools", 0.002, 0.01, 7, 8, 8),
        ("tests", 0.005, 0.02, 540, 370, 60),
    ],
)
def test_the_counts_do_not_grow(
    folder: str,
    filler_share: float,
    wide_share: float,
    positional_calls: int,
    splatted_calls: int,
    tuple_assignments: int,
) -> None:
    """A little above what there is.

    Whoever lowers a count lowers its bound."""
    counts = clarity_of(REPOSITORY / folder)
    assert counts.filler_names <= filler_share * counts.assigned_names
    assert counts.wide_lines <= wide_share * counts.lines
    assert counts.positional_calls <= positional_calls
    assert counts.splatted_calls <= splatted_calls
    assert counts.tuple_assignments <= tuple_assignments
    assert counts.fragments == 0
