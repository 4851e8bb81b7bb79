"""Partial rollouts (`rollout.tail`): which groups are in flight, and which of them a step learns
from. Pure.

    draws -> groups in flight -> rounds: every sequence that is sampled gets at most so many new tokens
          -> complete groups leave in the order of their draws; the others stay in flight

- "carry" (`advance_carry`): what is not complete goes on in the next step, from where it is (Kimi
  k1.5, arXiv:2501.12599, section 2.6.2).
- "defer" (`advance_defer`): what is not complete is discarded. Its group waits until there are
  enough such groups for a step, which samples them anew and whole (RollPacker's tail batching,
  arXiv:2509.21009, with the same noise).

What a step samples and learns follows from tokens, settings and this state, never from the clock.
It learns from `groups_per_step` groups that selection keeps; every group that was drawn leaves
once, learned or dropped by selection.

Draws are counted over the whole run: draw d is place d of all steps' prompts, one step behind the
other, so that a run with partial rollouts learns from the same prompts, with the same seeds, as one
without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    Prompt,
    ScoredCompletion,
    ScoredGroup,
    scored_group,
)


@dataclass(frozen=True)
class UnfinishedGroup:
    """A prompt that was drawn, and what is sampled of its completions."""

    draw: int
    """Which draw of the run it was, counted from 0."""
    first_step: int
    """The step, counted from 0, in which its first token was sampled."""
    samples: tuple[PartialCompletion | ScoredCompletion, ...]
    """By sample index: those that are finished have a score."""
    deferred: bool = False
    """A completion of it did not fit a short round: it waits for a whole one."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples that are not finished."""
        return [g for g, sample in enumerate(self.samples) if isinstance(sample, PartialCompletion)]

    @property
    def parts(self) -> list[PartialCompletion | Completion]:
        """By sample index: what is sampled of it, without scores."""
        return [
            one.completion if isinstance(one, ScoredCompletion) else one for one in self.samples
        ]

    @property
    def is_complete(self) -> bool:
        return PartialCompletion not in map(
            type, self.samples
        )  # often asked: faster than isinstance of each

    def nothing_sampled(self, deferred: bool) -> UnfinishedGroup:
        """The group without what is sampled of it."""
        if deferred == self.deferred and all(sample is NOTHING_SAMPLED for sample in self.samples):
            return self
        return replace(self, samples=(NOTHING_SAMPLED,) * len(self.samples), deferred=deferred)

    def scored(self, prompt: Prompt) -> ScoredGroup:
        """The group as it is learned from; it must be complete."""
        return scored_group(prompt, self.samples)


@dataclass(frozen=True)
class UnfinishedRules:
    """How many groups are in flight, and for how long."""

    groups_per_step: int
    """Groups that a step learns from."""
    max_groups: int
    """Most groups in flight; with "carry" at most groups_per_step x (max_staleness + 1)."""
    max_staleness: int
    """Most steps between the one that sampled a group's first token and the one that learns from
    it."""
    max_dropped: int = 0
    """Most groups of a step that selection may drop and that others take the place of."""


@dataclass
class UnfinishedGroups:
    """The groups in flight: the state that partial rollouts carry from step to step."""

    groups: list[UnfinishedGroup] = field(default_factory=list)
    """In the order of their draws."""
    next_draw: int = 0
    short_share: float = 0.5
    """"defer": share of the groups of the last short rounds that became complete (0 to 1)."""


@dataclass(frozen=True)
class Leaving:
    """What leaves the unfinished groups in a step."""

    groups: list[UnfinishedGroup]
    """Complete, in the order of their draws."""
    chosen: list[Chosen]
    """What is learned from of each."""
    rounds: int = 0
    """Rounds that the step made."""
    waits: int = 0
    """Of these, those that it made only because groups would have become too old."""

    @property
    def kept(self) -> int:
        return sum(one.dropped is None for one in self.chosen)


def advance_carry(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    step: int,
    steps_left: int,
    samples: int,
    sample_round: Callable[[list[UnfinishedGroup]], list[UnfinishedGroup]],
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """Make step `step`, counted from 0, of a run that has `steps_left` steps more, this one among
    them: draw groups of so many `samples`, make rounds, and take out of the unfinished groups what
    the step learns from. Where enough groups are complete already, nothing is drawn and no round is
    made, unless the step would leave a group behind that could not be learned within
    `max_staleness` steps of its first token.

    `sample_round` gets all groups in flight and returns them after a round; `choose` says what is
    learned from of a complete group. At the end of `steps_left` steps nothing is in flight, but for
    at most `max_dropped` groups from which no step learns: others took their place where selection
    dropped some.
    """
    found, rounds, waits = leaving(unfinished, rules, choose), 0, 0
    while not (enough := is_enough(found, rules)) or too_old(
        left_behind(unfinished, found), rules, step, choose
    ):
        draw(unfinished, room(unfinished, found, rules, steps_left), step, samples)
        if not any(group.unfinished for group in unfinished.groups):
            break
        unfinished.groups = sample_round(unfinished.groups)
        rounds, waits = rounds + 1, waits + enough
        found = leaving(unfinished, rules, choose)
    unfinished.groups = left_behind(unfinished, found)
    return replace(found, rounds=rounds, waits=waits)


def advance_defer(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    step: int,
    steps_left: int,
    samples: int,
    sample_round: Callable[[list[UnfinishedGroup], bool], list[UnfinishedGroup]],
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """As `advance_carry`, but nothing that is sampled stays in flight.

    `sample_round` gets groups of which nothing is sampled and whether to sample them whole, and
    returns them after that.

    - A short round samples groups that are not deferred, more than are missing, since some do not
      become complete: those are deferred.
    - A whole round, as soon as a step's groups are deferred, or the run has too few draws left for
      a short one, samples as many as are missing.
    """
    found, rounds = Leaving([], []), 0
    while not is_enough(found, rules):
        missing = rules.groups_per_step - found.kept
        waiting = [group for group in unfinished.groups if not group.is_complete]
        deferred = [group for group in waiting if group.deferred]
        others = [group for group in waiting if not group.deferred]
        new = room(unfinished, found, rules, steps_left)
        whole = len(deferred) >= rules.groups_per_step or len(others) + new < missing
        wanted = missing if whole else with_reserve(missing, unfinished.short_share)
        chosen = [*deferred, *others][:wanted] if whole else others[:wanted]
        chosen += draw(unfinished, min(new, wanted - len(chosen)), step, samples)
        if not chosen:
            break
        sampled = {group.draw: group for group in sample_round(chosen, whole)}
        if not whole:
            complete = sum(group.is_complete for group in sampled.values()) / len(sampled)
            unfinished.short_share = (unfinished.short_share + complete) / 2
        unfinished.groups = [
            one if one.is_complete else one.nothing_sampled(one.deferred or one.draw in sampled)
            for one in (sampled.get(group.draw, group) for group in unfinished.groups)
        ]
        found, rounds = leaving(unfinished, rules, choose), rounds + 1
    unfinished.groups = [
        group.nothing_sampled(group.deferred) for group in left_behind(unfinished, found)
    ]
    return replace(found, rounds=rounds)


RESERVE = 1.5
"""Standard deviations by which a short round has more groups than should suffice."""
LEAST_SHARE = 0.25
"""Of the groups of a short round that are expected to become complete."""


def with_reserve(missing: int, share: float) -> int:
    """How many groups to sample, each of which becomes complete with probability `share`, so that
    `missing` do.

    >>> with_reserve(10, share=1.0), with_reserve(10, share=0.5), with_reserve(10, share=0.0)
    (10, 28, 61)
    """
    share = max(share, LEAST_SHARE)
    # The root of n share - RESERVE sqrt(n share (1 - share)) = missing.
    deviation = RESERVE * math.sqrt(share * (1 - share))
    root = (deviation + math.sqrt(deviation**2 + 4 * share * missing)) / (2 * share)
    return math.ceil(root**2 - 1e-9)


def draw(
    unfinished: UnfinishedGroups, count: int, step: int, samples: int
) -> list[UnfinishedGroup]:
    """The next groups, which are in flight from now on."""
    first = unfinished.next_draw
    drawn = [UnfinishedGroup(first + i, step, (NOTHING_SAMPLED,) * samples) for i in range(count)]
    unfinished.groups += drawn
    unfinished.next_draw += len(drawn)
    return drawn


def room(
    unfinished: UnfinishedGroups, found: Leaving, rules: UnfinishedRules, steps_left: int
) -> int:
    """How many groups to draw now.

    `found` are those that would leave the unfinished groups now, of which selection drops some:
    others take the place of up to `max_dropped`.

    >>> room(UnfinishedGroups(), Leaving([], []), UnfinishedRules(4, 8, max_staleness=1), steps_left=1)
    4
    """
    most = min(rules.max_groups, rules.groups_per_step * steps_left)
    replaced = min(len(found.groups) - found.kept, rules.max_dropped)
    return max(0, most - (len(unfinished.groups) - replaced))


def leaving(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """The complete groups that a step would take now, those drawn first: up to `groups_per_step`
    that selection keeps, and with the dropped ones among them at most `max_dropped` more."""
    taken, chosen, kept = [], [], 0
    for group in unfinished.groups:
        if kept == rules.groups_per_step or len(taken) == rules.groups_per_step + rules.max_dropped:
            break
        if group.is_complete:
            taken.append(group)
            chosen.append(choose(group))
            kept += chosen[-1].dropped is None
    return Leaving(taken, chosen)


def is_enough(found: Leaving, rules: UnfinishedRules) -> bool:
    """Whether a step may learn from `found`: it has its groups, or has dropped as many as it
    may."""
    whole = len(found.groups) == rules.groups_per_step + rules.max_dropped
    return whole or found.kept == rules.groups_per_step


def left_behind(unfinished: UnfinishedGroups, found: Leaving) -> list[UnfinishedGroup]:
    """The groups in flight without those that leave, in the order of their draws."""
    gone = {group.draw for group in found.groups}
    return [group for group in unfinished.groups if group.draw not in gone]


def too_old(
    left: Sequence[UnfinishedGroup],
    rules: UnfinishedRules,
    step: int,
    choose: Callable[[UnfinishedGroup], Chosen],
) -> bool:
    """Whether one of the groups that step `step` leaves behind would be older than `max_staleness`
    when it is learned: of those, each of the next steps takes the oldest, as `leaving` does. What
    is not complete may all be kept."""
    learning, taken, kept = step + 1, 0, 0
    for group in left:
        if kept == rules.groups_per_step or taken == rules.groups_per_step + rules.max_dropped:
            learning, taken, kept = learning + 1, 0, 0
        if learning - group.first_step > rules.max_staleness:
            return True
        taken += 1
        kept += not (group.is_complete and choose(group).dropped is not None)
    return False
