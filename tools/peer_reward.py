"""The reward of tools/bench_peer.py's G1 on both sides.

No group is without contrast, whatever the model knows."""

from __future__ import annotations

from typing import Any


def early_letters(completion: str, solutions: Any = (), row: Any = None) -> float:
    """Share of a to m among all characters.

    >>> early_letters("abyz")
    0.5
    """
    return sum("a" <= character <= "m" for character in completion) / max(1, len(completion))
