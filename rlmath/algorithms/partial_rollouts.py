"""Partial rollouts (`rollout.tail`): the groups in flight, and those that a step learns from.

All functions are pure.

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
    """Number of the draw in the run, counted from 0."""
    first_step: int
    """The step, counted from 0, in which its first token was sampled."""
    samples: tuple[PartialCompletion | ScoredCompletion, ...]
    """Samples by their index; finished ones have a score."""
    deferred: bool = False
    """Whether a completion of it did not fit a short round: it waits for a whole one."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples that are not finished."""
        return [g for g, sample in enumerate(self.samples) if isinstance(sample, PartialCompletion)]

    @property
    def parts(self) -> list[PartialCompletion | Completion]:
        """What is sampled of each completion, by sample index, without scores."""
        return [
            sample.completion if isinstance(sample, ScoredCompletion) else sample
            for sample in self.samples
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
    """Bounds on how many groups are in flight, and for how long."""

    groups_per_step: int
    """Groups that a step learns from."""
    max_groups: int
    """Most groups in flight; with "carry" at most groups_per_step x (max_staleness + 1)."""
    max_staleness: int
    """Most steps from the one that sampled a group's first token to the one that learns from it."""
    max_dropped: int = 0
    """Most groups of a step that selection may drop and that others take the place of."""


@dataclass
class UnfinishedGroups:
    """The groups in flight: the state that partial rollouts carry from step to step."""

    groups: list[UnfinishedGroup] = field(default_factory=list)
    """Groups in flight, in the order of their draws."""
    next_draw: int = 0
    short_share: float = 0.5
    """Share of the groups of the last short rounds that became complete (0 to 1), with "defer"."""


@dataclass(frozen=True)
class Leaving:
    """The groups that leave the unfinished ones in a step."""

    groups: list[UnfinishedGroup]
    """Complete groups, in the order of their draws."""
    chosen: list[Chosen]
    """The choice from each group."""
    rounds: int = 0
    """Rounds that the step made."""
    waits: int = 0
    """Rounds that it made only because groups would have become too old."""

    @property
    def kept(self) -> int:
        return sum(choice.dropped is None for choice in self.chosen)


def advance_carry(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    step: int,
    steps_left: int,
    samples: int,
    sample_round: Callable[[list[UnfinishedGroup]], list[UnfinishedGroup]],
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """Make step `step` (from 0) of a run that has `steps_left` steps to make, this one included.

    Draw groups of so many `samples`, make rounds, and take out of the unfinished groups what the
    step learns from. Where enough groups are complete already, nothing is drawn and no round is
    made, unless the step would leave a group behind that could not be learned within
    `max_staleness` steps of its first token.

    `sample_round` gets all groups in flight and returns them after a round; `choose` says what is
    learned from of a complete group. At the end of `steps_left` steps nothing is in flight, but for
    at most `max_dropped` groups from which no step learns: others took their place where selection
    dropped some.
    """
    leaving_groups = leaving(unfinished, rules, choose)
    rounds = 0
    waits = 0
    while not (enough := is_enough(leaving_groups, rules)) or too_old(
        left_behind(unfinished, leaving_groups), rules, step, choose=choose
    ):
        new_draws = room(unfinished, leaving_groups, rules, steps_left=steps_left)
        draw(unfinished, new_draws, step, samples=samples)
        if not any(group.unfinished for group in unfinished.groups):
            break
        unfinished.groups = sample_round(unfinished.groups)
        rounds = rounds + 1
        waits = waits + enough
        leaving_groups = leaving(unfinished, rules, choose)
    unfinished.groups = left_behind(unfinished, leaving_groups)
    return replace(leaving_groups, rounds=rounds, waits=waits)


def advance_defer(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    step: int,
    steps_left: int,
    samples: int,
    sample_round: Callable[[list[UnfinishedGroup], bool], list[UnfinishedGroup]],
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """Do what `advance_carry` does, but leave nothing that is sampled in flight.

    `sample_round` gets groups of which nothing is sampled and whether to sample them whole, and
    returns them after that.

    - A short round samples groups that are not deferred, more than are missing, since some do not
      become complete: those are deferred.
    - A whole round, as soon as a step's groups are deferred, or the run has too few draws left for
      a short one, samples as many as are missing.
    """
    leaving_groups = Leaving([], [])
    rounds = 0
    while not is_enough(leaving_groups, rules):
        missing = rules.groups_per_step - leaving_groups.kept
        waiting = [group for group in unfinished.groups if not group.is_complete]
        deferred = [group for group in waiting if group.deferred]
        not_deferred = [group for group in waiting if not group.deferred]
        new_draws = room(unfinished, leaving_groups, rules, steps_left=steps_left)
        whole = len(deferred) >= rules.groups_per_step or len(not_deferred) + new_draws < missing
        count = missing if whole else with_reserve(missing, unfinished.short_share)
        chosen = [*deferred, *not_deferred][:count] if whole else not_deferred[:count]
        chosen += draw(unfinished, min(new_draws, count - len(chosen)), step, samples=samples)
        if not chosen:
            break
        sampled = {group.draw: group for group in sample_round(chosen, whole)}
        if not whole:
            complete = sum(group.is_complete for group in sampled.values()) / len(sampled)
            unfinished.short_share = (unfinished.short_share + complete) / 2
        unfinished.groups = [
            unfinished_group
            if unfinished_group.is_complete
            else unfinished_group.nothing_sampled(
                unfinished_group.deferred or unfinished_group.draw in sampled
            )
            for unfinished_group in (sampled.get(group.draw, group) for group in unfinished.groups)
        ]
        leaving_groups = leaving(unfinished, rules, choose)
        rounds = rounds + 1
    unfinished.groups = [
        group.nothing_sampled(group.deferred) for group in left_behind(unfinished, leaving_groups)
    ]
    return replace(leaving_groups, rounds=rounds)


RESERVE = 1.5
"""Standard deviations by which a short round has more groups than should suffice."""
LEAST_SHARE = 0.25
"""Least share of the groups of a short round that are expected to become complete."""


def with_reserve(missing: int, share: float) -> int:
    """How many groups to sample so that `missing` become complete, each with probability `share`.

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
    """Draw the next groups, which are in flight from now on."""
    first_draw = unfinished.next_draw
    drawn = [
        UnfinishedGroup(first_draw + offset, step, (NOTHING_SAMPLED,) * samples)
        for offset in range(count)
    ]
    unfinished.groups += drawn
    unfinished.next_draw += len(drawn)
    return drawn


def room(
    unfinished: UnfinishedGroups,
    leaving_groups: Leaving,
    rules: UnfinishedRules,
    steps_left: int,
) -> int:
    """How many groups to draw now.

    Selection drops some of the groups that would leave the unfinished ones now: others take the
    place of up to `max_dropped`.

    >>> room(UnfinishedGroups(), Leaving([], []), UnfinishedRules(4, 8, max_staleness=1), steps_left=1)
    4
    """
    most_groups = min(rules.max_groups, rules.groups_per_step * steps_left)
    replaced = min(len(leaving_groups.groups) - leaving_groups.kept, rules.max_dropped)
    return max(0, most_groups - (len(unfinished.groups) - replaced))


def leaving(
    unfinished: UnfinishedGroups,
    rules: UnfinishedRules,
    choose: Callable[[UnfinishedGroup], Chosen],
) -> Leaving:
    """The complete groups that a step would take now, those drawn first.

    They are up to `groups_per_step` that selection keeps, and with the dropped ones among them at
    most `max_dropped` more."""
    groups = []
    chosen = []
    kept_groups = 0
    for group in unfinished.groups:
        if (
            kept_groups == rules.groups_per_step
            or len(groups) == rules.groups_per_step + rules.max_dropped
        ):
            break
        if group.is_complete:
            groups.append(group)
            chosen.append(choose(group))
            kept_groups += chosen[-1].dropped is None
    return Leaving(groups, chosen)


def is_enough(leaving_groups: Leaving, rules: UnfinishedRules) -> bool:
    """Whether a step may learn from these: it has its groups, or dropped as many as it may."""
    whole = len(leaving_groups.groups) == rules.groups_per_step + rules.max_dropped
    return whole or leaving_groups.kept == rules.groups_per_step


def left_behind(unfinished: UnfinishedGroups, leaving_groups: Leaving) -> list[UnfinishedGroup]:
    """The groups in flight without those that leave, in the order of their draws."""
    leaving_draws = {group.draw for group in leaving_groups.groups}
    return [group for group in unfinished.groups if group.draw not in leaving_draws]


def too_old(
    groups_left: Sequence[UnfinishedGroup],
    rules: UnfinishedRules,
    step: int,
    choose: Callable[[UnfinishedGroup], Chosen],
) -> bool:
    """Whether a group that step `step` leaves behind would be learned later than `max_staleness`.

    Each of the next steps takes the oldest of those groups, as `leaving` does. Selection may keep
    every group that is not complete yet."""
    learning = step + 1
    taken_groups = 0
    kept_groups = 0
    for group in groups_left:
        if (
            kept_groups == rules.groups_per_step
            or taken_groups == rules.groups_per_step + rules.max_dropped
        ):
            learning = learning + 1
            taken_groups = 0
            kept_groups = 0
        if learning - group.first_step > rules.max_staleness:
            return True
        taken_groups += 1
        kept_groups += not (group.is_complete and choose(group).dropped is not None)
    return False
