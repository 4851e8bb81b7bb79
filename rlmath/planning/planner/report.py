"""A prediction as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.planning.memory_estimate import plan_ranks
from rlmath.planning.memory_fit import start_up_lines
from rlmath.planning.planner.asynchronous import Overlap
from rlmath.planning.planner.calibration import Measured
from rlmath.planning.planner.partial_rollouts import PROMPT_SHARE
from rlmath.planning.planner.published import (
    PAPER_STEPS,
    Calibrated,
    Predicted,
    errors_of_one_factor,
    largest_error,
)
from rlmath.planning.planner.run import RunPrediction, expected_steps
from rlmath.planning.planner.splits import Splits, engine_ranks
from rlmath.planning.planner.step import PHASES, Comparison, StepPlan
from rlmath.planning.planner.tails import ASYNCHRONOUS_STALENESS, Tails, settings_of_tail
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


def run_lines(
    prediction: RunPrediction,
    tails: Tails | None,
    splits: Splits | None,
    layouts: Comparison | None,
    shown: int,
) -> list[str]:
    """The whole plan of a run for the console. `splits` are there where its engines have ranks of their own."""
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
    if splits is not None:
        lines += ["", *split_lines(splits, prediction.stages[-1][1])]
    lines += [
        "",
        *(tail_lines(tails) if tails is not None else no_tail_lines()),
        "",
        *epoch_lines(prediction),
    ]
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
    if (carry := plan.rollout.carry) is not None:
        yield f"  in {_rounds(carry.rounds)}, for which it prefills {carry.prefilled_again:,.0f} sampled tokens again"
        yield (
            f"  a token is learned {carry.staleness:.1f} steps after it was sampled on average, {carry.oldest} at most"
        )
    if (defer := plan.rollout.defer) is not None:
        yield (
            f"  in {_rounds(defer.rounds)}; {defer.deferred:.0%} of the groups are sampled anew, and "
            f"{defer.discarded:.0%} of the sampled tokens are discarded"
        )
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
    if plan.overlap is not None:
        read, update = map(_seconds, plan.overlap.floor_parts)
        yield (
            f"  {'floor':<10}{_seconds(plan.overlap.floor):>10}  keys and values {read}, update {update}, on all "
            f"{plan.cluster.ranks} ranks"
        )


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


def _rounds(number: float) -> str:
    """
    >>> _rounds(1.0), _rounds(1.0573)
    ('1 round', '1.06 rounds')
    """
    return f"{number:.3g} round{'s' * (number != 1)}"


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


def split_lines(splits: Splits, own: StepPlan) -> Iterator[str]:
    """The fastest split of the ranks, and a few others."""
    yield f"Legal splits of the ranks: {len(splits.plans)} fit, {splits.without_room} do not. Predicted:"
    yield f"{'rollout.ranks':>14}{'trainers':>11}{'engines':>11}{'step':>11}{'running':>9}"
    for plan in splits.shown(own):
        assert plan.overlap is not None
        overlap = plan.overlap
        sides = f"{_seconds(overlap.trainer_seconds):>9} s{_seconds(overlap.engine_seconds):>9} s"
        marks = {"fastest": splits.best, "as configured": own}
        said = ", ".join(
            text for text, one in marks.items() if one is not None and engine_ranks(one) == engine_ranks(plan)
        )
        yield (
            f"{engine_ranks(plan):>14}{sides}{_seconds(plan.step_seconds):>9} s{overlap.running:>9,.0f}"
            f"{'  ' * bool(said)}{said}"
        )


def tail_lines(tails: Tails) -> Iterator[str]:
    """A step with every `rollout.tail`, with engines on ranks of their own, and the fastest."""
    yield "Predicted step by rollout.tail (age: of learned tokens, mean, in steps):"
    yield f"{'max_staleness':>33}{'slice_tokens':>14}{'max_groups_in_flight':>22}{'age':>6}"
    for plan in tails.plans:
        yield f"  {_seconds(plan.step_seconds):>9} s  {_tail(plan)}"
    for name, problems in (("carry", tails.problems), ("asynchronous", tails.asynchronous_problems)):
        for problem in problems:
            yield f"  {name}: not with these settings. {problem}"
    found = (("carry", tails.carry), ("asynchronous", tails.asynchronous))
    own = tails.wait.config.algorithm
    changed = [name for name, plan in found if plan is not None and plan.config.algorithm != own]
    if changed:
        yield f"  {', '.join(changed)}: with algorithm.* as in configs/algorithms/decoupled.yaml"
    yield f"  defer: assumed is that a prompt has {PROMPT_SHARE:.0%} of the variance of log-lengths"
    of = settings_of_tail(tails.fastest)
    named = {
        "wait": (),
        "carry": ("max_staleness",),
        "defer": ("slice_tokens",),
        "asynchronous": ("ranks", "max_staleness"),
    }[str(of["tail"])]
    yield " with ".join(
        [
            f"Predicted fastest: {of['tail']}",
            *([", ".join(f"{name} {of[name]:,}" for name in named)] if named else []),
        ]
    )


def no_tail_lines() -> Iterator[str]:
    yield "rollout.tail is not compared: engines in the training ranks could not have this layout, or would not fit."


def _tail(plan: StepPlan) -> str:
    of = settings_of_tail(plan)
    if of["tail"] == "wait":
        return "wait"
    if of["tail"] == "defer":
        shares = f"deferred {of['deferred']:.0%}, discarded {of['discarded']:.0%}"
        return f"defer{'':13}{of['slice_tokens']:>14,}{shares:>28}"
    if of["tail"] == "asynchronous":
        ranks = f"ranks {of['ranks']}, {of['on_new_weights']}"
        return f"asynchronous{of['max_staleness']:>6}{ranks:>42}"
    columns = f"{of['max_staleness']:>13}{of['slice_tokens']:>14,}{of['max_groups_in_flight']:>22,}"
    return f"carry{columns}{of['staleness']:>6.1f}"


def epoch_lines(prediction: RunPrediction) -> Iterator[str]:
    if prediction.steps_per_epoch is None:
        yield "Hours of an epoch: unknown, data.train_path is not there. Give --prompts."
        return
    config, per_epoch = prediction.place.config, prediction.steps_per_epoch
    hours = prediction.step_seconds / 3600
    assert prediction.total_steps is not None
    yield (
        f"An epoch has {per_epoch:,} steps: {per_epoch * hours:,.3g} hours. The run has "
        f"{expected_steps(config, per_epoch)}: {prediction.total_steps * hours:,.3g} hours, without saving and "
        "validation"
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


def published_lines(
    table: Sequence[Predicted],
    colocated: Sequence[Predicted],
    log: Sequence[Predicted],
    calibrated: Sequence[Calibrated],
    tails: Sequence[tuple[str, Tails]],
) -> Iterator[str]:
    """The published step times beside what is predicted for them."""
    yield "AReaL v0.2, 512 prompts, sampling and training on halves of the GPUs (seconds of a step):"
    yield from _rows(table)
    errors, corrected = [found.error for found in table], errors_of_one_factor(table)
    yield (
        f"Largest error: {largest_error(errors):+.0%} as predicted, {largest_error(corrected):+.0%} with one factor "
        "fitted to the other rows."
    )
    yield ""
    yield "AReaL v0.3, synchronous, all GPUs sample (layouts are not published; those of our recipes):"
    yield from _rows(colocated)
    yield f"Largest error: {largest_error([found.error for found in colocated]):+.0%} as predicted."
    yield ""
    yield "AReaL, a step log of February 2025, 1,024 prompts, completions of at most 16,384 tokens:"
    for one in log:
        yield f"{one.row.name}: {one.row.seconds:,.0f} published, {one.seconds:,.0f} predicted, {one.error:+.0%}"
    yield ""
    yield from _calibrated_lines(calibrated)
    yield ""
    yield "rlmath with our recipes of the first table, by rollout.tail; async: as in the next table:"
    yield from _tail_rows(tails)
    yield ""
    yield "rlmath with the same recipes, engines on ranks of their own, by rollout.max_staleness:"
    yield from _asynchronous_rows(tails)


def _calibrated_lines(calibrated: Sequence[Calibrated]) -> Iterator[str]:
    """Asynchronous figures beside what is predicted with the coefficients of the first synchronous one."""
    first = calibrated[0].found
    yield (
        f"AReaL v0.3, all coefficients calibrated by one factor on the {first.row.seconds:.0f} s of {first.row.name}, "
        "synchronous:"
    )
    head = f"{'published':>9}{'calibrated':>11}{'error':>7}{'default':>8}{'x4':>6}{'engines, trainers':>19}"
    yield f"{'':<29}{head}{'rlmath':>10}"
    for one in calibrated:
        row, best = one.found.row, None if one.splits is None else one.splits.best
        name = f"{row.name}, {'a' * (row.staleness is not None)}synchronous"
        by_paper = one.default_seconds / PAPER_STEPS / row.seconds - 1
        sides = "" if row.staleness is None else f"{one.found.rollout:,.0f}, {one.found.update:,.0f}"
        ours = "" if best is None else f"{best.step_seconds:,.0f} ({engine_ranks(best)})"
        yield (
            f"{name:<29}{row.seconds:>9,.0f}{one.found.seconds:>11,.0f}{one.found.error:>+7.0%}"
            f"{one.default_seconds:>8,.0f}{by_paper:>+6.0%}{sides:>19}{ours:>10}"
        ).rstrip()
    yield (
        f"Largest error: {largest_error([one.found.error for one in calibrated]):+.0%} calibrated. x4: error of the "
        f"default if a step is {PAPER_STEPS} of these, as AReaL's paper counts."
    )


def _tail_rows(tails: Sequence[tuple[str, Tails]]) -> Iterator[str]:
    """Carrying with the default settings, and with the fastest ones; deferring with the fastest ones."""
    yield (
        f"{'':<15}{'wait':>6}{'carry':>6}{'best':>6}{'max_staleness':>14}{'slice_tokens':>13}{'age':>5}"
        f"{'defer':>6}{'async':>6}{'fastest':>14}"
    )
    for name, one in tails:
        assert one.carry is not None, one.problems
        best = min((one.carry, *one.found), key=lambda plan: plan.step_seconds)
        of = settings_of_tail(best)
        seconds = "".join(f"{plan.step_seconds:>6,.0f}" for plan in (one.wait, one.carry, best))
        settings = f"{of['max_staleness']:>14}{of['slice_tokens']:>13,}{of['staleness']:>5.1f}"
        defer = (one.found_defer or one.defer).step_seconds
        beside = min(_asynchronous_plans(one), key=lambda plan: plan.step_seconds, default=None)
        seconds_beside = "none" if beside is None else f"{beside.step_seconds:,.0f}"
        fastest = settings_of_tail(one.fastest)["tail"]
        yield f"{name:<15}{seconds}{settings}{defer:>6,.0f}{seconds_beside:>6}{fastest:>14}"


def _asynchronous_plans(tails: Tails) -> list[StepPlan]:
    """Least staleness first."""
    return [plan for plan in tails.plans if plan.overlap is not None]


def _asynchronous_rows(tails: Sequence[tuple[str, Tails]]) -> Iterator[str]:
    """The fastest split for each staleness, and the ranks of its engines."""
    yield f"{'':<15}" + "".join(f"{n:>12}" for n in ASYNCHRONOUS_STALENESS) + f"{'floor':>8}{'of ranks':>10}"
    for name, one in tails:
        plans = _asynchronous_plans(one)
        figures = {plan.config.rollout.max_staleness: plan for plan in plans}
        cells = (
            f"{figures[n].step_seconds:,.0f} ({engine_ranks(figures[n])})" if n in figures else "none"
            for n in ASYNCHRONOUS_STALENESS
        )
        floors = [plan.overlap.floor for plan in plans if plan.overlap is not None]
        floor = f"{min(floors):,.0f}" if floors else ""
        yield (
            f"{name:<15}"
            + "".join(f"{cell:>12}" for cell in cells)
            + f"{floor:>8}{one.wait.cluster.ranks:>10}"
        )


def _rows(table: Sequence[Predicted]) -> Iterator[str]:
    yield f"{'':<16}{'published':>10}{'predicted':>10}{'error':>8}{'one factor':>12}   rollout, update, rest"
    for found, corrected in zip(table, errors_of_one_factor(table), strict=True):
        parts = f"{found.rollout:,.0f}, {found.update:,.0f}, {found.rest:,.0f}"
        yield (
            f"{found.row.name:<16}{found.row.seconds:>10,.0f}{found.seconds:>10,.0f}{found.error:>+8.0%}"
            f"{corrected:>+12.0%}   {parts}"
        )


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
    prediction: RunPrediction,
    tails: Tails | None,
    splits: Splits | None,
    layouts: Comparison | None,
    coefficients: Coefficients,
    shown: int,
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
        "tails": [_tail_data(plan) for plan in tails.plans] if tails is not None else [],
        "fastest_tail": settings_of_tail(tails.fastest) if tails is not None else None,
        "splits": [_tail_data(plan) for plan in splits.plans] if splits is not None else [],
        "layouts": [{"layout": p.mesh.describe(), "step_seconds": p.step_seconds} for p in fastest],
        "coefficients": asdict(coefficients),
    }


def _tail_data(plan: StepPlan) -> dict[str, Any]:
    return settings_of_tail(plan) | {"step_seconds": plan.step_seconds}


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
        "overlap": None if plan.overlap is None else asdict(plan.overlap) | {"floor": plan.overlap.floor},
        "work": {phase: asdict(work) for phase, work in plan.work.items()},
    }
