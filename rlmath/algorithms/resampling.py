"""Which completions of a group that is sampled too large are learned from (GRPO-RoC).

Resampling on correct: rStar2-Agent, arXiv:2508.20722. Right and wrong answers keep their shares. Of
the right ones those with the fewest failed calls and errors of form stay, of the wrong ones any, so
that failures stay as various as they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlmath.algorithms.types import Completion, Score, ScoredGroup, ToolCall

MIN_OF_EACH = 2
"""Right and wrong answers that stay at least where there are so many, as in rStar2's script."""
WITHOUT_CALLS = 0.5
"""What a completion without calls counts for, as if half of its calls had failed."""


def resampled(group: ScoredGroup, samples: Sequence[int], most: int, seed: int) -> tuple[int, ...]:
    """At most `most` of the positions `samples` of a group, in order.

    Chance is of the seed, the prompt and the step that began the group, whatever the rank."""
    if len(samples) <= most:
        return tuple(samples)
    chance = random.Random(f"{seed}:{_first_step(group)}:{group.prompt.prompt_id}")
    shuffled = chance.sample(sorted(samples), len(samples))
    right = [g for g in shuffled if group.scores[g].correct]
    wrong = [g for g in shuffled if not group.scores[g].correct]
    right.sort(key=lambda g: faults(group.completions[g], group.scores[g]))
    n_right = right_share(len(right), len(wrong), most)
    return tuple(sorted(right[:n_right] + wrong[: most - n_right]))


def right_share(right: int, wrong: int, most: int) -> int:
    """How many of `most` completions are right ones, where there are more than `most` of both.

    >>> right_share(8, 24, 16), right_share(1, 31, 16), right_share(31, 1, 16)
    (4, 1, 15)
    """
    least = min(MIN_OF_EACH, most // 2)
    share = round(right * most / (right + wrong))
    return min(max(share, min(least, right)), most - min(least, wrong))


def faults(completion: Completion, score: Score) -> float:
    """The share of failed calls, and how far the answer is from one box at the end (0 to 2).

    Where a function of the user's judges, only calls count."""
    calls = completion.calls
    failed = sum(map(has_failed, calls)) / len(calls) if calls else WITHOUT_CALLS
    if score.verdict == "function":
        return failed
    if not score.boxed:
        return failed + 1.0
    boxes = max(completion.text.count(mark) for mark in ("\\boxed{", "<answer>"))
    return failed + min(1.0, max(0, boxes - 1) / len(completion.turns))


def has_failed(call: ToolCall) -> bool:
    """Whether a call ended in an error, a limit or a denial; no fault of the machine is one."""
    return call.status not in ("ok", "lost")


def _first_step(group: ScoredGroup) -> int:
    """The step that sampled the first token of a group."""
    steps = [done.segments[0].step for done in group.completions if done.segments]
    return min(steps, default=0)
