"""What is chosen of the tests with ranks is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.selection import POOLED_IN_MATRIX, POOLED_IN_TEST, mark_of_pooled


@pytest.mark.parametrize("name", [*POOLED_IN_TEST, *POOLED_IN_MATRIX])
def test_a_chosen_test_exists(name: str) -> None:
    file, _, test = name.partition("::")
    texts = [path.read_text() for path in Path(__file__).parent.rglob(f"{file}.py")]
    assert any(re.search(rf"^def {test.partition('[')[0]}", text, re.MULTILINE) for text in texts)


def test_the_session_of_a_test_with_ranks() -> None:
    chosen = POOLED_IN_TEST[0]
    assert mark_of_pooled(f"tests/distributed/{chosen.replace('::', '.py::')}") is None
    assert mark_of_pooled("tests/distributed/test_context.py::test_one[TP2]") == "matrix"
    assert mark_of_pooled("tests/distributed/test_switch.py::test_another") == "full"
