"""A prediction as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.length_curriculum import has_length_stages, with_longest_lengths
from rlmath.planning.memory_estimate import plan_ranks
from rlmath.planning.memory_fit import start_up_lines
from rlmath.planning.planner.calibration import Measured
from rlmath.planning.planner.run import RunPrediction
from rlmath.planning.planner.step import PHASES, Comparison, Overlap, StepPlan
from rlmath.planning.planner.work import SHARES, Coefficients

PART_NAMES = {
    "flops_share": "FLOPs",
    "memory_share": "memory",
    "link_share": "links",
    "message_seconds": "messages",
    "decode_step_seconds": "engine steps",
    "sequence_step_seconds": "sequences",
    "microbatch_seconds": "micro-batches",
    "token_seconds": "tokens",
    "switch_seconds": "switch",
    "step_seconds": "step",
}
"""What the seconds of a coefficient are spent on."""


def run_lines(prediction: RunPrediction, layouts: Comparison | None, shown: int) -> list[str]:
    """The whole plan of a run for the console."""
    place = prediction.place
    lines = [
        f"{place.config.model.path}: {parameter_count(place.shape) / 1e9:.3g} B parameters on "
        f"{place.cluster.describe()}",
        *([place.note] if place.note else ()),
        f"Layout: {prediction.stages[0][1].mesh.describe()}",
        *start_up_lines(with_longest_lengths(place.config), place.shape, place.cluster.ranks),
    ]
    for stage, plan in prediction.stages:
        if len(prediction.stages) > 1:
            lines += ["", stage.line(len(prediction.stages))]
        lines += step_lines(plan)
    lines += ["", *epoch_lines(prediction)]
    return lines if layouts is None else [*lines, "", *layout_lines(prediction, layouts, shown)]


def step_lines(plan: StepPlan) -> Iterator[str]:
    """One step: its work, its seconds, what is hidden and what is idle."""
    batch, lengths, flops = plan.batch, plan.batch.lengths, plan.flops
    yield (
        f"Step: {batch.sequences:,} sequences, {batch.prompt_tokens:,.0f} + {lengths.mean:,.0f} tokens on average "
        f"(completions of at most {lengths.longest:,}, {lengths.truncated:.1%} cut off): {batch.tokens:,.0f} tokens"
    )
    yield (
        f"  {_flops(flops.sampling)} to sample, {_flops(flops.forward)} forwards, {_flops(flops.backward)} backwards, "
        f"{_flops(flops.recomputed)} recomputed"
    )
    yield f"  {_sampling(plan)}; {_micro_batches(plan)}"
    if plan.rollout.remark:
        yield f"  {plan.rollout.remark}"
    yield (
        "Predicted seconds:" if plan.overlap is None else "Predicted seconds, of both sides at the same time:"
    )
    for phase in PHASES:
        if phase in plan.seconds:
            yield f"  {phase:<10}{_seconds(plan.seconds[phase]):>10}  {_largest_parts(plan, phase)}"
            yield from _remarks(plan, phase)
    if plan.overlap is not None:
        yield from _side_lines(plan.overlap)
    if plan.judging_exposed > 0:
        yield f"  {'judging':<10}{_seconds(plan.judging_exposed):>10}  not hidden behind the rollout"
    tokens = batch.sequences * lengths.mean / plan.step_seconds
    yield f"  {'step':<10}{_seconds(plan.step_seconds):>10}  {tokens:,.0f} sampled tokens a second"


def _sampling(plan: StepPlan) -> str:
    rollout, overlap = plan.rollout, plan.overlap
    if overlap is None:
        return f"an engine samples {rollout.slots} of {rollout.requests} at a time in {rollout.steps:,} steps"
    return (
        f"an engine samples {rollout.requests} for a step, {overlap.running:,.0f} at a time on average (room for "
        f"{overlap.places}), in {rollout.steps:,} engine steps"
    )


def _micro_batches(plan: StepPlan) -> str:
    count = plan.microbatches
    return f"{count} micro-batch{'es' * (count != 1)} a minibatch and data-parallel rank"


def _side_lines(overlap: Overlap) -> Iterator[str]:
    """What trainers and engines take each, and whether one waits for the other."""
    waits = ", in turns" if overlap.take_turns else ""
    yield f"  {'trainers':<10}{_seconds(overlap.trainer_seconds):>10}  on {overlap.trainers} ranks{waits}"
    yield f"  {'engines':<10}{_seconds(overlap.engine_seconds):>10}  on {overlap.engine_ranks} ranks{waits}"


def _largest_parts(plan: StepPlan, phase: str) -> str:
    """ "FLOPs 250, memory 80": what makes up a twentieth of a phase or more, largest first."""
    parts = sorted(plan.parts[phase].items(), key=lambda item: -item[1])
    return ", ".join(
        f"{PART_NAMES[name]} {_seconds(value)}"
        for name, value in parts
        if 20 * value >= plan.seconds[phase] > 0
    )


def _remarks(plan: StepPlan, phase: str) -> Iterator[str]:
    if phase == "rollout" and plan.overlap is not None and plan.tail_seconds > 0:
        yield f"    {_seconds(plan.tail_seconds)} of it for the tail, when no request waits any more"
    if phase == "rollout" and plan.overlap is None:
        hidden = min(plan.judging_seconds, plan.seconds["rollout"])
        yield (
            f"    {_seconds(plan.tail_seconds)} of it for the tail, when no request waits any more; behind it "
            f"{_seconds(hidden)} of judging are hidden"
        )
    if phase == "update" and plan.idle_share > 0:
        yield f"    {plan.idle_share:.1%} of it a pipeline stage waits for others"


def epoch_lines(prediction: RunPrediction) -> Iterator[str]:
    if prediction.steps_per_epoch is None:
        yield "Hours of an epoch: unknown, data.train_path is not there. Give --prompts."
        return
    per_epoch, steps = prediction.steps_per_epoch, prediction.total_steps
    hours = prediction.step_seconds / 3600
    assert steps is not None
    what = f"{steps / per_epoch:.3g} epochs"
    if has_length_stages(prediction.place.config):
        what = "all stages"
    yield (
        f"An epoch has {per_epoch:,} steps: {per_epoch * hours:,.3g} hours. The run has "
        f"{steps:,} steps ({what}): {steps * hours:,.3g} hours, without saving and validation"
    )
    for warning in prediction.warnings:
        yield f"  - {warning}".replace("\n", "\n    ")


def layout_lines(prediction: RunPrediction, layouts: Comparison, shown: int) -> Iterator[str]:
    """The fastest layouts, and where the run's own stands."""
    own = prediction.stages[-1][1]
    yield (f"Legal layouts: {len(layouts.plans)} fit, {layouts.without_room} do not. Fastest by prediction:")
    for plan in layouts.plans[:shown]:
        mark = "  (as configured)" if plan.mesh == own.mesh else ""
        yield f"  {_seconds(plan.step_seconds):>9} s  {plan.mesh.describe()}{mark}"
    if layouts.plans and all(plan.mesh != own.mesh for plan in layouts.plans[:shown]):
        yield f"  {_seconds(own.step_seconds):>9} s  {own.mesh.describe()}  (as configured)"


def coefficient_lines(coefficients: Coefficients, defaults: Coefficients) -> Iterator[str]:
    """Every coefficient, with its default where it is another."""
    yield ""
    yield "Coefficients (docs/planning.md):"
    before = asdict(defaults)
    for name, value in asdict(coefficients).items():
        other = f"  (default {_value(name, before[name])})" if value != before[name] else ""
        yield f"  {name:<22}{_value(name, value):>10}{other}"


def _value(name: str, value: float) -> str:
    return f"{value:.3g}" if name in SHARES else f"{value:.2e}"


def calibration_lines(runs: Sequence[Measured], coefficients: Coefficients) -> Iterator[str]:
    """What the calibrated coefficients make of the runs that they were fitted to."""
    for run in runs:
        plan = run.planned(coefficients)
        yield f"Calibrated with {run.steps} steps of {run.source}, {plan.mesh.describe()} (measured, fitted seconds):"
        for phase in PHASES:
            if phase in plan.seconds:
                yield f"  {phase:<10}{run.seconds.get(phase, 0.0):>10.4f}{plan.seconds[phase]:>10.4f}"
        yield f"  {'step':<10}{run.step_seconds:>10.4f}{plan.step_seconds:>10.4f}"
    if runs:
        yield ""


def _seconds(number: float) -> str:
    """
    >>> _seconds(1234.5), _seconds(0.0123456)
    ('1,234', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _flops(number: float) -> str:
    """
    >>> _flops(3.21e18)
    '3.21 EFLOP'
    """
    for size, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e9:.3g} GFLOP"


# ---------------------------------------------------------------- plain data


def run_data(
    prediction: RunPrediction, layouts: Comparison | None, coefficients: Coefficients, shown: int
) -> dict[str, Any]:
    """Seconds, bytes and FLOPs."""
    place = prediction.place
    memory = plan_ranks(with_longest_lengths(place.config), place.shape, place.cluster.ranks, place.target)
    fastest = layouts.plans[:shown] if layouts is not None else ()
    return {
        "cluster": asdict(place.cluster),
        "memory": [{"rank": p.rank, "phases": {name: p.held(name) for name in p.phases}} for p in memory],
        "problems": list(prediction.memory_problems),
        "warnings": list(prediction.warnings),
        "stages": [step_data(plan) for _, plan in prediction.stages],
        "step_seconds": prediction.step_seconds,
        "steps_per_epoch": prediction.steps_per_epoch,
        "total_steps": prediction.total_steps,
        "layouts": [{"layout": p.mesh.describe(), "step_seconds": p.step_seconds} for p in fastest],
        "coefficients": asdict(coefficients),
    }


def step_data(plan: StepPlan) -> dict[str, Any]:
    return {
        "layout": plan.mesh.describe(),
        "sequences": plan.batch.sequences,
        "tokens": plan.batch.tokens,
        "seconds": dict(plan.seconds),
        "parts": {phase: dict(parts) for phase, parts in plan.parts.items()},
        "step_seconds": plan.step_seconds,
        "tail_seconds": plan.tail_seconds,
        "judging_seconds": plan.judging_seconds,
        "pipeline_idle_share": plan.idle_share,
        "microbatches": plan.microbatches,
        "flops": asdict(plan.flops),
        "overlap": None if plan.overlap is None else asdict(plan.overlap),
        "work": {phase: asdict(work) for phase, work in plan.work.items()},
    }
