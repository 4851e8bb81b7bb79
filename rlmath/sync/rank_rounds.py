"""One rank's part of the plan, round by round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.sync.plan import Copy, SyncPlan


@dataclass(frozen=True)
class RankRound:
    """What one rank does in one round. Both ends list a pair's copies in the same order."""

    sends: dict[int, tuple[Copy, ...]]
    """By receiving rank."""
    receives: dict[int, tuple[Copy, ...]]
    """By sending rank."""
    offsets: dict[int, int]
    """By sending rank: where its part for this rank starts among all that it sends in this round (elements)."""
    local: tuple[Copy, ...]
    """To be done while the others travel."""
    complete: tuple[str, ...]
    """Parameters of the engine that have all their elements after this round."""


def rank_rounds(plan: SyncPlan, rank: int) -> list[RankRound]:
    """One rank's part, at least one round. Local copies are spread: a parameter's go with the last of its others."""
    rounds = plan.rounds or ((),)
    last = {c.target_parameter: n for n, copies in enumerate(rounds) for c in copies if c.target == rank}
    own = list(dict.fromkeys(copy.target_parameter for copy in plan.local[rank]))
    alone = [name for name in own if name not in last]
    done = last | {name: number * len(rounds) // len(alone) for number, name in enumerate(alone)}
    complete: list[list[str]] = [[] for _ in rounds]
    for name, number in done.items():
        complete[number].append(name)
    local: list[list[Copy]] = [[] for _ in rounds]
    for copy in plan.local[rank]:
        local[done[copy.target_parameter]].append(copy)
    return [
        _rank_round(copies, rank, tuple(local[number]), tuple(complete[number]))
        for number, copies in enumerate(rounds)
    ]


def _rank_round(
    copies: Sequence[Copy], rank: int, local: tuple[Copy, ...], complete: tuple[str, ...]
) -> RankRound:
    by_pair: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_pair[copy.source, copy.target].append(copy)
    offsets, sent = {}, defaultdict(int)
    for source, target in sorted(by_pair):
        if target == rank:
            offsets[source] = sent[source]
        sent[source] += sum(copy.elements for copy in by_pair[source, target])
    return RankRound(
        sends={t: tuple(by_pair[s, t]) for s, t in sorted(by_pair) if s == rank},
        receives={s: tuple(by_pair[s, t]) for s, t in sorted(by_pair) if t == rank},
        offsets=offsets,
        local=local,
        complete=complete,
    )
