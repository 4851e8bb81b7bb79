"""Rules about settings that do not go together: what a row may name, and what is said of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.schema import Config, LoraConfig
from rlmath.planning import sensible_values, setting_tables
from rlmath.planning.sensible_values import SensibleRange
from rlmath.planning.setting_rules import Conflict, Unused


@pytest.mark.parametrize(
    ("file", "right", "misspelt", "told"),
    [
        (
            setting_tables,
            '["algorithm.pass_k"]',
            '["algorithm.pas_k"]',
            'did you mean "algorithm.pass_k"',
        ),
        (setting_tables, '["critic.", ', '["critics.", ', 'unknown key "critics."'),
        # The second condition of a row, where the first does not hold by default.
        (
            setting_tables,
            "config.parallel.virtual_pipeline > 1",
            "config.parallel.virtual > 1",
            "'virtual'",
        ),
        (
            setting_tables,
            "not teacher.with_rewards",
            "not teacher.with_reward",
            "'with_reward'",
        ),
        (setting_tables, "{parallel.context}", "{parallel.contexts}", "parallel.contexts"),
        (setting_tables, "{parallel.context}", "{paralel.context}", "paralel"),
        (
            setting_tables,
            "raise parallel.pipeline",
            "raise parallel.pipelines",
            "parallel.pipelines",
        ),
        (sensible_values, '"critic.gamma"', '"critic.gama"', 'did you mean "critic.gamma"'),
        (sensible_values, "config.algorithm.loss ==", "config.algorithm.los ==", "'los'"),
    ],
)
def test_a_misspelt_setting_raises_when_the_tables_are_imported(
    file, right: str, misspelt: str, told: str
):
    source = Path(file.__file__).read_text(encoding="utf-8")
    assert right in source
    wrong = compile(source.replace(right, misspelt, 1), "wrong.py", "exec")
    names = vars(file).copy()
    with pytest.raises(ValueError) as error:
        exec(wrong, names)
    row, _, problem = str(error.value).partition("): ")
    assert row.split("(")[0] in ("Conflict", "Unused", "SensibleRange") and told in problem


def test_a_row_whose_condition_is_no_list_is_refused():
    with pytest.raises(
        ValueError, match=r"Conflict\(text='never'\): the condition is 0; needed: a list"
    ):
        Conflict(when=lambda config: config.lora.rank and config.lora.alpha > 1, text="never")  # type: ignore


def test_a_row_holds_where_all_of_its_conditions_do():
    row = Unused(
        ["lora.alpha"], when=lambda config: [config.lora.rank == 0, config.run.seed], text="so"
    )
    other = Config(lora=LoraConfig(rank=8))
    assert [row.holds(Config()), row.holds(other)] == [True, False]
    doubt = SensibleRange("lora.alpha", 100, when=row.when).doubt
    assert (doubt(Config()) or "").startswith("lora.alpha=32 is legal") and doubt(other) is None
