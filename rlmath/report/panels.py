"""Figures of the runs, in sections, as page.js reads them.

A figure without data is left out. Metrics that are 0 in every step are named under their section
instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from rlmath.config.terminal import visible
from rlmath.report.metrics import Curve, stacked, thinned
from rlmath.report.run_folder import ShownRun

MOST_TRACES = 48
"""Curves of a figure."""
MOST_LABEL = 48
NO_PHASES = (
    "seconds/step",
    "seconds/alone_usual",
    "seconds/alone_slowest",
    "seconds/answer_slowest",
    "seconds/sync_packing",
    "seconds/sync_wait_for_engines",
)
"""The whole step, or a part of a phase."""


@dataclass(frozen=True)
class Lines:
    """A figure of curves over the steps, of all runs."""

    title: str
    unit: str
    """Unit of the values; one that begins with "share" is shown in percent."""
    metrics: Mapping[str, str]
    """Name of each metric in the legend.

    A star stands for all names without a slash in its place, which the legend has then."""
    note: str = ""
    form: Literal["lines", "log", "stack"] = "lines"
    """"log" for that scale; "stack" for areas on each other, of one run."""


@dataclass
class Section:
    title: str
    figures: list[dict[str, Any]] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    """Titles of figures that are 0 in every step."""


FIGURES: Mapping[str, Sequence[Lines]] = {
    "Learning": [
        Lines("Accuracy", "share of completions", {"rollout/accuracy": "accuracy"}),
        Lines(
            "Rewards above 0",
            "share of completions",
            {"rollout/reward_positive": "above 0"},
            note="What a reward function counts as right: no row has a solution to verify against",
        ),
        Lines("Reward", "mean of a completion", {"task_reward": "reward"}),
        Lines(
            "Validation accuracy",
            "share of answers",
            {"validation/accuracy": "all files", "validation/*/accuracy": ""},
        ),
        Lines(
            "Validation rewards above 0",
            "share of answers",
            {"validation/reward_positive": "all files", "validation/*/reward_positive": ""},
        ),
        Lines("Loss", "nats per token", {"train/loss": "training", "held_out/loss": "held out"}),
        Lines(
            "Groups that teach",
            "share of groups",
            {
                "train/teaching_groups": "learned from",
                "rollout/groups_with_contrast": "different rewards",
            },
            note="Learned from: kept by the selection, with an advantage that is not 0",
        ),
        Lines("Validation response length", "tokens", {"validation/*/mean_tokens": ""}),
        Lines("Validation answers cut off", "share of answers", {"validation/*/truncated": ""}),
        Lines("Reward parts that failed", "share of completions", {"reward/*/failures": ""}),
        Lines("Metrics of the reward function", "mean", {"reward/own/*": ""}),
    ],
    "Responses": [
        Lines(
            "Response length",
            "tokens",
            {"rollout/response_length": "mean", "rollout/max_new_tokens": "limit"},
        ),
        Lines(
            "Truncated completions",
            "share of completions",
            {"no_eos_ratio": "cut off"},
            note="Cut off at the length limit",
        ),
        Lines("Answers that could not be judged", "share", {"reward/failures": "failures"}),
        Lines(
            "What decided on the answers",
            "share of completions",
            {"reward/verdict/*": ""},
            form="stack",
        ),
    ],
    "Tools": [
        Lines(
            "Calls of a completion", "calls, mean", {"tools/calls_per_completion": "all that ran"}
        ),
        Lines(
            "Completions that call",
            "share of completions",
            {"tools/completions_with_calls": "call", "tools/out_of_calls": "cut off at a call"},
        ),
        Lines(
            "Accuracy with and without calls",
            "share of completions",
            {
                "tools/accuracy_with_calls": "with calls",
                "tools/accuracy_without_calls": "without",
            },
        ),
        Lines("How calls ended", "share of calls", {"tools/status/*": ""}, form="stack"),
        Lines(
            "Failed calls",
            "share of calls",
            {"tools/failed_calls": "sampled", "tools/failed_calls_learned": "learned from"},
        ),
        Lines("Outputs cut", "share of calls", {"tools/outputs_cut": "cut"}),
        Lines("Turns without an answer", "share of completions", {"tools/void_turns": "void"}),
        Lines(
            "Completions that left their groups",
            "completions",
            {"tools/void_completions": "void", "tools/lost_completions": "lost"},
        ),
        Lines("Output tokens", "tokens of a completion", {"tools/given_tokens": "mean"}),
        Lines(
            "Waiting for calls", "s", {"tools/wait_s": "mean of a call", "tools/wait_s_p99": "p99"}
        ),
        Lines(
            "Engines that only wait for calls",
            "share of the rollout",
            {"tools/wait_share": "all engines"},
        ),
    ],
    "Turns": [
        Lines(
            "Answers of a completion",
            "answers, mean",
            {"turns/answers_per_completion": "with those that went on"},
        ),
        Lines(
            "First and last answers",
            "share of completions",
            {"turns/accuracy_first": "first right", "turns/accuracy": "last right"},
        ),
        Lines("Corrected answers", "share of completions", {"turns/corrected": "corrected"}),
        Lines("Feedback tokens", "tokens of a completion", {"turns/feedback_tokens": "mean"}),
        Lines("Feedback cut", "share of texts", {"turns/feedback_cut": "cut"}),
        Lines("Figures of the environment", "mean of all turns", {"environment/*": ""}),
        Lines("Lost completions", "completions", {"turns/lost_completions": "lost"}),
        Lines("Waiting for feedback", "s", {"turns/wait_s": "mean of a turn"}),
        Lines(
            "Engines that only wait for feedback",
            "share of the rollout",
            {"turns/wait_share": "all engines"},
        ),
    ],
    "Policy": [
        Lines("Entropy", "nats per token", {"train/entropy_loss": "entropy"}),
        Lines(
            "KL to the reference",
            "nats per token",
            {"train/reference_kl": "KL"},
            note="The estimate that is chosen",
        ),
        Lines(
            "KL of the updates",
            "nats per token",
            {"ppo_approx_kl": "mean log ratio", "train/proximal_kl": "k3 estimate"},
            note="The policy that learns against the one that the loss starts from",
        ),
        Lines(
            "Engine against trainer",
            "|difference of log-probs|, nats",
            {"train/behaviour_logprob_diff": "mean", "train/behaviour_logprob_diff_max": "largest"},
            form="log",
        ),
        Lines(
            "Importance weights",
            "mean",
            {"importance_weight": "policy", "train/importance_correction": "engine correction"},
        ),
        Lines(
            "Clipped and masked tokens",
            "share of tokens",
            {
                "actor_clip_ratio": "clipped",
                "train/importance_correction_cut": "correction cut",
                "train/importance_masked_geometric": "masked (geometric)",
                "train/importance_masked_binary_kl": "masked (binary KL)",
                "train/off_policy_masked": "masked (off-policy)",
            },
        ),
    ],
    "Optimizer": [
        Lines("Gradient norm", "before clipping", {"train/grad_norm": "policy"}),
        Lines(
            "Learning rate", "", {"train/learning_rate": "policy", "critic/learning_rate": "critic"}
        ),
        Lines("Updates skipped", "updates", {"train/skipped_updates": "skipped"}),
    ],
    "Critic and teacher": [
        Lines("KL to the teacher", "nats per token", {"train/teacher_kl": "KL"}),
        Lines("Critic loss", "", {"critic/loss": "loss"}),
        Lines(
            "Variance of the returns that the critic explains",
            "at most 1",
            {"critic/explained_variance": "explained"},
        ),
    ],
    "Prompts": [
        Lines(
            "Groups sampled and learned from",
            "groups",
            {"selection/groups_sampled": "sampled", "selection/groups_learned": "learned from"},
        ),
        Lines("Groups dropped", "groups", {"selection/dropped/*": ""}),
        Lines("Completions filtered", "completions", {"selection/filtered/*": ""}),
        Lines(
            "Prompts by pass rate",
            "prompts",
            {
                "history/prompts/100": "all right",
                "history/prompts/below_100": "75% to 100%",
                "history/prompts/to_75": "50% to 75%",
                "history/prompts/to_50": "25% to 50%",
                "history/prompts/to_25": "0% to 25%",
                "history/prompts/0": "none right",
                "history/prompts/unseen": "not sampled yet",
            },
            form="stack",
        ),
        Lines(
            "Curriculum",
            "share of prompts",
            {"history/skipped_share": "skipped", "history/floor_share": "drawn beside the band"},
        ),
    ],
    "Your metrics": [],
    "Speed": [
        Lines(
            "Seconds by phase",
            "seconds per step",
            {"seconds/*": ""},
            note="The step's phases, and the save that follows it",
            form="stack",
        ),
        Lines(
            "Tokens per second",
            "tokens per second",
            {
                "tokens_per_second/step": "step",
                "tokens_per_second/learned": "learned from",
                "tokens_per_second/rollout": "rollout",
                "tokens_per_second/update": "update",
                "tokens_per_second/reference": "reference",
                "tokens_per_second/teacher": "teacher",
            },
        ),
        Lines(
            "Model FLOP utilisation",
            "share of the peak",
            {"rollout/mfu": "rollout", "train/mfu": "update"},
        ),
        Lines(
            "Idle and busy",
            "share of the time",
            {
                "rollout/idle_share": "engines idle (mean)",
                "rollout/idle_share_max": "engines idle (most)",
                "rollout/trainer_busy_share": "trainers busy",
                "rollout/engine_busy_share": "engines busy",
            },
        ),
        Lines(
            "Trainers wait for groups",
            "seconds per step",
            {"seconds/wait_for_groups": "waiting"},
            note="Of engines on ranks of their own",
        ),
        Lines(
            "Staleness",
            "steps",
            {"rollout/staleness": "mean", "rollout/staleness_max": "largest"},
            note="Steps between the weights that sampled and the step that learned",
        ),
        Lines(
            "Waiting for a reward worker",
            "seconds",
            {"reward/queue_wait_s": "mean", "reward/queue_wait_s_max": "longest"},
        ),
    ],
    "Memory": [
        Lines(
            "Memory after each phase",
            "GiB",
            {"memory/after_*_gib": "", "memory_gib": "end of the step"},
            note="Of rank 0",
        )
    ],
}
"""The figures by the sections of the page, in its order."""


def sections(runs: Sequence[ShownRun]) -> list[Section]:
    """Sections that have data, in the order of the page."""
    all_sections: list[Section] = []
    for title, specs in FIGURES.items():
        make_lines = {"Learning": _reward_parts, "Your metrics": _own}.get(title)
        section = Section(title)
        for spec in [*specs, *(make_lines(runs) if make_lines else ())]:
            figure, is_zero = _lines(spec, runs)
            if figure is not None:
                section.figures.append(figure)
            elif is_zero:
                section.zero.append(spec.title)
        all_sections.append(section)
    return [section for section in all_sections if section.figures or section.zero]


def _lines(spec: Lines, runs: Sequence[ShownRun]) -> tuple[dict[str, Any] | None, bool]:
    """The figure, if any value is not 0; and whether there were values at all."""
    traces = []
    left_out = 0
    has_values = False
    flat: dict[str, None] = {}
    stacks = spec.form == "stack" and len(runs) == 1
    for number, run in enumerate(runs):
        named = [
            pair for metric, called in spec.metrics.items() for pair in _curves(run, metric, called)
        ]
        if stacks:
            named = stacked(named)
        for place, (called, curve) in enumerate(named):
            has_values = has_values or bool(curve.values)
            if not any(curve.values):
                if curve.values and len(runs) == 1 and called in spec.metrics.values():
                    flat[called] = None
                continue
            if len(traces) == MOST_TRACES:
                left_out += 1
                continue
            label = shortened(called)
            several = len(named) > 1
            traces.append(
                {
                    "name": (f"{run.label}: {label}" if several else run.label)
                    if len(runs) > 1
                    else label,
                    "color": number if len(runs) > 1 else place,
                    "dash": place if len(runs) > 1 else 0,
                    **drawn(thinned(curve)),
                }
            )
    if not traces:
        return None, has_values
    is_log = spec.form == "log" and all(value > 0 for trace in traces for value in trace["y"])
    notes = [
        spec.note,
        f"0 in every step: {', '.join(flat)}" if flat else "",
        f"{left_out} more curves are left out" if left_out else "",
    ]
    return {
        "title": spec.title,
        "unit": spec.unit,
        "note": "; ".join(filter(None, notes)),
        "percent": spec.unit.startswith("share"),
        "log": is_log,
        "stack": stacks,
        "legend": len(traces) > 1 or len(spec.metrics) > 1,
        "whole": all(value == int(value) for trace in traces for value in trace["y"]),
        "range": None if is_log else axis_range(traces, spec.unit.startswith("share"), stacks),
        "traces": traces,
    }, True


def axis_range(
    traces: Sequence[Mapping[str, Any]], is_share: bool, stacks: bool
) -> list[float] | None:
    """Ends of the values' axis for shares and for values that are all the same.

    An axis of shares has no place below 0, and none above all where no value is. None: the ends are
    as the values have it.

    >>> axis_range([{"y": [1.0, 1.0]}], is_share=True, stacks=False)
    [0.0, 1.02]
    >>> axis_range([{"y": [0.4, 0.9]}], is_share=True, stacks=False)
    [0.375, 0.925]
    """
    columns = [trace["y"] for trace in traces]
    values = (
        [sum(column) for column in zip(*columns, strict=True)]
        if stacks
        else list(chain.from_iterable(columns))
    )
    low = 0.0 if stacks else min(values)
    largest = max(values)
    high = largest
    if low == high > 0:
        low = 0.0
        high = 1.5 * high
    elif not is_share or low < 0:
        return None
    all_of_it = is_share and largest < 1.0005  # sums of rounded shares may be a little more
    high = min(high, 1.0) if all_of_it else high
    bottom = max(0.0, low - 0.05 * (high - low))
    top = high + 0.05 * (high - low)
    if all_of_it:
        top = min(
            top, 1 + 0.02 * (high - low)
        )  # a line at 1 is drawn whole, and no number above it fits
    return [float(f"{bottom:.6g}"), float(f"{top:.6g}")]


def _curves(run: ShownRun, metric: str, called: str) -> list[tuple[str, Curve]]:
    """Names and curves of a metric, or of all that a star stands for."""
    metrics = run.validation if metric.startswith("validation/") else run.metrics
    if (
        metric == "validation/accuracy"
        and sum(name.endswith("/accuracy") for name in metrics.curves) == 2
    ):
        return []  # the mean over files, where there is only one
    head, star, tail = metric.partition("*")
    if not star:
        return [(called, metrics.curve(metric))]
    curves = []
    for name in metrics.starting_with(head):
        inside = name.removeprefix(head).removesuffix(tail)
        if name == head + inside + tail and "/" not in inside and name not in NO_PHASES:
            curves.append((inside.replace("_", " "), metrics.curve(name)))
    return curves


def drawn(curve: Curve) -> dict[str, list[Any]]:
    return {"x": curve.steps, "y": [float(f"{value:.6g}") for value in curve.values]}


def shortened(text: str) -> str:
    visible_text = visible(text).replace("\n", "\\n")
    return visible_text if len(visible_text) <= MOST_LABEL else f"{visible_text[: MOST_LABEL - 1]}…"


# ---------------------------------------------------------------- figures whose metrics a run names


def _reward_parts(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """The figure of the parts of several rewards (`reward.rewards`).

    Their names are those that have a share of failures beside them."""
    failed = dict.fromkeys(name for run in runs for name in run.metrics.starting_with("reward/"))
    names = [name.removesuffix("/failures") for name in failed if name.endswith("/failures")]
    parts = {name: name.removeprefix("reward/") for name in names if name != "reward"}
    yield Lines("Reward parts", "mean of a completion", parts)


def _own(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """Figures of what the user's functions measure (`telemetry.metrics`), one for each function."""
    names = dict.fromkeys(name for run in runs for name in run.metrics.starting_with("own/"))
    for function in dict.fromkeys(name.split("/")[1] for name in names):
        names_of_function = [name for name in names if name.split("/")[1] == function]
        yield Lines(function, "", {name: name.split("/", 2)[-1] for name in names_of_function})
