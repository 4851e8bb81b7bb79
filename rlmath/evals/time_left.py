"""How long an evaluation will take still, from the tokens that were sampled and not from the completions that ended.

Of completions that begin together the short ones end first: early on, those that have ended are shorter than all will
be. What runs still says so, too: it is at least as long as it is. So lengths are estimated from both, by the hazard,
the chance that a completion ends with its next token, which is constant within a bucket of lengths (the piecewise
exponential model of survival analysis).

What waits gets the mean length of *first* samples, one for each problem: the others are sampled in an order that begins
with long answers (`rollout.work_queue`). So the last third of an evaluation is said to take longer than it does.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmath.rollout.sampling import Key, RunningRequests

LEAST_ENDED, LEAST_SHARE = 20, 0.1
"""Completions that must have ended before anything is said, and the share of all that is enough."""
RECENT = 0.8
"""Speed is that since this share of the time: a step is faster when less runs."""
_GROWTH = 1.2
"""Of the buckets of lengths, from one to the next; the first one is of 16 tokens."""


@dataclass
class Lengths:
    """Completions that have ended, and that run, in buckets of their length; they add up over engines."""

    longest: int
    """Tokens after which a completion is cut off, which is no end of its own."""
    ends: list[int] = field(default_factory=list)
    entered: list[float] = field(default_factory=list)
    """Completions that were longer than the bucket's begin; one that runs there now counts half (the actuarial life
    table: it was at risk of an end for a part of the bucket)."""
    sampled: int = 0
    """Tokens in all."""

    def __post_init__(self) -> None:
        edges = [0, *itertools.takewhile(lambda edge: edge < self.longest, _edges()), self.longest]
        self.buckets = list(itertools.pairwise(edges))
        self.ends = self.ends or [0] * len(self.buckets)
        self.entered = self.entered or [0.0] * len(self.buckets)

    def add(self, length: int, ended: bool) -> None:
        self.sampled += length
        for number, (low, high) in enumerate(self.buckets):
            if length <= low:
                return
            self.entered[number] += 1 if ended or length >= high else 0.5
            self.ends[number] += ended and length <= high and length < self.longest

    def join(self, ends: Sequence[int], entered: Sequence[float], sampled: int) -> None:
        """Add those of another engine."""
        self.ends = [mine + theirs for mine, theirs in zip(self.ends, ends, strict=True)]
        self.entered = [mine + theirs for mine, theirs in zip(self.entered, entered, strict=True)]
        self.sampled += sampled

    def hazards(self) -> Hazards:
        """As estimated from all that was added; where nothing was sampled yet that of the upper half of the lengths
        that were."""
        widths = [high - low for low, high in self.buckets]
        seen = max(
            (high for (_, high), count in zip(self.buckets, self.entered, strict=True) if count), default=0
        )
        upper = [number for number, (low, _) in enumerate(self.buckets) if 2 * low >= seen]
        tokens = sum(self.entered[number] * widths[number] for number in upper)
        beyond = (sum(self.ends[number] for number in upper) + 0.5) / (tokens + 1)
        rates = []
        for ends, entered, width in zip(self.ends, self.entered, widths, strict=True):
            share = min(ends / max(1, entered), 1 - 0.5 / (entered + 1))
            rates.append(-math.log1p(-share) / width if entered else beyond)
        return Hazards([0, *(high for _, high in self.buckets)], rates)


class Hazards:
    """Chances of an end with the next token, constant between the edges; at the last edge everything ends."""

    def __init__(self, edges: Sequence[int], rates: Sequence[float]) -> None:
        self._edges, self._rates = edges, rates
        widths = [high - low for low, high in itertools.pairwise(edges)]
        self._summed = [0.0, *itertools.accumulate(map(operator.mul, rates, widths))]

    def left(self, length: int) -> float:
        """Expected tokens until the end of a completion that has `length` tokens."""
        expected, alive = 0.0, 1.0
        for rate, (low, high) in zip(self._rates, itertools.pairwise(self._edges), strict=True):
            width = high - max(low, length)
            if width > 0:
                dies = -math.expm1(-rate * width)
                expected += alive * (dies / rate if rate else width)
                alive *= 1 - dies
        return expected

    def last_end(self, lengths: Collection[int]) -> float:
        """Tokens until the last of the completions ends that have so many tokens: until half of one is left."""
        low, high = 0.0, float(self._edges[-1])
        while high - low > 1:
            middle = (low + high) / 2
            alive = sum(self._survival(one, one + middle) for one in lengths)
            low, high = (middle, high) if alive > 0.5 else (low, middle)
        return high

    def _survival(self, length: float, until: float) -> float:
        """Share of those with `length` tokens that have `until` ones."""
        return 0.0 if until >= self._edges[-1] else math.exp(self._sum_to(length) - self._sum_to(until))

    def _sum_to(self, length: float) -> float:
        number = min(len(self._rates), bisect.bisect_right(self._edges, length)) - 1
        return self._summed[number] + self._rates[number] * (length - self._edges[number])


def _edges() -> Any:
    return (math.ceil(16 * _GROWTH**power) for power in itertools.count())


class TimeLeft:
    """What this engine has sampled, and on rank 0 the estimate for all."""

    def __init__(self, total: int, longest: int, first: Collection[Key]) -> None:
        """`total` completions of all engines, of at most `longest` tokens; `first` are the first samples."""
        self._total, self._longest, self._first = total, longest, first
        self._done = self._steps = 0
        self._of_first, self._of_all = Lengths(longest), Lengths(longest)
        self._running: RunningRequests | None = None
        self._past: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)])
        """(seconds, tokens, steps) of earlier calls, as far back as speed is measured."""

    def on_step(self, running: RunningRequests) -> None:
        self._running = running
        self._steps += 1

    def add(self, key: Key, length: int) -> None:
        """A completion has ended."""
        self._done += 1
        self._of_all.add(length, ended=True)
        if key in self._first:
            self._of_first.add(length, ended=True)

    def told(self) -> dict[str, Any]:
        """What rank 0 needs of this engine, as JSON."""
        running = {} if self._running is None else self._running.lengths()
        return {
            "done": self._done,
            "steps": self._steps,
            "first": [self._of_first.ends, self._of_first.entered, self._of_first.sampled],
            "all": [self._of_all.ends, self._of_all.entered, self._of_all.sampled],
            "running": [[length, key in self._first] for key, length in running.items()],
        }

    def seconds(self, engines: Sequence[dict[str, Any]], passed: float) -> float | None:
        """The seconds that are left, `passed` seconds after the start, by what all engines `told`; None as long as too
        few completions have ended.

        What waits is sampled as fast as what was lately. What runs ends with less and less beside it: that takes
        between its tokens at the speed of lately, and the steps until the last one's end.
        """
        done = sum(one["done"] for one in engines)
        if done < min(LEAST_ENDED, LEAST_SHARE * self._total):
            return None
        of_first, of_all = Lengths(self._longest), Lengths(self._longest)
        running = [length for one in engines for length, _ in one["running"]]
        for one in engines:
            of_first.join(*one["first"])
            of_all.join(*one["all"])
            for length, is_first in one["running"]:
                of_all.add(length, ended=False)
                if is_first:
                    of_first.add(length, ended=False)
        sampled, steps = of_all.sampled, max(one["steps"] for one in engines)
        waiting = self._total - done - len(running)
        self._past.append((passed, sampled, steps))
        while len(self._past) > 2 and self._past[1][0] < RECENT * passed:
            self._past.popleft()
        seconds, new_tokens, new_steps = (
            now - then for now, then in zip(self._past[-1], self._past[0], strict=True)
        )
        per_token, per_step = seconds / max(1, new_tokens), seconds / max(1, new_steps)
        queue = per_token * waiting * of_first.hazards().left(0)
        hazards = of_all.hazards()
        least = per_token * sum(map(hazards.left, running))
        most = per_step * hazards.last_end(running)
        return queue + math.sqrt(least * max(least, most))
