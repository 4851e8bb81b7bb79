"""Forms of the rows of `setting_tables` and `sensible_values`, and the check of each row.

A row says of which runs it is, `when`, in conditions that must all hold, and what the user reads,
`text`. A name in it that is no setting's raises where the row is made: when its file is
imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlmath.config.help import all_settings, is_among, section_classes, unknown_key_text
from rlmath.config.schema import Config

Condition = Callable[[Config], list[object]]
"""Conditions of a run that must all be true.

They are a list, not joined by `and`, so that every name is read when the row is checked."""

DEFAULTS = Config()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of a table of rules."""

    when: Condition = field(repr=False)
    text: str
    """Text that the user reads; {optimizer.lr} stands for the value."""

    def __post_init__(self) -> None:
        check_row(self, self.when, text=self.text)

    def holds(self, config: Config) -> bool:
        return all(self.when(config))


@dataclass(frozen=True, kw_only=True)
class Conflict(Rule):
    """A refused combination; the text is what was got, what is needed and what to change."""


@dataclass(frozen=True)
class Unused(Rule):
    """Settings that have no effect in such runs.

    The text goes on from "no effect", and may say why."""

    keys: Sequence[str]
    """A section with its dot, "critic.", stands for all its settings."""

    def __post_init__(self) -> None:
        check_row(self, self.when, text=self.text, keys=self.keys)


@dataclass(frozen=True, kw_only=True)
class Doubt(Rule):
    """A doubtful combination, which is told at the start and is no error."""


def check_row(row: object, when: Condition, text: str = "", keys: Iterable[str] = ()) -> None:
    """ValueError with the row where its condition, its text or its keys name what no setting is."""
    in_text = [
        key
        for key in re.findall(r"[a-z]+\.\w+", text)
        if key.partition(".")[0] in section_classes()
    ]
    unknown = [
        key
        for key in (*keys, *in_text)
        if not any(is_among(setting, [key]) for setting in all_settings())
    ]
    try:
        if unknown:
            raise ValueError(unknown_key_text(unknown[0]))
        conditions = when(DEFAULTS)
        text.format_map(vars(DEFAULTS))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{row}: {error}") from error
    if not isinstance(conditions, list):
        raise ValueError(
            f"{row}: the condition is {conditions!r}; needed: a list of what must all hold"
        )
