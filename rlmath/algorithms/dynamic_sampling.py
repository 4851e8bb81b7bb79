"""Which sampled completions are learned from: length filters and dynamic sampling.

Pure.

    sampled groups -> length filters -> groups without contrast are dropped -> more prompts where
    too few are left

Dynamic sampling: DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlmath.algorithms.types import Completion, Score, ScoredGroup

Contrast = Literal["accuracy", "reward"]

DROP_REASONS = ("right", "wrong", "uniform", "rule", "empty", "surplus")
FILTER_REASONS = ("short", "long", "truncated")

MOST_PER_MISSING = 4
"""Most prompts that a refill samples at once for each group that is missing."""


@dataclass(frozen=True)
class SelectionRules:
    """What is left out; see `SelectionConfig`."""

    dynamic: Contrast | Literal["function"] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    drop_truncated: bool = False
    parts: tuple[int, ...] = ()
    """With dynamic sampling by "reward", where several rewards are normalised each for itself:
    which of a score's parts are. A group has contrast where any of them has. Empty: the reward
    counts."""
    keep: Callable[[Sequence[ScoredGroup]], list[bool]] | None = None
    """With dynamic sampling by "function": which of some groups are learned from."""

    @property
    def drop_anything(self) -> bool:
        return self != SelectionRules()


@dataclass(frozen=True)
class Chosen:
    """What of one sampled group is learned from."""

    samples: tuple[int, ...]
    """Positions of its completions; none where the group is dropped."""
    filtered: tuple[str, ...] = ()
    """Why completions left the group, one of FILTER_REASONS each."""
    dropped: str | None = None
    """Why the whole group is left out: all "right" or "wrong", "uniform" (the same rewards), "rule"
    (a function of the user's), "empty" (no completion is left) or "surplus" (the step has enough).
    """

    def learned(self, group: ScoredGroup) -> ScoredGroup:
        """The group without the completions that left it."""
        return ScoredGroup(
            group.prompt,
            tuple(group.completions[g] for g in self.samples),
            tuple(group.scores[g] for g in self.samples),
        )


def choose(group: ScoredGroup, rules: SelectionRules) -> Chosen:
    """`choose_all` of one group."""
    return choose_all([group], rules)[0]


def choose_all(groups: Sequence[ScoredGroup], rules: SelectionRules) -> list[Chosen]:
    """What of each group is learned from.

    Length filters first; the completions they keep are then checked for contrast, or given to
    `rules.keep`."""
    chosen = [_choose(group, rules) for group in groups]
    if rules.keep is None:
        return chosen
    asked = [(group, one) for group, one in zip(groups, chosen, strict=True) if one.dropped is None]
    kept = iter(rules.keep([one.learned(group) for group, one in asked]) if asked else ())
    return [
        one if one.dropped is not None or next(kept) else replace(one, samples=(), dropped="rule")
        for one in chosen
    ]


def _choose(group: ScoredGroup, rules: SelectionRules) -> Chosen:
    reasons = [_filtered(completion, rules) for completion in group.completions]
    samples = tuple(g for g, reason in enumerate(reasons) if reason is None)
    filtered = tuple(reason for reason in reasons if reason is not None)
    dropped = "empty" if not samples else _without_contrast(group, samples, rules)
    return Chosen(() if dropped else samples, filtered, dropped)


def _filtered(completion: Completion, rules: SelectionRules) -> str | None:
    tokens = completion.n_sampled
    if rules.drop_truncated and completion.finish_reason == "length":
        return "truncated"
    if tokens < rules.min_tokens:
        return "short"
    return "long" if rules.max_tokens is not None and tokens > rules.max_tokens else None


def _without_contrast(
    group: ScoredGroup, samples: Sequence[int], rules: SelectionRules
) -> str | None:
    if rules.dynamic == "accuracy":
        correct = {group.scores[g].correct for g in samples}
        return None if len(correct) > 1 else ("right" if correct == {True} else "wrong")
    if rules.dynamic == "reward":
        return None if has_contrast([group.scores[g] for g in samples], rules.parts) else "uniform"
    return None


def has_contrast(scores: Sequence[Score], parts: Sequence[int] = ()) -> bool:
    """Whether rewards differ: with `parts` any of these parts of the scores, among those that have
    it."""
    if not parts:
        return len({score.reward for score in scores}) > 1
    return any(len({score.parts[k] for score in scores} - {None}) > 1 for k in parts)


@dataclass(frozen=True)
class Selection:
    """All groups that a step sampled, and what of each is learned from."""

    sampled: list[ScoredGroup]
    chosen: list[Chosen]
    wanted: int
    """Groups that the step should learn from."""

    @property
    def learned(self) -> list[ScoredGroup]:
        """The groups to learn from, without the completions that left them."""
        return [
            chosen.learned(group)
            for group, chosen in zip(self.sampled, self.chosen, strict=True)
            if chosen.samples
        ]

    def spread(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Numbers of the learned completions laid out by sampled group, 0 for what is not learned
        from."""
        assert len(values) == sum(bool(chosen.samples) for chosen in self.chosen)
        rows = iter(values)
        spread = []
        for group, chosen in zip(self.sampled, self.chosen, strict=True):
            row = [0.0] * len(group.completions)
            if chosen.samples:
                for g, value in zip(chosen.samples, next(rows), strict=True):
                    row[g] = value
            spread.append(row)
        return spread

    def dropped_groups(self) -> Counter[str]:
        """How many groups are left out, by reason."""
        return Counter(chosen.dropped for chosen in self.chosen if chosen.dropped)

    def filtered_completions(self) -> Counter[str]:
        """How many completions left their groups, by reason."""
        return Counter(reason for chosen in self.chosen for reason in chosen.filtered)

    def line(self) -> str:
        """One line for the console: what was left out, and why."""
        learned = sum(one.dropped is None for one in self.chosen)
        groups = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped_groups().items()))
        completions = ", ".join(
            f"{n} {reason}" for reason, n in sorted(self.filtered_completions().items())
        )
        return (
            f"{learned} of {len(self.sampled)} sampled groups are learned from, {self.wanted} "
            "were wanted"
            + (f"; groups dropped: {groups}" if groups else "")
            + (f"; completions dropped: {completions}" if completions else "")
        )


def select(
    sample: Callable[[int], list[ScoredGroup]], wanted: int, max_extra: int, rules: SelectionRules
) -> Selection:
    """Sample `wanted` groups, and with dynamic sampling up to `max_extra` more until as many are
    kept.

    `sample(n)` gives the groups of the next n prompts, fewer where there are no more. A refill
    samples as many as should suffice by the share kept so far; groups beyond `wanted` are then
    "surplus", the last sampled first.
    """
    sampled = list(sample(wanted))
    chosen = choose_all(sampled, rules)
    while rules.dynamic is not None:
        kept = sum(one.dropped is None for one in chosen)
        most = (wanted - kept) * MOST_PER_MISSING
        enough = -(-(wanted - kept) * len(chosen) // kept) if kept else most
        count = min(enough, most, wanted + max_extra - len(sampled))
        more = sample(count) if count > 0 else []
        if not more:
            break
        sampled += more
        chosen += choose_all(more, rules)
    return Selection(sampled, _without_surplus(chosen, wanted), wanted)


def _without_surplus(chosen: list[Chosen], wanted: int) -> list[Chosen]:
    kept = 0
    result = []
    for one in chosen:
        kept += one.dropped is None
        surplus = one.dropped is None and kept > wanted
        result.append(replace(one, samples=(), dropped="surplus") if surplus else one)
    return result
