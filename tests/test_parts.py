"""`make test-full PART=...`: no test is left out, none runs twice."""

from __future__ import annotations

import pytest

from tests.__main__ import main
from tests.parts import PARTS, TESTS, part_of, paths_of


def test_every_file_of_tests_is_in_one_part_and_every_name_of_a_part_exists() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 100
    assert {file.name: part_of(file) for file in files if len(part_of(file)) != 1} == {}
    assert [name for names in PARTS.values() for name in names if not (TESTS / name).exists()] == []


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--part", "rolout"]) == 2
    message = capsys.readouterr().err
    assert '"rolout"' in message and "rollout" in message
    assert paths_of("evals") == ["tests/evals", "tests/report"]
