"""Ranks and hosts in the words of messages: short, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_NAMED = 8


def ranks_text(ranks: Iterable[int]) -> str:
    """Runs of numbers.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 7])
    ('rank 3', 'ranks 0-2, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    alone = len(runs) == 1 and runs[0][0] == runs[0][1]
    return ("rank " if alone else "ranks ") + ", ".join(texts)


def hosts_text(hosts: Sequence[str]) -> str:
    """The first few names, and how many more.

    >>> hosts_text(["a", "b"]), hosts_text([f"n{i}" for i in range(10)])
    ('a, b', 'n0, n1, n2, n3, n4, n5, n6, n7 and 2 more')
    """
    more = f" and {len(hosts) - MOST_NAMED} more" if hosts[MOST_NAMED:] else ""
    return ", ".join(hosts[:MOST_NAMED]) + more
