"""Typed reading of a Hugging Face config.json, which is somebody else's file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_MAX_SIZE = 2**31 - 1
_DTYPES = ("float32", "bfloat16", "float16")


def shown(value: Any) -> str:
    """A value as an error message shows it."""
    return "missing" if value is None else repr(value)[:80]


class Fields:
    """Typed reading of config.json; what is wrong is collected in `problems` and read as 1."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.problems: list[str] = []

    def note(self, problem: str) -> None:
        text = f"{self.path}: {problem}."
        if text not in self.problems:
            self.problems.append(text)

    def whole(
        self,
        key: str,
        most: int = _MAX_SIZE,
        default: int | None = None,
        values: dict[str, Any] | None = None,
        least: int = 1,
    ) -> int:
        """A whole number in `values`, or without them in the file's own; null is like missing."""
        stated_value = (self.values if values is None else values).get(key)
        value = default if stated_value is None else stated_value
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.note(f'"{key}" is {shown(value)}; needed: a whole number from {least} to {most}')
        return 1

    def positive(
        self, key: str, values: dict[str, Any] | None = None, default: float | None = None
    ) -> float:
        """A number above 0 in `values`, or without them in the file's own; null is like missing."""
        stated_value = (self.values if values is None else values).get(key)
        value = default if stated_value is None else stated_value
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value <= sys.float_info.max
        ):
            return float(value)
        self.note(f'"{key}" is {shown(value)}; needed: a number above 0')
        return 1.0

    def flag(self, key: str, values: dict[str, Any] | None = None, default: bool = False) -> bool:
        """A switch in `values`, or without them in the file's own; null is like missing."""
        stated_value = (self.values if values is None else values).get(key)
        value = default if stated_value is None else stated_value
        if not isinstance(value, bool):
            self.note(f'"{key}" is {value!r}; needed: true or false')
        return value is True

    def dtype(self) -> str:
        """The number format, "dtype" (transformers 5) or "torch_dtype" (transformers 4)."""
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key) or "float32"
        if value not in _DTYPES:
            self.note(f'"{key}" is {value!r}; needed: one of {", ".join(_DTYPES)}')
        return str(value)
