"""The coefficients of a machine, from runs that were measured on it."""

# Shape legend: R phases of all runs, C coefficients.

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlmath.config.files import read_json_object
from rlmath.config.help import nearest_word, raise_problems
from rlmath.config.length_curriculum import has_length_stages
from rlmath.config.load import load_config
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, SWITCH_PHASES
from rlmath.config.schema import Config
from rlmath.models.hf_config import planned_shape
from rlmath.planning.checks import value_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.parallelism import ranks_of_layout
from rlmath.planning.planner.lengths import Batch, lengths_measured
from rlmath.planning.planner.step import StepPlan, plan_step, problems_of, step_inputs
from rlmath.planning.planner.work import (
    NAMES,
    RANKS_PER_NODE,
    Cluster,
    Coefficients,
    cluster_of,
    machine_of,
    on_gpu,
    seconds_by_coefficient,
    slower_by,
)
from rlmath.telemetry.metrics_writer import read_metrics

WORKING_PHASES = ("sync", "rollout", "logprobs", "reference", "critic", "teacher", "update")
NOT_OF_A_STEP = ("validation", "probe")
"""Timers inside of a step that no plan is about."""
NEEDED = ("n_seqs", "avg_prompt_len", "rollout/response_length", "seconds/rollout", "seconds/update")
WARM_UP_STEPS = 2
"""Steps at the start of a run that do not count: kernels are compiled and caches filled."""
ROUNDS = 5000
"""Of the fit."""
MOST_CHANGE = 20.0
"""A fit multiplies or divides no coefficient by more: what little data suggest beyond that is noise."""
LAYOUT = re.compile(
    r"TP(\d+)(?: x CP(\d+))? x PP(\d+)(?: x VPP\d+)? x DP(\d+)(?: x EP\d+)?(?: x ETP\d+)?, .*"
)
"""As `Mesh.describe` writes it into summary.json."""


@dataclass(frozen=True)
class Measured:
    """A run's steps, by their medians."""

    source: str
    config: Config
    shape: ModelShape
    target: Target
    cluster: Cluster
    batch: Batch
    seconds: Mapping[str, float]
    """By phase of `step.PHASES`."""
    step_seconds: float
    steps: int
    """Steps that were looked at."""

    def planned(self, coefficients: Coefficients) -> StepPlan:
        inputs = step_inputs(self.config, self.shape, self.target, self.cluster, self.batch)
        return plan_step(inputs, coefficients)


def run_folder_of(path: Path) -> Path:
    """The folder of a run, given by itself or by its metrics.jsonl."""
    return path.parent if path.name == METRICS_FILE else path


def read_config(folder: Path) -> Config:
    """The settings of a run that was measured; ValueError where they cannot be read, are those of stages, or where
    engines had ranks of their own: what overlaps says little of what each part takes."""
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder}: there is no {CONFIG_FILE}; --calibrate needs the folder of a run, or its metrics.jsonl"
        )
    config = load_config([folder / CONFIG_FILE], [], saved=True)
    if has_length_stages(config):
        raise ValueError(
            f"{folder}: a run with stages; its steps are not alike. Calibrate with one that has none."
        )
    if config.rollout.ranks > 0:
        raise ValueError(
            f"{folder}: rollout.ranks is {config.rollout.ranks}; trainers and engines worked at the same time. "
            "Calibrate with a run that has rollout.ranks=0."
        )
    return config


def read_run(path: Path, gpu: str | None = None, ranks_per_node: int = RANKS_PER_NODE) -> Measured:
    """The steps of a run, and what they did. `gpu` is that of a run whose settings name none.

    Errors: ValueError for what is missing or cannot be read, and for a run with too few steps.
    """
    folder = run_folder_of(path)
    config = read_config(folder)
    if config.memory.gpu is None and config.run.device != "cpu":
        config = on_gpu(config, gpu)
    raise_problems(f"the run {folder}", value_problems(config))
    found = planned_shape(config.model.path)
    raise_problems(f"the model of the run {folder}", found.problems)
    assert found.shape is not None
    rows = read_rows(folder)
    target = planned_target(config)
    size = ranks_of_layout(config.parallel) or ranks_of_summary(folder)
    cluster = cluster_of(machine_of(config, target), size, ranks_per_node=min(size, ranks_per_node))
    raise_problems(f"the run {folder} on {size} ranks", problems_of(config, found.shape, cluster))
    # Steps of partial rollouts are not alike: some make no round.
    average = statistics.median if config.rollout.tail == "wait" else statistics.fmean
    return Measured(
        str(folder),
        config,
        shape=found.shape,
        target=target,
        cluster=cluster,
        batch=batch_of_rows(config, rows),
        seconds=phases_of(rows, average),
        step_seconds=over(rows, "seconds/step", average),
        steps=len(rows),
    )


def read_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl after the warm-up; ValueError for those of no GRPO run."""
    rows = [row for row in read_metrics(str(folder)) if "seconds/step" in row]
    if len(rows) <= WARM_UP_STEPS:
        raise ValueError(
            f"{folder / METRICS_FILE} has {len(rows)} steps; needed: more than {WARM_UP_STEPS}, as the first ones are "
            "slow"
        )
    rows = rows[WARM_UP_STEPS:]
    missing = [name for name in NEEDED if not any(name in row for row in rows)]
    if missing:
        raise ValueError(
            f"{folder / METRICS_FILE} has no {', '.join(missing)}; needed: a run of launch/train_grpo.py"
        )
    return rows


def ranks_of_summary(folder: Path) -> int:
    """Ranks of a run whose settings give only the sharding of its model; ValueError where they are not known."""
    layout = ""
    if (folder / SUMMARY_FILE).is_file():
        layout = str(read_json_object(folder / SUMMARY_FILE).get("layout", ""))[:200]
    if found := LAYOUT.fullmatch(layout):
        return math.prod(int(size or 1) for size in found.groups())
    raise ValueError(
        f"{folder}: neither {CONFIG_FILE} (parallel.data) nor {SUMMARY_FILE} has the number of ranks of the run; "
        "set parallel.data there"
    )


Average = Callable[[Sequence[float]], float]


def over(rows: Sequence[Mapping[str, float]], name: str, average: Average = statistics.median) -> float:
    """A metric over the rows that have it, 0 where none has; NaN and infinities do not count."""
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return average(values) if values else 0.0


def phases_of(rows: Sequence[Mapping[str, float]], average: Average = statistics.median) -> dict[str, float]:
    """Average seconds of every phase; what is in none of them is "other"."""
    seconds = {"switch": sum(over(rows, f"seconds/{name}", average) for name in SWITCH_PHASES)}
    seconds |= {name: over(rows, f"seconds/{name}", average) for name in WORKING_PHASES}
    counted = (*SWITCH_PHASES, *WORKING_PHASES, *NOT_OF_A_STEP)
    rest = [
        {"rest": row["seconds/step"] - sum(row.get(f"seconds/{name}", 0.0) for name in counted)}
        for row in rows
    ]
    seconds["other"] = max(0.0, over(rest, "rest", average))
    return {name: value for name, value in seconds.items() if value > 0}


def batch_of_rows(config: Config, rows: Sequence[Mapping[str, float]]) -> Batch:
    """The sequences of the median step; ValueError for steps without any."""
    sequences = round(over(rows, "n_seqs"))
    if sequences < 1:
        raise ValueError(f"the steps have {sequences} sequences (n_seqs); needed: at least 1")
    mean, longest = over(rows, "rollout/response_length"), config.rollout.max_new_tokens
    lengths = lengths_measured(max(1.0, min(mean, longest)), longest, over(rows, "no_eos_ratio"))
    return Batch(
        sequences,
        config.rollout.group_size,
        max(1.0, over(rows, "avg_prompt_len")),
        lengths,
    )


# ---------------------------------------------------------------- the fit


def fit(runs: Sequence[Measured], start: Coefficients) -> Coefficients:
    """Of the coefficients that explain the phases of the runs best, those nearest to `start`.

    Each round multiplies a coefficient by the mean of measured over predicted seconds of the phases it is part of,
    geometric, weighted by the seconds that it has there. Where several coefficients could explain a phase, they share
    what is missing as they share the phase (the simultaneous multiplicative reconstruction technique: of all exact
    solutions it finds the one with the least relative entropy to the start; Byrne, "Iterative image reconstruction
    algorithms based on cross-entropy minimization", IEEE Trans. Image Processing 2, 1993). What no phase is made of
    stays as it was.
    """
    rows = [
        (seconds_by_coefficient(work, run.cluster.machine, start), run.seconds[phase])
        for run in runs
        for phase, work in run.planned(start).work.items()
        if phase in run.seconds
    ]
    if not rows:
        raise ValueError("no run has a phase to calibrate with")
    parts_RC = np.array([[parts[name] for name in NAMES] for parts, _ in rows])
    measured_R = np.array([seconds for _, seconds in rows])
    weights_C = parts_RC.sum(axis=0)
    factors_C = np.ones(len(NAMES))
    for _ in range(ROUNDS):
        missing_R = np.log(measured_R / (parts_RC @ factors_C))
        step_C = np.divide(missing_R @ parts_RC, weights_C, out=np.zeros_like(weights_C), where=weights_C > 0)
        factors_C = np.clip(factors_C * np.exp(np.clip(step_C, -1, 1)), 1 / MOST_CHANGE, MOST_CHANGE)
    factors = dict(zip(NAMES, factors_C.tolist(), strict=True))
    return slower_by(start, factors)


# ---------------------------------------------------------------- coefficients in a file


def as_file(coefficients: Coefficients, kind: str, runs: Sequence[Measured]) -> dict[str, Any]:
    """Plain data of calibrated coefficients, for `read_coefficients`."""
    return {
        "kind": kind,
        "coefficients": asdict(coefficients),
        "runs": [
            {"folder": run.source, "steps": run.steps, "step_seconds": run.step_seconds} for run in runs
        ],
    }


def read_coefficients(file: Path, kind: str) -> Coefficients:
    """The coefficients that `as_file` wrote; ValueError for another kind of device, and for what is missing, unknown
    or no number."""
    data = read_json_object(file)
    if data.get("kind") != kind:
        raise ValueError(f'{file}: coefficients of kind "{data.get("kind")}"; this plan is for "{kind}"')
    values = data.get("coefficients")
    if not isinstance(values, dict):
        raise ValueError(f'{file}: it has no "coefficients"; write one by --write-coefficients')
    known = [field.name for field in fields(Coefficients)]
    for name in values:
        if name not in known:
            raise ValueError(f'{file}: there is no coefficient "{name}".{nearest_word(str(name), known)}')
    wrong = [name for name in known if type(values.get(name)) not in (int, float)]
    if wrong:
        raise ValueError(f"{file}: needed are numbers for {', '.join(wrong)}")
    return Coefficients(**{name: float(values[name]) for name in known})
