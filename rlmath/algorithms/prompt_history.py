"""How often the model solves each prompt, and which prompts a curriculum passes over.

All functions are pure.

    sampled groups -> counts of the last groups of each prompt -> pass rate -> verdict: "easy",
    "hard" or to be drawn

A pass rate counts the last `data.history_groups` groups of a prompt alone: what older weights
sampled is forgotten. Passing over what is always right is what AReaL and Skywork-OR1
(arXiv:2505.22312, section 3) do with their data; a band of pass rates is the online difficulty
filter of arXiv:2504.03380.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["easy", "hard"]

Counts = tuple[int, int]
"""(right completions, sampled completions)."""

BUCKETS = ("unseen", "0", "to_25", "to_50", "to_75", "below_100", "100")
"""Ranges of pass rates in percent.

No completion yet, none right, up to a quarter, ..., above three quarters, all right."""


def bucket(correct: int, sampled: int) -> str:
    """The one of BUCKETS that a prompt with these counts belongs to.

    >>> bucket(0, 0), bucket(0, 8), bucket(2, 8), bucket(3, 8), bucket(7, 8), bucket(8, 8)
    ('unseen', '0', 'to_25', 'to_50', 'below_100', '100')
    """
    if sampled == 0:
        return "unseen"
    if correct in (0, sampled):
        return "100" if correct else "0"
    return BUCKETS[2 + min(3, (4 * correct - 1) // sampled)]


class PromptHistory:
    """Counts of the last `keep` groups of every prompt, by the prompt's index.

    >>> history = PromptHistory(keep=2)
    >>> for correct in (0, 1, 3):
    ...     history.record(7, correct, sampled=4)
    >>> history.totals(7), history.totals(8)
    ((4, 8), (0, 0))
    """

    def __init__(self, keep: int, groups: Mapping[int, tuple[Counts, ...]] | None = None) -> None:
        self.keep = keep
        self._groups = {index: rows[-keep:] for index, rows in (groups or {}).items() if rows}
        self._totals = {index: _sum(rows) for index, rows in self._groups.items()}
        self._sizes = Counter(
            bucket(correct, sampled) for correct, sampled in self._totals.values()
        )

    @property
    def groups(self) -> Mapping[int, tuple[Counts, ...]]:
        """The counts of each prompt's last groups, the oldest first; only prompts that have any."""
        return self._groups

    def record(self, index: int, correct: int, sampled: int) -> None:
        """Count a group of a prompt, in which `correct` of `sampled` completions are right.

        A group without completions does not count."""
        assert 0 <= correct <= sampled, (correct, sampled)
        if sampled == 0:
            return
        if index in self._totals:
            self._sizes[bucket(*self._totals[index])] -= 1
        self._groups[index] = (*self._groups.get(index, ()), (correct, sampled))[-self.keep :]
        self._totals[index] = _sum(self._groups[index])
        self._sizes[bucket(*self._totals[index])] += 1

    def totals(self, index: int) -> Counts:
        """Counts over the prompt's last groups; (0, 0) if it was never sampled."""
        return self._totals.get(index, (0, 0))

    def buckets(self, n_prompts: int) -> dict[str, int]:
        """How many of the prompts belong to each of BUCKETS."""
        sizes = {name: self._sizes[name] for name in BUCKETS}
        return sizes | {"unseen": n_prompts - len(self._totals)}

    def copy(self) -> PromptHistory:
        return PromptHistory(self.keep, self._groups)


def _sum(rows: tuple[Counts, ...]) -> Counts:
    return sum(correct for correct, _ in rows), sum(sampled for _, sampled in rows)


@dataclass(frozen=True)
class CurriculumRules:
    """Rules by which prompts are passed over: `data.curriculum`."""

    kind: Literal["none", "skip_solved", "band"] = "none"
    solved_samples: int = 1
    """Fewest completions that must all be right, with "skip_solved"."""
    low: float = 0.0
    high: float = 1.0
    """Ends of the pass rates that are drawn, both included, with "band"."""
    floor: float = 0.1
    """Share of the draws that is taken from what is passed over, above 0 and below 1."""

    def verdict(self, correct: int, sampled: int) -> Verdict | None:
        """Why a prompt with these counts is passed over; None where it is drawn.

        >>> band = CurriculumRules("band", low=0.25, high=0.75)
        >>> band.verdict(0, 0), band.verdict(1, 8), band.verdict(2, 8), band.verdict(7, 8)
        (None, 'hard', None, 'easy')
        """
        if self.kind == "none" or sampled == 0:
            return None
        if self.kind == "skip_solved":
            return "easy" if correct == sampled >= self.solved_samples else None
        if correct / sampled > self.high:
            return "easy"
        return "hard" if correct / sampled < self.low else None
