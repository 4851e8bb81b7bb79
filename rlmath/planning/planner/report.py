"""A prediction as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.length_curriculum import has_length_stages, with_longest_lengths
from rlmath.planning.memory_estimate import plan_ranks
from rlmath.planning.memory_fit import start_up_lines
from rlmath.planning.planner.run import RunPrediction
from rlmath.planning.planner.step import PHASES, Comparison, StepPlan
from rlmath.planning.planner.work import Coefficients


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
    batch, lengths, rollout = plan.batch, plan.batch.lengths, plan.rollout
    yield (
        f"Step: {batch.sequences:,} sequences, {batch.prompt_tokens:,.0f} + {lengths.mean:,.0f} tokens on average "
        f"(completions of at most {lengths.longest:,}, {lengths.truncated:.1%} cut off): {batch.tokens:,.0f} tokens"
    )
    yield (
        f"  an engine samples {rollout.requests} completions, {rollout.slots} at a time, in {rollout.steps:,} engine "
        f"steps; {plan.microbatches} micro-batch{'es' * (plan.microbatches != 1)} a minibatch and data-parallel rank"
    )
    if (tail := plan.config.rollout.tail) != "wait":
        yield f'  rollout.tail="{tail}" is planned as a step that waits for its longest completions'
    yield "Predicted seconds, of both sides at the same time:" if plan.overlaps else "Predicted seconds:"
    for phase in PHASES:
        if phase in plan.seconds:
            yield f"  {phase:<10}{_seconds(plan.seconds[phase]):>10}"
        if phase == "rollout" and plan.tail_seconds > 0:
            yield f"    {_seconds(plan.tail_seconds)} of it for the tail, when no request waits any more"
        if phase == "update" and plan.idle_share > 0:
            yield f"    {plan.idle_share:.1%} of it a pipeline stage waits for others"
    if plan.overlaps:
        ranks = plan.config.rollout.ranks
        yield f"  {'trainers':<10}{_seconds(plan.trainer_seconds):>10}  on {plan.cluster.ranks - ranks} ranks"
        yield f"  {'engines':<10}{_seconds(plan.engine_seconds):>10}  on {ranks} ranks"
    if plan.judging_exposed > 0:
        yield f"  {'judging':<10}{_seconds(plan.judging_exposed):>10}  not hidden behind the rollout"
    tokens = batch.sequences * lengths.mean / plan.step_seconds
    yield f"  {'step':<10}{_seconds(plan.step_seconds):>10}  {tokens:,.0f} sampled tokens a second"


def epoch_lines(prediction: RunPrediction) -> Iterator[str]:
    if prediction.steps_per_epoch is None:
        yield "Hours of an epoch: unknown, data.train_path is not there. Give --prompts."
        return
    per_epoch, steps = prediction.steps_per_epoch, prediction.total_steps
    hours = prediction.step_seconds / 3600
    assert steps is not None
    staged = has_length_stages(prediction.place.config)
    what = "all stages" if staged else f"{steps / per_epoch:.3g} epochs"
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


def _seconds(number: float) -> str:
    """
    >>> _seconds(1234.5), _seconds(0.0123456)
    ('1,234', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


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
    }
