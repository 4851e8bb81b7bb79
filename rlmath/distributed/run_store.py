"""The run's own values in torch's key-value store, as JSON.

Keys begin with the name of the run (torchrun's --rdzv-id) until its ranks share a random name for
each start, so that a run that reaches another one's store by mistake finds nothing of it there.
Whoever can reach the store's port can write anything, also what torch itself reads there:
docs/clusters.md says who may.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch.distributed as dist

RecordT = TypeVar("RecordT")

_ABSENT = "\0absent"
"""The value that `compare_set` returns for a missing key."""


def run_id() -> str:
    """The name of this run that its launcher gives all ranks.

    Runs to which torchrun gave none have the same."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


class RunStore:
    """Values by key, of this run only, for one thread at a time.

    RuntimeError where the store does not answer."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """`name` comes before all keys."""
        self._store = store
        self._name = name

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._full(key), json.dumps(value))

    def get(self, key: str) -> Any:
        """The value; None where there is none.

        Never waits."""
        # torch's `get` would wait for a key that is deleted after a `check`.
        content = self._store.compare_set(self._full(key), _ABSENT, _ABSENT)
        return None if content in (b"", _ABSENT.encode()) else json.loads(content)

    def get_all(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values that are there, by key: two requests where all are."""
        if not keys:
            return {}
        if self.all_there(keys):
            contents = self._store.multi_get([self._full(key) for key in keys])
            return {key: json.loads(content) for key, content in zip(keys, contents, strict=True)}
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def all_there(self, keys: Sequence[str]) -> bool:
        """Whether there are values at all keys: one request."""
        return self._store.check([self._full(key) for key in keys])

    def set_first(self, key: str, value: Any) -> Any:
        """Set the value if none is there; the one that is there then, of whichever rank."""
        return json.loads(self._store.compare_set(self._full(key), "", json.dumps(value)))

    def fetch_add(self, key: str) -> int:
        """Add 1 to a counter that all ranks share; returns what it was before, at first 0."""
        return self._store.add(self._full(key), 1) - 1

    def delete(self, key: str) -> None:
        self._store.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._name}/{key}"


def record_of(record_class: type[RecordT], value: Any) -> RecordT | None:
    """The dataclass of a JSON object with exactly its fields; None for any other object.

    Other code writes other objects."""
    names = {field.name for field in fields(record_class)}  # type: ignore[arg-type]
    return record_class(**value) if isinstance(value, dict) and value.keys() == names else None
