"""Marks that choose which tests run.

`make test` runs every test and case without one, `make test-matrix` those marked `matrix`, and
`make test-full` also those marked `full`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

matrix = pytest.mark.matrix
"""A mark of a test that `make test-matrix` runs, which CI does, too.

`make test` has another test of the same part of the program."""


def two_ranks(mark: pytest.MarkDecorator) -> Any:
    """The case of two ranks, for a parameter or fixture that `make test` has on one."""
    return pytest.param(2, marks=[pytest.mark.distributed, mark])


def keeping(cases: Iterable[Any], *kept: Any, others: int = 1) -> list[Any]:
    """Cases for `parametrize`, with marks.

    `make test` runs those of `kept`, `make test-matrix` the first so many of the `others`, and
    `make test-full` the rest. A case that has marks of its own stays as it is."""
    cases = list(cases)
    parameter_set = type(pytest.param())
    parameters = []
    count = 0
    assert all(case in cases for case in kept)
    for case in cases:
        if isinstance(case, parameter_set) or case in kept:
            parameters.append(case)
            continue
        count += 1
        mark = matrix if count <= others else pytest.mark.full
        parameters.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark))
    return parameters
