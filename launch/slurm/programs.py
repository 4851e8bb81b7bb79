"""Facts that a job needs of its program, and problems that show before anything is queued.

Nothing here asks for GPUs, starts ranks or reads prompts: the machine that jobs are submitted on
has none of the first, and the run's own start checks the rest (so does `launch/train_grpo.py
--dry-run`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.config.hub import is_hub_id
from rlmath.config.load import load_config
from rlmath.config.schema import Kind
from rlmath.config.shipped_files import shipped_config
from rlmath.evals import command as evaluate
from rlmath.planning.checks import only_used
from rlmath.run.early_checks import early_problems

EVALUATION_GRACE_SECONDS = 60
"""An evaluation has everything on the disk and ends at once."""
END_SECONDS = 90
"""Seconds from the verdict that a run is over to the end of its last rank.

That rank may still send metrics to a service."""


@dataclass(frozen=True)
class Program:
    """A program of `launch/` with its command line."""

    file: str
    """train_grpo.py"""
    arguments: tuple[str, ...]
    output: Path
    """The folder that it writes, in full."""
    reads: tuple[Path, ...]
    """Models and prompts, in full."""
    work_files: tuple[str, str]
    """What it writes as it gets on: a folder of `output`, and the names of files there."""
    grace_seconds: int
    """How long it may take to save and stop."""
    wait_seconds: int
    """How long all ranks may take to end, after those of one node have."""
    goes_on: bool
    """Whether another start goes on from what this one has saved."""
    problems: tuple[str, ...]
    """What is wrong with it."""
    engine_ranks: int = 0
    """Ranks of their own that engines have, the last ones."""
    engine_size: int = 1
    """Ranks of one engine."""


def training(
    kind: Kind, config_files: Sequence[Path], overrides: Sequence[str], ranks: int
) -> Program:
    """A run of GRPO ("grpo") or supervised training ("sft").

    ValueError for settings that cannot be loaded."""
    # The job starts elsewhere: a file that rlmath ships is given by its place.
    config_files = [
        file if file.exists() else shipped_config(file) or file for file in config_files
    ]
    config = load_config(list(config_files), list(overrides))
    if kind == "sft":
        config, _ = only_used(config)
    files = [word for file in config_files for word in ("--config", str(file.absolute()))]
    data_config = config.data
    reads = [
        *config_files,
        config.model.path,
        data_config.train_path,
        *data_config.more_train_paths,
    ]
    optional_paths = (
        config.sft.held_out_path,
        data_config.history_path,
        config.critic.path,
        config.teacher.path,
    )
    reads += [*config.validation.paths, *filter(None, (*optional_paths, config.model.adapter_path))]
    # Rank 0 uploads the model when the others have ended.
    upload = 0.0 if config.save.push_to_hub is None else config.run.hub_timeout_seconds
    problems, _ = early_problems(config, ranks, kind)
    return Program(
        f"train_{kind}.py",
        (*files, *overrides),
        Path(config.run.output_dir).resolve(),
        reads=tuple(Path(path).absolute() for path in reads if not is_hub_id(str(path))),
        work_files=("checkpoints", "manifest.json"),
        grace_seconds=math.ceil(config.run.stop_grace_seconds),
        wait_seconds=math.ceil(config.run.heartbeat_timeout_seconds)
        + END_SECONDS
        + math.ceil(upload),
        goes_on=config.run.recover_mode != "disabled",
        problems=tuple(problems),
        engine_ranks=config.rollout.ranks,
        engine_size=config.rollout.tensor_parallel,
    )


def evaluation(arguments: Sequence[str], ranks: int) -> Program:
    """An evaluation by launch/evaluate.py.

    ValueError for arguments that make no evaluation."""
    options = evaluate.parse(arguments)
    plan = evaluate.plan_of(options)
    engine = evaluate.rollout_of(options).tensor_parallel
    model_folders = [plan.model] if isinstance(plan.model, Path) else []
    problems = evaluate.input_problems(plan)
    if ranks % engine:
        problems.append(
            f"--tensor-parallel is {engine}, which does not divide the {ranks} ranks; change one."
        )
    nearest = next(
        path for path in (plan.output.absolute(), *plan.output.absolute().parents) if path.exists()
    )
    if not nearest.is_dir() or not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        problems.append(
            f'--output "{plan.output}": "{nearest}" is not a folder that you may write into'
        )
    return Program(
        "evaluate.py",
        tuple(arguments),
        plan.output.resolve(),
        reads=tuple(path.absolute() for path in (*model_folders, plan.data_dir)),
        work_files=("generations", "*.jsonl"),
        grace_seconds=EVALUATION_GRACE_SECONDS,
        wait_seconds=END_SECONDS,
        goes_on=True,
        problems=tuple(problems),
    )
