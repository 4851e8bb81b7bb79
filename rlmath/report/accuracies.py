"""Accuracies of a run's models, each beside the model before training, with intervals.

They are on its validation files while it trained, and in evaluations (`rlmath eval`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.algorithms.intervals import Interval, difference_interval
from rlmath.config.hub import is_hub_id
from rlmath.config.run_files import BEST_FOLDER, CHECKPOINTS_FOLDER, EXPORT_FOLDER, MODELS_FOLDER
from rlmath.config.terminal import visible
from rlmath.report.metrics import Metrics
from rlmath.report.results_file import RESULTS, SAMPLED, Accuracies, Results, read_results
from rlmath.report.settings import Settings

BEFORE = "before training"
BEST = "best"
AFTER = "after training"
MOST_FOLDERS = 1000
"""Folders in a run's, and beside it, in which evaluations are looked for."""
MOST_MODELS = 8
"""Columns of a table."""


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers."""

    value: float
    interval: Interval | None
    """The 95% interval; None where it is not known."""
    step: int | None = None
    """Step after which the model was measured; None: not known."""


@dataclass
class AccuracyRow:
    """The accuracies of several models on the same problems, asked in the same way."""

    problems: str
    """A file of problems, or a benchmark."""
    measure: str
    """How they were asked: "greedy", "4 samples at temperature 1"; "" for validations."""
    by_model: dict[str, Accuracy] = field(default_factory=dict)
    """Accuracies by the name of the model: BEFORE, "step 20", BEST, AFTER."""
    change: Accuracy | None = None
    """Change from the model before training to the last one."""


# ---------------------------------------------------------------- validations


def validation_rows(validation: Metrics) -> list[AccuracyRow]:
    """The accuracies of every file: before training, the best and the last one."""
    names = [name for name in validation.starting_with("validation/") if name.endswith("/accuracy")]
    files = [name for name in names if name.count("/") == 2]
    rows = []
    for name in [*files, *([] if len(files) == 1 else ["validation/accuracy"])]:
        curve = validation.curve(name)
        if not curve.values:
            continue
        lows, highs = (validation.curve(f"{name}_{end}").by_step() for end in ("low", "high"))
        measured = [
            Accuracy(
                value, (lows[step], highs[step]) if step in lows and step in highs else None, step
            )
            for step, value in zip(curve.steps, curve.values, strict=True)
        ]
        row = AccuracyRow(name.split("/")[1] if name in files else "all files", "")
        if measured[0].step == 0:
            row.by_model[BEFORE] = measured[0]
        row.by_model[BEST] = max(measured, key=lambda accuracy: accuracy.value)
        row.by_model[AFTER] = measured[-1]
        if row.by_model[AFTER].step == 0:
            del row.by_model[BEST], row.by_model[AFTER]
        rows.append(_with_change(row))
    return rows


def _with_change(row: AccuracyRow) -> AccuracyRow:
    """The row with the change, where both models of it are there and it has none."""
    if row.change is None and BEFORE in row.by_model and AFTER in row.by_model:
        row.change = Accuracy(row.by_model[AFTER].value - row.by_model[BEFORE].value, None)
    return row


# ---------------------------------------------------------------- evaluations


@dataclass(frozen=True)
class Evaluation:
    """A `results.json` and the model of the run that it is about."""

    results: Results
    model: str
    """Name of the model, as in `AccuracyRow.by_model`."""


def find_evaluations(
    folder: Path, settings: Settings, named: Sequence[Path], notes: list[str]
) -> list[Evaluation]:
    """Evaluations of a run's models and of the model that it began with.

    They are those that the user `named`, and those in the run's folder and beside it. What is named
    and is none of these is noted in `notes`."""
    base = settings.get("model.path")
    evaluations = {}
    for path in [*named, *_folders_with_results(folder)]:
        try:
            results = read_results(path, "evaluation")
        except (OSError, ValueError) as error:
            if path in named or path.parent == folder:
                notes.append(visible(str(error))[:300])
            continue
        model = model_of(results.settings, folder, base if isinstance(base, str) else "")
        if model is not None:
            evaluations[path.resolve()] = Evaluation(results, model)
        elif path in named:
            about = visible(str(results.settings.get("about_model")))[:200]
            notes.append(
                f"{visible(str(path))}: an evaluation of {about}, which is no model of this run."
            )
    return list(evaluations.values())


def _folders_with_results(folder: Path) -> Iterator[Path]:
    """Folders with results in the run's folder and beside it."""
    count = 0
    for parent in (folder, folder.resolve().parent):
        try:
            inside = sorted(parent.iterdir())
        except OSError:
            continue
        for path in inside:
            count += 1
            if count > MOST_FOLDERS:
                return
            if (path / RESULTS).is_file():
                yield path


def model_of(settings: dict[str, Any], folder: Path, base: str) -> str | None:
    """Name of the evaluated model in the run in `folder`; None where it is none of the run's.

    The run began with the model `base`."""
    about = str(settings.get("about_model") or "")
    if is_hub_id(about):
        return BEFORE if about.partition("#")[0] == base.partition("#")[0] else None
    path = Path(str(settings.get("about_model_folder") or about)).resolve()
    run = folder.resolve()
    if not about:
        return None
    if base and not is_hub_id(base) and path == Path(base).resolve():
        return BEFORE
    if not path.is_relative_to(run):
        return None
    parts = path.relative_to(run).parts
    if not parts or parts[0] == EXPORT_FOLDER:
        return AFTER
    if parts[0] == BEST_FOLDER:
        return BEST
    number = re.fullmatch(r"step-0*(\d+)", parts[1]) if len(parts) > 1 else None
    if parts[0] in (CHECKPOINTS_FOLDER, MODELS_FOLDER) and number is not None:
        return f"step {number[1]}"
    return "/".join(parts[:2])


def evaluation_rows(evaluations: Sequence[Evaluation]) -> list[AccuracyRow]:
    """A row for every benchmark and way of asking."""
    rows: dict[tuple[str, str], AccuracyRow] = {}
    accuracies: dict[tuple[str, str], dict[str, Accuracies]] = {}
    for evaluation in evaluations:
        for benchmark, measures in evaluation.results.accuracies.items():
            for measure, measured in measures.items():
                way = _way_of_asking(measure, measured, evaluation.results.settings)
                key = (benchmark, way)
                row = rows.setdefault(key, AccuracyRow(problems=benchmark, measure=way))
                row.by_model[evaluation.model] = Accuracy(measured.mean, measured.interval)
                accuracies.setdefault(key, {})[evaluation.model] = measured
    for key, row in rows.items():
        measured = accuracies[key]
        if BEFORE in measured and AFTER in measured:
            row.change = _change(measured[BEFORE], measured[AFTER])
    return list(rows.values())


def _way_of_asking(measure: str, measured: Accuracies, settings: dict[str, Any]) -> str:
    """ "greedy", or how many samples and by which settings."""
    if measure != SAMPLED:
        return "greedy"
    count = "1 sample" if measured.samples == 1 else f"{measured.samples} samples"
    top_p = settings.get("top_p", 1)
    truncated = "" if top_p == 1 else f", top-p {visible(str(top_p))}"
    return f"{count} at temperature {visible(str(settings.get('temperature', '?')))}{truncated}"


def _change(before: Accuracies, after: Accuracies) -> Accuracy | None:
    """The change on the problems that both were asked."""
    common = [problem for problem in before.shares if problem in after.shares]
    if not common:
        return None
    differences = [after.shares[problem] - before.shares[problem] for problem in common]
    return Accuracy(sum(differences) / len(differences), difference_interval(differences))


def columns(rows: Sequence[AccuracyRow]) -> list[str]:
    """The models of a table in the order of training; of many the middle ones are left out."""
    names = dict.fromkeys(name for row in rows for name in row.by_model)
    places = {BEFORE: -1.0, BEST: 1e15, AFTER: 1e16}

    def place(name: str) -> float:
        number = re.fullmatch(r"step (\d+)", name)
        return float(number[1]) if number else places.get(name, 1e14)

    ordered = sorted(names, key=place)
    half = MOST_MODELS // 2
    return ordered if len(ordered) <= MOST_MODELS else [*ordered[:half], *ordered[-half:]]
