"""What is drawn of the runs: sections of figures, as page.js reads them.

A figure without data is left out. Metrics that are 0 in every step are named under their section instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlmath.config.run_files import SWITCH_PHASES
from rlmath.config.terminal import visible
from rlmath.report.metrics import Curve, Metrics, means_on_common_steps, thinned
from rlmath.report.run_folder import ShownRun

MOST_TRACES = 48
"""Curves of a figure."""
MOST_SINGLE = 6
"""Runs that get a figure of their own where runs cannot share one."""
MOST_LABEL = 48

NO_PHASES = (
    "step",
    "alone_usual",
    "alone_slowest",
    "answer_slowest",
    "sync_packing",
    "sync_wait_for_engines",
)
"""In `seconds/`, but the whole step or a part of a phase."""
PASS_RATES = {
    "100": "all right",
    "below_100": "75% to 100%",
    "to_75": "50% to 75%",
    "to_50": "25% to 50%",
    "to_25": "0% to 25%",
    "0": "none right",
    "unseen": "not sampled yet",
}
"""What `history/prompts/...` are called, from the best."""


@dataclass(frozen=True)
class Lines:
    """A figure of curves over the steps, of all runs."""

    title: str
    unit: str
    """Of what begins with "share" percent are shown."""
    metrics: tuple[tuple[str, str], ...] = ()
    """(metric, what the legend calls it); a metric that ends with a slash stands for all that begin so."""
    note: str = ""
    log: bool = False


@dataclass
class Section:
    title: str
    figures: list[dict[str, Any]] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    """Titles of what is 0 in every step."""


FIGURES = """
Learning
  Accuracy; share of completions; rollout/accuracy=accuracy
  Reward; mean of a completion; task_reward=reward
  Validation accuracy; share of answers; validation/accuracy=all files
  Loss; nats per token; train/loss=training, held_out/loss=held out
  Groups that teach; share of groups; rollout/groups_with_contrast=different rewards
Responses
  Response length; tokens; rollout/response_length=mean, rollout/max_new_tokens=limit
  Truncated completions; share of completions; no_eos_ratio=cut off; Cut off at the length limit
  Answers that could not be judged; share; reward/failures=failures
Policy
  Entropy; nats per token; train/entropy_loss=entropy
  KL to the reference; nats per token; train/reference_kl=KL; The estimate that is chosen
  KL of the updates; nats per token; ppo_approx_kl=mean log ratio, train/proximal_kl=k3 estimate;
    The policy that learns against the one that the loss starts from
  Engine against trainer; |difference of log-probs|, nats;
    train/behaviour_logprob_diff=mean, train/behaviour_logprob_diff_max=largest; ; log
  Importance weights; mean; importance_weight=policy, train/importance_correction=engine correction
  Clipped and masked tokens; share of tokens; actor_clip_ratio=clipped,
    train/importance_correction_cut=correction cut, train/importance_masked_geometric=masked (geometric),
    train/importance_masked_binary_kl=masked (binary KL), train/off_policy_masked=masked (off-policy)
Optimizer
  Gradient norm; before clipping; train/grad_norm=policy
  Learning rate; ; train/learning_rate=policy, critic/learning_rate=critic
  Updates skipped; updates; train/skipped_updates=skipped
Critic and teacher
  KL to the teacher; nats per token; train/teacher_kl=KL
  Critic loss; ; critic/loss=loss
  Variance of the returns that the critic explains; at most 1; critic/explained_variance=explained
Prompts
  Groups sampled and learned from; groups; selection/groups_sampled=sampled, selection/groups_learned=learned from
  Groups dropped; groups; selection/dropped/=
  Completions filtered; completions; selection/filtered/=
  Curriculum; share of prompts; history/skipped_share=skipped, history/floor_share=drawn beside the band
Speed
  Tokens per second; tokens per second; tokens_per_second/step=step, tokens_per_second/learned=learned from,
    tokens_per_second/rollout=rollout, tokens_per_second/update=update, tokens_per_second/reference=reference,
    tokens_per_second/teacher=teacher
  Model FLOP utilisation; share of the peak; rollout/mfu=rollout, train/mfu=update
  Idle and busy; share of the time; rollout/idle_share=engines idle (mean),
    rollout/idle_share_max=engines idle (most), rollout/trainer_busy_share=trainers busy,
    rollout/engine_busy_share=engines busy
  Trainers wait for groups; seconds per step; seconds/wait_for_groups=waiting; Of engines on ranks of their own
  Staleness; steps; rollout/staleness=mean, rollout/staleness_max=largest;
    Steps between the weights that sampled and the step that learned
  Waiting for a reward worker; seconds; reward/queue_wait_s=mean, reward/queue_wait_s_max=longest
"""
"""Sections, and their figures: title; unit; metrics with what the legend calls them; note; "log" for that scale."""


def _named_figures(text: str) -> dict[str, list[Lines]]:
    """The figures of FIGURES by their sections."""
    found: dict[str, list[Lines]] = {}
    for line in text.replace("\n    ", " ").strip().split("\n"):
        if not line.startswith(" "):
            title = line
            continue
        name, unit, metrics, *rest = (part.strip() for part in line.split(";"))
        pairs = tuple(tuple(one.split("=")) for one in metrics.split(", "))
        found.setdefault(title, []).append(Lines(name, unit, pairs, "".join(rest[:1]), "log" in rest[1:]))
    return found


def sections(runs: Sequence[ShownRun]) -> list[Section]:
    """All that has data, in the order of the page."""
    named = _named_figures(FIGURES)
    phases = _of_each(runs, _phases)
    found = [
        _section("Learning", runs, [*named["Learning"], *_validation_files(runs), *_reward_parts(runs)]),
        _section("Responses", runs, named["Responses"], _of_each(runs, _verdicts)),
        *(_section(title, runs, named[title]) for title in ("Policy", "Optimizer", "Critic and teacher")),
        _section("Prompts", runs, named["Prompts"], _of_each(runs, _pass_rates)),
        _section("Your metrics", runs, _own(runs)),
        _section("Speed", runs, named["Speed"]),
        _section("Memory", runs, _memory(runs)),
    ]
    found[-2].figures[:0] = phases
    return [section for section in found if section.figures or section.zero]


def _section(
    title: str, runs: Sequence[ShownRun], specs: Iterable[Lines], more: Iterable[dict[str, Any]] = ()
) -> Section:
    section = Section(title)
    for spec in specs:
        figure, is_zero = _lines(spec, runs)
        if figure is not None:
            section.figures.append(figure)
        elif is_zero:
            section.zero.append(spec.title)
    section.figures += more
    return section


def _lines(spec: Lines, runs: Sequence[ShownRun]) -> tuple[dict[str, Any] | None, bool]:
    """The figure, if any value is not 0; and whether there were values at all."""
    traces, left_out, there = [], 0, False
    for number, run in enumerate(runs):
        named = [pair for metric, called in spec.metrics for pair in _curves(run, metric, called)]
        for place, (called, curve) in enumerate(named):
            there = there or bool(curve.values)
            if not any(curve.values):
                continue
            if len(traces) == MOST_TRACES:
                left_out += 1
                continue
            label = shortened(called)
            several = len(named) > 1
            traces.append(
                {
                    "name": (f"{run.label}: {label}" if several else run.label) if len(runs) > 1 else label,
                    "color": number if len(runs) > 1 else place,
                    "dash": place if len(runs) > 1 else 0,
                    **drawn(thinned(curve)),
                }
            )
    if not traces:
        return None, there
    log = spec.log and all(value > 0 for trace in traces for value in trace["y"])
    notes = [spec.note, f"{left_out} more curves are left out" if left_out else ""]
    return _figure("lines", spec.title, spec.unit, notes, traces) | {"log": log}, True


def _curves(run: ShownRun, metric: str, called: str) -> list[tuple[str, Curve]]:
    """(what it is called, curve) of a metric, or of all that begin so where it ends with a slash."""
    metrics = run.validation if metric.startswith("validation/") else run.metrics
    if not metric.endswith("/"):
        return [(called, metrics.curve(metric))]
    return [(name.removeprefix(metric), metrics.curve(name)) for name in metrics.starting_with(metric)]


def _figure(
    kind: str, title: str, unit: str, notes: Sequence[str], traces: list[dict[str, Any]]
) -> dict[str, Any]:
    """A figure as page.js reads it."""
    note, percent = "; ".join(filter(None, notes)), unit.startswith("share")
    return {"kind": kind, "title": title, "unit": unit, "note": note, "percent": percent, "traces": traces}


def drawn(curve: Curve) -> dict[str, list[Any]]:
    return {"x": curve.steps, "y": [_rounded(value) for value in curve.values]}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def shortened(text: str) -> str:
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= MOST_LABEL else f"{shown[: MOST_LABEL - 1]}…"


# ---------------------------------------------------------------- figures whose metrics a run names


def _validation_files(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """Of the files that were validated: each one's accuracy where there are several, lengths and truncation."""
    names = dict.fromkeys(
        name.split("/")[1]
        for run in runs
        for name in run.validation.starting_with("validation/")
        if name.count("/") == 2
    )
    for ending, title, unit in (
        ("accuracy", "Validation accuracy by file", "share of answers"),
        ("mean_tokens", "Validation response length", "tokens"),
        ("truncated", "Validation answers cut off", "share of answers"),
    ):
        if ending != "accuracy" or len(names) > 1:
            yield Lines(title, unit, tuple((f"validation/{name}/{ending}", name) for name in names))


def _reward_parts(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """Of several rewards (`reward.rewards`), and of what a reward function measures itself."""
    failing = "/failures"
    names = dict.fromkeys(
        name.removesuffix(failing)
        for run in runs
        for name in run.metrics.starting_with("reward/")
        if name.endswith(failing) and name.count("/") >= 2
    )
    parts = tuple((name, name.removeprefix("reward/")) for name in names)
    yield Lines("Reward parts", "mean of a completion", parts)
    failures = tuple((name + failing, name.removeprefix("reward/")) for name in names)
    yield Lines("Reward parts that failed", "share of completions", failures)
    yield Lines("Metrics of the reward function", "mean", (("reward/own/", ""),))


def _of_each(
    runs: Sequence[ShownRun], figures_of: Callable[[ShownRun], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Figures that runs cannot share, of the first runs; where there are several their titles name the run."""
    return [
        {**figure, "title": f"{figure['title']}: {run.label}" if len(runs) > 1 else figure["title"]}
        for run in runs[:MOST_SINGLE]
        for figure in figures_of(run)
    ]


def _verdicts(run: ShownRun) -> Iterator[dict[str, Any]]:
    names = run.metrics.starting_with("reward/verdict/")
    parts = [(name.rpartition("/")[2].replace("_", " "), run.metrics.curve(name)) for name in names]
    return _stack("What decided on the answers", "share of completions", parts)


def _pass_rates(run: ShownRun) -> Iterator[dict[str, Any]]:
    named = list(PASS_RATES.values())
    parts = [(called, run.metrics.curve(f"history/prompts/{name}")) for name, called in PASS_RATES.items()]
    for figure in _stack("Prompts by pass rate", "prompts", parts):
        colors = [{**trace, "color": named.index(trace["name"])} for trace in figure["traces"]]
        yield {**figure, "traces": colors, "ramp": True}


def _phases(run: ShownRun) -> Iterator[dict[str, Any]]:
    parts = [(name.replace("_", " "), curve) for name, curve in phase_curves(run.metrics)]
    note = "The step's phases, and the save that follows it"
    return _stack("Seconds by phase", "seconds per step", parts, note)


def phase_curves(metrics: Metrics) -> list[tuple[str, Curve]]:
    """(phase, seconds) that add up to a step and the save after it, the longest first; what no phase has is "other"."""
    names = [name.removeprefix("seconds/") for name in metrics.starting_with("seconds/")]
    names = [name for name in names if name not in NO_PHASES and "/" not in name]
    switch = [metrics.curve(f"seconds/{name}") for name in names if name in SWITCH_PHASES]
    found = [(name, metrics.curve(f"seconds/{name}")) for name in names if name not in SWITCH_PHASES]
    if switch:
        found.append(("memory switch", _summed(switch)))
    step = metrics.curve("seconds/step")
    if step.values:
        inside = _summed([curve for name, curve in found if name != "save"])
        known = dict(zip(inside.steps, inside.values, strict=True))
        rest = [
            max(0.0, value - known.get(number, 0.0))
            for number, value in zip(step.steps, step.values, strict=True)
        ]
        found.append(("other", Curve(step.steps, rest)))
    return sorted(found, key=lambda part: -sum(part[1].values))


def _summed(curves: Sequence[Curve]) -> Curve:
    total: dict[int, float] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            total[step] = total.get(step, 0.0) + value
    return Curve(sorted(total), [total[step] for step in sorted(total)])


def _stack(
    title: str, unit: str, parts: Sequence[tuple[str, Curve]], note: str = ""
) -> Iterator[dict[str, Any]]:
    """One figure of areas on each other, or none where all is 0."""
    shown = [(name, curve) for name, curve in parts if any(curve.values)]
    if not shown:
        return
    left_out, shown = shown[MOST_TRACES // 2 :], shown[: MOST_TRACES // 2]
    steps, values, width = means_on_common_steps([curve for _, curve in shown])
    notes = [note, f"A point is the mean of {width} steps" if width > 1 else ""]
    notes.append(f"{len(left_out)} more are left out" if left_out else "")
    traces = [
        {"name": shortened(name), "color": number, "x": steps, "y": [_rounded(value) for value in row]}
        for number, ((name, _), row) in enumerate(zip(shown, values, strict=True))
    ]
    yield _figure("stack", title, unit, notes, traces)


def _memory(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """What rank 0 holds after each phase."""
    prefix = "memory/after_"
    names = dict.fromkeys(name for run in runs for name in run.metrics.starting_with(prefix))
    metrics = [(name, name.removeprefix(prefix).removesuffix("_gib").replace("_", " ")) for name in names]
    title = "Memory after each phase" if names else "Memory at the end of a step"
    yield Lines(title, "GiB", (*metrics, ("memory_gib", "end of the step")), "Of rank 0")


def _own(runs: Sequence[ShownRun]) -> Iterator[Lines]:
    """What functions of the user's measure (`telemetry.metrics`): a figure for each function."""
    names = dict.fromkeys(name for run in runs for name in run.metrics.starting_with("own/"))
    for function in dict.fromkeys(name.split("/")[1] for name in names):
        known = [name for name in names if name.split("/")[1] == function]
        yield Lines(function, "", tuple((name, name.split("/", 2)[-1]) for name in known))


# ---------------------------------------------------------------- what happened between steps


def markers(run: ShownRun) -> list[dict[str, Any]]:
    """Steps at which the run went on from a checkpoint, for dotted lines: {"x": steps done there, "kind": ...}."""
    found = [{"x": one.step, "kind": "rollback"} for one in run.rollbacks]
    for before, start in pairwise([None, *run.events.starts]):
        if before is not None and start is not None and start.resumed_after is not None:
            found.append({"x": start.resumed_after, "kind": "restart"})
    return found[:40]
