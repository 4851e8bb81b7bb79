"""Every labelled case is verified as its label says, and no class worse than by math-verify."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlmath.answers.verifier import FAILURES, verify
from tests.selection import matrix


def read_cases(name: str) -> list[dict]:
    return [
        json.loads(line)
        for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    ]


ROWS = read_cases("cases.jsonl")
BLIND = read_cases("cases_blind.jsonl")
"""Cases in ten parts, written by others who had seen neither code nor cases.

When the verifier first saw them it was right on 97.9%, 92.1%, 89.0%, 90.0%, 96.0%, 95.3%, 97.0%,
94.3%, 96.3% and 98.1% of them. It took no wrong answer for right in the third to the eighth part,
two in the ninth and 32 of 1,370 in the tenth: rates, areas and volumes that were not asked for. Of
the tenth's 2,316 cases only those are here that failed and a sample of the others. The ninth and
tenth have questions; earlier cases got one where their answer has a unit or noun that the
reference lacks."""


def test_the_set_is_large_spread_and_its_ids_are_unique():
    assert len(ROWS) >= 400
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert all(row["why"] for row in ROWS)
    classes = Counter(row["class"] for row in ROWS)
    assert len(classes) >= 30
    assert min(classes.values()) >= 8
    assert 0.25 < sum(row["correct"] for row in ROWS) / len(ROWS) < 0.75


def wrongly_verified(rows: list[dict]) -> list[dict]:
    """The rows whose verdict is not their label, or no verdict at all, each with it."""
    verdicts = [
        (
            row,
            verify(
                row["completion"],
                row["solutions"],
                row.get("task", "math"),
                question=row.get("question", ""),
            ),
        )
        for row in rows
    ]
    return [
        row | {"verdict": verdict}
        for row, verdict in verdicts
        if verdict.correct is not row["correct"] or verdict.verdict in FAILURES
    ]


def shown(rows: list[dict]) -> str:
    return "\n".join(map(str, rows))


def in_parts(rows: list[dict]) -> list:
    """Every fourth row for `make test`, and the others for `make test-matrix`."""
    other_rows = [row for number, row in enumerate(rows) if number % 4]
    return [
        pytest.param(rows[::4], id="every fourth"),
        pytest.param(other_rows, id="the others", marks=matrix),
    ]


@pytest.mark.parametrize("rows", in_parts(ROWS))
def test_the_verifier_agrees_with_every_label(rows: list[dict]):
    wrong = wrongly_verified(rows)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("rows", in_parts(BLIND))
def test_cases_written_without_sight_of_the_verifier(rows: list[dict]):
    """The verifier refuses right answers only in habits unknown to it, and accepts no wrong one."""
    wrong = wrongly_verified(rows)
    assert all(row["correct"] for row in wrong) and len(wrong) <= 0.01 * len(rows), shown(wrong)
