"""Which cases of a behaviour `make test` runs, and which `make test-matrix` adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

matrix = pytest.mark.matrix
"""On a test: `make test` has another one of the same behaviour, CI runs this one with `make test-matrix`."""


def keeping(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases for `parametrize`: `make test` runs those of `kept`, `make test-matrix` the others. A case that has marks
    of its own stays as it is."""
    cases, own = list(cases), type(pytest.param())
    assert all(case in cases for case in kept)
    return [case if isinstance(case, own) or case in kept else _marked(case) for case in cases]


def _marked(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=matrix)
