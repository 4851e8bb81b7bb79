"""A reward function whose number says which completion it belongs to.

It also says which answers the completion was scored against."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence


def hash_of(completion: str, solutions: Sequence[str]) -> float:
    """A number from -1 to 1 that tells completions and solutions apart.

    Two completions, or one completion with two lists of solutions, do not share it."""
    digest = hashlib.sha256(json.dumps([completion, list(solutions)]).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**31 - 1


def reward(completion: str, solutions: list[str], row: dict) -> tuple[float, dict[str, float]]:
    """What `reward.function` names.

    The metric is a hash of what the row says itself."""
    return hash_of(completion, solutions), {"row": hash_of(row["query_id"], row["solutions"])}


def of_group(
    completions: list[str], solutions: list[str], row: dict
) -> list[tuple[float, dict[str, float]]]:
    """What `reward` gives each of a group of two, with `reward.function_takes=group`."""
    if len(completions) != 2:
        raise ValueError(f"a group of {len(completions)}")
    return [reward(completion, solutions, row) for completion in completions]


def wrong(completion: str, solutions: list[str], row: dict) -> float:
    """Every answer is."""
    return 0.0
