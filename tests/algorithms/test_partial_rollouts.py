"""Partial rollouts: what is drawn, carried and learned from.

The completions are nothing but lengths."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.partial_rollouts import (
    Leaving,
    UnfinishedGroup,
    UnfinishedGroups,
    UnfinishedRules,
    advance_carry,
    advance_defer,
    room,
    too_old,
    with_reserve,
)
from rlmath.algorithms.types import Completion, PartialCompletion, Score, ScoredCompletion, Segment
from rlmath.checkpoint.unfinished_groups import read_unfinished, write_unfinished

RIGHT = Score(1.0, True, "", "string")


@dataclass
class Engines:
    """Sample at most `slice_tokens` tokens of each completion.

    The final length is a function of draw and sample."""

    length: Callable[[int, int], int]
    slice_tokens: int
    step: int = 0
    rounds: list[int] = field(default_factory=list)
    """The longest slice that was sampled in each round."""

    def sample_round(self, groups: list[UnfinishedGroup]) -> list[UnfinishedGroup]:
        longest = 0
        after = []
        for group in groups:
            samples = []
            for g, sample in enumerate(group.samples):
                if isinstance(sample, ScoredCompletion):
                    samples.append(sample)
                    continue
                whole = self.length(group.draw, g)
                done = len(sample.token_ids)
                new = min(self.slice_tokens, whole - done)
                longest = max(longest, new)
                part = sample.extended(
                    (7,) * new, (-1.0,) * new, policy_version=self.step, step=self.step
                )
                samples.append(part if done + new < whole else finished(g, part))
            after.append(replace(group, samples=tuple(samples)))
        self.rounds.append(longest)
        return after


def finished(g: int, part: PartialCompletion) -> ScoredCompletion:
    return ScoredCompletion(
        Completion(g, part.token_ids, part.logprobs, "", "stop", 0, part.segments), RIGHT
    )


def keep(group: UnfinishedGroup) -> Chosen:
    return Chosen(tuple(range(len(group.samples))))


def run(
    engines: Engines,
    rules: UnfinishedRules,
    steps: int,
    samples: int,
    choose: Callable[[UnfinishedGroup], Chosen] = keep,
) -> tuple[list[Leaving], UnfinishedGroups]:
    unfinished = UnfinishedGroups()
    leavings = []
    for step in range(steps):
        engines.step = step
        leavings.append(
            advance_carry(
                unfinished, rules, step, steps - step, samples, engines.sample_round, choose
            )
        )
    return leavings, unfinished


def draws(found: Leaving) -> list[int]:
    return [group.draw for group in found.groups]


def check_all_left(found: list[Leaving], unfinished: UnfinishedGroups, replaced: int) -> int:
    """Every group of a run that was drawn left once, and how many did.

    So many may be in flight still: others took their place when they were dropped, and older ones
    that were complete only then left before them."""
    left = sorted(d for leaving in found for d in draws(leaving))
    assert sorted([*left, *(group.draw for group in unfinished.groups)]) == list(
        range(unfinished.next_draw)
    )
    assert len(unfinished.groups) <= replaced
    return len(left)


def test_short_groups_overtake_long_ones_and_long_ones_are_carried() -> None:
    # Draws 0 and 3 have 8 tokens, the others 2. A step learns from 2 of at most 4 groups, by slices
    # of 4 tokens.
    rules = UnfinishedRules(groups_per_step=2, max_groups=4, max_staleness=1)
    engines = Engines(lambda draw, g: 8 if draw in (0, 3) else 2, slice_tokens=4)
    leavings, unfinished = run(engines, rules, steps=3, samples=1)
    # Step 0 draws 0-3 and learns 1 and 2; step 1 draws 4 and 5, finishes 0 and 3, which are older;
    # step 2 has 4 and 5.
    assert [draws(leaving) for leaving in leavings] == [[1, 2], [0, 3], [4, 5]]
    assert unfinished == UnfinishedGroups([], 6)
    assert leavings[1].groups[0].samples[0].completion.segments == (
        Segment(4, 0, 0),
        Segment(4, 1, 1),
    )
    assert [leaving.rounds for leaving in leavings] == [1, 1, 0], (
        "all groups of the last step were complete"
    )


def test_a_step_waits_for_groups_that_are_about_to_be_too_old() -> None:
    # Only draw 0 is long: it has 4 of 12 tokens after step 0, which learns from draw 1.
    rules = UnfinishedRules(groups_per_step=1, max_groups=2, max_staleness=1)
    engines = Engines(lambda draw, g: 12 if draw == 0 else 2, slice_tokens=4)
    leavings, _ = run(engines, rules, steps=4, samples=1)
    # Step 1 must learn from it: it has 8 tokens after the round that completes draw 2, and 12 after
    # one more.
    assert [draws(leaving) for leaving in leavings] == [[1], [0], [2], [3]]
    assert [(leaving.rounds, leaving.waits) for leaving in leavings] == [
        (1, 0),
        (2, 1),
        (0, 0),
        (1, 0),
    ]


def test_room_by_hand() -> None:
    rules = UnfinishedRules(groups_per_step=4, max_groups=10, max_staleness=2, max_dropped=1)
    three = UnfinishedGroups([UnfinishedGroup(d, 0, (PartialCompletion(),)) for d in range(3)], 3)
    assert room(three, Leaving([], []), rules, steps_left=9) == 7
    assert room(three, Leaving([], []), rules, steps_left=2) == 5, "8 groups are left to learn from"
    dropped = Leaving(three.groups[:2], [Chosen((), dropped="right"), Chosen((0,))])
    assert room(three, dropped, rules, steps_left=2) == 6, "one of the three is dropped"
    both = Leaving(three.groups[:2], [Chosen((), dropped="right")] * 2)
    assert room(three, both, rules, steps_left=2) == 6, "two are, and one may be replaced"
    assert room(three, Leaving([], []), rules, steps_left=0) == 0


def test_age_by_hand() -> None:
    rules = UnfinishedRules(groups_per_step=2, max_groups=6, max_staleness=2)
    old = [UnfinishedGroup(d, 3, (PartialCompletion(),)) for d in range(4)]
    # Of step 3, two are learned in step 4 and two in step 5, two steps later: as old as may be.
    one_more = UnfinishedGroup(4, 3, (PartialCompletion(),))
    assert not too_old(old, rules, 3, keep)
    assert too_old([*old, one_more], rules, 3, keep)
    assert too_old(old, rules, 4, keep)


def test_a_group_that_is_known_to_be_dropped_takes_no_place_of_one_that_is_learned() -> None:
    done = (finished(0, PartialCompletion().extended((7,), (-1.0,), 3, 3)),)
    left = [
        UnfinishedGroup(0, 3, done),
        *(UnfinishedGroup(d, 3, (PartialCompletion(),)) for d in range(1, 5)),
    ]

    def drop_first(group: UnfinishedGroup) -> Chosen:
        return Chosen((), dropped="right") if group.draw == 0 else keep(group)

    # With the first dropped, step 4 takes it and two more, if it may take three; step 5 the last
    # two.
    assert not too_old(left, UnfinishedRules(2, 6, 2, max_dropped=1), 3, drop_first)
    assert too_old(left, UnfinishedRules(2, 6, 2, max_dropped=0), 3, drop_first)
    assert too_old(left, UnfinishedRules(2, 6, 2, max_dropped=1), 3, keep)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**20),
    per_step=st.integers(1, 5),
    staleness=st.integers(0, 4),
    share=st.floats(0, 1),
    samples=st.integers(1, 3),
    steps=st.integers(1, 12),
    slice_tokens=st.integers(1, 40),
    drop_every=st.sampled_from([0, 0, 2, 3]),
    max_dropped=st.integers(0, 8),
)
def test_every_group_leaves_once_whole_and_in_time(
    seed: int,
    per_step: int,
    staleness: int,
    share: float,
    samples: int,
    steps: int,
    slice_tokens: int,
    drop_every: int,
    max_dropped: int,
) -> None:
    most = round(per_step * (1 + share * staleness))
    rules = UnfinishedRules(per_step, most, staleness, max_dropped)

    @functools.cache
    def length(draw: int, g: int) -> int:
        return min(40, 1 + int(random.Random(f"{seed}/{draw}/{g}").expovariate(0.08)))

    @functools.cache
    def is_dropped(draw: int) -> bool:
        return drop_every > 0 and random.Random(f"{seed}/{draw}").random() < 1 / drop_every

    def choose(group: UnfinishedGroup) -> Chosen:
        return Chosen((), dropped="uniform") if is_dropped(group.draw) else keep(group)

    engines = Engines(length, slice_tokens)
    leavings, unfinished = run(engines, rules, steps, samples, choose)
    left = check_all_left(leavings, unfinished, max_dropped if drop_every else 0)
    assert drop_every or left == per_step * steps
    assert max(engines.rounds) <= slice_tokens
    for step, leaving in enumerate(leavings):
        assert leaving.kept == per_step or (
            drop_every and len(leaving.groups) == per_step + max_dropped
        )
        assert draws(leaving) == sorted(draws(leaving))
        for group in leaving.groups:
            assert 0 <= step - group.first_step <= staleness
            for g, sample in enumerate(group.samples):
                assert isinstance(sample, ScoredCompletion)
                segments = sample.completion.segments
                assert sum(segment.tokens for segment in segments) == length(group.draw, g)
                sampled_steps = [segment.step for segment in segments]
                assert sampled_steps == sorted(set(sampled_steps)), "one for each version"
                assert sampled_steps[0] >= group.first_step and sampled_steps[-1] <= step


def test_a_step_replaces_what_was_complete_and_is_dropped() -> None:
    """The last step finds two complete groups, of which selection drops one: it draws another."""
    done = finished(0, PartialCompletion().extended((7,), (-1.0,), 0, 0))
    unfinished = UnfinishedGroups([UnfinishedGroup(d, 0, (done,)) for d in (4, 5)], 6)
    engines = Engines(lambda draw, g: 3, 3)

    def choose(group: UnfinishedGroup) -> Chosen:
        return Chosen((), dropped="right") if group.draw == 4 else keep(group)

    leaving = advance_carry(
        unfinished, UnfinishedRules(2, 4, 2, max_dropped=2), 1, 1, 1, engines.sample_round, choose
    )
    assert draws(leaving) == [4, 5, 6] and leaving.kept == 2 and leaving.rounds == 1


# ---------------------------------------------------------------- defer


@dataclass
class DeferringEngines:
    """Sample groups of which nothing is sampled.

    A short round stops at `slice_tokens` tokens of a completion."""

    length: Callable[[int, int], int]
    slice_tokens: int
    step: int = 0
    rounds: list[tuple[bool, list[int]]] = field(default_factory=list)
    """Whether each round was a whole one, and its draws."""

    def sample_round(self, groups: list[UnfinishedGroup], whole: bool) -> list[UnfinishedGroup]:
        assert groups and not any(sample.token_ids for group in groups for sample in group.samples)
        self.rounds.append((whole, [group.draw for group in groups]))
        engines = Engines(self.length, 10**6 if whole else self.slice_tokens, self.step)
        return engines.sample_round(groups)


def run_deferring(
    engines: DeferringEngines,
    rules: UnfinishedRules,
    steps: int,
    samples: int = 1,
    choose: Callable[[UnfinishedGroup], Chosen] = keep,
    unfinished: UnfinishedGroups | None = None,
    first: int = 0,
) -> tuple[list[Leaving], UnfinishedGroups]:
    unfinished = unfinished or UnfinishedGroups()
    leavings = []
    for step in range(first, steps):
        engines.step = step
        leavings.append(
            advance_defer(
                unfinished, rules, step, steps - step, samples, engines.sample_round, choose
            )
        )
    return leavings, unfinished


def test_long_groups_are_sampled_anew_in_a_step_of_their_own() -> None:
    # Every third group is long. Half of them are expected to be short at first: 9 are sampled for
    # the first 2.
    assert with_reserve(2, 0.5) == 9
    engines = DeferringEngines(lambda draw, g: 9 if draw % 3 == 2 else 3, slice_tokens=4)
    leavings, unfinished = run_deferring(engines, UnfinishedRules(2, 10**6, 0), steps=5)
    assert [draws(leaving) for leaving in leavings] == [[0, 1], [2, 5], [3, 4], [6, 7], [8, 9]]
    assert engines.rounds == [
        (False, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (True, [2, 5]),
        (False, [3, 4, 6, 7, 9]),  # sampled again but for the last, which is the run's tenth
        (False, [6, 7, 9]),
        (True, [8, 9]),
    ]
    assert unfinished.groups == [] and unfinished.next_draw == 10
    assert [
        segment.step
        for leaving in leavings
        for group in leaving.groups
        for segment in group.parts[0].segments
    ] == [step for step in range(5) for _ in range(2)], (
        "every token is of the step that learns from it"
    )


def test_what_is_learned_from_was_short_in_every_short_round_or_is_sampled_whole() -> None:
    """The weights change, and with them what is long.

    docs/algorithm.md derives the estimator from what is tested."""
    rules = UnfinishedRules(4, 10**6, 0)
    unfinished = UnfinishedGroups()
    steps = 40
    seen = {"anew": 0, "surplus": 0}
    engines = DeferringEngines(
        lambda draw, g: random.Random(f"{draw}/{engines.step // 2}").choice([3, 3, 3, 9]),
        slice_tokens=4,
    )
    was_short: dict[int, list[bool]] = {}
    """Whether a draw fitted, in each of its short rounds."""

    def sample_round(groups: list[UnfinishedGroup], whole: bool) -> list[UnfinishedGroup]:
        sampled = engines.sample_round(groups, whole)
        for group in sampled if not whole else []:
            was_short.setdefault(group.draw, []).append(group.is_complete)
        return sampled

    for step in range(steps):
        engines.step = step
        before = len(engines.rounds)
        leaving = advance_defer(unfinished, rules, step, steps - step, 1, sample_round, keep)
        sampled = {draw: whole for whole, round_ in engines.rounds[before:] for draw in round_}
        for group in leaving.groups:
            fitted = was_short.get(group.draw, [])
            assert group.deferred == (fitted[-1:] == [False]) and False not in fitted[:-1]
            assert sampled[group.draw] or len(group.parts[0].token_ids) <= 4
            seen["anew"] += group.deferred and len(group.parts[0].token_ids) <= 4
            seen["surplus"] += len(fitted) > 1
    assert seen["anew"] > 3 and seen["surplus"] > 3, "else the rule says little"


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**20),
    per_step=st.integers(1, 6),
    samples=st.integers(1, 3),
    steps=st.integers(1, 12),
    slice_tokens=st.integers(1, 40),
    drop_every=st.sampled_from([0, 0, 2, 3]),
    max_dropped=st.integers(0, 8),
    resumed_at=st.integers(0, 11),
)
@example(
    seed=51634,
    per_step=6,
    samples=1,
    steps=12,
    slice_tokens=4,
    drop_every=3,
    max_dropped=8,
    resumed_at=0,
)
def test_every_deferred_group_leaves_once_and_whole(
    seed: int,
    per_step: int,
    samples: int,
    steps: int,
    slice_tokens: int,
    drop_every: int,
    max_dropped: int,
    resumed_at: int,
) -> None:
    rules = UnfinishedRules(per_step, 10**6, 0, max_dropped)

    @functools.cache
    def length(draw: int, g: int) -> int:
        return min(40, 1 + int(random.Random(f"{seed}/{draw}/{g}").expovariate(0.08)))

    @functools.cache
    def is_dropped(draw: int) -> bool:
        return drop_every > 0 and random.Random(f"{seed}/{draw}").random() < 1 / drop_every

    def choose(group: UnfinishedGroup) -> Chosen:
        return Chosen((), dropped="uniform") if is_dropped(group.draw) else keep(group)

    engines = DeferringEngines(length, slice_tokens)
    leavings, unfinished = run_deferring(engines, rules, steps, samples, choose)
    left = check_all_left(leavings, unfinished, max_dropped if drop_every else 0)
    assert drop_every or left == per_step * steps
    for step, leaving in enumerate(leavings):
        assert leaving.kept == per_step or (
            drop_every and len(leaving.groups) == per_step + max_dropped
        )
        assert draws(leaving) == sorted(draws(leaving))
        for group in leaving.groups:
            for g, sample in enumerate(group.samples):
                assert isinstance(sample, ScoredCompletion)
                assert sample.completion.segments == (Segment(length(group.draw, g), step, step),)
                assert (
                    group.deferred
                    or leaving.rounds
                    or len(sample.completion.token_ids) <= slice_tokens
                )
    # A checkpoint in between changes nothing.
    middle = min(resumed_at, steps)
    engines = DeferringEngines(length, slice_tokens)
    unfinished = UnfinishedGroups()
    resumed_leavings = []
    for step in range(steps):
        if step == middle:
            unfinished = read_unfinished(write_unfinished(unfinished), samples, 8, lambda *_: "")
        engines.step = step
        resumed_leavings.append(
            advance_defer(
                unfinished, rules, step, steps - step, samples, engines.sample_round, choose
            )
        )
    assert [draws(leaving) for leaving in resumed_leavings] == [
        draws(leaving) for leaving in leavings
    ]


def test_the_reserve_of_a_short_round() -> None:
    """A simulated step needs a second round in about 1 of 15 cases.

    1.5 standard deviations: 6.7%."""
    random_draws = random.Random(7)
    rounds = 20_000
    short = 0
    for _ in range(rounds):
        complete = sum(random_draws.random() < 0.6 for _ in range(with_reserve(32, 0.6)))
        short += complete < 32
    assert 0.04 < short / rounds < 0.08
