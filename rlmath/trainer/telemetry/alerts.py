"""The signs by which the published runs knew too late that they were going wrong, each told once.

What is looked at are the rows of `metrics.jsonl`, so a run that goes on knows from them what was told before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmath.config.schema import TelemetryConfig

RECENT_STEPS = 5
"""Most signs look at the mean of so many steps: one step alone may be chance."""
FIRST_STEPS = 5
"""What a run started from is the mean of so many steps."""
EARLY_STOP_STEPS = 10
"""Discarded minibatches are a sign where most of so many steps had one."""
USUAL_CLIP_RATIO = 0.1
"""The AReaL documents: actor_clip_ratio "is usually less than 0.1"."""
GOOD_ACCURACY = 0.95
"""A reward that no longer rises is no sign where answers are right this often."""
ENTROPY_AND_ERRORS = 0.5
"""Entropy falls by nature as a model learns, about as far as the share of wrong answers. It is a sign where it fell
to less than this part of where that share fell to."""

Row = Mapping[str, float]


@dataclass(frozen=True)
class Seen:
    """What a rule may look at."""

    first: Sequence[Row]
    """The first steps, at most FIRST_STEPS."""
    last: Sequence[Row]
    """The steps up to now, as many as the longest rule needs."""
    limits: TelemetryConfig
    clips_whole_completions: bool
    length_key: str


class WarningSigns:
    """Tells of each sign when it is first there.

    >>> signs = WarningSigns(TelemetryConfig())
    >>> signs.after({"step": 1, "no_eos_ratio": 0.01})
    []
    >>> [text.partition(".")[0] for text in signs.after({"step": 2, "no_eos_ratio": 0.45})]
    ['23% of the completions of the last 2 steps were cut off at their limit (telemetry']
    >>> signs.after({"step": 3, "no_eos_ratio": 0.45})
    []
    """

    def __init__(
        self,
        limits: TelemetryConfig,
        clips_whole_completions: bool = False,
        length_key: str = "rollout.max_new_tokens",
    ) -> None:
        """`clips_whole_completions`: the loss is GSPO's, which clips many tokens by design. `length_key` is the setting
        that cuts completions off."""
        self._how = (limits, clips_whole_completions, length_key)
        self._told: set[str] = set()
        self._first: list[Row] = []
        kept = max(limits.warn_flat_steps, RECENT_STEPS, EARLY_STOP_STEPS)
        self._last: deque[Row] = deque(maxlen=kept)

    def after(self, row: Row) -> list[str]:
        """What to tell after a step, given its metrics. Metrics that a step does not have are no sign."""
        watched = {name: row[name] for name in WATCHED if name in row}
        if len(self._first) < FIRST_STEPS:
            self._first.append(watched)
        self._last.append(watched)
        seen = Seen(self._first, self._last, *self._how)
        found = {name: rule(seen) for name, rule in RULES.items() if name not in self._told}
        texts = {name: text for name, text in found.items() if text is not None}
        self._told |= set(texts)
        return list(texts.values())

    def new_stage(self) -> None:
        """From here limits and data are others: what was seen before is no measure for what comes."""
        self._first.clear()
        self._last.clear()


def dropped_sign(share: float, limits: TelemetryConfig) -> str | None:
    """What to tell at the start of a run whose filters dropped this share of the prompts (0 to 1)."""
    if not share > limits.warn_dropped:
        return None
    return (
        f"{_percent(share)} of the prompts are dropped before the run starts (telemetry.warn_dropped is "
        f"{_percent(limits.warn_dropped)}); it learns from what is left only. The lines above say by which filter. "
        "Raise data.max_prompt_tokens, which counts tokens, or look at the rows that could not be used."
    )


# ---------------------------------------------------------------- the rules


def truncated_sign(seen: Seen) -> str | None:
    """SimpleRL's first run broke at 23% truncated completions, its report calls under 5% normal."""
    values, limit = _recent(seen, "no_eos_ratio"), seen.limits.warn_truncated
    if not values or not statistics.mean(values) > limit:
        return None
    return (
        f"{_percent(statistics.mean(values))} of the completions of {_last(values)} were cut off at their limit "
        f"(telemetry.warn_truncated is {_percent(limit)}). A cut answer counts as wrong however good it was. Raise "
        f"{seen.length_key}, or take reward.mask_no_eos_with_zero=true or selection.drop_truncated=true so that "
        "nothing is learned from it."
    )


def importance_sign(seen: Seen) -> str | None:
    values, limit = _recent(seen, "importance_weight"), seen.limits.warn_importance_weight
    if not values or statistics.mean(abs(value - 1) for value in values) <= limit:
        return None  # a NaN is above every limit
    return (
        f"The mean importance weight was {statistics.mean(values):.3g} over {_last(values)}, further from 1 than "
        f"telemetry.warn_importance_weight ({limit:g}): the policy that learns is no longer the one that sampled. "
        "Lower optimizer.lr, algorithm.n_minibatches or algorithm.epochs; with algorithm.recompute_logprobs=true the "
        "ratio leaves out what engine and trainer differ by (train/behaviour_logprob_diff)."
    )


def clip_sign(seen: Seen) -> str | None:
    values = _recent(seen, "actor_clip_ratio")
    if seen.clips_whole_completions or not values or not statistics.mean(values) > USUAL_CLIP_RATIO:
        return None
    return (
        f"{_percent(statistics.mean(values))} of the tokens were clipped over {_last(values)}; usual is less than "
        f"{_percent(USUAL_CLIP_RATIO)}. Updates go further than algorithm.clip_ratio lets count. Lower optimizer.lr, "
        "algorithm.n_minibatches or algorithm.epochs."
    )


def flat_sign(seen: Seen) -> str | None:
    """No rise of the mean of the later half over that of the earlier half beyond the standard error of their
    difference, as the scatter within the halves gives it."""
    steps = seen.limits.warn_flat_steps
    rewards = [value for value in _recent(seen, "task_reward", steps) if math.isfinite(value)]
    if len(rewards) < steps:
        return None
    half = steps // 2
    earlier, later = rewards[:half], rewards[-half:]
    accuracy = _recent(seen, "rollout/accuracy", half)
    if accuracy and statistics.mean(accuracy) >= GOOD_ACCURACY:
        return None
    before, after = statistics.mean(earlier), statistics.mean(later)
    scatter = sum(statistics.variance(part) for part in (earlier, later)) if half > 1 else 0.0
    if after - before > math.sqrt(scatter / half):
        return None
    contrast = _recent(seen, "rollout/groups_with_contrast", half)
    shown = f" ({_percent(statistics.mean(contrast))} of the groups did)" if contrast else ""
    return (
        f"The reward has not risen over the last {steps} steps (telemetry.warn_flat_steps): its mean went from "
        f"{before:.3g} in their first half to {after:.3g} in the second. Only groups with right and wrong answers teach"
        f"{shown}: where they are few, set selection.dynamic_sampling or take problems that fit the model; else raise "
        "optimizer.lr or rollout.group_size, or lower algorithm.kl_coef."
    )


def entropy_sign(seen: Seen) -> str | None:
    """Entropy that fell below its share of the first steps', and at least twice as far as the wrong answers did."""
    limit, name = seen.limits.warn_entropy_share, "train/entropy_loss"
    first, last = [row[name] for row in seen.first if name in row], _recent(seen, name)
    if len(seen.first) < FIRST_STEPS or not first or not last or not statistics.mean(first) > 0:
        return None
    share = statistics.mean(last) / statistics.mean(first)
    errors = _errors_left(seen)
    if not share < limit or not share < ENTROPY_AND_ERRORS * errors:
        return None
    return (
        f"The entropy was {statistics.mean(last):.3g} over {_last(last)}, {_percent(share)} of the first steps' "
        f"{statistics.mean(first):.3g} (telemetry.warn_entropy_share is {_percent(limit)}), while "
        f"{_percent(errors)} of their share of wrong answers is still there: the model no longer tries other ways. "
        "Raise algorithm.entropy_coef or algorithm.clip_ratio_high, or lower optimizer.lr."
    )


def _errors_left(seen: Seen) -> float:
    """The share of wrong answers in the last steps over that in the first; 1 where it is not known."""
    name = "rollout/accuracy"
    first, last = [1 - row[name] for row in seen.first if name in row], _recent(seen, name)
    if not first or not last or statistics.mean(first) <= 0:
        return 1.0
    return (1 - statistics.mean(last)) / statistics.mean(first)


def early_stop_sign(seen: Seen) -> str | None:
    values = _recent(seen, "train/early_stopped_minibatches", EARLY_STOP_STEPS)
    stopped = sum(value > 0 for value in values)
    if len(values) < EARLY_STOP_STEPS or 2 * stopped <= EARLY_STOP_STEPS:
        return None
    return (
        f"{stopped} of the last {EARLY_STOP_STEPS} steps discarded minibatches ({sum(values):.0f} in all): much of "
        "what is sampled teaches nothing. Lower optimizer.lr, algorithm.n_minibatches or algorithm.epochs; the bounds "
        "are algorithm.early_stop_ratio, early_stop_ratio_low and early_stop_kl."
    )


RULES: dict[str, Callable[[Seen], str | None]] = {
    "truncated": truncated_sign,
    "importance weight": importance_sign,
    "clipped": clip_sign,
    "flat reward": flat_sign,
    "entropy": entropy_sign,
    "early stop": early_stop_sign,
}
WATCHED = (
    "no_eos_ratio",
    "importance_weight",
    "actor_clip_ratio",
    "task_reward",
    "rollout/accuracy",
    "rollout/groups_with_contrast",
    "train/entropy_loss",
    "train/early_stopped_minibatches",
)


def _recent(seen: Seen, name: str, steps: int = RECENT_STEPS) -> list[float]:
    """A metric of the last `steps` steps, as far as they have it."""
    return [row[name] for row in list(seen.last)[-steps:] if name in row]


def _last(values: Sequence[float]) -> str:
    return "the last step" if len(values) == 1 else f"the last {len(values)} steps"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
