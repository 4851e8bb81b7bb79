"""The dataclasses of the config say of themselves what a user needs to know."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlmath.config.help import all_settings, as_yaml_word, field_docs, section_classes
from rlmath.config.schema import MISSING, Config

PATHS = {"run.output_dir", "model.path", "data.train_path"}
FREE_TEXTS = {
    *PATHS,
    "model.adapter_path",
    "data.more_train_paths",
    "data.chat_template",
    "data.chat_template_kwargs",
    "data.system_prompt",
    "validation.paths",
    "sft.held_out_path",
    "critic.path",
    "data.history_path",
    "reward.function",
    "run.plugins",
    "validation.scorer",
    "turns.feedback",
    "environment.function",
    "telemetry.metrics",
    "teacher.path",
    "reward.rewards",
    "telemetry.wandb_project",
    "telemetry.wandb_name",
    "save.push_to_hub",
}


def test_every_field_has_a_docstring_right_under_it():
    fields = [f.name for c in section_classes().values() for f in dataclasses.fields(c)]
    assert [setting.key for setting in all_settings().values() if not setting.doc] == []
    assert len(fields) == len(all_settings()) > 40


def test_docs_are_found_under_fields_only():
    source = (
        'class A:\n    """Its own."""\n    x: int = 1\n    """Of\n    x."""\n    y: int = '
        "2\n    3\n"
    )
    assert field_docs(source) == {("A", "x"): "Of x."}


def test_every_section_is_frozen_and_has_a_docstring():
    for section in (Config, *section_classes().values()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section(), "any_name", 1)  # noqa: B010 (not a field of every section)
        assert section.__doc__ and not section.__doc__.startswith(f"{section.__name__}(")


def test_omegaconf_reads_every_field():
    assert set(OmegaConf.structured(Config)) == set(section_classes())


def test_only_the_paths_must_be_given():
    assert {key for key, setting in all_settings().items() if setting.default == MISSING} == PATHS


@pytest.mark.parametrize("key", all_settings())
def test_every_number_has_a_range_and_every_word_its_set(key: str):
    setting = all_settings()[key]
    kind = setting.type_name.removeprefix("list of ")
    assert (setting.range is not None) == kind.startswith(("int", "float"))
    assert bool(setting.words) == (kind.startswith("str") and key not in FREE_TEXTS)
    assert setting.range or setting.words or kind.startswith("bool") or key in FREE_TEXTS
    assert (
        setting.default == []
        if kind != setting.type_name
        else setting.problem(setting.default) is None
    )


def test_no_type_default_range_or_word_changes_unseen():
    """settings.txt has a line for every setting; whoever changes a setting changes its line, too.

    It was written before types, ranges and words stood in one place."""
    lines = (Path(__file__).parent / "settings.txt").read_text(encoding="utf-8").splitlines()
    assert [table_line(key) for key in all_settings()] == lines[1:]


def table_line(key: str) -> str:
    setting = all_settings()[key]
    limits = all_settings()[key].range
    bounds = (str(limits), limits.why) if limits else ("", "")
    default = as_yaml_word(setting.default)
    words = " ".join(setting.words)
    return " | ".join((key, setting.type_name, default, *bounds, words)).rstrip()
