"""The settings of runs: what differs from the defaults, and in what several runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlmath.config.files import MAX_YAML_BYTES, read_regular
from rlmath.config.help import all_settings, as_yaml_word
from rlmath.config.terminal import visible

MOST_CHARS = 300
"""Most characters of a value."""

Settings = Mapping[str, Any]
"""Value by key ("optimizer.lr")."""


def read_settings(path: Path) -> Settings:
    """The settings in a run's `config.yaml`.

    ValueError where it holds something else, OSError where it cannot be read."""
    try:
        text = read_regular(path, MAX_YAML_BYTES).decode("utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}; needed: sections")
    return {
        f"{section}.{name}": value
        for section, values in tree.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def changed(settings: Settings) -> dict[str, tuple[str, str]]:
    """Value and default by key, of the settings that are not at their defaults.

    "" is the default of an unknown key."""
    differences = {}
    for key, value in settings.items():
        setting = all_settings().get(key)
        if setting is None:
            differences[key] = written(value), ""
        elif not _same(value, setting.default):
            differences[key] = (
                written(value),
                "must be given" if setting.default == "???" else written(setting.default),
            )
    return differences


def differing(runs: Sequence[Settings]) -> dict[str, list[str]]:
    """Values of the runs by key, of the settings that are not the same in all.

    "" stands where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run)
    order = {key: place for place, key in enumerate(all_settings())}
    differences = {}
    for key in sorted(keys, key=lambda key: order.get(key, len(order))):
        values = [written(run[key]) if key in run else "" for run in runs]
        if any(not _same(run.get(key), runs[0].get(key)) for run in runs[1:]):
            differences[key] = values
    return differences


def doc(key: str) -> str:
    """Sentence on what a setting does; "" for one that this version does not know."""
    setting = all_settings().get(key)
    return "" if setting is None else " ".join(setting.doc.split())


def written(value: Any) -> str:
    """A value on one line, all of its characters visible, of at most MOST_CHARS."""
    text = visible(as_yaml_word(value)).replace("\n", "\\n")
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ... ({len(text)} characters)"


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
