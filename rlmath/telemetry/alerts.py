"""Alerts: signs by which published runs were known, too late, to be going wrong.

Each is raised once. Rules read the rows of `metrics.jsonl`, so a resumed run finds in them which
alerts were raised before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmath.config.run_files import UNUSABLE_ROWS_FILE
from rlmath.config.schema import TelemetryConfig

RECENT_STEPS = 5
"""Steps whose mean most rules look at: one step alone may be chance."""
FIRST_STEPS = 5
"""First steps whose mean is what a run started from."""
EARLY_STOP_STEPS = 10
"""Steps of which most must have discarded minibatches to raise an alert."""
IDLE_STEPS = 2
"""Steps in a row that learn nothing and raise an alert.

No group has two different rewards, or all are dropped."""
QUEUE_SECONDS = 1.0
QUEUE_SHARE = 0.1
"""Waits for a reward worker that raise an alert.

Answers wait longer than these seconds, and longer than this share of a step."""
DISCARDED_SHARE = 0.9
"""Share of groups above which dynamic sampling that drops them raises an alert."""
DISCARDED_GROUPS = 16
"""Fewest groups in the last steps that raise that alert."""
USUAL_CLIP_RATIO = 0.1
"""The AReaL documents: actor_clip_ratio "is usually less than 0.1"."""
GOOD_ACCURACY = 0.95
"""Accuracy from which a reward that no longer rises raises no alert."""
ENOUGH_KEPT = 0.95
"""Share of the adapters' update below which merged weights that were rounded raise an alert."""
ENTROPY_AND_ERRORS = 0.5
"""Ratio of the rest of entropy to the rest of wrong answers below which there is an alert.

A rest is what is left of the share at the start. Entropy falls by nature as a model learns, about
as far as the share of wrong answers."""

Row = Mapping[str, float]


@dataclass
class Alerts:
    """Raises each alert when its rule first holds.

    >>> alerts = Alerts(TelemetryConfig())
    >>> alerts.check({"step": 1, "no_eos_ratio": 0.01})
    []
    >>> [text.partition(".")[0] for text in alerts.check({"step": 2, "no_eos_ratio": 0.45})]
    ['23% of completions were cut off (last 2 steps)']
    >>> alerts.check({"step": 3, "no_eos_ratio": 0.45})
    []
    """

    limits: TelemetryConfig
    clips_whole_completions: bool = False
    """Whether the loss is GSPO's, which clips many tokens by design."""
    length_key: str = "rollout.max_new_tokens"
    """The setting that cuts completions off: this, or "stages.max_new_tokens"."""
    group_relative: bool = True
    """Whether advantages compare the completions of a group."""

    @property
    def length_advice(self) -> str:
        """Advice on longer completions.

        A resumed run keeps the lengths of the steps that are done."""
        if self.length_key == "stages.max_new_tokens":
            return "Resume with a larger stages.max_new_tokens for the steps to come."
        return f"Resume with longer `stages` (--help stages); new runs: {self.length_key}."

    def __post_init__(self) -> None:
        self.first: list[Row] = []
        self.last: deque[Row] = deque(
            maxlen=max(self.limits.warn_flat_steps, RECENT_STEPS, EARLY_STOP_STEPS)
        )
        self._raised: set[Callable[[Alerts], str | None]] = set()

    def check(self, row: Row) -> list[str]:
        """The alerts that a step's metrics raise.

        Metrics that a step does not have raise none."""
        if len(self.first) < FIRST_STEPS:
            self.first.append(row)
        self.last.append(row)
        text_by_rule = {rule: rule(self) for rule in RULES if rule not in self._raised}
        texts = {rule: text for rule, text in text_by_rule.items() if text is not None}
        self._raised |= texts.keys()
        return list(texts.values())

    def reset(self) -> None:
        """Forget the steps so far: limits and data change here."""
        self.first.clear()
        self.last.clear()


def dropped_alert(share: float, limits: TelemetryConfig, is_written: bool = True) -> str | None:
    """The alert of a run whose filters dropped this share of the prompts (0 to 1) at its start.

    `is_written`: they are listed in the run's folder."""
    if not share > limits.warn_dropped:
        return None
    listed = f", or see {UNUSABLE_ROWS_FILE}" if is_written else ""
    return (
        f"{_percent(share)} of the prompts are dropped before the start.\n"
        f"  Raise data.max_prompt_tokens{listed}."
    )


# --------------------------------------------- the rules, two lines each: what, and what to change,
# which says "new run" where a resumed run refuses the change


def truncated_alert(run: Alerts) -> str | None:
    """Alert of truncated completions.

    SimpleRL's first run broke at 23% truncated completions, its report calls under 5% normal."""
    values = _recent(run, "no_eos_ratio")
    limit = run.limits.warn_truncated
    if not values or not statistics.mean(values) > limit:
        return None
    out_of_calls = _recent(run, "tools/out_of_calls")
    calls_text = ""
    if any(out_of_calls):
        share = _percent(statistics.mean(out_of_calls))
        calls_text = f" {share} of completions had no call left (tools.max_calls)."
    return (
        f"{_percent(statistics.mean(values))} of completions were cut off ({_last(values)})."
        f"{calls_text}\n  {run.length_advice}"
    )


def importance_alert(run: Alerts) -> str | None:
    """Alert of importance weights that are far from 1."""
    values = _recent(run, "importance_weight")
    limit = run.limits.warn_importance_weight
    if not values or statistics.mean(abs(value - 1) for value in values) <= limit:
        return None  # a NaN is above every limit
    return (
        f"The mean importance weight is {statistics.mean(values):.3g} ({_last(values)}).\n"
        "  In a new run lower optimizer.lr, algorithm.n_minibatches or algorithm.epochs."
    )


def clip_alert(run: Alerts) -> str | None:
    """Alert of a share of clipped tokens that is above the usual one."""
    values = _recent(run, "actor_clip_ratio")
    if run.clips_whole_completions or not values or not statistics.mean(values) > USUAL_CLIP_RATIO:
        return None
    return (
        f"{_percent(statistics.mean(values))} of tokens are clipped ({_last(values)}).\n"
        f"  Usual is under {_percent(USUAL_CLIP_RATIO)}. In a new run lower optimizer.lr, "
        "algorithm.n_minibatches."
    )


def contrast_alert(run: Alerts) -> str | None:
    """Alert of rewards that are alike within every group.

    The reward function returns a constant, or problems are too easy or too hard."""
    rows = list(run.last)[-IDLE_STEPS:]
    dropped = [row.get("train/minibatches") == 0 for row in rows]
    alike = [run.group_relative and row.get("rollout/groups_with_contrast") == 0 for row in rows]
    if len(rows) < IDLE_STEPS or not all(map(max, dropped, alike)):
        return None
    without_contrast = [row.get("rollout/groups_with_contrast") == 0 for row in rows]
    problem = (
        "No group had different rewards" if any(without_contrast) else "No group was learned from"
    )
    return (
        f"{problem} ({_last(rows)}).\n"
        "  See `rlmath samples`, reward.function. New run: problems it sometimes solves."
    )


def queue_alert(run: Alerts) -> str | None:
    """Alert of answers that wait long for a worker.

    As a rule a slow reward function makes them wait, and the step with them."""
    waits = _recent(run, "reward/queue_wait_s_max")
    seconds = _recent(run, "seconds/step")
    if len(waits) < 2 or not seconds:  # workers start in the first step
        return None
    wait = statistics.mean(waits)
    step = statistics.mean(seconds)
    if wait <= max(QUEUE_SECONDS, QUEUE_SHARE * step):
        return None
    return (
        f"Answers waited {wait:.3g} s for a worker ({_last(waits)}).\n"
        "  Raise reward.workers, or make reward.function faster."
    )


def discarded_alert(run: Alerts) -> str | None:
    """Alert of dynamic sampling that drops almost all groups.

    Partial credit makes all answers count as right, or problems are too easy or hard."""
    names = {"right": "all right", "wrong": "all wrong", "uniform": "all alike"}
    dropped = {name: sum(_recent(run, f"selection/dropped/{name}")) for name in names}
    sampled = _recent(run, "selection/groups_sampled")
    if sum(sampled) < DISCARDED_GROUPS or not sum(dropped.values()) > DISCARDED_SHARE * sum(
        sampled
    ):
        return None
    main_reason = max(dropped, key=dropped.__getitem__)
    contrast = _recent(run, "rollout/groups_with_contrast")
    advice = "In a new run take problems it sometimes solves, or raise rollout.group_size."
    if (
        contrast
        and statistics.mean(contrast) > 2 * (1 - DISCARDED_SHARE)
        and not dropped["uniform"]
    ):
        advice = "Rewards do differ. In a new run: selection.dynamic_sampling=reward."
    share = _percent(sum(dropped.values()) / sum(sampled))
    return f"{share} of groups dropped as {names[main_reason]} ({_last(sampled)}).\n  {advice}"


def flat_alert(run: Alerts) -> str | None:
    """Alert of a reward that does not rise.

    The later half's mean is not above the earlier half's by more than the standard error of their
    difference."""
    steps = run.limits.warn_flat_steps
    rewards = [value for value in _recent(run, "task_reward", steps) if math.isfinite(value)]
    if len(rewards) < steps:
        return None
    half = steps // 2
    earlier = rewards[:half]
    later = rewards[-half:]
    accuracy = _recent(run, "rollout/accuracy", half)
    if accuracy and statistics.mean(accuracy) >= GOOD_ACCURACY:
        return None
    earlier_mean = statistics.mean(earlier)
    later_mean = statistics.mean(later)
    scatter = sum(statistics.variance(part) for part in (earlier, later)) if half > 1 else 0.0
    if later_mean - earlier_mean > math.sqrt(scatter / half):
        return None
    return (
        f"The reward did not rise: {earlier_mean:.3g}, then {later_mean:.3g} ({_last(rewards)}).\n"
        "  In a new run: selection.dynamic_sampling, other problems, larger optimizer.lr."
    )


def entropy_alert(run: Alerts) -> str | None:
    """Alert of entropy that fell below its share of the first steps'.

    It fell at least twice as far as the wrong answers did."""
    limit = run.limits.warn_entropy_share
    name = "train/entropy_loss"
    first_values = [row[name] for row in run.first if name in row]
    last_values = _recent(run, name)
    if (
        len(run.first) < FIRST_STEPS
        or not first_values
        or not last_values
        or not statistics.mean(first_values) > 0
    ):
        return None
    share = statistics.mean(last_values) / statistics.mean(first_values)
    if not share < limit or not share < ENTROPY_AND_ERRORS * _errors_left(run):
        return None
    return (
        f"Entropy fell to {_percent(share)} of its start ({_last(last_values)}).\n"
        "  New run: larger algorithm.entropy_coef, clip_ratio_high; lower optimizer.lr."
    )


def _errors_left(run: Alerts) -> float:
    """Share of wrong answers in the last steps over that in the first.

    It is 1 where it is not known."""
    name = "rollout/accuracy"
    first_errors = [1 - row[name] for row in run.first if name in row]
    last_accuracies = _recent(run, name)
    if not first_errors or not last_accuracies or statistics.mean(first_errors) <= 0:
        return 1.0
    return (1 - statistics.mean(last_accuracies)) / statistics.mean(first_errors)


def early_stop_alert(run: Alerts) -> str | None:
    """Alert of steps that discard minibatches."""
    values = _recent(run, "train/early_stopped_minibatches", EARLY_STOP_STEPS)
    stopped = sum(value > 0 for value in values)
    if len(values) < EARLY_STOP_STEPS or 2 * stopped <= EARLY_STOP_STEPS:
        return None
    return (
        f"{stopped} of the {_last(values)} discarded minibatches.\n"
        "  In a new run lower optimizer.lr, algorithm.n_minibatches or algorithm.epochs."
    )


def rounding_alert(run: Alerts) -> str | None:
    """Alert of engines that sample without much of what the adapters learned.

    Their merged weights were rounded (`checkpoint.hf.lora_merge.kept_share`)."""
    values = _recent(run, "sync/lora_kept", 1)
    if not values or not values[0] < ENOUGH_KEPT:
        return None
    return (
        f"Rounded, merged weights keep {_percent(values[0])} of LoRA's update.\n"
        "  New run: lora.engine=adapters, with which engines sample what learns."
    )


RULES = (
    truncated_alert,
    importance_alert,
    clip_alert,
    contrast_alert,
    queue_alert,
    discarded_alert,
    flat_alert,
    entropy_alert,
    early_stop_alert,
    rounding_alert,
)


def _recent(run: Alerts, name: str, steps: int = RECENT_STEPS) -> list[float]:
    """A metric of the last `steps` steps, as far as they have it."""
    return [row[name] for row in list(run.last)[-steps:] if name in row]


def _last(values: Sequence[object]) -> str:
    return "last step" if len(values) == 1 else f"last {len(values)} steps"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
