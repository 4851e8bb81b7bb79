"""docs/rewards.md says what is true: its tables are run."""

import re
from pathlib import Path

import pytest

from rlmath.answers.verifier import VERDICTS, Rules, verify
from rlmath.rewards.schemes import Scheme, raw_reward

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
_ROW = re.compile(
    r"^\| `(?P<gold>[^`]+)` \| `(?P<answer>[^`]+)` \| (?P<right>yes|no) \|(?P<why>[^|]*\|)?$", re.MULTILINE
)
_SCHEME = re.compile(r"^\| `(\w+)` \((?:AReaL|SimpleRL)\) \| (.*) \|$", re.MULTILINE)

STRICT_PART, LOOSE_PART = PAGE.split("`reward.strict: false` restores")


def rows(part: str) -> list[tuple[str, str, bool]]:
    return [(row["gold"], row["answer"], row["right"] == "yes") for row in _ROW.finditer(part)]


@pytest.mark.parametrize(("gold", "answer", "right"), rows(STRICT_PART))
def test_the_table_of_examples(gold, answer, right):
    assert verify(f"\\boxed{{{answer}}}", [gold], "math").correct is right


@pytest.mark.parametrize(("gold", "answer", "right"), rows(LOOSE_PART))
def test_the_table_of_the_loose_protocol(gold, answer, right):
    assert verify(f"\\boxed{{{answer}}}", [gold], "math", Rules(protocol=True)).correct is right


def test_every_row_of_the_tables_is_run():
    assert len(rows(STRICT_PART)) >= 40
    assert len(rows(LOOSE_PART)) == 4
    assert len(rows(PAGE)) == len(re.findall(r"\| (?:yes|no) \|", PAGE))


def test_the_table_of_schemes():
    table = dict(_SCHEME.findall(PAGE))
    assert set(table) == {"correctness", "mix", "independent"}
    for name, cells in table.items():
        *numbers, scaling = cells.split(" | ")
        found = [
            raw_reward(name, correct, boxed, format_penalty=-7.0)
            for correct, boxed in ((True, True), (True, False), (False, True), (False, False))
        ]
        assert found == [-7.0 if number == "`format_penalty`" else float(number) for number in numbers]
        assert Scheme(name).scale(verified=True) == float(scaling.split(",")[0])


def test_all_verdicts_are_named():
    assert all(f"`{kind}`" in PAGE for kind in VERDICTS)
