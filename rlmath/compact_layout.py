"""A layout in one word, as AReaL and its successors write it: d32t2p1."""

from __future__ import annotations

import re

COMPACT_SECTION = "parallel"
"""The section of the config that such a word stands for."""

_LETTERS = {"d": "data", "t": "tensor", "m": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_FACTOR = re.compile(r"([a-z])(\d+)")


def compact_layout(word: str) -> dict[str, int | None]:
    """Sizes by the names of `ParallelConfig`; 1 where the word does not say, but for data: None, what remains.

    >>> compact_layout("d32t2p1")
    {'data': 32, 'tensor': 2, 'pipeline': 1, 'context': 1, 'expert': 1}

    ValueError for a word that is not one.
    """
    form = (
        f'"{COMPACT_SECTION}" got "{word:.40}"; needed: a layout such as d32t2p1 (d data, t or m tensor, p pipeline, '
        "c context, e expert)"
    )
    factors = _FACTOR.findall(word)
    if not factors or "".join(letter + size for letter, size in factors) != word:
        raise ValueError(f"{form}, or its keys one by one.")
    sizes: dict[str, int | None] = {"data": None, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
    named = [_LETTERS.get(letter) for letter, _ in factors]
    for (letter, size), name in zip(factors, named, strict=True):
        if name is None:
            raise ValueError(f'{form}. There is no size "{letter}".')
        if named.count(name) > 1:
            raise ValueError(f"{form}. The {name} size is given twice.")
        if len(size) > 6 or int(size) == 0:
            raise ValueError(f"{form}. The {name} size is {size:.10}.")
        sizes[name] = int(size)
    return sizes
