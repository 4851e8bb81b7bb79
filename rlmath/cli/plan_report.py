"""A prediction as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.cli.plan_prediction import RunPrediction
from rlmath.config.length_curriculum import has_length_stages
from rlmath.planning.memory_estimate import plan_ranks
from rlmath.planning.memory_fit import keeps_base, start_up_lines
from rlmath.planning.planner.step import PHASES, Comparison, StepPlan


def run_lines(run: RunPrediction, shown: int) -> list[str]:
    """The whole plan of a run for the console, with at most so many layouts."""
    lines = [
        f"{run.config.model.path}: {parameter_count(run.shapes.policy) / 1e9:.3g} B parameters on "
        f"{run.cluster.describe()}",
        *([run.note] if run.note else ()),
        f"Layout: {run.stages[0][1].mesh.describe()}",
        *start_up_lines(run.config, run.shapes, run.cluster.ranks),
    ]
    for stage, plan in run.stages:
        if len(run.stages) > 1:
            lines += ["", stage.line(len(run.stages))]
        lines += step_lines(plan)
    lines += ["", *epoch_lines(run)]
    return (
        lines
        if run.layouts is None
        else [*lines, "", *layout_lines(run.layouts, run.stages[-1][1], shown)]
    )


def step_lines(plan: StepPlan) -> Iterator[str]:
    """One step: its work, its seconds, and what is idle."""
    batch = plan.batch
    lengths = plan.batch.lengths
    rollout = plan.rollout
    given_text = f" + {batch.given_tokens:,.0f} given" if batch.given_tokens else ""
    yield (
        f"Step: {batch.sequences:,} sequences, {batch.prompt_tokens:,.0f} + {lengths.mean:,.0f}"
        f"{given_text} tokens on average "
        f"(completions of at most {lengths.longest:,}, {lengths.truncated:.1%} cut off): "
        f"{batch.tokens:,.0f} tokens"
    )
    yield (
        f"  an engine samples {rollout.requests} completions, {rollout.slots} at a time, in "
        f"{rollout.steps:,} engine "
        f"steps; {plan.microbatches} micro-batch{'es' * (plan.microbatches != 1)} a minibatch and "
        "data-parallel rank"
    )
    yield (
        "Predicted seconds, of both sides at the same time:"
        if plan.overlaps
        else "Predicted seconds:"
    )
    for phase in PHASES:
        if phase in plan.seconds:
            yield f"  {phase:<10}{_seconds(plan.seconds[phase]):>10}"
        if phase == "rollout" and rollout.tail_seconds > 0:
            yield (
                f"    {_seconds(rollout.tail_seconds)} of it for the tail, with fewer "
                "completions than places"
            )
        if phase == "rollout" and rollout.waiting_seconds > 0:
            yield f"    {_seconds(rollout.waiting_seconds)} of it engines wait for tools"
        if phase == "update" and plan.idle_share > 0:
            yield f"    {plan.idle_share:.1%} of it a pipeline stage waits for others"
    if plan.overlaps:
        yield (
            f"  {'trainers':<10}{_seconds(plan.trainer_seconds):>10}  beside engines, on ranks "
            "of their own"
        )
    tokens = batch.sequences * lengths.mean / plan.step_seconds
    yield f"  {'step':<10}{_seconds(plan.step_seconds):>10}  {tokens:,.0f} sampled tokens a second"


def epoch_lines(run: RunPrediction) -> Iterator[str]:
    per_epoch = run.steps_per_epoch
    steps = run.total_steps
    hours = run.step_seconds / 3600
    if per_epoch is None or steps is None:
        yield "Hours of an epoch: unknown, data.train_path is not there. Give --prompts."
    else:
        extent = (
            "all stages" if has_length_stages(run.config) else f"{steps / per_epoch:.3g} epochs"
        )
        yield (
            f"An epoch has {per_epoch:,} steps: {per_epoch * hours:,.3g} hours. The run has "
            f"{steps:,} steps ({extent}): {steps * hours:,.3g} hours, without saving and validation"
        )
    for warning in run.warnings:
        yield f"  - {warning}".replace("\n", "\n    ")


def layout_lines(layouts: Comparison, run_plan: StepPlan, shown: int) -> Iterator[str]:
    """The fastest layouts, and where the run's own stands."""
    yield (
        f"Legal layouts: {len(layouts.plans)} fit, {layouts.without_room} do not. Fastest by "
        "prediction:"
    )
    fastest = layouts.plans[:shown]
    for plan in (
        fastest
        if any(fast_plan.mesh == run_plan.mesh for fast_plan in fastest)
        else (*fastest, run_plan)
    ):
        mark = "  (as configured)" if plan.mesh == run_plan.mesh else ""
        yield f"  {_seconds(plan.step_seconds):>9} s  {plan.mesh.describe()}{mark}"


def _seconds(number: float) -> str:
    """Seconds with three digits, or rounded from 100 on.

    >>> _seconds(1234.4), _seconds(0.01234)
    ('1,234', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# ---------------------------------------------------------------- plain data


def run_data(run: RunPrediction, shown: int) -> dict[str, Any]:
    """Seconds and bytes."""
    keeps = keeps_base(run.config, run.shapes, run.cluster.ranks, target=run.target)
    memory = plan_ranks(
        run.config, run.shapes, run.cluster.ranks, target=run.target, keeps_base=keeps
    )
    fastest = run.layouts.plans[:shown] if run.layouts is not None else ()
    return {
        "cluster": asdict(run.cluster),
        "memory": [
            {"rank": p.rank, "phases": {name: p.held(name) for name in p.phases}} for p in memory
        ],
        "problems": list(run.memory_problems),
        "warnings": list(run.warnings),
        "stages": [step_data(plan) for _, plan in run.stages],
        "step_seconds": run.step_seconds,
        "steps_per_epoch": run.steps_per_epoch,
        "total_steps": run.total_steps,
        "layouts": [{"layout": p.mesh.describe(), "step_seconds": p.step_seconds} for p in fastest],
    }


def step_data(plan: StepPlan) -> dict[str, Any]:
    return {
        "layout": plan.mesh.describe(),
        "sequences": plan.batch.sequences,
        "tokens": plan.batch.tokens,
        "seconds": dict(plan.seconds),
        "step_seconds": plan.step_seconds,
        "tail_seconds": plan.rollout.tail_seconds,
        "tool_seconds": plan.rollout.waiting_seconds,
        "pipeline_idle_share": plan.idle_share,
        "microbatches": plan.microbatches,
    }
