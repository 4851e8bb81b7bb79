"""Choice of the sampled completions to learn from: filters, resampling and dynamic sampling.

All functions are pure.

    sampled groups -> length filters -> resampling -> groups without contrast are dropped -> more
    prompts where too few are left

Dynamic sampling: DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlmath.algorithms.resampling import resampled
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup

Contrast = Literal["accuracy", "reward"]

DROP_REASONS = ("right", "wrong", "uniform", "rule", "empty", "surplus")
FILTER_REASONS = ("short", "long", "truncated", "oversampled")
TOOL_REASONS = ("void", "lost")
"""Why completions with tools leave their groups: `tools.void_turns`, and faults of the machine."""

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
    """Parts of a score that are normalised each for itself, with dynamic sampling by "reward".

    A group has contrast where any of them has. Empty: the reward counts."""
    is_void: Callable[[Prompt, Completion], bool] | None = None
    """Says which completions leave their group as their last turn has neither call nor answer."""
    keep: Callable[[Sequence[ScoredGroup]], list[bool]] | None = None
    """Says which groups are learned from, with dynamic sampling by "function"."""
    resample_to: int | None = None
    """Most completions of a group that are learned from; the others are "oversampled"."""
    seed: int = 0
    """Seed of what resampling leaves to chance."""

    @property
    def drop_anything(self) -> bool:
        return self != SelectionRules()


@dataclass(frozen=True)
class Chosen:
    """The choice from one sampled group: what is learned from, and why the others are not."""

    samples: tuple[int, ...]
    """Positions of its completions; none where the group is dropped."""
    filtered: tuple[str, ...] = ()
    """Why completions left the group, of FILTER_REASONS and TOOL_REASONS."""
    dropped: str | None = None
    """Why the whole group is left out, if it is.

    All are "right" or "wrong", "uniform" (the same rewards), "rule" (a function of the user's),
    "empty" (no completion is left) or "surplus" (the step has enough)."""

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
    """The choice from each group.

    Length filters come first, then resampling; the completions that these keep are checked for
    contrast, or given to `rules.keep`."""
    chosen = [_choose(group, rules) for group in groups]
    if rules.keep is None:
        return chosen
    asked = [
        (group, choice)
        for group, choice in zip(groups, chosen, strict=True)
        if choice.dropped is None
    ]
    verdicts = iter(rules.keep([choice.learned(group) for group, choice in asked]) if asked else ())
    return [
        choice
        if choice.dropped is not None or next(verdicts)
        else replace(choice, samples=(), dropped="rule")
        for choice in chosen
    ]


def _choose(group: ScoredGroup, rules: SelectionRules) -> Chosen:
    reasons = [_filtered(group.prompt, completion, rules) for completion in group.completions]
    samples = tuple(g for g, reason in enumerate(reasons) if reason is None)
    filtered = tuple(reason for reason in reasons if reason is not None)
    if rules.resample_to is not None:
        remaining = resampled(group, samples, rules.resample_to, seed=rules.seed)
        filtered += ("oversampled",) * (len(samples) - len(remaining))
        samples = remaining
    dropped = "empty" if not samples else _without_contrast(group, samples, rules)
    return Chosen(() if dropped else samples, filtered, dropped)


def _filtered(prompt: Prompt, completion: Completion, rules: SelectionRules) -> str | None:
    """Why a completion leaves its group, of FILTER_REASONS or TOOL_REASONS; None if it stays."""
    tokens = completion.n_sampled
    if completion.is_lost:
        return "lost"
    if rules.is_void is not None and rules.is_void(prompt, completion):
        return "void"
    if rules.drop_truncated and completion.finish_reason == "length":
        return "truncated"
    if tokens < rules.min_tokens:
        return "short"
    return "long" if rules.max_tokens is not None and tokens > rules.max_tokens else None


def _without_contrast(
    group: ScoredGroup, samples: Sequence[int], rules: SelectionRules
) -> str | None:
    """Why a group has no contrast, one of DROP_REASONS; None where it has any."""
    if rules.dynamic == "accuracy":
        correct = {group.scores[g].correct for g in samples}
        return None if len(correct) > 1 else ("right" if correct == {True} else "wrong")
    if rules.dynamic == "reward":
        return None if has_contrast([group.scores[g] for g in samples], rules.parts) else "uniform"
    return None


def has_contrast(scores: Sequence[Score], parts: Sequence[int] = ()) -> bool:
    """Whether rewards differ, or with `parts` any of these parts, among the scores that have it."""
    if not parts:
        return len({score.reward for score in scores}) > 1
    return any(len({score.parts[k] for score in scores} - {None}) > 1 for k in parts)


@dataclass(frozen=True)
class Selection:
    """All groups that a step sampled, and the choice from each."""

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
        """Numbers of the learned completions, laid out by sampled group; 0 for the others."""
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
        learned = sum(choice.dropped is None for choice in self.chosen)
        groups = ", ".join(
            f"{count} {reason}" for reason, count in sorted(self.dropped_groups().items())
        )
        completions = ", ".join(
            f"{count} {reason}" for reason, count in sorted(self.filtered_completions().items())
        )
        return (
            f"{learned} of {len(self.sampled)} sampled groups are learned from, {self.wanted} "
            "were wanted"
            + (f"; groups dropped: {groups}" if groups else "")
            + (f"; completions dropped: {completions}" if completions else "")
        )


def select(
    sample: Callable[[int], list[ScoredGroup]], count: int, max_extra: int, rules: SelectionRules
) -> Selection:
    """Sample `count` groups, and with dynamic sampling at most `max_extra` others, until enough stay.

    `sample(n)` gives the groups of the next n prompts, fewer where there are no more. A refill
    samples as many as should suffice by the share kept so far; groups beyond `count` are then
    "surplus", the last sampled first.
    """
    sampled = list(sample(count))
    chosen = choose_all(sampled, rules)
    while rules.dynamic is not None:
        kept_groups = sum(choice.dropped is None for choice in chosen)
        missing = count - kept_groups
        max_refill = missing * MOST_PER_MISSING
        enough = -(-missing * len(chosen) // kept_groups) if kept_groups else max_refill
        refill = min(enough, max_refill, count + max_extra - len(sampled))
        new_groups = sample(refill) if refill > 0 else []
        if not new_groups:
            break
        sampled += new_groups
        chosen += choose_all(new_groups, rules)
    return Selection(sampled, _without_surplus(chosen, count), count)


def _without_surplus(chosen: list[Chosen], count: int) -> list[Chosen]:
    """The choices, in which groups beyond `count` are "surplus"."""
    kept_groups = 0
    choices = []
    for choice in chosen:
        kept_groups += choice.dropped is None
        surplus = choice.dropped is None and kept_groups > count
        choices.append(replace(choice, samples=(), dropped="surplus") if surplus else choice)
    return choices
