"""Problems of a run that its settings and the names and manifests of files show.

No prompt is read, and neither a GPU, the hub nor torch is used. Programs that start a run
elsewhere, or before its ranks, check this much; the start of the ranks checks the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlmath.checkpoint.hf.config_json import planned_shape
from rlmath.checkpoint.hf.run_shapes import InspectedShapes, RunShapes, inspect_run_shapes
from rlmath.config.help import nearest_path
from rlmath.config.hub import hub_ids, is_hub_id
from rlmath.config.schema import Config, Kind
from rlmath.planning.checks import device_problems, file_problems, run_problems
from rlmath.run.recovery.resume import changes_since_newest
from rlmath.run.run_dir import folder_problems


def early_problems(config: Config, ranks: int, kind: Kind) -> tuple[list[str], RunShapes | None]:
    """Problems of settings, model, files and the run's folder, and the shapes of the run's models.

    A model on the hub has no shape yet."""
    inspected: InspectedShapes | None = None
    problems: list[str] = []
    if is_hub_id(config.model.path):
        hub_ids(config)
    elif missing := list(missing_problems("model.path", config.model.path)):
        problems += missing
    else:
        planned = planned_shape(config.model.path)
        if planned.shape is not None:
            inspected = inspect_run_shapes(config, planned.shape, kind)
        problems += planned.problems
    problems += run_problems(config, ranks, inspected, kind=kind)
    problems += file_problems(config, kind)
    if config.run.device == "cpu" and inspected is not None:
        problems += device_problems(config, inspected.shapes.policy, on_gpu=False, kind=kind)
    problems += _output_problems(config)
    return problems, None if inspected is None else inspected.shapes


def missing_problems(setting: str, path: str) -> Iterator[str]:
    if not os.path.exists(path):
        yield f'{setting}: there is no "{path}".{nearest_path(Path(path))}'


def _output_problems(config: Config) -> Iterator[str]:
    """Problems of the run's folder.

    Model and data, which a checkpoint compares by their contents, are named beside refused settings;
    alone they are left to the run's start."""
    folder = config.run.output_dir
    changes = None
    try:
        changes = changes_since_newest(config)
    except ValueError as error:
        yield f'run.output_dir "{folder}": {error}'
        return
    if changes:
        changes_text = "; ".join(changes)
        yield (
            f'the run in "{folder}" cannot go on with other settings: {changes_text}. Give another '
            "run.output_dir."
        )
    for problem in folder_problems(folder, config, 0, resumes=changes is not None):
        yield f'run.output_dir "{folder}": {problem}'
