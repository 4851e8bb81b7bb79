"""docs/rewards.md says what is true: its tables are run."""

import re
from pathlib import Path

from rlmath.answers.verifier import STRICT, VERDICTS, Rules, verify
from rlmath.config.help import all_settings
from rlmath.config.schema import RewardConfig
from rlmath.rewards.schemes import raw_reward, reward_scale

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
_ROW = re.compile(
    r"^\| `(?P<gold>[^`]+)` \| `(?P<answer>[^`]+)` \| (?P<right>yes|no) \|(?P<why>[^|]*\|)?$",
    re.MULTILINE,
)
_ASKED = re.compile(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \| (right|wrong) \|$", re.MULTILINE)
_SCHEME = re.compile(r"^\| `(\w+)` \((?:AReaL|DAPO|TRL, verl|SimpleRL)\) \| (.*) \|$", re.MULTILINE)

STRICT_PART, LOOSE_PART = PAGE.split("`reward.strict: false` restores")


def rows(part: str) -> list[tuple[str, str, bool]]:
    return [(row["gold"], row["answer"], row["right"] == "yes") for row in _ROW.finditer(part)]


def test_the_tables_of_examples():
    for part, rules in ((STRICT_PART, STRICT), (LOOSE_PART, Rules(protocol=True))):
        wrong = [
            (gold, answer)
            for gold, answer, right in rows(part)
            if verify(f"\\boxed{{{answer}}}", [gold], rules=rules).correct is not right
        ]
        assert not wrong, wrong


def test_the_table_of_questions():
    answers = _ASKED.findall(PAGE)
    assert len(answers) == PAGE.count("| right |\n") + PAGE.count("| wrong |\n") >= 9
    wrong = [
        (question, answer)
        for question, gold, answer, verdict in answers
        if verify(f"\\boxed{{{answer}}}", [gold], question=question).correct
        is not (verdict == "right")
    ]
    assert not wrong, wrong


def test_every_row_of_the_tables_is_run():
    assert len(rows(STRICT_PART)) >= 40
    assert len(rows(LOOSE_PART)) == 4
    assert len(rows(PAGE)) == len(re.findall(r"\| (?:yes|no) \|", PAGE))


def test_the_table_of_schemes():
    table = dict(_SCHEME.findall(PAGE))
    assert set(table) == set(all_settings()["reward.scheme"].words)
    for name, cells in table.items():
        *numbers, scaling = cells.split(" | ")
        settings = RewardConfig(name, format_penalty=-7.0)
        rewards = [
            raw_reward(settings, correct, boxed)
            for correct, boxed in ((True, True), (True, False), (False, True), (False, False))
        ]
        assert rewards == [
            -7.0 if number == "`format_penalty`" else float(number) for number in numbers
        ]
        assert reward_scale(settings, verified=True) == float(scaling.split(",")[0])


def test_all_verdicts_are_named():
    assert all(f"`{kind}`" in PAGE for kind in VERDICTS)
